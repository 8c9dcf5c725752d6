"""One text being written: which rows it wants in the next pass, and what their outputs commit.

Every decision is the core's (``*.hpp`` beside this file). A text here adds what only Python knows: stop strings,
grammars, and rows for backends that take them one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from bitmtp.backends.base import MAX_WIDTH, Head, Output, Row, Window
from bitmtp.core import _core
from bitmtp.core.costs import Calibration, Tuning
from bitmtp.core.policy import Policy, Verify
from bitmtp.core.stats import Stats
from bitmtp.core.topology import Kind
from bitmtp.numerics import UInt32
from bitmtp.sampling import GREEDY, Choice, Sampling

MAX_RANKS = int(_core.MAX_RANKS)
_GOES_ON, _STOP = 0, 1  # of the core's ``Status``


class Source(StrEnum):
    """How a token came to be committed."""

    EXACT = "exact"  # by the exact head: first tokens, the verifier's own, every autoregressive one
    ACCEPTED = "accepted"  # a proposal that the verifier confirmed
    CONFIDENT = "confident"  # a proposal committed on its probability alone


SOURCES = tuple(Source)


class Finish(StrEnum):
    """Why a text ended."""

    STOP = "stop"  # an end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens or the context
    INTERRUPTED = "interrupted"  # the caller went away


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities (nats) of a token and of the likeliest ones, of the exact head's raw distribution."""

    chosen: float
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, output: Output, top: int, token: int | None = None) -> Logprobs:
        """Of the token chosen, or another, from an output with logits and at least ``top`` alternatives."""
        assert output.logits is not None
        logits = output.logits.astype(np.float64)
        largest = logits.max()
        total = largest + np.log(np.exp(logits - largest).sum())
        best = tuple((token, float(raw - total)) for token, raw in output.top[:top])
        return cls(float(logits[output.token if token is None else token] - total), best)


@dataclass(frozen=True, slots=True)
class Token:
    """A committed token, how it came about, and its log-probabilities if the text asked for them."""

    id: int
    source: Source
    logprobs: Logprobs | None = None


class Grammar(Protocol):
    """What may stand next; see :class:`Text`."""

    def allowed(self, path: Sequence[int]) -> UInt32 | None:
        """Bit set of the tokens allowed behind the committed text and ``path``; None if ``path`` itself is not."""
        ...

    def accepts(self, path: Sequence[int]) -> int:
        """How many tokens of ``path``, from its beginning, may stand behind the committed text."""
        ...

    def commit(self, tokens: Sequence[int]) -> None:
        """These tokens are text now."""
        ...


def _never(_: Token) -> bool:
    return False


