"""Attention alone: microseconds of a layer behind histories of any length, against what its K/V cost to read.

    python benchmarks/attention.py [--shape bonsai-1.7b] [--history 512 4096 32768 131072] [--widths 1 8]

Every layer of the shape, one after the other, each with K/V of its own where the store would have them, in a graph; the
median of its replays. Results are compared with float64 on the host, and each width with the widest, bit for bit.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitmtp.backends.cuda.attention import AttentionShape, attention_kernels
from bitmtp.backends.cuda.device import Gpu, check
from bitmtp.backends.cuda.layout import MAX_WIDTH, PASS, PIECE
from bitmtp.benchmark.shapes import SHAPES
from bitmtp.config import ModelConfig

DISTINCT = 5  # pieces of K/V that a history repeats
REPLAYS = 20
LAYER = 1  # whose results are compared


@dataclass(frozen=True, slots=True)
class History:
    """A store that repeats a few pieces, and the rows behind it."""

    gpu: Gpu
    config: ModelConfig
    length: int
    pieces: NDArray[np.float16]  # [DISTINCT, layers, 2, kv_heads, PIECE, head_dim]
    store: Any
    qkv: NDArray[np.float32]  # [MAX_WIDTH, (heads + 2 kv_heads) * head_dim]

    @classmethod
    def of(cls, gpu: Gpu, config: ModelConfig, length: int) -> History:
        """Fill the store by copies on the card."""
        from cuda.bindings import driver

        rng = np.random.default_rng(length)
        shape = DISTINCT, config.num_layers, 2, config.num_kv_heads, PIECE, config.head_dim
        pieces = rng.standard_normal(shape, np.float32).astype(np.float16)
        count, size, source = -(-(length + MAX_WIDTH) // PIECE), pieces[0].nbytes, gpu.upload(pieces)
        store, stream = gpu.empty(count * size), driver.CUstream(int(gpu.stream.handle))
        for piece in range(count):
            to, origin = int(store.handle) + piece * size, int(source.handle) + piece % DISTINCT * size
            check(driver.cuMemcpyDtoDAsync(to, origin, size, stream), "fill the store")
        columns = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        return cls(gpu, config, length, pieces, store, rng.standard_normal((MAX_WIDTH, columns), np.float32))

    def state(self, width: int) -> NDArray[Any]:
        """A pass of causal rows behind the history."""
        state = np.zeros((), PASS)
        state["width"], state["num_sequences"] = width, 1
        state["sequences"][0] = (int(self.store.handle), self.length, 0, width, 1)
        for index in range(width):
            row = state["rows"][index]
            row["visible"], row["position"], row["index"] = (2 << index) - 1, self.length + index, index
        return state

    def run(self, width: int) -> tuple[float, NDArray[np.float32]]:
        """Seconds of a layer, and the rows' results in layer ``LAYER``."""
        gpu, config = self.gpu, self.config
        capacity = 1 << (self.length + width - 1).bit_length()
        shape = AttentionShape(config, -(-width // 8) * 8)
        kernels = attention_kernels(gpu, shape, capacity)
        ones = np.ones((self.length + MAX_WIDTH) * config.head_dim // 2 + config.attention_size, np.float32)
        one, zero, qkv = gpu.upload(ones), gpu.zeros(ones.nbytes), gpu.upload(self.qkv)
        results = [gpu.zeros(MAX_WIDTH * config.attention_size * 4) for _ in range(2)]
        stats, workspace = gpu.zeros(1 << 20), gpu.zeros(shape.workspace_bytes(kernels.blocks, capacity))
        state = gpu.upload(self.state(width))
        builder = gpu.device.create_graph_builder()
        builder.begin_building()
        for layer in range(config.num_layers):
            to = results[layer == LAYER]
            kernels.launch(builder, state, np.int32(layer), qkv, one, one, one, zero, one, to, stats, workspace)
        graph = builder.end_building().complete()
        taken = [self._replay(graph) for _ in range(REPLAYS)]
        rows = gpu.read(results[1], np.float32, (width, config.num_heads, config.head_dim))
        return median(taken[3:]) / config.num_layers, rows

    def _replay(self, graph: Any) -> float:
        options = self.gpu.core.EventOptions(timing_enabled=True)
        begin = self.gpu.stream.record(options=options)
        graph.launch(self.gpu.stream)
        end = self.gpu.stream.record(options=options)
        end.sync()
        return float(end - begin) / 1e3

    def error(self, width: int, found: NDArray[np.float32]) -> float:
        """Largest relative error of a head of a row, against float64."""
        config, eps = self.config, self.config.norm_eps
        heads = self.qkv[:width].reshape(width, -1, config.head_dim).astype(np.float64)
        q, k, v = np.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=1)
        if config.qk_norm:
            q, k = (x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) for x in (q, k))
        keys, values = self.pieces[:, LAYER].astype(np.float64).transpose(1, 3, 0, 2, 4).reshape(
            2, PIECE * DISTINCT, config.num_kv_heads, config.head_dim
        )  # fmt: skip
        place = np.arange(PIECE)[:, None] + PIECE * np.arange(DISTINCT)  # how often each position is repeated
        repeats = np.maximum(0, -(-(self.length - place) // (PIECE * DISTINCT))).ravel()
        worst = 0.0
        for row in range(width):
            for head in range(config.num_heads):
                group = head // (config.num_heads // config.num_kv_heads)
                all_keys, all_values = (
                    np.concatenate([old[:, group], x[: row + 1, group].astype(np.float16)])
                    for old, x in ((keys, k), (values, v))
                )
                scores = all_keys @ q[row, head] / np.sqrt(config.head_dim)
                weights = np.exp(scores - scores.max()) * np.concatenate([repeats, np.ones(row + 1)])
                expected = weights @ all_values / weights.sum()
                worst = max(worst, float(np.linalg.norm(found[row, head] - expected) / np.linalg.norm(expected)))
        return worst


def copy_speed(gpu: Gpu) -> float:
    """Bytes a second that a large copy reads and writes."""
    from cuda.bindings import driver

    size, options = 2 << 30, gpu.core.EventOptions(timing_enabled=True)
    a, b, stream = gpu.zeros(size), gpu.zeros(size), driver.CUstream(int(gpu.stream.handle))
    taken = []
    for _ in range(5):
        begin = gpu.stream.record(options=options)
        check(driver.cuMemcpyDtoDAsync(int(a.handle), int(b.handle), size, stream), "copy")
        end = gpu.stream.record(options=options)
        end.sync()
        taken.append(float(end - begin) / 1e3)
    return 2 * size / median(taken)


def main() -> None:
    """One line for a history and a width."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="bonsai-1.7b", choices=SHAPES)
    parser.add_argument("--history", nargs="*", type=int, default=[512, 4096, 32_768, 131_072])
    parser.add_argument("--widths", nargs="*", type=int, default=[1, 8])
    options = parser.parse_args()
    gpu, config = Gpu(), SHAPES[options.shape]
    speed = copy_speed(gpu)
    print(f"{gpu.device.name}, copies at {speed / 1e12:.2f} TB/s; {options.shape}, microseconds of a layer")
    for length in options.history:
        history = History.of(gpu, config, length)
        floor = length * 2 * config.kv_size * 2 / speed
        widest: NDArray[np.float32] | None = None
        for width in sorted(options.widths, reverse=True):
            seconds, rows = history.run(width)
            widest = rows if widest is None else widest
            same = "same bits" if np.array_equal(widest[:width], rows) else "OTHER BITS"
            print(
                f"  {length:7} positions, width {width:2}: {seconds * 1e6:7.1f} us, floor {floor * 1e6:6.1f} us "
                f"({floor / seconds:4.0%}), error {history.error(width, rows):.1e}, {same}", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
