"""Intervals against exact enumeration."""

from __future__ import annotations

import math

import pytest

from bitmtp.evaluation.intervals import paired, wilson


def test_wilson_against_its_equation() -> None:
    # Its ends are the proportions that lie exactly 1.96 of their own standard deviations from the one observed.
    for right, total in ((0, 10), (3, 10), (50, 200), (10, 10)):
        for end in wilson(right, total):
            if 1e-9 < end < 1 - 1e-9:
                assert abs(end - right / total) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / total))
    assert wilson(0, 10)[0] == pytest.approx(0, abs=1e-9)
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.9])
def test_wilson_covers(rate: float) -> None:
    total = 200
    chances = [math.comb(total, n) * rate**n * (1 - rate) ** (total - n) for n in range(total + 1)]
    inside = sum(p for n, p in enumerate(chances) if wilson(n, total)[0] <= rate <= wilson(n, total)[1])
    assert 0.93 < inside < 0.985


def test_paired() -> None:
    first, second = [True] * 30 + [False] * 70, [False] * 20 + [True] * 10 + [False] * 70
    mean, half = paired(first, second)
    assert mean == pytest.approx(0.2)
    assert 0.05 < half < 0.1
    assert paired(second, first)[0] == -mean
    mean, half = paired([True, False], [True, False])
    assert mean == 0
    assert half > 0.4  # two questions prove little
