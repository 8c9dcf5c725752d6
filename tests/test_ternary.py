"""Low-bit packing, absmean quantisation and activation quantisation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitmtp.ternary import pack, quantise_rows, ternarise, unpack

RANGE = {2: (-1, 1), 4: (-8, 7), 8: (-128, 127)}


@given(bits=st.sampled_from([2, 4, 8]), out=st.integers(1, 5), cells=st.integers(1, 9), seed=st.integers(0, 99))
def test_round_trip(bits: int, out: int, cells: int, seed: int) -> None:
    low, high = RANGE[bits]
    weights = np.random.default_rng(seed).integers(low, high + 1, (out, cells * 4), dtype=np.int8)
    packed = pack(weights, bits)
    assert packed.dtype == np.uint8
    assert packed.shape == (out, cells * 4 * bits // 8)
    assert np.array_equal(unpack(packed, bits), weights)


def test_lowest_bits_come_first() -> None:
    assert pack(np.array([[-1, 0, 1, 1]], np.int8), 2).tolist() == [[0b10_10_01_00]]
    assert pack(np.array([[-8, 7]], np.int8), 4).tolist() == [[0xF0]]


@pytest.mark.parametrize(("weight", "bits"), [(2, 2), (-2, 2), (8, 4), (-9, 4)])
def test_a_weight_that_does_not_fit(weight: int, bits: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        pack(np.array([[0, 1, weight, 0]], np.int8), bits)


@pytest.mark.parametrize(("inputs", "bits"), [(3, 2), (6, 2), (3, 4)])
def test_inputs_must_fill_bytes(inputs: int, bits: int) -> None:
    with pytest.raises(ValueError, match="whole bytes"):
        pack(np.zeros((1, inputs), np.int8), bits)


@pytest.mark.parametrize(("layout", "shape"), [("tensor", (1,)), ("row", (6,)), ("group", (6, 2))])
def test_ternarise_by_hand(layout: str, shape: tuple[int, ...]) -> None:
    weights = np.random.default_rng(1).normal(0, 3, (6, 16)).astype(np.float32)
    ternary, scale = ternarise(weights, layout, 8)
    assert scale.shape == shape
    for row in range(6):
        for column in range(16):
            cells = {"tensor": weights, "row": weights[row], "group": weights[row, column // 8 * 8 :][:8]}[layout]
            mean = np.abs(cells).astype(np.float64).mean()
            assert ternary[row, column] == max(-1, min(1, round(weights[row, column] / np.float32(mean))))
            used = {"tensor": scale[0], "row": scale[row % len(scale)], "group": scale[row % len(scale), ...]}[layout]
            assert (used if layout != "group" else used[column // 8]) == pytest.approx(mean)


def test_ternarise_of_zeros_is_finite() -> None:
    ternary, scale = ternarise(np.zeros((2, 8), np.float32), "row")
    assert not ternary.any()
    assert (scale > 0).all()


def test_activations_by_hand() -> None:
    levels, step = quantise_rows(np.array([[127.0, -63.5, 0.5, 1.5, 2.5, -0.4]], np.float32))
    assert levels.tolist() == [[127, -64, 0, 2, 2, 0]]  # halves go to the even neighbour
    assert step.tolist() == [[1.0]]


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40),
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40),
)
def test_activations_are_close_and_rows_independent(first: list[float], second: list[float]) -> None:
    width = max(len(first), len(second))
    rows = np.zeros((2, width), np.float32)
    rows[0, : len(first)], rows[1, : len(second)] = first, second
    levels, step = quantise_rows(rows)
    assert np.abs(levels.astype(np.int64)).max() <= 127
    assert (np.abs(levels * step - rows) <= step * 0.51).all()
    alone, alone_step = quantise_rows(rows[1:])
    assert np.array_equal(alone[0], levels[1])
    assert alone_step[0] == step[1]


def test_tiny_activations_use_the_floor() -> None:
    levels, step = quantise_rows(np.array([[1e-7, 0, -1e-7]], np.float32))
    assert levels.tolist() == [[1, 0, -1]]
    assert step[0, 0] == np.float32(1e-5) / np.float32(127)
