"""ASGI layers around the application: log and count, API keys, limits of a request's body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Sequence
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bitmtp.server import logs
from bitmtp.server.errors import ApiError
from bitmtp.server.metrics import Metrics

GUARDED = ("/v1/", "/tokenize", "/metrics", "/openapi.json")


def guarded(path: str) -> bool:
    """Whether a path is the API (and not the page, which holds no secrets)."""
    return path.startswith(GUARDED)


class Observe:
    """Logs and counts each request by path and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Sequence[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), HTTPStatus.INTERNAL_SERVER_ERROR.value

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            # Only known paths: a label for whatever a client makes up would grow without bound.
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests.labels(path, str(status)).inc()
            logs.request(path, status, time.perf_counter() - begun)


class HeadAsGet:
    """Answers HEAD as GET; the server in front sends no body then."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class RequireKey:
    """Answers 401 to API requests without a known key. Hashes are compared, with every known one, in constant time."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._known = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "http" and guarded(scope["path"]) and not self._admits(Headers(scope=scope)):
            error = ApiError(401, "a valid API key is required (Authorization: Bearer …)", "invalid_api_key")
            await _refuse(error, scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admits(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()  # the bytes as they came
        matches = [hmac.compare_digest(digest, known) for known in self._known]
        return scheme.lower() == "bearer" and any(matches)


class LimitBody:
    """Reads the body before the application does: 413 if it is too large, 408 if it does not arrive in time."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout: float) -> None:
        self._app = app
        self._max = max_bytes
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout):
                body = await self._read(Headers(scope=scope), receive)
        except TimeoutError:
            message = f"the body did not arrive within {self._timeout:g} seconds"
            await _refuse(ApiError(408, message, "body_timeout"), scope, receive, send)
        except ApiError as error:
            await _refuse(error, scope, receive, send)
        else:
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        declared = headers.get("content-length", "0")
        too_large = ApiError(413, f"the body is larger than {self._max} bytes", "body_too_large")
        if declared.isdecimal() and int(declared) > self._max:
            raise too_large
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self._max:
                raise too_large
            if not message.get("more_body"):
                return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the body once and then what follows it: the client's going away."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    # What is left of the body is not read: the connection cannot serve another request.
    headers = {**error.headers, "connection": "close"}
    await JSONResponse(error.body(), error.status, headers)(scope, receive, send)
