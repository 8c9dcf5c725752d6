"""JSON as it comes in: its content type and its depth are known before anything looks at it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.responses import Response

from bitmtp.server.errors import ApiError
from bitmtp.server.schemas import LENIENT

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def parse(text: str | bytes) -> Any:
    """What a JSON text says; nested 200 deep at most, and whole characters only.

    Raises:
        ValueError: it is anything else; NaN and Infinity are no JSON.
    """
    return from_json(text, allow_inf_nan=False)


class JsonRequest(Request):
    """A request whose body was parsed already."""

    parsed: Any = None

    async def json(self) -> Any:
        """The body."""
        return self.parsed


class JsonRoute(APIRoute):
    """An endpoint that sees a body only if it is JSON."""

    def get_route_handler(self) -> Handler:
        """The endpoint behind the check."""
        handle = super().get_route_handler()
        return self._checked(handle) if self.body_field else handle

    @staticmethod
    def _checked(handle: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            LENIENT.set(request.app.state.lenient)  # for this request: each has a task of its own
            found = JsonRequest(request.scope, request.receive)
            found.parsed = _body(request.headers.get("content-type", "none"), await found.body())
            return await handle(found)

        return checked


def _body(content_type: str, body: bytes) -> Any:
    # A web page of any origin may send other types without asking, so they are not guessed to be JSON.
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f"the content type is {content_type!r}; send application/json", "unsupported_media_type")
    try:
        return parse(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON ({error})", "invalid_json") from None
