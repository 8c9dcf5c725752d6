"""What a pass costs on this machine, and what a draft's probabilities are worth: shapes follow from these tables."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median
from typing import Any

from bitmtp.backends.base import MAX_WIDTH, Backend, Head, Row, TimedBackend, causal_rows, mask
from bitmtp.core import _core
from bitmtp.errors import ConfigError
from bitmtp.sampling import GREEDY

# On both sides of where a kernel's next width begins: a pass of 9 rows may cost what 16 cost.
WIDTHS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64)
DEAR = 6  # times a pass of one row: wide passes that cost more are taken to cost in proportion to their rows
LEAST_ROUNDS, ROUNDS = 3, 9
SECONDS = 1.0  # after which a slow machine has shown enough
SHORT, FAR, FAR_ON_DEVICE = 16, 256, 4096
_GROWTH_WIDTHS = (1, 8)


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of a pass by its width.

    Attributes:
        widths: ascending, from 1.
        milliseconds: of a pass of each width behind a history of ``history`` positions.
        per_position: what each further position of history adds to any pass, and to each of its rows.

    Raises:
        ConfigError: the entries are no such table.
    """

    widths: tuple[int, ...]
    milliseconds: tuple[float, ...]
    history: int = SHORT
    per_position: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.widths, self.widths[1:], strict=False))
        if not rising or self.widths[:1] != (1,) or len(self.widths) != len(self.milliseconds):
            raise ConfigError(f"a cost table needs a cost for each of its widths, ascending from 1, not {self.widths}")
        if not all(cost > 0 for cost in self.milliseconds) or min(self.per_position) < 0:
            raise ConfigError("a cost table holds a cost that is not positive")

    def cost(self, width: int, history: int) -> float:
        """Milliseconds of a pass of ``width`` rows, at least 1; linear between the widths measured, and beyond them."""
        fixed, each = self.per_position
        return self.near[width] + (history - self.history) * (fixed + each * width)

    def core(self) -> _core.Costs:
        """For the core; they stay as they are."""
        return _core.Costs(list(self.near), self.per_position, self.history, False, [], [])

    @property
    def row(self) -> float:
        """What a further row of a narrow pass costs."""
        return (self.near[MAX_WIDTH // 4] - self.near[1]) / (MAX_WIDTH // 4 - 1)

    @cached_property
    def near(self) -> tuple[float, ...]:
        """Read between the entries once: every decision weighs many widths."""
        if len(self.widths) == 1:
            return self.milliseconds * (MAX_WIDTH + 1)
        return tuple(self._between(width) for width in range(MAX_WIDTH + 1))

    def _between(self, width: int) -> float:
        right = min(max(sum(each < width for each in self.widths), 1), len(self.widths) - 1)
        (w0, w1), (c0, c1) = self.widths[right - 1 : right + 1], self.milliseconds[right - 1 : right + 1]
        return c0 + (c1 - c0) * (width - w0) / (w1 - w0)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Makes a proposal's probability mean what it says, given that the ones before it stood.

    ``logit(p) / temperature + offset``, one pair a depth; a depth beyond the last takes the last. A temperature alone
    (Guo et al., arXiv:1706.04599) cannot mend a draft that keeps back probability for tokens it never proposes. The
    default is what drafts of the shipped model need (docs/lab/2026-11-30-shapes.md).
    """

    temperatures: tuple[float, ...] = (0.75,)
    offsets: tuple[float, ...] = (1.3,)

    def __post_init__(self) -> None:
        if not self.temperatures or len(self.temperatures) != len(self.offsets) or min(self.temperatures) <= 0:
            raise ConfigError("a calibration needs a positive temperature and an offset for each depth")

    def logit(self, depth: int, probability: float) -> float:
        """Log-odds that the proposal of this depth (from 1 on) stands."""
        temperature, offset = self._pair(depth)
        return logit(probability) / temperature + offset

    def bar(self, depth: int, chance: float) -> float:
        """The least probability of the proposal of this depth with which it stands with this chance; what is certain,
        no probability says."""
        if not 0 < chance < 1:
            return math.inf if chance > 0 else 0.0
        temperature, offset = self._pair(depth)
        return sigmoid((logit(chance) - offset) * temperature)

    def down_to(self, depth: int) -> Calibration:
        """The same, with a pair for each depth from 1 to this one."""
        temperatures, offsets = zip(*map(self._pair, range(1, depth + 1)), strict=True)
        return Calibration(temperatures, offsets)

    def _pair(self, depth: int) -> tuple[float, float]:
        place = min(depth, len(self.temperatures)) - 1
        return self.temperatures[place], self.offsets[place]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Everything that the adaptive policy knows beforehand, about the machine and the model.

    Attributes:
        calibration: of greedy texts.
        sampled: of texts at temperature 1, where noise has its part in whether a proposal stands.
    """

    costs: CostTable
    calibration: Calibration = Calibration()
    sampled: Calibration = Calibration((2.0,), (0.4,))

    @classmethod
    def usual(cls) -> Tuning:
        """Of a machine of which nothing is known."""
        return cls(CostTable((1,), (1.0,)))

    def calibration_at(self, temperature: float) -> Calibration:
        """The nearer of the two."""
        return self.calibration if temperature < 0.5 else self.sampled

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Tuning:
        """Read :meth:`to_json`.

        Raises:
            ConfigError: the text is none.
        """
        try:
            return cls.from_data(json.loads(text))
        except ValueError as error:
            raise ConfigError(f"not a tuning ({error})") from None

    @classmethod
    def from_data(cls, data: Any) -> Tuning:
        """Of what JSON holds.

        Raises:
            ConfigError: it is none.
        """
        try:
            kinds = {"costs": CostTable, "calibration": Calibration, "sampled": Calibration}
            parts = {name: {key: _frozen(value) for key, value in data[name].items()} for name in kinds}
            return cls(**{name: kind(**parts[name]) for name, kind in kinds.items()})
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"not a tuning ({error})") from None


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def logit(probability: float) -> float:
    """Log-odds, kept finite."""
    inside = min(max(probability, 1e-4), 1 - 1e-4)
    return math.log(inside / (1 - inside))


def sigmoid(x: float) -> float:
    """The probability of these log-odds."""
    return 1 / (1 + math.exp(-x))


def measure_costs(backend: Backend, context: int) -> CostTable:
    """Time a few passes of each width, behind a short history and a longer one: about a second for a small model.

    Only ratios matter to a decision. Each is the median of those to a pass of one row within a round, so that a machine
    that is slower at times still shows them.

    Args:
        context: positions that a sequence of the backend may have.
    """
    near = min(SHORT, context - 1)
    # Where a device reads prompts fast, only a long history tells what a position costs.
    far = min(FAR_ON_DEVICE if isinstance(backend, TimedBackend) else FAR, context - _GROWTH_WIDTHS[-1])
    passes = [(near, width) for width in WIDTHS if near + width <= context]
    distant = [(far, width) for width in _GROWTH_WIDTHS] if far >= 4 * near else []
    sequences = {history: backend.open() for history, _ in passes[:1] + distant[:1]}
    try:
        for history, sequence in sequences.items():
            backend.prefill(sequence, [index % backend.config.vocab_size for index in range(history)])
        times = _times(backend, sequences, passes + distant)
    finally:
        for sequence in sequences.values():
            backend.close(sequence)
    growth = _growth(times, near, far) if distant else (0.0, 0.0)
    costs = {width: times[near, width] for _, width in passes if (near, width) in times}
    widest, last = passes[-1][1], max(costs)
    costs[widest] = costs[last] * widest / last
    return CostTable(tuple(costs), tuple(costs.values()), near, growth)


def _growth(times: Mapping[tuple[int, int], float], near: int, far: int) -> tuple[float, float]:
    """What a position adds to a pass and to each of its rows."""
    narrow, wide = _GROWTH_WIDTHS
    added = [max(times[far, width] - times[near, width], 0.0) / (far - near) for width in (narrow, wide)]
    each = max(added[1] - added[0], 0.0) / (wide - narrow)
    return max(added[0] - each * narrow, 0.0), each


def _times(
    backend: Backend, sequences: Mapping[int, int], passes: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    """Milliseconds of passes (history, width), but for the dear ones; the first is the measure of the others. No row is
    kept."""

    def run(history: int, width: int) -> float:
        return time_pass(backend, _draft_rows(sequences[history], history, width, backend.config.block_size))

    end = time.perf_counter() + SECONDS
    first = dict(zip(passes, [run(*each) for each in passes], strict=True))  # buffers grow in this round
    narrow, limit = _GROWTH_WIDTHS[-1], DEAR * first[passes[0]]
    timed = [each for each in passes if each[1] <= narrow or first[each] <= limit]
    rounds: list[list[float]] = []
    while len(rounds) < LEAST_ROUNDS or (len(rounds) < ROUNDS and time.perf_counter() < end):
        rounds.append([run(*each) for each in timed])
    unit = median(times[0] for times in rounds)
    return {each: unit * median(times[i] / times[0] for times in rounds) for i, each in enumerate(timed)}


def time_pass(backend: Backend, rows: Sequence[Row]) -> float:
    """Milliseconds of a pass, on the device where the backend can tell; its rows are not kept."""
    if isinstance(backend, TimedBackend):
        return backend.time_step(rows)
    begun = time.perf_counter()
    backend.step(rows)
    return (time.perf_counter() - begun) * 1e3


def _draft_rows(sequence: int, start: int, width: int, block_size: int) -> list[Row]:
    """As many plain rows as masks, so that both kinds have their share in the cost."""
    masks = min(width // 2, block_size - 1)
    tokens = [*range(width - masks), *(mask(depth) for depth in range(1, masks + 1))]
    return causal_rows(sequence, tokens, start, [Head.EXACT] * width, GREEDY)
