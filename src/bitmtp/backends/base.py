"""What a backend is: rows in, outputs out, and a handful of operations on sequences. Nothing else in a backend knows
about policies, blocks or trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

from bitmtp.config import ModelConfig
from bitmtp.numerics import Float32
from bitmtp.sampling import GREEDY, Choice

MAX_WIDTH = 64


class Head(IntEnum):
    """What is computed from a row's last hidden state."""

    NONE = 0
    DRAFT = 1
    EXACT = 2


@dataclass(frozen=True, slots=True)
class Window:
    """The history that a windowed row sees: the first ``sinks`` positions and the last ``recent`` before its own."""

    sinks: int = 4
    recent: int = 1024


def mask(depth: int) -> int:
    """The ``token`` of a mask row of this depth (1 … block size - 1)."""
    return -depth


@dataclass(frozen=True, slots=True)
class Row:
    """One token position in a pass.

    Attributes:
        sequence: handle from :meth:`Backend.open`.
        token: a token id, or :func:`mask` of a depth. A Medusa head's mask is computed from the row it hangs from, its
            anchor, which must be a row of the pass that it sees; no row with a token may see it.
        position: where it stands in the text.
        visible: bit i is set if it sees row ``since + i`` *of its own sequence* in this pass; its own bit is set, and
            the rows seen stand at distinct positions, none after its own.
        head: what to compute from it.
        choice: how its token is chosen.
        window: what it sees of the history, if not all; such a row is never materialized.
        since: it sees every row of its sequence in this pass before this one.
    """

    sequence: int
    token: int
    position: int
    visible: int
    head: Head = Head.EXACT
    choice: Choice = GREEDY
    window: Window | None = None
    since: int = 0

    @property
    def bits(self) -> int:
        """What it sees as one set: bit i is row i of its sequence."""
        return self.visible << self.since | (1 << self.since) - 1

    @property
    def sees(self) -> list[int]:
        """Numbers, within its sequence, of the rows that it sees in this pass, ascending."""
        bits = self.bits
        return [index for index in range(bits.bit_length()) if bits >> index & 1]


@dataclass(frozen=True, slots=True)
class Output:
    """What a row with a head predicts for the position after its own.

    Attributes:
        token: the chosen token.
        probability: of that token in the raw distribution (temperature 1, nothing removed).
        entropy: of the raw distribution, in nats.
        top: the asked-for number of (token id, raw logit), best first.
        logits: raw logits ``[vocab]`` if asked for.
    """

    token: int
    probability: float
    entropy: float
    top: tuple[tuple[int, float], ...] = ()
    logits: Float32 | None = None


class Backend(Protocol):
    """Operations on sequences; every method raises ``ValueError`` for a handle or length that does not exist."""

    name: str
    config: ModelConfig

    def describe(self) -> dict[str, str]:
        """What runs: instruction set or device, threads, bytes of the weights; for people to read."""
        ...

    def open(self) -> int:
        """A new, empty sequence."""
        ...

    def close(self, sequence: int) -> None:
        """Give its memory back."""
        ...

    def length(self, sequence: int) -> int:
        """How many positions are materialized."""
        ...

    def truncate(self, sequence: int, length: int) -> None:
        """Forget every position from ``length`` on."""
        ...

    def fork(self, sequence: int, length: int) -> int:
        """A new sequence that shares the first ``length`` positions."""
        ...

    def prefill(self, sequence: int, tokens: Sequence[int], choice: Choice = GREEDY) -> Output:
        """Materialize one or more tokens and return the output of the last one."""
        ...

    def step(self, rows: Sequence[Row], *, top: int = 0, logits: bool = False) -> list[Output | None]:
        """One pass over 1 … 64 rows; None for rows without a head. K/V are kept until the next pass."""
        ...

    def materialize(self, sequence: int, indices: Sequence[int]) -> None:
        """Append rows of the last pass (numbered within the sequence) to the history, in this order.

        Raises:
            ValueError: a row is windowed, a mask, out of place, or does not see exactly what now stands before it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Workload:
    """What passes of coming texts may hold, as far as a backend wants to know beforehand.

    Attributes:
        several: rows of more than one sequence.
        filtered: penalties, biases, grammars, top-k, top-p or min-p.
        shaped: trees or windows.
    """

    several: bool = False
    filtered: bool = False
    shaped: bool = False


@runtime_checkable
class PreparedBackend(Protocol):
    """What a backend offers besides, if the first pass of a kind takes it long."""

    def prepare(self, workload: Workload) -> None:
        """Make ready for such passes, before a text begins; free if that has been done."""
        ...


@runtime_checkable
class TimedBackend(Protocol):
    """What a backend offers besides, if a pass costs less where it iterates by itself than the host sees."""

    def time_step(self, rows: Sequence[Row]) -> float:
        """Milliseconds of such a pass on the device; its outputs are lost."""
        ...


@runtime_checkable
class LoopBackend(Protocol):
    """What a backend offers besides, if it runs passes of texts by itself: plans, passes and outputs, without the host.

    Texts and batches are those of ``bitmtp.core._core``.
    """

    def can_run(self, texts: Sequence[Any]) -> bool:
        """Whether it can go on with these texts; makes ready for them."""
        ...

    def run(self, batch: Any, texts: Sequence[Any], prompt_rows: int, milliseconds: float) -> Ran:
        """At least one pass, and further ones for about so long; texts keep what they commit."""
        ...

    def settle(self) -> None:
        """End a loop that goes on between two calls of :meth:`run`, with its iteration."""
        ...


@dataclass(frozen=True, slots=True)
class Ran:
    """What a loop did.

    Attributes:
        widths: of its passes, as far as it can tell.
        order: places of the texts, those first that found no room.
        milliseconds: within passes of prompts, of drafts (with masks), and without masks.
    """

    widths: Sequence[int]
    order: Sequence[int]
    milliseconds: tuple[float, float, float] = (0.0, 0.0, 0.0)


def causal_rows(sequence: int, tokens: Sequence[int], start: int, heads: Sequence[Head], choice: Choice) -> list[Row]:
    """Plain causal rows for ``tokens`` from position ``start`` on; all share one ``choice``."""
    return [
        Row(sequence, token, start + index, (1 << (index + 1)) - 1, head, choice)
        for index, (token, head) in enumerate(zip(tokens, heads, strict=True))
    ]


def prefill_by_steps(
    backend: Backend, sequence: int, tokens: Sequence[int], choice: Choice, width: int = MAX_WIDTH
) -> Output:
    """Prefill in passes of up to ``width`` causal rows; any width gives the same bits."""
    if not tokens:
        raise ValueError("prefill needs at least one token")
    output = None
    for start in range(0, len(tokens), width):
        piece = tokens[start : start + width]
        last = start + len(piece) == len(tokens)
        heads = [Head.NONE] * (len(piece) - 1) + [Head.EXACT if last else Head.NONE]
        output = backend.step(causal_rows(sequence, piece, backend.length(sequence), heads, choice))[-1]
        backend.materialize(sequence, range(len(piece)))
    assert output is not None
    return output
