"""The attention kernel: its constants, its grid and the memory it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bitmtp.backends.cuda.compile import Constants
from bitmtp.backends.cuda.device import Gpu, Kernel
from bitmtp.backends.cuda.layout import MAX_WIDTH, PIECE
from bitmtp.config import ModelConfig
from bitmtp.errors import BackendError

FILE = "attention.cu"
THREADS = 256
# Blocks of a cluster, which share a K/V head behind a short history, and the pieces that one of them may take.
CLUSTER = 8
MAX_SLOTS = 4
# Blocks that share one history, at most: what they leave for the last of them to put together grows with their number.
MAX_BLOCKS = 32
# Shared memory a block may have.
_SHARED_KB = {"sm_80": 163, "sm_87": 163, "sm_86": 99, "sm_89": 99, "sm_120": 99, "sm_121": 99}
_SHARED_KB_OTHERS = 227
# Positions of the largest node; the workspace has room for two to a block.
_LARGEST_NODE = 4096
_MAX_QUERIES = 32


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

    def shared_bytes(self, stages: int) -> int:
        """Shared memory of a block; ``Shared`` in the kernel, field by field."""
        queries = 32 if self.item_rows * self.ratio > 16 else 16
        row, weights = (self._row_stride(-(-self.config.head_dim // 16) * 16), self._row_stride(PIECE))
        numbers = (stages * 2 * PIECE + 2 * self.tile + queries) * row + queries * weights
        peaks = 16 * THREADS // 32
        return numbers * self.number_bytes + peaks * 4 + self.tile * 28 + 16

    def _row_stride(self, columns: int) -> int:
        """Numbers of a row of a tile; ``Rows`` in the kernel."""
        return columns + (0 if self.number_bytes == 2 and columns % 64 == 0 else 16 // self.number_bytes)

    def stages(self, architecture: str) -> int:
        """Pieces on their way at a time: two or three if two blocks fit on a multiprocessor, else what one can hold.

        Raises:
            BackendError: not even one fits.
        """
        room = _SHARED_KB.get(architecture, _SHARED_KB_OTHERS) << 10
        half = (room - 1024) // 2  # a block takes 1 KiB besides its own
        for stages, limit in ((3, half), (2, half), (2, room), (1, room)):
            if self.shared_bytes(stages) <= limit:
                return stages
        raise BackendError(
            f"attention over {self.tile} rows with head_dim {self.config.head_dim} and {self.config.kv_type} K/V needs "
            f"{self.shared_bytes(1) >> 10} KiB of shared memory, {architecture} has {room >> 10}; use narrower passes"
        )

    def constants(self, architecture: str) -> Constants:
        """Definitions for ``kernels/attention.cu``."""
        c, stages = self.config, self.stages(architecture)
        return {
            "NUM_LAYERS": c.num_layers, "NUM_HEADS": c.num_heads, "NUM_KV_HEADS": c.num_kv_heads,
            "HEAD_SIZE": c.head_dim, "KV_BYTES": self.number_bytes, "QK_NORM": int(c.qk_norm),
            "NORM_EPS": c.norm_eps, "SCALE": c.head_dim**-0.5, "MAX_ROWS": self.tile,
            "ONE_SEQUENCE": int(self.sequences == 1), "STAGES": stages, "SHARED_BYTES": self.shared_bytes(stages),
            "QKV_STRIDE": self.qkv_stride or c.attention_size + 2 * c.kv_size,
            "OUT_STRIDE": self.out_stride or c.attention_size,
        }  # fmt: skip

    def blocks(self, capacity: int, multiprocessors: int) -> int:
        """Blocks that share one history of up to ``capacity`` positions, the pass's own included."""
        pieces = -(-capacity // PIECE)
        most = min(MAX_BLOCKS, max(4, 2 * multiprocessors // self.config.num_kv_heads))
        return max(min(pieces, most), -(-capacity // (2 * _LARGEST_NODE)))

    def workspace_bytes(self, blocks: int) -> int:
        """Memory for unfinished results, zero before the first launch; ``Workspace`` in the kernel."""
        entries = 2 * blocks * self.tile * self.config.num_heads
        return self.config.num_kv_heads * MAX_WIDTH * 4 + entries * 4 * (-(-self.config.head_dim // 4) * 4 + 4)


def short_kernel(gpu: Gpu, shape: AttentionShape, capacity: int) -> Kernel | None:
    """The kernel for short histories without trees and windows, if it takes this shape and the card has clusters.

    Arguments of a launch: those of :func:`attention_kernel` without the workspace; the same bits.
    """
    slots = -(-capacity // (PIECE * CLUSTER))
    config, queries = shape.config, 32 if shape.item_rows * shape.ratio > 16 else 16
    if not gpu.overlaps or shape.number_bytes != 2 or config.head_dim % 64 or slots > MAX_SLOTS:
        return None
    constants = {
        name: value
        for name, value in shape.constants(gpu.architecture).items()
        if name not in ("STAGES", "SHARED_BYTES")
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


def attention_kernel(gpu: Gpu, shape: AttentionShape, blocks: int) -> Kernel:
    """The kernel whose launches let ``blocks`` share a history (:meth:`AttentionShape.blocks`); no bit depends on it.

    Arguments of a launch: pass, int32 layer, qkv, q_norm, k_norm, cosines, sines, gain, attended, stats, workspace.
    """
    constants = shape.constants(gpu.architecture)
    grid = (blocks, shape.config.num_kv_heads, shape.items)
    shared = shape.shared_bytes(shape.stages(gpu.architecture))
    return gpu.kernel(FILE, "attention", constants, grid=grid, block=THREADS, shared_bytes=shared)


def move_kernel(gpu: Gpu, shape: AttentionShape) -> Kernel:
    """Moves K/V of rows of a pass to the slots right behind the history, in a given order.

    Arguments of a launch: store, int32 length, row numbers (int32), int32 count.
    """
    grid = (shape.config.num_layers, 2, shape.config.num_kv_heads)
    narrow = replace(shape, tile=8)  # of no consequence here, but it fits every device
    return gpu.kernel(FILE, "move_rows", narrow.constants(gpu.architecture), grid=grid, block=THREADS)
