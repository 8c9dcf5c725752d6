"""From updates to choices: text, tool calls, log-probabilities and trace, in either API's form, whole or in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from bitmtp.decoding.decoder import Finish
from bitmtp.server.intake import Plan
from bitmtp.server.jobs import Piece, Update
from bitmtp.server.responses import (
    AnswerMessage,
    AnswerToolCall,
    ChatChoice,
    ChatDelta,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    FunctionDelta,
    TokenLogprob,
    TopLogprob,
    TraceToken,
)
from bitmtp.server.tools import ToolCall, ToolParser
from bitmtp.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one choice.

    Attributes:
        first_call: number of the first of ``calls`` within the answer.
        offset: characters of the tokens before ``pieces``.
    """

    index: int
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    pieces: tuple[Piece, ...] = ()
    finish: FinishReason | None = None
    first_call: int = 0
    offset: int = 0


class Answer:
    """Turns the updates of a plan's choices into deltas, and deltas into the API's choices."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer, eos_ids: Iterable[int]) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_ids)
        self._parsers = [ToolParser() if plan.tools else None for _ in plan.requests]
        self._offsets = [0 for _ in plan.requests]

    def delta(self, index: int, update: Update) -> Delta:
        """What an update brings; the finish reason comes with the last one."""
        text: str = "".join(piece.text for piece in update.pieces)
        calls: list[ToolCall] = []
        parser, first_call = self._parsers[index], 0
        if parser is not None:
            first_call = parser.calls
            parts = parser.push(text) + (parser.finish() if update.result else [])
            text = "".join(part for part in parts if isinstance(part, str))
            calls = [part for part in parts if isinstance(part, ToolCall)]
        finish: FinishReason | None = None
        if update.result is not None:
            finish = "length" if update.result.finish is Finish.LENGTH else "stop"
            finish = "tool_calls" if parser is not None and parser.calls and finish == "stop" else finish
        offset = self._offsets[index]
        if self._plan.top is not None:
            self._offsets[index] += sum(len(self._token(piece.id)) for piece in update.pieces)
        return Delta(index, text, tuple(calls), update.pieces, finish, first_call, offset)

    def fold(self, deltas: Sequence[Delta]) -> list[Delta]:
        """The whole of each choice."""
        return [
            Delta(
                index,
                "".join(delta.text for delta in own),
                tuple(call for delta in own for call in delta.calls),
                tuple(piece for delta in own for piece in delta.pieces),
                own[-1].finish,
            )
            for index in range(len(self._plan.requests))
            for own in [[delta for delta in deltas if delta.index == index]]
        ]

    # Plain completions

    def completion(self, delta: Delta) -> CompletionChoice:
        """A choice of a plain completion, whole or what is new of it."""
        return CompletionChoice(
            index=delta.index,
            text=delta.text,
            logprobs=self._completion_logprobs(delta),
            finish_reason=delta.finish,
            **self._trace(delta),
        )

    def _completion_logprobs(self, delta: Delta) -> CompletionLogprobs | None:
        if self._plan.top is None:
            return None
        tokens, chosen, top, offsets = [], [], [], []
        offset = delta.offset
        for piece in self._shown(delta):
            assert piece.logprobs is not None
            tokens.append(self._token(piece.id))
            chosen.append(piece.logprobs.chosen)
            top.append({self._token(token): value for token, value in reversed(piece.logprobs.top)})
            offsets.append(offset)
            offset += len(tokens[-1])
        return CompletionLogprobs(tokens=tokens, token_logprobs=chosen, top_logprobs=top, text_offset=offsets)

    # Chat

    def message(self, delta: Delta) -> ChatChoice:
        """A whole answer."""
        calls = self._calls(delta, numbered=False)
        message = AnswerMessage(role="assistant", content=delta.text if delta.text or not calls else None)
        if calls:
            message.tool_calls = calls
        return ChatChoice(
            index=delta.index,
            message=message,
            logprobs=self._chat_logprobs(delta),
            finish_reason=delta.finish,
            **self._trace(delta),
        )

    def opening(self, index: int) -> ChatDelta:
        """What a streamed answer begins with: who speaks."""
        return ChatDelta(
            index=index, delta=AnswerMessage(role="assistant", content=""), logprobs=None, finish_reason=None
        )

    def chat(self, delta: Delta) -> ChatDelta:
        """What is new of an answer."""
        message = AnswerMessage(content=delta.text) if delta.text else AnswerMessage()
        if calls := self._calls(delta, numbered=True):
            message.tool_calls = calls
        return ChatDelta(
            index=delta.index,
            delta=message,
            logprobs=self._chat_logprobs(delta),
            finish_reason=delta.finish,
            **self._trace(delta),
        )

    def _calls(self, delta: Delta, *, numbered: bool) -> list[AnswerToolCall]:
        """The calls; in a stream each has its number."""
        return [
            AnswerToolCall(
                id=call.id,
                type="function",
                function=FunctionDelta(name=call.name, arguments=call.arguments),
                **({"index": delta.first_call + place} if numbered else {}),
            )
            for place, call in enumerate(delta.calls)
        ]

    def _chat_logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if self._plan.top is None:
            return None
        content = []
        for piece in self._shown(delta):
            assert piece.logprobs is not None
            top = [self._entry(token, value) for token, value in piece.logprobs.top]
            own = self._entry(piece.id, piece.logprobs.chosen)
            content.append(TokenLogprob(**own.model_dump(), top_logprobs=top))
        return ChatLogprobs(content=content)

    def _entry(self, token: int, logprob: float) -> TopLogprob:
        text = self._token(token)
        whole = "\ufffd" not in text  # a token may hold a part of a character only
        return TopLogprob(token=text, logprob=logprob, bytes=list(text.encode()) if whole else None)

    # Both

    def _token(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special=False)

    def _shown(self, delta: Delta) -> list[Piece]:
        """The tokens that are text."""
        return [piece for piece in delta.pieces if piece.id not in self._eos]

    def _trace(self, delta: Delta) -> dict[str, list[TraceToken]]:
        if not self._plan.trace:
            return {}
        return {"tokens": [TraceToken(id=p.id, text=p.text, source=p.source.value) for p in delta.pieces]}
