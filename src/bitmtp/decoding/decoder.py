"""One text being written: which rows it wants in the next pass, and what their outputs commit.

A decoder never runs a pass itself, so that the rows of several texts can share one (:func:`advance`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from bitmtp.backends.base import MAX_WIDTH, Backend, Output, Row
from bitmtp.decoding.policy import Policy, decide, longest_match
from bitmtp.decoding.state import State
from bitmtp.decoding.stats import Stats


class Source(StrEnum):
    """How a token came to be committed."""

    EXACT = "exact"  # by the exact head: first tokens, the verifier's own, every autoregressive one
    ACCEPTED = "accepted"  # a proposal that the verifier confirmed
    CONFIDENT = "confident"  # a proposal committed on its probability alone


class Finish(StrEnum):
    """Why a text ended."""

    STOP = "stop"  # an end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens or the context
    INTERRUPTED = "interrupted"  # the caller went away


@dataclass(frozen=True, slots=True)
class Token:
    """A committed token and how it came about."""

    id: int
    source: Source
    output: Output | None = field(default=None, compare=False, repr=False)  # of the row that chose it


def _never(_: Token) -> bool:
    return False


@dataclass(slots=True)
class Decoder:
    """Decodes one text by a policy.

    Attributes:
        state: its text; the prompt is not materialized before :meth:`start`.
        limit: length of prompt and text at which it ends (context and ``max_tokens``).
        eos_ids: tokens that end it; the token itself is committed.
        ends: told of each token in order, once; True if the text ends with it (a stop string, say).
    """

    state: State
    policy: Policy
    limit: int
    eos_ids: frozenset[int]
    ends: Callable[[Token], bool] = _never
    finish: Finish | None = None
    stats: Stats = field(default_factory=Stats)
    _proposals: list[Output] = field(default_factory=list)

    def start(self, backend: Backend) -> Token:
        """Prefill what is not materialized yet and commit the first token, before any drafting."""
        state = self.state
        output = backend.prefill(state.sequence, state.pending, state.choice())
        return self._begin(output, len(state.pending))[0]

    def rows(self, width: int = MAX_WIDTH) -> list[Row]:
        """What the next pass must run for this text, in at most ``width`` rows.

        A piece of a long prompt, a draft, or the proposals to verify. Empty if it has to wait for a wider pass: a lossy
        policy's draft cannot shrink, or its text would change.
        """
        pending = len(self.state.pending)
        if self._proposals:
            proposals = self._proposals[:width] if self.policy.lossless else self._proposals
            rows = self.state.verify_rows([proposal.token for proposal in proposals])
        elif pending > width:
            rows = self.state.piece_rows(width)
        else:
            block = min(self.policy.block_size, self._room) if self.state.generated else 1
            rows = self.state.draft_rows(min(block, width - pending + 1) if self.policy.lossless else block)
        return rows if len(rows) <= width else []

    def absorb(self, backend: Backend, outputs: Sequence[Output | None]) -> list[Token]:
        """Take the outputs of :meth:`rows`; returns what was committed (nothing between draft and verify)."""
        chosen = [output for output in outputs if output is not None]
        if not chosen or not self.state.generated:
            backend.materialize(self.state.sequence, range(len(outputs)))
            if chosen:
                return self._begin(chosen[0], len(outputs))
            self.state.materialized += len(outputs)
            return []
        self.stats.passes += 1
        return self._accept(backend, chosen) if self._proposals else self._judge(backend, chosen)

    def _begin(self, output: Output, materialized: int) -> list[Token]:
        """The first token, from the prompt's last row; it is committed before anything is drafted."""
        first = self._kept([Token(output.token, Source.EXACT, output)])
        self._commit(first, materialized)
        return first

    @property
    def _room(self) -> int:
        return self.limit - len(self.state.committed)

    def _judge(self, backend: Backend, outputs: Sequence[Output]) -> list[Token]:
        """After a draft pass: the pending rows are history now; commit proposals, or set them aside to verify."""
        pending = len(self.state.pending)
        backend.materialize(self.state.sequence, range(pending))
        outputs = outputs[: self.state.accepts([output.token for output in outputs])]
        decision = decide(self.policy, [output.probability for output in outputs], self._room)
        if decision.verify:
            self.state.materialized += pending
            self._proposals = list(outputs[: decision.verify])
            return []
        sources = [Source.EXACT] + [Source.CONFIDENT] * (decision.commit - 1)
        kept = self._kept(_tokens(outputs[: decision.commit], sources))
        return self._iterate(kept, pending, len(outputs) > 1, len(outputs) - 1)

    def _accept(self, backend: Backend, outputs: Sequence[Output]) -> list[Token]:
        """After a verify pass: the longest match, then the verifier's own token."""
        proposals, self._proposals = self._proposals[: len(outputs)], []
        length = longest_match([output.token for output in proposals], [output.token for output in outputs])
        sources = [Source.EXACT] + [Source.ACCEPTED] * (length - 1) + [Source.EXACT]
        # A proposal that stands is the token which the exact row before it chose.
        kept = self._kept(_tokens([proposals[0], *outputs[:length]], sources))
        materialized = min(length, len(kept) - 1)
        backend.materialize(self.state.sequence, range(materialized))
        return self._iterate(kept, materialized, True, len(proposals) - 1)

    def _iterate(self, kept: list[Token], materialized: int, drafted: bool, proposed: int) -> list[Token]:
        self._commit(kept, materialized)
        accepted = sum(token.source is not Source.EXACT for token in kept)
        self.stats.record(len(kept), drafted=drafted, proposed=proposed, accepted=accepted)
        return kept

    def _kept(self, tokens: list[Token]) -> list[Token]:
        """The tokens up to the one that ends the text, if one does."""
        for index, token in enumerate(tokens):
            if self.ends(token) or token.id in self.eos_ids:
                self.finish = Finish.STOP
                return tokens[: index + 1]
        return tokens

    def _commit(self, kept: Sequence[Token], materialized: int) -> None:
        self.state.commit([token.id for token in kept], materialized)
        if self.finish is None and self._room <= 0:
            self.finish = Finish.LENGTH


def _tokens(outputs: Sequence[Output], sources: Sequence[Source]) -> list[Token]:
    return [Token(output.token, source, output) for output, source in zip(outputs, sources, strict=True)]


def advance(backend: Backend, decoders: Sequence[Decoder]) -> list[list[Token]]:
    """One pass for every unfinished decoder (several passes if their rows exceed the width of one).

    Returns what each of ``decoders`` committed.
    """
    committed: list[list[Token]] = [[] for _ in decoders]
    batch: list[tuple[int, list[Row]]] = []
    for index, decoder in enumerate(decoders):
        if decoder.finish is not None:
            continue
        rows = decoder.rows()
        if batch and sum(len(other) for _, other in batch) + len(rows) > MAX_WIDTH:
            _run(backend, decoders, batch, committed)
            batch = []
        batch.append((index, rows))
    if batch:
        _run(backend, decoders, batch, committed)
    return committed


def _run(
    backend: Backend,
    decoders: Sequence[Decoder],
    batch: Sequence[tuple[int, list[Row]]],
    committed: list[list[Token]],
) -> None:
    outputs = backend.step([row for _, rows in batch for row in rows])
    start = 0
    for index, rows in batch:
        committed[index] = decoders[index].absorb(backend, outputs[start : start + len(rows)])
        start += len(rows)
