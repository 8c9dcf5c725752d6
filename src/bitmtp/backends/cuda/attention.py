"""The attention kernel: its constants, its grid and the memory it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from bitmtp.backends.cuda.compile import Constants
from bitmtp.backends.cuda.device import Gpu, Kernel
from bitmtp.backends.cuda.layout import PIECE
from bitmtp.config import ModelConfig
from bitmtp.errors import BackendError

FILE = "attention.cu"
# Blocks of a cluster, which share a K/V head behind a short history, and the pieces that one of them may take.
CLUSTER = 8
MAX_SLOTS = 4
# Shared memory a block may have.
_SHARED_KB = {"sm_80": 163, "sm_87": 163, "sm_86": 99, "sm_89": 99, "sm_120": 99, "sm_121": 99}
_SHARED_KB_OTHERS = 227
_MAX_QUERIES = 32
# Pieces at a time, and the fewest stages of those that are worth it, the best first.
_CUTS = ((4, 3), (2, 3), (1, 2))
_MAX_STAGES = 8
_QUAD = 4  # pieces that blocks share out together
_MAX_BLOCKS = 256  # that share one history: a thread of the merge lists the parts of each
_MERGE_THREADS = 256
_MOVE_THREADS = 256
_ENTRY = 12  # bytes of a part in the merge's list


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """How the attention of a pass is cut.

    Attributes:
        config: shape of the model.
        tile: rows a pass may have.
        sequences: how many sequences a pass may have; 1 saves blocks.
        qkv_stride: floats of a row of the product's output, 0: no padding.
        out_stride: floats of a row of the result, 0: no padding.
    """

    config: ModelConfig
    tile: int
    sequences: int = 1
    qkv_stride: int = 0
    out_stride: int = 0

    def __post_init__(self) -> None:
        if self.ratio > _MAX_QUERIES:
            raise BackendError(
                f"{self.ratio} heads to a K/V head, the cuda backend takes at most {_MAX_QUERIES}; use --backend cpu"
            )

    @property
    def ratio(self) -> int:
        """Query heads of one K/V head."""
        return self.config.num_heads // self.config.num_kv_heads

    @property
    def number_bytes(self) -> int:
        """Bytes of a number in the K/V store."""
        return 2 if self.config.kv_type == "float16" else 4

    @property
    def item_rows(self) -> int:
        """Rows of a sequence that one block takes."""
        return min(self.tile, _MAX_QUERIES // self.ratio)

    @property
    def items(self) -> int:
        """Blocks of the grid's last dimension."""
        return -(-self.tile // self.item_rows) if self.sequences == 1 else self.tile

    def shared_bytes(self, step: int, stages: int) -> int:
        """Shared memory of a block; ``Shared`` in the kernel, field by field."""
        queries = 16 * self.query_tiles
        row, weights = (self._row_stride(-(-self.config.head_dim // 16) * 16), self._row_stride(PIECE))
        numbers = (stages * step * PIECE + 2 * self.tile + queries) * row + step * queries * weights
        return numbers * self.number_bytes + 4 * queries * 4 + self.tile * 28 + 16

    @property
    def query_tiles(self) -> int:
        """Tiles of 16 queries of a block."""
        return 2 if self.item_rows * self.ratio > 16 else 1

    def _row_stride(self, columns: int) -> int:
        """Numbers of a row of a tile; ``Rows`` in the kernel."""
        return columns + (0 if self.number_bytes == 2 and columns % 64 == 0 else 16 // self.number_bytes)

    def cut(self, architecture: str) -> tuple[int, int]:
        """Pieces of a step and stages of a block.

        Raises:
            BackendError: not even the smallest block fits.
        """
        for step, fewest in _CUTS:
            for stages in range(_MAX_STAGES, fewest - 1, -1):
                if self.shared_bytes(step, stages) <= _room(architecture):
                    return step, stages
        raise BackendError(
            f"attention over {self.tile} rows with head_dim {self.config.head_dim} and {self.config.kv_type} K/V needs "
            f"{self.shared_bytes(*_CUTS[-1]) >> 10} KiB of shared memory, {architecture} has "
            f"{_room(architecture) >> 10}; use narrower passes"
        )

    def constants(self, architecture: str) -> Constants:
        """Definitions for ``kernels/attention.cu``."""
        c, (step, stages) = self.config, self.cut(architecture)
        return {
            "NUM_LAYERS": c.num_layers, "NUM_HEADS": c.num_heads, "NUM_KV_HEADS": c.num_kv_heads,
            "HEAD_SIZE": c.head_dim, "KV_BYTES": self.number_bytes, "QK_NORM": int(c.qk_norm),
            "NORM_EPS": c.norm_eps, "SCALE": c.head_dim**-0.5, "MAX_ROWS": self.tile,
            "ONE_SEQUENCE": int(self.sequences == 1), "STEP_PIECES": step, "STAGES": stages,
            "SHARED_BYTES": self.shared_bytes(step, stages),
            "QKV_STRIDE": self.qkv_stride or c.attention_size + 2 * c.kv_size,
            "OUT_STRIDE": self.out_stride or c.attention_size,
        }  # fmt: skip

    def blocks(self, gpu: Gpu, capacity: int) -> int:
        """Blocks that share one history of up to ``capacity`` positions, the pass's own included; a block fills a
        multiprocessor."""
        groups = self.config.num_kv_heads * -(-self.tile // self.item_rows)
        return min(max(1, gpu.multiprocessors // groups), _quads(capacity), _MAX_BLOCKS)

    def workspace_bytes(self, blocks: int, capacity: int) -> int:
        """Memory for the results of parts; ``Workspace`` in the kernel."""
        entries = blocks * most_parts(-(-_quads(capacity) // blocks)) * self.tile * self.config.num_heads
        return entries * 4 * (-(-self.config.head_dim // 4) * 4 + 4)


def _room(architecture: str) -> int:
    """Bytes of shared memory that one block may have."""
    return _SHARED_KB.get(architecture, _SHARED_KB_OTHERS) << 10


def _quads(capacity: int) -> int:
    return -(-capacity // (PIECE * _QUAD))


@cache
def most_parts(quads: int) -> int:
    """Nodes, at most, that make up a block's range of so many quads, a gap in it or not; ``Part`` in the kernel."""

    def nodes(count: int) -> int:  # up to three of each depth before the largest, and behind it
        return min(count, 6 + nodes(count // 4)) if count else 0

    return max(nodes(first) + nodes(quads - first) for first in range(quads + 1))


def short_kernel(gpu: Gpu, shape: AttentionShape, capacity: int) -> Kernel | None:
    """The kernel for short histories without trees and windows, if it takes this shape and the card has clusters.

    Arguments of a launch: those of :func:`attention_kernels` without the workspace; the same bits.
    """
    slots = -(-capacity // (PIECE * CLUSTER))
    config, queries = shape.config, 32 if shape.item_rows * shape.ratio > 16 else 16
    if not gpu.overlaps or shape.number_bytes != 2 or config.head_dim % 64 or slots > MAX_SLOTS:
        return None
    constants = {
        name: value
        for name, value in shape.constants(gpu.architecture).items()
        if name not in ("STEP_PIECES", "STAGES", "SHARED_BYTES")
    }
    parallel = min(slots, 512 // (8 * queries))
    numbers = slots * 2 * PIECE * config.head_dim + queries * (config.head_dim + parallel * PIECE)
    floats = (
        parallel * queries * 4 + 2 * (shape.item_rows + shape.item_rows % 2) + slots * queries * (config.head_dim + 4)
    )
    shared = numbers * 2 + floats * 4
    if shared > _SHARED_KB_OTHERS << 10:
        return None
    return gpu.kernel(
        "attention_short.cu", "attention_short", constants | {"CLUSTER": CLUSTER, "SLOTS": slots, "PARALLEL": parallel},
        grid=(1, config.num_kv_heads, shape.items), block=8 * queries * parallel, shared_bytes=shared, cluster=CLUSTER,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Attention:
    """The kernels for any history; no bit depends on how many blocks share it."""

    gpu: Gpu
    main: Kernel
    merge: Kernel
    blocks: int
    parts: int

    def launch(self, stream: Any, state: Any, layer: np.int32, *arguments: Any, overlap: bool = True) -> None:
        """Launch them into a stream or a graph being built.

        Args:
            arguments: qkv, q_norm, k_norm, cosines, sines, gain, attended, stats, workspace.
        """
        *inputs, gain, attended, stats, workspace = arguments
        parts = np.int32(self.parts)
        self.gpu.launch(stream, self.main, state, layer, *inputs, workspace, parts, overlap=overlap)
        merged = gain, attended, stats, workspace, np.int32(self.blocks), parts
        self.gpu.launch(stream, self.merge, state, *merged, overlap=overlap)


def attention_kernels(gpu: Gpu, shape: AttentionShape, capacity: int, blocks: int = 0) -> Attention:
    """The kernels for histories of up to ``capacity`` positions, the pass's own included.

    Args:
        blocks: how many share a history; 0: as many as is best.
    """
    constants = shape.constants(gpu.architecture)
    blocks = blocks or shape.blocks(gpu, capacity)
    parts = most_parts(-(-_quads(capacity) // blocks))
    grid = (blocks, shape.config.num_kv_heads, shape.items)
    main = gpu.kernel(
        FILE, "attention", constants, grid=grid, block=128 * shape.query_tiles,
        shared_bytes=shape.shared_bytes(*shape.cut(gpu.architecture)),
    )  # fmt: skip
    merge = gpu.kernel(
        FILE, "attention_merge", constants, grid=(shape.tile, shape.config.num_heads), block=_MERGE_THREADS,
        shared_bytes=blocks * parts * _ENTRY,
    )  # fmt: skip
    return Attention(gpu, main, merge, blocks, parts)


def move_kernel(gpu: Gpu, shape: AttentionShape) -> Kernel:
    """Moves K/V of rows of a pass to the slots right behind the history, in a given order.

    Arguments of a launch: store, int32 length, row numbers (int32), int32 count.
    """
    grid = (shape.config.num_layers, 2, shape.config.num_kv_heads)
    narrow = replace(shape, tile=8)  # of no consequence here, but it fits every device
    return gpu.kernel(FILE, "move_rows", narrow.constants(gpu.architecture), grid=grid, block=_MOVE_THREADS)