class Text:
    """A text and its policy.

    Committed tokens come one iteration at a time (:meth:`take`), however far a loop has gone on meanwhile; a text that
    ends or is left stands where the last one taken does.

    Args:
        sequence: the backend's handle.
        ids: the prompt; its first ``materialized`` tokens have their K/V in the sequence.
        limit: length of prompt and text at which it ends (context and ``max_tokens``).
        eos_ids: tokens that end it; the token itself is committed.
        costs: of passes on this machine, shared by all texts.
        grammar: restricts the tokens of exact rows along each row's own path; drafts are drawn freely, and cut where
            they leave it.
        top: alternatives for log-probabilities; None: none are wanted.
        scored: the prompt's tokens from this one on (1 or later) get log-probabilities too, which needs ``top``.
        ends: told of each token in order, once; True if the text ends with it (a stop string, say).
    """

    def __init__(
        self,
        sequence: int,
        ids: Sequence[int],
        materialized: int,
        policy: Policy,
        sampling: Sampling,
        limit: int,
        eos_ids: frozenset[int],
        costs: _core.Costs,
        *,
        tuning: Tuning | None = None,
        grammar: Grammar | None = None,
        top: int | None = None,
        scored: int | None = None,
        ends: Callable[[Token], bool] = _never,
    ) -> None:
        self.sequence, self.policy, self.sampling = sequence, policy, sampling
        self.prompt, self.written = list(ids), list[int]()
        self.grammar, self.top, self.ends = grammar, top, ends
        self.stats, self.limit = Stats(), limit
        self.finish = None if limit > len(ids) or scored is not None else Finish.LENGTH
        self.fault: BaseException | None = None  # what makes it impossible to go on; raised by :meth:`take`
        record = _policy_record(policy, sampling, (tuning or Tuning.usual()).calibration_at(sampling.temperature))
        eos = sorted(eos_ids)
        self.core = _core.Text(self.prompt, materialized, limit, eos, record, _sampling_record(sampling), costs)
        self.core.sequence, self.core.top = sequence, -1 if top is None else top
        self.core.guarded = grammar is not None
        if scored is not None:
            self.core.scored = scored
        self._plain = GREEDY if sampling == Sampling(seed=sampling.seed, choice=sampling.choice) else Choice(sampling)
        self.checked: Sequence[tuple[int, int]] = ()  # proposals of the iteration taken last, if the core traces them
        self._masks: Sequence[UInt32 | None] = ()  # of the rows last prepared
        self._events: deque[Any] = deque()
        self._scores: list[Logprobs] = []
        self._outputs: Sequence[Output | None] = ()
        self._first: Output | None = None  # the anchor's, of the draft before

    @property
    def committed(self) -> list[int]:
        """Prompt and text, as far as it was taken."""
        return self.prompt + self.written

    @property
    def materialized(self) -> int:
        """How many of them have their K/V in the store; the last one never has."""
        return min(self.core.materialized, len(self.prompt) + len(self.written) - (1 if self.written else 0))

    @property
    def goes_on(self) -> bool:
        """Whether there is more to write."""
        return self.finish is None and self.fault is None

    @property
    def begun(self) -> bool:
        """Whether the first token is there."""
        return bool(self.written)

    # Passes

    def rows(self) -> list[Row]:
        """The rows last planned, for a backend that takes them one by one."""
        pairs = zip(self.core.rows(), self.core.targets(), strict=True)
        return [self._row(number, target < 0, *fields) for number, (fields, target) in enumerate(pairs)]

    def _row(
        self, number: int, chooses: bool, token: int, position: int, since: int, visible: int, head: int, node: int,
        free: bool, sinks: int, recent: int,
    ) -> Row:  # fmt: skip
        window = Window(sinks, recent) if recent else None
        choice = self._plain if chooses else GREEDY
        if head and chooses:
            choice = self._choice(node, None if free else number)
        return Row(self.sequence, token, position, visible, Head(head), choice, window, since)

    def _choice(self, node: int, masked: int | None) -> Choice:
        allowed = self._masks[masked] if self.grammar is not None and masked is not None else None
        if not self.sampling.penalised:
            return self._plain if allowed is None else Choice(self.sampling, allowed=allowed)
        seen = dict(zip(*self.core.seen(node), strict=True))
        return Choice.with_counts(self.sampling, seen, allowed)

    def prepare(self, width: int = MAX_WIDTH) -> None:
        """Plan a guarded text: proposals that leave the grammar are cut, and each row gets what it allows."""
        grammar, core = self.grammar, self.core
        assert grammar is not None
        core.plan(width)
        paths, masked = core.proposals()
        if paths:
            wanted = [mask or grammar.accepts(path) == len(path) for path, mask in zip(paths, masked, strict=True)]
            if not all(wanted):
                core.cut(wanted)
                core.plan(width)
        self._masks = [self._mask(grammar, head, node, free) for *_, head, node, free, _, _ in core.rows()]
        core.attach([[] if mask is None else mask.tolist() for mask in self._masks])
        core.ready = core.width > 0

    def _mask(self, grammar: Grammar, head: int, node: int, free: bool) -> UInt32 | None:
        return None if free or not head else grammar.allowed(self.core.path(node))

    def absorb(self, outputs: Sequence[Output | None]) -> list[int]:
        """Take the outputs of the planned rows; returns which of them are history now, in this order."""
        self._outputs = outputs
        anchor = next((output for output in outputs if output is not None), None)
        self._score(outputs)
        legal = self._legal([output.token for output in outputs if output is not None])
        kept: list[int] = self.core.absorb([_output_record(output) for output in outputs], legal)
        self._fetch()
        self._first = anchor
        return kept

    def _score(self, outputs: Sequence[Output | None]) -> None:
        for output, target in zip(outputs, self.core.targets(), strict=False):
            if target >= 0 and output is not None:
                self._scores.append(Logprobs.of(output, self.top or 0, target))

    def absorb_waiting(self) -> list[int]:
        """The same for outputs that a backend's loop has left for the host."""
        pairs = zip(self.core.rows(), self.core.waiting_tokens(), strict=True)
        kept: list[int] = self.core.absorb_waiting(self._legal([token for row, token in pairs if row[4]]))
        self._fetch()
        return kept

    def _legal(self, tokens: Sequence[int]) -> int:
        """How many of a draft's proposals the grammar lets stand; of anything else, all."""
        return MAX_WIDTH if self.grammar is None or self.core.drafted else self.grammar.accepts(tokens)

    def _fetch(self) -> None:
        self._scores += [Logprobs(chosen, tuple(best)) for chosen, best in self.core.take_scores()]
        for event in self.core.take():
            self._events.append((event, self._shown(event)))
            if self.grammar is not None:
                self.grammar.commit(event[0])

    def _shown(self, event: Any) -> list[Logprobs | None]:
        """Log-probabilities of an iteration's tokens: a loop's own, or from the outputs at hand."""
        if event[-1]:
            return [Logprobs(chosen, tuple(top)) for chosen, top in event[-1]]
        if self.top is None or not self._outputs:
            return [None] * len(event[0])
        chosen = [self._first if row < 0 else self._outputs[row] for row in event[2]]
        return [None if output is None else Logprobs.of(output, self.top) for output in chosen]

    # What was committed

    def take(self) -> list[Token]:
        """The tokens of the next iteration that nobody has taken yet; none if there is none."""
        if self.fault is not None:
            raise self.fault
        self._fetch()
        if self.finish is not None or not self._events:
            return []
        event, shown = self._events.popleft()
        self.checked = event[-2]
        room = self.limit - len(self.prompt) - len(self.written)  # none: only the prompt was to be read
        tokens = self._kept([Token(i, SOURCES[s], p) for i, s, p in zip(event[0], event[1], shown, strict=True)][:room])
        self.written += [token.id for token in tokens]
        self.stats.add(event, len(tokens), sum(token.source is not Source.EXACT for token in tokens))
        if self.finish is not None:
            self.leave()
        elif not self._events and self.core.status != _GOES_ON:
            self.finish = Finish.STOP if tokens and self.core.status == _STOP else Finish.LENGTH
        return tokens

    def take_scores(self) -> list[Logprobs]:
        """Log-probabilities of the prompt's tokens from ``scored`` on that were read and that nobody has taken yet."""
        self._fetch()
        scores, self._scores = self._scores, []
        return scores

    def _kept(self, tokens: list[Token]) -> list[Token]:
        """The tokens up to the one that ends the text, if one does."""
        for index, token in enumerate(tokens):
            if self.ends(token):
                self.finish = Finish.STOP
                return tokens[: index + 1]
        return tokens

    def leave(self) -> None:
        """Nobody goes on with it: what was committed and not taken is forgotten."""
        self._events.clear()
        self.core.end(len(self.prompt) + len(self.written))


