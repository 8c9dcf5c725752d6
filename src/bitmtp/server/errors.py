"""Errors in the shape that OpenAI's clients understand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bitmtp.errors import BitMTPError, RequestError


class ApiError(BitMTPError):
    """An error with an HTTP status; :meth:`body` is what the client gets.

    Attributes:
        param: the request field at fault.
        retry_after: seconds after which another try makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after

    @property
    def type(self) -> str:
        """OpenAI's class of error, by which clients choose their exception."""
        if self.status in (408, 429):
            return "timeout_error" if self.status == 408 else "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that go with it."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})

    def body(self) -> dict[str, Any]:
        """The JSON object of the response, or of an event in a stream."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None) -> ApiError:
    """A request that cannot be carried out as asked: 400."""
    return ApiError(400, message, "invalid_value", param=param)


@contextmanager
def blamed_on(param: str) -> Iterator[None]:
    """What the engine refuses is the fault of a request's field."""
    try:
        yield
    except RequestError as error:
        raise invalid(str(error), param) from None


def explained(found: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """What pydantic found wrong with a body, in one line.

    Where a field may be of several types there is an error for each; the one that got furthest was meant.
    """
    about = [error for error in found if error["loc"][:2] == found[0]["loc"][:2]]
    paths = [_path(error, body) for error in about]
    deepest = max(paths, key=len)
    messages = [_message(error) for error, path in zip(about, paths, strict=True) if path == deepest]
    field, message = ".".join(map(str, deepest)), "; or: ".join(dict.fromkeys(messages))
    return invalid(f"{field}: {message}" if field else message, field or None)


def _path(error: Mapping[str, Any], body: Any) -> list[Any]:
    """Where the error is in the body; pydantic's place names the types of a union on the way there as well."""
    path = []
    for place in error["loc"][1:]:
        if (isinstance(body, dict) and place in body) or (isinstance(body, list) and isinstance(place, int)):
            body = body[place]
            path.append(place)
    return [*path, error["loc"][-1]] if error["type"] == "missing" and len(error["loc"]) > 1 else path


def _message(error: Mapping[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown or unsupported parameter"
    return str(error["msg"]).removeprefix("Value error, ")


def busy(waiting: int) -> ApiError:
    """The queue is full: 429."""
    return ApiError(429, f"{waiting} requests are waiting already; try again later", "queue_full", retry_after=1)


def timed_out() -> ApiError:
    """A request ran into its deadline: 408."""
    return ApiError(408, "the request ran into its time limit", "timeout")


def shutting_down() -> ApiError:
    """The server stops: 503."""
    return ApiError(503, "the server is shutting down", "shutting_down", retry_after=5)


def failed() -> ApiError:
    """A fault of the server, reported without its inner life: 500."""
    return ApiError(500, "the server failed on this request; its log says why", "internal_error")
