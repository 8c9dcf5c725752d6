"""Answers one request, whole or as a stream of server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from bitmtp import __version__
from bitmtp.server import logs
from bitmtp.server.answer import Answer, Delta
from bitmtp.server.errors import ApiError
from bitmtp.server.intake import Plan
from bitmtp.server.options import ServerOptions
from bitmtp.server.responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionDetails,
    DecodingReport,
    PromptDetails,
    Usage,
)
from bitmtp.server.run import ClientGoneError, Run
from bitmtp.server.scheduler import Scheduler
from bitmtp.server.vocabulary import Vocabulary

Api = Literal["completion", "chat"]
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Service:
    """What the two generating endpoints share."""

    def __init__(self, vocabulary: Vocabulary, options: ServerOptions, scheduler: Scheduler) -> None:
        self._vocabulary = vocabulary
        self._options = options
        self._scheduler = scheduler

    async def answer(self, plan: Plan, request: Request, api: Api) -> Response:
        """Run a plan and answer in the form of ``api``.

        Raises:
            ApiError: it could not be done; in a stream that has begun, an event says so instead.
        """
        run = Run(self._scheduler, plan, request.receive)
        reply = _Reply(api, run, Answer(plan, self._vocabulary), self._options)
        run.submit()
        if plan.stream:
            return StreamingResponse(reply.events(), media_type="text/event-stream", headers=STREAM_HEADERS)
        return await reply.whole()


class _Reply:
    """One answer on its way."""

    def __init__(self, api: Api, run: Run, answer: Answer, options: ServerOptions) -> None:
        self._api = api
        self._run = run
        self._answer = answer
        self._options = options
        self._id = f"{'chatcmpl' if api == 'chat' else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    async def whole(self) -> Response:
        """The answer as one JSON object."""
        try:
            async with aclosing(self._run.updates()) as updates:
                deltas = [self._answer.delta(index, update) async for index, update in updates]
        except ClientGoneError:
            return Response(status_code=499)  # nobody reads it
        finally:
            self._log()
        whole = self._answer.fold(deltas)
        rest = {"usage": self._usage(), "decoding": self._report()}
        if self._api == "chat":
            body = self._body(ChatCompletion, [self._answer.message(one) for one in whole], **rest)
        else:
            body = self._body(Completion, [self._answer.completion(one) for one in whole], **rest)
        return Response(body, media_type="application/json")

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events, one for what a pass commits; usage, if asked for, at the end."""
        plan, answer = self._run.plan, self._answer
        indices = range(len(plan.requests))
        form, show, begin = (
            (ChatChunk, answer.chat, answer.opening)
            if self._api == "chat"
            else (Completion, answer.completion, lambda index: answer.completion(Delta(index)))
        )
        try:
            yield _event(self._body(form, [begin(index) for index in indices], decoding=self._report()))
            async with aclosing(self._run.updates()) as updates:
                async for index, update in updates:
                    for delta in _in_events(answer.delta(index, update), plan):
                        rest = {"decoding": self._report()} if delta.finish and self._run.warning else {}
                        yield _event(self._body(form, [show(delta)], **rest))
            if plan.usage:
                yield _event(self._body(form, [], usage=self._usage()))
            yield _event("[DONE]")
        except ClientGoneError:
            return
        except ApiError as error:
            yield _event(json.dumps(error.body()))
        finally:
            self._run.give_up()
            self._log()

    def _body(self, form: type[BaseModel], choices: Sequence[BaseModel], **rest: BaseModel) -> str:
        """JSON of a response or an event: the nulls that were set stand in it, those that were not do not."""
        fields: dict[str, Any] = {
            "id": self._id,
            "object": form.model_fields["object"].default,
            "created": self._created,
            "model": self._options.model_name,
            "system_fingerprint": f"bitmtp-{__version__}",
            "choices": list(choices),
        }
        return form(**fields, **rest).model_dump_json(exclude_unset=True)

    def _usage(self) -> Usage:
        run = self._run
        return Usage(
            prompt_tokens=run.prompt_tokens,
            completion_tokens=run.completion_tokens,
            total_tokens=run.prompt_tokens + run.completion_tokens,
            prompt_tokens_details=PromptDetails(cached_tokens=run.cached_tokens),
            completion_tokens_details=CompletionDetails(
                accepted_prediction_tokens=run.stats.accepted,
                rejected_prediction_tokens=run.stats.proposed - run.stats.accepted,
            ),
            mean_acceptance_length=run.stats.mean_acceptance_length,
            draft_acceptance_rate=run.stats.draft_acceptance_rate,
            num_spec_steps=run.stats.num_spec_steps,
            passes=run.stats.passes,
            graph_replays=run.stats.graph_replays,
        )

    def _report(self) -> DecodingReport:
        plan, warning = self._run.plan, self._run.warning
        return DecodingReport(
            policy=plan.policy.name,
            block_size=plan.policy.block_size,
            lossless=plan.policy.lossless,
            seed=plan.seed,
            temperature=plan.temperature,
            temperature_from=plan.temperature_from,
            **({"warning": warning} if warning else {}),
        )

    def _log(self) -> None:
        logs.texts(self._id, self._run, self._options.log_prompts)


def _in_events(delta: Delta, plan: Plan) -> Iterator[Delta]:
    """A delta as clients expect it: what is new, and the finish reason by itself. Text held back makes no event, unless
    its tokens are to be shown."""
    shown = plan.trace or plan.top is not None
    if delta.text or delta.calls or (shown and delta.pieces):
        yield replace(delta, finish=None)
    if delta.finish:
        yield Delta(delta.index, finish=delta.finish)


def _event(data: str) -> bytes:
    return b"data: " + data.encode() + b"\n\n"
