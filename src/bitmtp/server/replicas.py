"""Several engines behind one address, by Ray Serve (extra ``ray``).

Each replica runs the whole application around an engine of its own. The process with the address passes requests on,
those with the same beginning to the same replica while it has room, so that the K/V it keeps are found again. A replica
that dies is replaced by Ray; what had not begun to answer runs again elsewhere, and gives the same text.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from bitmtp.engine import Engine
from bitmtp.server.app import create_app
from bitmtp.server.errors import ApiError
from bitmtp.server.host import listen, make_server
from bitmtp.server.json_body import parse
from bitmtp.server.middleware import LimitBody
from bitmtp.server.options import ServerOptions

ATTEMPTS = 3
REMEMBERED = 256  # beginnings by which a replica is found again
BEGINNING = 1024  # characters or tokens of a prompt that count as its beginning
HELD = 2  # messages of an answer before its first token: the head, and the event that opens a stream
_FORWARDED = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "root_path")
_log = logging.getLogger("bitmtp.server")


class Replica:
    """One engine with its application, in a process of its own."""

    def __init__(self, load: Callable[[], Engine], options: ServerOptions) -> None:
        self._app = create_app(load(), options)
        self._app.state.scheduler.start()

    async def call(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """Answer a request; yields the ASGI messages of the answer."""
        if key := serve.get_multiplexed_model_id():
            await self._remember(key)
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        task = asyncio.create_task(self._app({**scope, "asgi": {"version": "3.0"}}, _receive(body, gone), messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            gone.set()
            await task

    @serve.multiplexed(max_num_models_per_replica=REMEMBERED)  # type: ignore[untyped-decorator]
    async def _remember(self, beginning: str) -> str:
        """Make Ray send what begins alike here again."""
        return beginning

    def check_health(self) -> None:
        """Raises if no texts can be written any more; Ray then replaces the replica."""
        if not self._app.state.scheduler.alive:
            raise RuntimeError("the scheduler has ended")


def _receive(body: bytes, gone: asyncio.Event) -> Receive:
    given = False

    async def receive() -> Message:
        nonlocal given
        if given:
            await gone.wait()
            return {"type": "http.disconnect"}
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


class Gateway:
    """ASGI application that passes requests on to replicas."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            return
        body = (await receive()).get("body", b"") if scope["method"] == "POST" else b""
        work = asyncio.create_task(self._forward(scope, body, send))
        watch = asyncio.create_task(_disconnected(receive))
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        watch.cancel()
        if not work.done():
            work.cancel()
        with suppress(asyncio.CancelledError):
            await work

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        plain = {key: scope[key] for key in _FORWARDED if key in scope}
        for attempt in range(ATTEMPTS):
            held: list[Message] | None = []
            try:
                async with aclosing(self._ask(plain, body)) as answer:
                    async for message in answer:
                        held = await _pass_on(message, held, send)
                for message in held or ():
                    await send(message)
                return
            except RayError as error:
                _log.warning(
                    "a replica was lost", extra={"fields": {"error": type(error).__name__, "attempt": attempt}}
                )
                if held is None:
                    await _break_off(send)
                    return
        await JSONResponse(_lost().body(), 503)(scope, _nothing, send)

    async def _ask(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[Message, None]:
        handle = self._replicas.options(stream=True, multiplexed_model_id=beginning(body))
        answer = handle.call.remote(scope, body)
        try:
            async for message in answer:
                yield message
        finally:
            answer.cancel()  # nothing happens if it has ended


async def _pass_on(message: Message, held: list[Message] | None, send: Send) -> list[Message] | None:
    """Hold messages back while nothing is lost by asking again; None once some were sent."""
    if held is not None and len(held) < HELD:
        return [*held, message]
    for earlier in held or ():
        await send(earlier)
    await send(message)
    return None


async def _break_off(send: Send) -> None:
    """Tell the client of a stream that there is no more to come."""
    event = b"data: " + json.dumps(_lost().body()).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": event, "more_body": False})


def _lost() -> ApiError:
    return ApiError(503, "the replica that wrote this was lost; send the request again", "replica_lost", retry_after=1)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def beginning(body: bytes) -> str:
    """A key that requests share if their prompts begin alike: conversations by their first turn, texts by their first
    kilobyte. Empty if there is no prompt: any replica will do."""
    try:
        asked = parse(body)
        messages, prompt = asked.get("messages"), asked.get("prompt")
        if isinstance(messages, list):
            turns = 2 if messages and messages[0].get("role") in ("system", "developer") else 1
            start: Any = messages[:turns]
        else:
            start = prompt[:BEGINNING]
    except (ValueError, AttributeError, TypeError):
        return ""
    return hashlib.sha256(json.dumps(start).encode()).hexdigest()[:16]


def start_replicas(load: Callable[[], Engine], options: ServerOptions, replicas: int) -> Gateway:
    """Start Ray (or join the cluster that ``RAY_ADDRESS`` names) and the replicas.

    Args:
        load: makes an engine; called once in each replica.
    """
    ray.init(ignore_reinit_error=True, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    serve.start(proxy_location="Disabled")
    deployed = serve.deployment(
        name="bitmtp",
        num_replicas=replicas,
        max_ongoing_requests=options.slots + options.queue,
        health_check_period_s=2,
        graceful_shutdown_timeout_s=options.grace,
        ray_actor_options={"num_cpus": 0},  # the engines' own threads share the machine
    )(Replica)
    return Gateway(serve.run(deployed.bind(load, options), name="bitmtp", route_prefix=None))


def serve_replicas(load: Callable[[], Engine], options: ServerOptions, replicas: int, host: str, port: int) -> None:
    """Serve on an address until told to stop."""
    sockets = listen(host, port)
    gateway = start_replicas(load, options, replicas)
    app = LimitBody(gateway, options.max_body_bytes, options.receive_timeout)
    try:
        make_server(app, options).run(sockets)
    finally:
        serve.shutdown()
        ray.shutdown()
