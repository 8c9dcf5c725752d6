"""The head of 16-bit floats against NumPy, from fresh random inputs."""

from __future__ import annotations

import numpy as np
import pytest

from bitmtp.backends.base import Head
from bitmtp.backends.cuda.heads import float_head
from bitmtp.backends.cuda.layout import MAX_WIDTH, PASS
from bitmtp.backends.cuda.matrices import Matrix, round_up

EPS = 1e-5


class FloatHead:
    """A head on the device, and rows to multiply; logits are poisoned before each pass."""

    def __init__(self, gpu, random, hidden, vocab):
        self.gpu, self.stride, self.out_stride = gpu, round_up(hidden, 16), round_up(vocab, 16)
        self.weights = random.normal(0, 0.1, (vocab, hidden)).astype(np.float16)
        self.gain = random.uniform(0.5, 2, hidden).astype(np.float32)
        self.x = (random.standard_normal((MAX_WIDTH, hidden)) * random.uniform(0.1, 10, (MAX_WIDTH, 1))).astype(
            np.float32
        )
        self.matrix = Matrix(16, hidden, vocab, 0, gpu.upload(self.weights), None, None)

    def _padded(self, array):
        return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, self.stride - array.shape[-1])])

    def run(self, rows, heads, launch_width, head=Head.NONE):
        gpu, x = self.gpu, np.full((MAX_WIDTH, self.stride), np.nan, np.float32)
        x[: len(rows)] = self._padded(self.x[rows])
        squares = np.nan_to_num(x).reshape(MAX_WIDTH, -1, 16) ** 2
        stats = np.stack([squares.sum(2), np.full(squares.shape[:2], np.nan)], axis=2).astype(np.float32)
        state = np.zeros(1, PASS)
        state["width"], state["rows"]["head"][0, : len(rows)] = len(rows), heads
        out = gpu.upload(np.full((MAX_WIDTH, self.out_stride), np.nan, np.float32))
        kernel = float_head(gpu, self.matrix, launch_width, self.out_stride, head)
        buffers = [gpu.upload(each) for each in (x, stats, self._padded(self.gain))]
        gpu.launch(gpu.stream, kernel, gpu.upload(state), self.matrix.weights, *buffers, out, np.float32(EPS))
        return gpu.read(out, np.float32, (MAX_WIDTH, self.out_stride))[: len(rows), : self.matrix.outputs]

    def exact(self, rows):
        x = self.x[rows].astype(np.float64)
        normed = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + EPS) * self.gain
        return normed @ self.weights.T.astype(np.float64)


@pytest.mark.parametrize(("hidden", "vocab"), [(576, 1009), (260, 33), (2560, 4099)])
def test_logits_at_every_width(gpu, hidden, vocab):
    random = np.random.default_rng()
    head = FloatHead(gpu, random, hidden, vocab)
    everything = np.arange(MAX_WIDTH)
    whole = head.run(everything, [Head.EXACT] * MAX_WIDTH, 64)
    exact = head.exact(everything)
    assert np.abs(whole - exact).max() < 1e-5 * np.abs(exact).max()
    for width in range(1, MAX_WIDTH + 1):
        rows = random.choice(MAX_WIDTH, width, replace=False)
        launch = next(each for each in (1, 2, 4, 8, 16, 32, 64) if each >= width)
        np.testing.assert_array_equal(head.run(rows, [Head.EXACT] * width, launch), whole[rows])


def test_only_rows_of_its_head_are_written(gpu):
    random = np.random.default_rng()
    head = FloatHead(gpu, random, 576, 200)
    heads = random.integers(0, 3, 21)
    rows = np.arange(21)
    for kind in (Head.NONE, Head.DRAFT, Head.EXACT):
        written = ~np.isnan(head.run(rows, heads, 32, kind)).any(axis=1)
        np.testing.assert_array_equal(written, heads > 0 if kind is Head.NONE else heads == kind)
