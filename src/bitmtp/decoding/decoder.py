"""One text being written: which rows it wants in the next pass, and what their outputs commit.

A decoder never runs a pass itself, so that the rows of several texts can share one (:func:`advance`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from bitmtp.backends.base import MAX_WIDTH, Backend, Output, Row, Window, graphs_a_pass
from bitmtp.decoding.policy import Policy
from bitmtp.decoding.shaper import Drafted, FixedShaper, Shaper, Verified
from bitmtp.decoding.state import State
from bitmtp.decoding.stats import Stats
from bitmtp.decoding.topology import Topology, chain
from bitmtp.decoding.tree import Guess, Tree, grow, longest_path, masks


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
        shaper: shapes the passes; None: as the policy's fields say, all along.
    """

    state: State
    policy: Policy
    limit: int
    eos_ids: frozenset[int]
    ends: Callable[[Token], bool] = _never
    shaper: Shaper | None = None
    finish: Finish | None = None
    stats: Stats = field(default_factory=Stats)
    _shaper: Shaper = field(init=False)
    _drafted: Drafted | None = None
    _asked: tuple[Tree, Window | None] = (masks(1), None)  # the tree of the rows last asked for
    _widths: list[int] = field(default_factory=list)  # of this iteration's passes

    def __post_init__(self) -> None:
        self._shaper = self.shaper or FixedShaper(self.policy)

    def start(self, backend: Backend) -> Token:
        """Prefill what is not materialized yet and commit the first token, before any drafting."""
        state = self.state
        output = backend.prefill(state.sequence, state.pending, state.choice())
        return self._begin(output, len(state.pending))[0]

    @property
    def top(self) -> int:
        """How many alternatives of each row it can use."""
        ranks = self._shaper.ranks
        # Noise can lift a token that is not among the likeliest.
        return 0 if ranks == 1 else 2 * ranks if self.state.sampling.temperature else ranks

    def rows(self, width: int = MAX_WIDTH) -> list[Row]:
        """What the next pass must run for this text, in at most ``width`` rows.

        A piece of a long prompt, a draft, or the proposals to verify. Empty if it has to wait for a wider pass: a lossy
        policy's draft cannot shrink, or its text would change.
        """
        state, pending = self.state, len(self.state.pending)
        if not state.generated and pending > width:
            return state.piece_rows(width)
        self._asked = self._ask(width - pending if self.policy.lossless else MAX_WIDTH)
        rows = state.rows(*self._asked)
        return rows if len(rows) <= width else []

    def _ask(self, width: int) -> tuple[Tree, Window | None]:
        """The tree of the next pass, in at most ``width`` rows behind the pending ones, and what it sees."""
        if self._drafted is not None:
            return self._drafted.tree.first(width), None
        if not self.state.generated:
            return masks(1), None
        draft = self._shaper.draft(self.state.committed, self._room, self.state.materialized)
        if draft.copied:
            self._drafted = self._draft(chain(len(draft.copied)), draft.copied, None, copied=True)
            return self._drafted.tree.first(width), None
        size = max(min(draft.size, self._room, width + 1), 1)
        return masks(size), draft.window if size > 1 else None

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
        self.stats.graph_replays += graphs_a_pass(backend)
        self._widths.append(len(outputs))
        if self._drafted is not None:
            return self._accept(backend, self._drafted, chosen)
        return self._judge(backend, chosen)

    def _begin(self, output: Output, materialized: int) -> list[Token]:
        """The first token, from the prompt's last row; it is committed before anything is drafted."""
        first = self.kept([Token(output.token, Source.EXACT, output)])
        self.commit(first, materialized)
        return first

    @property
    def _room(self) -> int:
        return self.limit - len(self.state.committed)

    def _judge(self, backend: Backend, outputs: Sequence[Output]) -> list[Token]:
        """After a draft pass: commit proposals, or set them aside to verify. Unless the draft was provisional, the
        pending rows are history now, and the first proposal is the exact head's."""
        provisional, pending = self._asked[1] is not None, len(self.state.pending)
        self.stats.windowed += provisional
        if not provisional:
            backend.materialize(self.state.sequence, range(pending))
        guesses = self._guesses(outputs)
        answer = self._shaper.judge(guesses, not provisional, self._room, self.state.materialized)
        if isinstance(answer, Topology):
            self.state.materialized += 0 if provisional else pending
            self._drafted = self._draft(answer, guesses, None if provisional else outputs[0])
            return []
        sources = [Source.EXACT] + [Source.CONFIDENT] * (answer - 1)
        kept = self.kept(_tokens(outputs[:answer], sources))
        proposed = 0 if self.policy.lossless else len(guesses) - 1
        return self._iterate(kept, pending, len(guesses) > 1, proposed)

    def _guesses(self, outputs: Sequence[Output]) -> list[Guess]:
        """What a draft says of the places behind the text, as far as its own choices may stand."""
        state, start = self.state, len(self.state.committed)
        legal = state.accepts([output.token for output in outputs])
        return [Guess.of(output, start + index, state.sampling) for index, output in enumerate(outputs[:legal])]

    def _draft(self, shape: Topology, guesses: Sequence[Guess], known: Output | None, copied: bool = False) -> Drafted:
        state = self.state
        tree = grow(shape, guesses, None if state.grammar is None else lambda path: state.accepts(path) == len(path))
        return Drafted(tree, tuple(guesses), known, copied)

    def _accept(self, backend: Backend, drafted: Drafted, outputs: Sequence[Output]) -> list[Token]:
        """After a verify pass: the longest path that the text follows, then the verifier's own token."""
        tree, pending = self._asked[0], len(self.state.pending)
        first, own = drafted.known or outputs[0], outputs[0 if drafted.known else 1 :]
        path = longest_path(tree, first.token, [output.token for output in own])
        # A proposal that stands is the token which the exact row before it chose.
        chosen = [first, *(own[index] for index in path)]
        sources = [Source.ACCEPTED] * len(path) + [Source.EXACT]
        if drafted.known:
            sources[0] = Source.EXACT
        kept = self.kept(_tokens(chosen, sources))
        verified = drafted.verified(tree, path)
        path = path[: len(kept) - 1]
        backend.materialize(self.state.sequence, [*range(pending), *(pending + index for index in path)])
        self._drafted = None
        self._iterate(kept, pending + len(path), True, tree.shape.depth - (drafted.known is not None), verified)
        self.stats.copied += drafted.copied
        self.stats.ahead += tree.shape.drafts
        if self.finish is None and path and (block := tree.block(path[-1])):
            self.stats.ahead_used += 1
            self._go_on([own[index] for index in block])
        return kept

    def _go_on(self, outputs: Sequence[Output]) -> None:
        """The pass that verified has drafted as well, behind the proposal that the text reached."""
        guesses = self._guesses(outputs)
        shape = self._shaper.judge(guesses, False, self._room, self.state.materialized)
        if isinstance(shape, Topology) and shape.width:
            self._drafted = self._draft(shape, guesses, None)

    def _iterate(
        self, kept: list[Token], materialized: int, drafted: bool, proposed: int, verified: Sequence[Verified] = ()
    ) -> list[Token]:
        self.commit(kept, materialized)
        accepted = sum(token.source is not Source.EXACT for token in kept)
        self.stats.record(len(kept), drafted=drafted, proposed=proposed, accepted=accepted)
        self._shaper.learn([token.output for token in kept if token.output], verified, self._widths)
        self._widths = []
        return kept

    def kept(self, tokens: list[Token]) -> list[Token]:
        """The tokens up to the one that ends the text, if one does."""
        for index, token in enumerate(tokens):
            if self.ends(token) or token.id in self.eos_ids:
                self.finish = Finish.STOP
                return tokens[: index + 1]
        return tokens

    def commit(self, kept: Sequence[Token], materialized: int) -> None:
        """These tokens are text now, and ``materialized`` more positions are in the store."""
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
    top = max(decoders[index].top for index, _ in batch)
    outputs = backend.step([row for _, rows in batch for row in rows], top=top)
    start = 0
    for index, rows in batch:
        committed[index] = decoders[index].absorb(backend, outputs[start : start + len(rows)])
        start += len(rows)
