"""Errors in the shape that OpenAI's clients understand."""

from __future__ import annotations

from typing import Any

from bitmtp.errors import BitMTPError


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
