"""Intervals against exact enumeration, and against what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bitmtp.evaluation.intervals import bootstrap, paired, wilson


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


def test_a_bootstrap_interval_covers_the_true_mean_as_often_as_it_says() -> None:
    random, inside = np.random.default_rng(3), 0
    for _ in range(300):
        cases = random.normal(5.0, 2.0, 40)
        inside += bootstrap(40, lambda picks, cases=cases: cases[picks].mean(axis=1)).holds(5.0)
    assert 0.90 < inside / 300 < 0.98


def test_blocks_cover_cases_that_drift() -> None:
    random, inside = np.random.default_rng(5), {1: 0, 12: 0}
    for _ in range(200):
        cases = np.repeat(random.normal(5.0, 1.0, 20), 6) + random.normal(0.0, 0.5, 120)
        for block in inside:
            inside[block] += bootstrap(120, lambda picks, cases=cases: cases[picks].mean(axis=1), block).holds(5.0)
    assert inside[1] / 200 < 0.75
    assert inside[12] / 200 > 0.85


def test_cases_stay_paired_under_the_bootstrap() -> None:
    first = np.random.default_rng(4).uniform(1, 100, 50)
    second = 2 * first
    found = bootstrap(50, lambda picks: np.median(second[picks] / first[picks], axis=1))
    assert (found.value, found.low, found.high) == (2, 2, 2)
    assert found == bootstrap(50, lambda picks: np.median(second[picks] / first[picks], axis=1))
    with pytest.raises(ValueError, match="at least one case"):
        bootstrap(0, lambda picks: picks.sum(axis=1).astype(np.float64))
