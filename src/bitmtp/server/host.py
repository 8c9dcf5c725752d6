"""The process around the application: sockets, limits on connections, and an orderly end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from bitmtp.server.options import ServerOptions

BACKLOG = 2048
LEAVING = 2.0  # seconds beyond the grace for the last words of unfinished requests


class Connection(H11Protocol):
    """A connection that is cut off when its request does not arrive, or its answer is not read, within a limit.

    The options come in by :func:`bound`; uvicorn constructs protocols itself.
    """

    options: ServerOptions
    _timer: asyncio.TimerHandle | None = None
    _opened = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is here; beyond the limit the one that has been idle longest has to go."""
        super().connection_made(transport)
        self._opened = self.loop.time()
        # A pause then means that the system's own buffer is full: the client has left that much unread.
        transport.set_write_buffer_limits(high=0)
        self._cut_off_after(self.options.receive_timeout)
        if len(self.connections) > self.options.max_connections:
            idle = [other for other in self.connections if isinstance(other, Connection) and other._idle]
            min(idle, key=lambda other: other._opened).transport.abort()

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """A part of a request; once its head is whole, the application minds the time."""
        super().data_received(data)
        if not self._idle:
            self._cut_off_after(None)

    def on_response_complete(self) -> None:
        """The next request, if there is one, has to arrive in time as well."""
        super().on_response_complete()
        self._cut_off_after(self.options.receive_timeout)

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._cut_off_after(self.options.stall_timeout)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        self._cut_off_after(self.options.receive_timeout if self._idle else None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._cut_off_after(None)
        super().connection_lost(exc)
        self._cut_off_after(None)  # the base class resumes writing

    def _cut_off_after(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


def bound(options: ServerOptions) -> type[Connection]:
    """The class of a server's connections."""
    return type("BoundConnection", (Connection,), {"options": options})


class Server(uvicorn.Server):
    """Says so when it begins to stop, and stops when there is nobody left to serve by."""

    def __init__(self, config: uvicorn.Config, stopping: Callable[[], None], alive: Callable[[], bool]) -> None:
        super().__init__(config)
        self._stopping, self._alive = stopping, alive

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop; asked ten times a second."""
        return await super().on_tick(counter) or not self._alive()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, and wait for those that run."""
        self._stopping()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets bound to an address; ``port`` 0 chooses a free one.

    Raises:
        OSError: the address cannot be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return [socket.create_server((host, port), family=found[0], backlog=BACKLOG)]
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def make_server(
    app: ASGIApp,
    options: ServerOptions,
    stopping: Callable[[], None] = lambda: None,
    alive: Callable[[], bool] = lambda: True,
) -> Server:
    """A server for an application; run it on sockets of :func:`listen`.

    Args:
        stopping: called when the server is told to stop; what runs then has the options' grace to end.
        alive: whether there is a reason to go on.
    """
    _allow_open_files()
    settings = uvicorn.Config(
        app,
        http=bound(options),
        ws="none",
        access_log=False,
        server_header=False,
        log_config=None,
        backlog=BACKLOG,
        timeout_keep_alive=int(options.receive_timeout) + 1,  # the connection's own limit comes first
        timeout_graceful_shutdown=int(options.grace + LEAVING),
    )
    return Server(settings, stopping, alive)


def _allow_open_files() -> None:
    """Raise the limit of open files as far as the system lets us: each connection is one."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
