"""The HTTP application: endpoints, and every error in the API's shape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from bitmtp import __version__
from bitmtp.core.policies import POLICIES
from bitmtp.engine import Engine
from bitmtp.server.errors import ApiError, explained, failed
from bitmtp.server.grammar import Grammars
from bitmtp.server.intake import Intake
from bitmtp.server.json_body import JsonRoute
from bitmtp.server.metrics import Metrics
from bitmtp.server.middleware import HeadAsGet, LimitBody, Observe, RequireKey
from bitmtp.server.options import ServerOptions
from bitmtp.server.responses import (
    ChatCompletion,
    Completion,
    ErrorBody,
    Health,
    Model,
    ModelList,
    TokenizeResponse,
)
from bitmtp.server.scheduler import Scheduler
from bitmtp.server.schemas import ChatRequest, CompletionRequest, TokenizeRequest
from bitmtp.server.service import Service
from bitmtp.server.vocabulary import Vocabulary

STATIC = Path(__file__).parent / "static"
_REASONS = {
    400: "the request cannot be carried out as asked",
    401: "an API key is required",
    404: "no such model or endpoint",
    408: "the request did not arrive in time, or ran into its time limit",
    413: "the body is too large",
    415: "the body is not JSON by its content type",
    429: "the queue is full",
    500: "the server failed",
    503: "the server is shutting down",
}
ABSENT = {"/v1/embeddings": "this server writes text and has no embeddings; ask another server for them"}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": reason} for status, reason in _REASONS.items()
}
_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


class Page(StaticFiles):
    """The page, and 404 for whatever there is not: a client that asks for an endpoint of another server is told so."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a file."""
        if scope["method"] != "GET":
            raise HTTPException(404)
        await super().__call__(scope, receive, send)


def create_app(engine: Engine, options: ServerOptions) -> FastAPI:
    """The application around a loaded model. ``app.state.scheduler`` is its scheduler."""
    metrics = Metrics()
    scheduler = Scheduler(engine, options, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        yield
        scheduler.stop(0)
        await asyncio.to_thread(scheduler.join)

    app = FastAPI(title="BitMTP", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.router.route_class = JsonRoute
    app.state.scheduler, app.state.lenient = scheduler, options.lenient
    vocabulary = Vocabulary(engine)
    _add_texts(app, Intake(engine, options, Grammars(vocabulary)), Service(vocabulary, options, scheduler))
    _add_rest(app, engine, options, metrics)
    _add_errors(app)
    paths = [path for route in app.routes if (path := getattr(route, "path", None))]
    if STATIC.is_dir():
        app.mount("/", Page(directory=STATIC, html=True))
    app.add_middleware(HeadAsGet)
    app.add_middleware(LimitBody, max_bytes=options.max_body_bytes, timeout=options.receive_timeout)
    if options.api_keys:
        app.add_middleware(RequireKey, keys=options.api_keys)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Observe, metrics=metrics, paths=paths)
    return app


def _add_texts(app: FastAPI, intake: Intake, service: Service) -> None:
    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=ERRORS | _STREAMED)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """The next message of a conversation."""
        return await service.answer(await run_in_threadpool(intake.chat, body), request, "chat")

    @app.post("/v1/completions", response_model=Completion, responses=ERRORS | _STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """What follows a text."""
        return await service.answer(await run_in_threadpool(intake.completion, body), request, "completion")

    @app.post("/tokenize", responses=ERRORS)
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        """The token ids of a text or a conversation."""
        ids = await run_in_threadpool(intake.tokenize, body)
        return TokenizeResponse(tokens=ids, count=len(ids), max_model_len=intake.context)


def _add_rest(app: FastAPI, engine: Engine, options: ServerOptions, metrics: Metrics) -> None:
    model = Model(
        id=options.model_name,
        created=int(time.time()),
        max_model_len=engine.context,
        block_size=engine.config.block_size,
        policies=list(POLICIES),
    )

    @app.get("/v1/models", responses=ERRORS)
    async def models() -> ModelList:
        """The model that is served."""
        return ModelList(data=[model])

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def one_model(name: str) -> Model:
        """The model that is served, by name."""
        if name != model.id:
            raise ApiError(404, f"there is no model {name!r} here", "model_not_found", param="model")
        return model

    @app.get("/health", responses=ERRORS)
    async def health(request: Request) -> Health:
        """Whether texts can be written."""
        if not request.app.state.scheduler.alive:
            raise failed()
        return Health(status="ok")

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}, 401: ERRORS[401]})
    async def prometheus() -> Response:
        """Figures for Prometheus."""
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        return await api_error(request, explained(error.errors(), error.body))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {ABSENT.get(request.url.path, error.detail)}"
        return JSONResponse(ApiError(error.status_code, message, "http_error").body(), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def fault(request: Request, _: Exception) -> Response:
        return await api_error(request, failed())
