"""How far a figure measured on some questions may lie from what all questions would give: 95% intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_SAMPLES = 2000
_Z = 1.959964  # 97.5% of a standard normal distribution lie below it


def wilson(right: int, total: int) -> tuple[float, float]:
    """Interval of a proportion (Wilson 1927): unlike the normal one, it holds for few questions and near 0 and 1."""
    if not total:
        return 0.0, 1.0
    rate, spread = right / total, _Z * _Z / total
    centre = (rate + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(rate * (1 - rate) / total + spread / (4 * total))
    return max(0.0, centre - half), min(1.0, centre + half)


def paired(first: Sequence[bool], second: Sequence[bool]) -> tuple[float, float]:
    """Mean of ``first - second`` over the same questions, and half the width of its interval.

    Half a question is added to each cell of the table of agreement (Agresti & Min 2005), so that a few questions on
    which both agree do not pass for certainty.
    """
    pairs, total = list(zip(first, second, strict=True)), len(first) + 2
    won = sum(a and not b for a, b in pairs) + 0.5
    lost = sum(b and not a for a, b in pairs) + 0.5
    half = _Z * math.sqrt(won + lost - (won - lost) ** 2 / total) / total
    return ((won - lost) / len(pairs) if pairs else 0.0), half


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95% interval."""

    value: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether the interval contains a value."""
        return self.low <= value <= self.high


def bootstrap(count: int, statistic: Callable[[NDArray[np.intp]], NDArray[np.float64]], block: int = 1) -> Estimate:
    """A figure of ``count`` cases, with its interval by the percentile bootstrap (Efron 1979), always the same draws.

    Args:
        statistic: from picks of cases ``[samples, count]`` to the figure of each sample ``[samples]``; cases that were
            measured together stay together.
        block: so many neighbours are picked together, around the end too (circular blocks, Politis & Romano 1992). For
            cases in the order of their measurement: what changes slowly, such as the speed of a shared machine, then
            widens the interval as it should.
    """
    if not count:
        raise ValueError("a figure needs at least one case")
    value = float(statistic(np.arange(count)[None])[0])
    starts = np.random.default_rng(0).integers(0, count, (_SAMPLES, -(-count // block)))
    picks = (starts[:, :, None] + np.arange(block)).reshape(_SAMPLES, -1)[:, :count] % count
    low, high = np.quantile(statistic(picks), (0.025, 0.975))
    return Estimate(value, float(low), float(high))
