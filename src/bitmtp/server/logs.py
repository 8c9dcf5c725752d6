"""Structured logs: one JSON object a line on stderr. Prompts and texts appear only if the operator asks."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from bitmtp.server.run import Run

_log = logging.getLogger("bitmtp.server")


class JsonLines(logging.Formatter):
    """A record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {"time": f"{when}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        line["event"] = record.getMessage()
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def to_stderr() -> None:
    """Send the server's and uvicorn's logs to stderr as JSON lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name in ("bitmtp.server", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)


def request(path: str, status: int, seconds: float) -> None:
    """An HTTP request was answered."""
    fields = {"path": path, "status": status, "seconds": round(seconds, 4)}
    _log.info("request", extra={"fields": fields})


def texts(identity: str, run: Run, with_text: bool) -> None:
    """The texts of a request came to their end, or it was given up."""
    plan = run.plan
    fields: dict[str, Any] = {
        "id": identity,
        "policy": plan.policy.name,
        "choices": len(plan.requests),
        "stream": plan.stream,
        "end": [result.finish.value for _, result in sorted(run.results.items())],
        "error": run.error.code if run.error else None,
        "prompt_tokens": run.prompt_tokens,
        "cached_tokens": run.cached_tokens,
        "completion_tokens": run.completion_tokens,
        "mean_acceptance_length": round(run.stats.mean_acceptance_length, 3),
        "first_token_seconds": None if run.first is None else round(run.first, 4),
        "seconds": round(run.seconds, 4),
    }
    if run.warning is not None:
        fields["warning"] = run.warning
    if plan.user is not None:
        fields["user"] = plan.user
    if with_text:
        fields["prompts"] = [request.prompt for request in plan.requests[:: plan.n]]
        fields["texts"] = [result.text for _, result in sorted(run.results.items())]
    _log.info("texts", extra={"fields": fields})
