"""The float primitives against float64 and against loops written out."""

from __future__ import annotations

import ctypes
import ctypes.util

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitmtp import numerics

F = np.float32


def lane_sum_by_loop(x: np.ndarray) -> np.float32:
    """The order of ``docs/numerics.md``, one addition at a time."""
    padded = [*x, *[F(0)] * (-len(x) % 16)]
    lanes = padded[:16]
    for start in range(16, len(padded), 16):
        lanes = [F(lane + term) for lane, term in zip(lanes, padded[start : start + 16], strict=True)]
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [F(lanes[i] + lanes[i + half]) for i in range(half)]
    return lanes[0]


@given(size=st.integers(1, 100), seed=st.integers(0, 1000))
def test_lane_sum_takes_its_order(size: int, seed: int) -> None:
    x = (np.random.default_rng(seed).normal(0, 1, size) * 10.0 ** np.arange(size).clip(0, 6)).astype(F)
    assert numerics.lane_sum(x) == lane_sum_by_loop(x)


def test_lane_sum_works_on_the_last_axis() -> None:
    x = np.random.default_rng(0).normal(0, 1, (3, 2, 37)).astype(F)
    want = [[lane_sum_by_loop(x[i, j]) for j in range(2)] for i in range(3)]
    assert np.array_equal(numerics.lane_sum(x), np.array(want, F))


def test_another_order_would_be_noticed() -> None:
    x = np.random.default_rng(0).normal(0, 1, (20, 1000)).astype(F)
    assert (numerics.lane_sum(x) != numerics.fold(x.T)).any()
    assert numerics.lane_sum(x[0]) == pytest.approx(float(x[0].astype(np.float64).sum()), abs=1e-4)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 9000])
def test_blocked_sum_takes_its_order(size: int) -> None:
    x = np.random.default_rng(size).random(size).astype(F)
    total: np.float32 | None = None
    for start in range(0, size, 4096):
        block = lane_sum_by_loop(x[start : start + 4096])
        total = block if total is None else F(total + block)
    assert numerics.blocked_sum(x) == total


def test_fold_is_strictly_in_order() -> None:
    assert numerics.fold(np.array([1e8, 1, -1e8, 1], F)) == F(1)
    assert numerics.fold(np.array([1, 1, 1e8, -1e8], F)) == F(0)


def test_exp_is_accurate() -> None:
    x = np.linspace(-87, 88, 200_001).astype(F)
    want = np.exp(x.astype(np.float64))
    assert np.abs(numerics.exp(x) / want - 1).max() < 2e-7


def test_exp_at_its_ends() -> None:
    x = np.array([-np.inf, -1e30, -87.01, -87, 0, 88, 88.5, 1e30], F)
    y = numerics.exp(x)
    assert y[:3].tolist() == [0, 0, 0]
    assert y[3] > 0
    assert y[4] == 1
    assert y[5] == y[6] == y[7]
    assert np.isfinite(y).all()


def test_exp_rises() -> None:
    """Neighbours may be equal, never in the wrong order by more than a rounding; here: on a grid, strictly."""
    for low, high in ((-86, -60), (-2, 2), (-1e-2, 1e-2), (30, 60)):
        assert (np.diff(numerics.exp(np.linspace(low, high, 2001).astype(F))) > 0).all()


def test_log_is_accurate() -> None:
    x = np.exp(np.linspace(-80, 80, 200_001)).astype(F)
    want = np.log(x.astype(np.float64))
    assert np.abs(numerics.log(x) - want).max() < 8e-6
    near = np.linspace(0.5, 2, 100_001).astype(F)
    assert np.abs(numerics.log(near) - np.log(near.astype(np.float64))).max() < 1.2e-7


def test_log_at_known_places() -> None:
    assert numerics.log(np.array([1], F))[0] == 0
    assert numerics.log(np.array([2], F))[0] == F(np.log(2))
    assert (np.diff(numerics.log(np.linspace(0.1, 9, 3001).astype(F))) > 0).all()


@given(st.floats(-80, 80, width=32))
def test_log_undoes_exp(x: float) -> None:
    assert numerics.log(numerics.exp(np.array([x], F)))[0] == pytest.approx(x, abs=1e-5)


def test_a_value_does_not_depend_on_its_neighbours() -> None:
    x = np.linspace(-5, 5, 37).astype(F)
    for function in (numerics.exp, lambda v: numerics.log(np.abs(v) + F(1))):
        alone = np.array([function(x[i : i + 1])[0] for i in range(len(x))])
        assert np.array_equal(function(x), alone)


def test_norm() -> None:
    random = np.random.default_rng(3)
    x, weight = random.normal(0, 2, (4, 30)).astype(F), random.normal(1, 0.1, 30).astype(F)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
    assert np.abs(numerics.norm(x, weight, 1e-5) - want).max() < 1e-5
    assert np.array_equal(numerics.norm(x, weight, 1e-5)[2], numerics.norm(x[2:3], weight, 1e-5)[0])


def test_mix32_is_a_bijection_on_a_sample() -> None:
    x = np.arange(1 << 16, dtype=np.uint32) * np.uint32(65537)
    assert len(np.unique(numerics.mix32(x))) == len(x)


def test_mix64_against_splitmix64() -> None:
    """The first outputs of SplitMix64 seeded with 0, as published with the generator."""
    step = 0x9E3779B97F4A7C15
    assert numerics.mix64(step) == 0xE220A8397B1DCDAF
    assert numerics.mix64(2 * step) == 0x6E789E6AA1B965F4


def test_gumbel_depends_on_each_key_and_nothing_else() -> None:
    ids = np.arange(2000, dtype=np.int32)
    base = numerics.gumbel(5, 0, 7, ids)
    for other in ((6, 0, 7), (5, 1, 7), (5, 0, 8), (5 + (1 << 40), 0, 7)):
        assert np.mean(numerics.gumbel(*other, ids) == base) < 0.01
    assert len(np.unique(base)) > 1990
    picked = np.array([1999, 3, 700], np.int32)
    assert np.array_equal(numerics.gumbel(5, 0, 7, picked), base[picked])


def test_gumbel_has_the_gumbel_distribution() -> None:
    noise = numerics.gumbel(1, 0, 0, np.arange(100_000, dtype=np.int32)).astype(np.float64)
    assert np.isfinite(noise).all()
    for quantile in (0.01, 0.1, 0.5, 0.9, 0.99):
        want = -np.log(-np.log(quantile))
        assert np.mean(noise <= want) == pytest.approx(quantile, abs=0.006)


def test_gumbel_at_neighbouring_positions_is_uncorrelated() -> None:
    ids = np.arange(50_000, dtype=np.int32)
    first, second = numerics.gumbel(1, 0, 10, ids), numerics.gumbel(1, 0, 11, ids)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.02


def test_fma_rounds_once() -> None:
    name = ctypes.util.find_library("m")
    if name is None:
        pytest.skip("no C library to compare with")
    reference = ctypes.CDLL(name).fmaf
    reference.restype, reference.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    random = np.random.default_rng(3)
    a, b = (random.standard_normal(40_000).astype(F) for _ in range(2))
    spread = np.ldexp(F(1), random.integers(-40, 20, len(a))).astype(F)
    c = np.where(random.random(len(a)) < 0.5, -(a * b), random.standard_normal(len(a)).astype(F)) * spread
    for addend in (c.astype(F), -(a * b)):  # the second cancels all but the rounding error of the product
        expected = np.array([reference(*triple) for triple in zip(a, b, addend, strict=True)], F)
        np.testing.assert_array_equal(numerics.fma(a, b, addend), expected)
