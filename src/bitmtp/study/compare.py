"""Two runs of one study: do they say the same?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bitmtp.errors import RequestError
from bitmtp.evaluation.intervals import Estimate
from bitmtp.study.record import Record
from bitmtp.study.summary import RELATIVE, estimates, summarise

EXPECTED = 0.95  # share of the figures of two runs that agree if nothing but chance sets them apart


@dataclass(frozen=True, slots=True)
class Agreement:
    """One figure in two runs."""

    workload: str
    label: str
    figure: str
    first: Estimate
    second: Estimate

    @property
    def agrees(self) -> bool:
        """The difference is no larger than the 95% interval of a difference: the sides of the two intervals that face
        each other, added as independent errors are."""
        lower, upper = sorted((self.first, self.second), key=lambda each: each.value)
        return upper.value - lower.value <= math.hypot(lower.high - lower.value, upper.value - upper.low)

    @property
    def relative(self) -> bool:
        """It is a ratio within one run, or a count: the speed of the machine at the time does not enter."""
        return self.figure in RELATIVE

    @property
    def change(self) -> float:
        """Second ÷ first, less 1."""
        return self.second.value / self.first.value - 1 if self.first.value else 0.0


def compare(first: Record, second: Record) -> list[Agreement]:
    """Every figure that has an interval.

    Raises:
        RequestError: the runs differ in model, policies, requests or longest text.
    """
    for name in ("model", "subjects", "max_tokens"):
        if getattr(first, name) != getattr(second, name):
            raise RequestError(f"these studies differ in {name}; only runs of the same study can be compared")
    counts = [{name: len(rows) for name, rows in each.texts.items()} for each in (first, second)]
    if counts[0] != counts[1]:
        raise RequestError(f"these studies have different requests ({counts[0]} and {counts[1]})")
    others = summarise(second)
    return [
        Agreement(workload, own.label, figure, estimate, estimates(other)[figure])
        for workload, figures in summarise(first).items()
        for own, other in zip(figures, others[workload], strict=True)
        for figure, estimate in estimates(own).items()
    ]
