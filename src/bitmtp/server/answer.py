"""From updates to choices: text, tool calls, log-probabilities and trace, in either API's form, whole or in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bitmtp.core.text import Finish, Logprobs, Source
from bitmtp.server.intake import Plan
from bitmtp.server.jobs import Piece, Proposal, Update
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
    TraceProposal,
    TraceToken,
)
from bitmtp.server.tools import ToolCall, ToolParser
from bitmtp.server.vocabulary import Offsets, Vocabulary

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one choice.

    Attributes:
        first_call: number of the first of ``calls`` within the answer.
        offsets: where each of ``prompt`` and ``pieces`` begins in the text, if log-probabilities are wanted.
        prompt: the tokens of the prompt, if they have log-probabilities; the first of them has none.
        checked: in a stream, the proposals of the pass that committed ``pieces``.
        ms: in a stream, milliseconds since the choice's first token.
    """

    index: int
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    pieces: tuple[Piece, ...] = ()
    finish: FinishReason | None = None
    first_call: int = 0
    offsets: tuple[int, ...] = ()
    prompt: tuple[Piece, ...] = ()
    checked: tuple[Proposal, ...] = ()
    ms: float | None = None


class Answer:
    """Turns the updates of a plan's choices into deltas, and deltas into the API's choices."""

    def __init__(self, plan: Plan, vocabulary: Vocabulary) -> None:
        self._plan = plan
        self._vocabulary = vocabulary
        self._parsers = [ToolParser(plan.tools, plan.single_call) if plan.tools else None for _ in plan.requests]
        self._offsets = [Offsets(vocabulary) for _ in plan.requests]
        self._echoes = dict(enumerate(plan.echoes))  # those that are still to come
        self._begun: dict[int, float] = {}  # when each choice had its first token

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
            if parser is not None and parser.calls and (finish == "stop" or self._plan.single_call):
                finish = "tool_calls"
        prompt = self._prompt(index, update)
        wanted = update.pieces if self._plan.top is not None else ()
        offsets = tuple(self._offsets[index].push(piece.id, special=True) for piece in prompt)
        offsets += tuple(self._offsets[index].push(piece.id) for piece in wanted)
        text = self._echoes.pop(index, "") + text
        ms = 1e3 * (update.at - self._begun.setdefault(index, update.at))
        return Delta(index, text, tuple(calls), update.pieces, finish, first_call, offsets, prompt, update.checked, ms)

    def _prompt(self, index: int, update: Update) -> tuple[Piece, ...]:
        """The tokens of a prompt, with the first update of a choice."""
        if not self._plan.scored or index not in self._echoes:
            return ()
        found: list[Logprobs | None] = [None, *update.read]
        pairs = zip(self._plan.prompts[index], found, strict=True)
        return tuple(Piece(token, "", Source.EXACT, logprobs) for token, logprobs in pairs)

    def fold(self, deltas: Sequence[Delta]) -> list[Delta]:
        """The whole of each choice."""
        return [
            Delta(
                index,
                "".join(delta.text for delta in own),
                tuple(call for delta in own for call in delta.calls),
                tuple(piece for delta in own for piece in delta.pieces),
                own[-1].finish,
                offsets=tuple(offset for delta in own for offset in delta.offsets),
                prompt=tuple(piece for delta in own for piece in delta.prompt),
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
        found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for piece, offset in self._shown(delta):
            said = piece.logprobs
            top = said.top if said else ()
            names = self._vocabulary.names([piece.id, *(token for token, _ in top)])
            found.tokens.append(names[piece.id])
            found.token_logprobs.append(said.chosen if said else None)
            found.top_logprobs.append({names[token]: value for token, value in reversed(top)} if said else None)
            found.text_offset.append(offset)
        return found

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
        for piece, _ in self._shown(delta):
            assert piece.logprobs is not None
            top = [self._entry(token, value) for token, value in piece.logprobs.top]
            own = self._entry(piece.id, piece.logprobs.chosen)
            content.append(TokenLogprob(**own.model_dump(), top_logprobs=top))
        return ChatLogprobs(content=content)

    def _entry(self, token: int, logprob: float) -> TopLogprob:
        names = self._vocabulary.names([token])
        return TopLogprob(token=names[token], logprob=logprob, bytes=list(self._vocabulary.bytes_of(token)))

    # Both

    def _shown(self, delta: Delta) -> list[tuple[Piece, int]]:
        """The tokens that are text, and where they begin; behind an echo all, for who asks for one counts tokens."""
        pairs = zip((*delta.prompt, *delta.pieces), delta.offsets, strict=True)
        hidden = frozenset() if self._plan.echoes else self._vocabulary.eos
        return [(piece, offset) for piece, offset in pairs if piece.id not in hidden]

    def _trace(self, delta: Delta) -> dict[str, Any]:
        if not self._plan.trace:
            return {}
        tokens = [TraceToken(id=p.id, text=p.text, source=p.source.value) for p in delta.pieces]
        if delta.ms is None:
            return {"tokens": tokens}
        texts = {p.id: self._vocabulary.bytes_of(p.id).decode("utf-8", "replace") for p in delta.checked}
        checked = [TraceProposal(id=p.id, text=texts[p.id], after=p.after) for p in delta.checked]
        return {"tokens": tokens, "proposals": checked, "ms": round(delta.ms, 3)}