def _output_record(output: Output | None) -> tuple[int, float, float, Sequence[tuple[int, float]]]:
    return (-1, 0.0, 0.0, ()) if output is None else (output.token, output.probability, output.entropy, output.top)


def _policy_record(policy: Policy, sampling: Sampling, calibration: Calibration) -> dict[str, Any]:
    depth = max(policy.block_size, 2)
    usable = calibration.down_to(depth - 1)
    window, shape = policy.window, policy.topology
    nodes = () if shape is None else shape.nodes
    ranks = 3 if policy.adaptive else 1 if shape is None else shape.ranks
    return {
        "bars": policy.bars, "temperatures": _filled(usable.temperatures), "offsets": _filled(usable.offsets),
        "verify_bound": policy.verify_bound, "block_size": policy.block_size,
        "verify": tuple(Verify).index(policy.verify), "min_prefix": policy.min_prefix, "adaptive": policy.adaptive,
        "linear": False, "ranks": ranks, "temperature": sampling.temperature,
        "window": (window.sinks, window.recent) if window else (0, 0), "shaped": shape is not None,
        "shape": [(n.kind is Kind.MASK, n.depth, n.rank, -1 if n.parent is None else n.parent) for n in nodes],
    }  # fmt: skip


def _filled(values: Sequence[float], size: int = 32) -> list[float]:
    """As long as the core's arrays; what lies deeper is as the deepest."""
    return [*values, *[values[-1]] * (size - len(values))]


def _sampling_record(s: Sampling) -> tuple[Any, ...]:
    return (
        s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty,
        s.seed, s.choice, list(s.logit_bias),
    )  # fmt: skip
