"""How a product is cut into blocks, and its kernel for a number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from bitmtp.backends.base import Head
from bitmtp.backends.cuda.device import Gpu, Kernel
from bitmtp.backends.cuda.matrices import GROUP, Matrix, round_up

WARPS = 8
# Floats that every block of a product may read to quantise its rows by itself. For more, the blocks of a cluster share
# the inputs, or, on cards without clusters, they are quantised once, by a kernel.
FUSED_FLOATS = 5 << 10
FUSED_FLOATS_ALONE = 10 << 10  # of a row that is alone
FUSED_FLOATS_CLUSTERS = 2 << 10  # of several rows, if a cluster may share them
# Registers that a lane may fill with weights and scales in flight.
_IN_FLIGHT = 72
_IN_FLIGHT_HEAD = 60


class Role(StrEnum):
    """What becomes of a product; names of ``kernels/product.cu``."""

    STORE = "STORE"
    RESIDUAL = "RESIDUAL"
    SILU = "SILU"
    RELU2 = "RELU2"

    @property
    def gated(self) -> bool:
        """Whether tiles of gate and up come in pairs."""
        return self in (Role.SILU, Role.RELU2)


@dataclass(frozen=True, slots=True)
class Cut:
    """Work of a block: ``kwarps`` warps share a tile's inputs, each warp has ``tiles`` tiles of a batch."""

    kwarps: int
    tiles: int

    @property
    def batch(self) -> int:
        """Tiles of 16 outputs a block takes at a time."""
        return WARPS // self.kwarps * self.tiles


def cut(matrix: Matrix, role: Role, streaming: bool, multiprocessors: int) -> Cut:
    """Whoever shares the inputs fixes the order of float sums, so ``kwarps`` depends on the matrix alone.

    ``tiles`` only spreads work: over all multiprocessors, as many as a lane can hold weights for.
    """
    registers, least = matrix.bits * 2 + 2 * matrix.cell_scales, 2 if role.gated else 1
    limit = _IN_FLIGHT_HEAD if streaming else _IN_FLIGHT
    kwarps = 1 if streaming else WARPS
    while kwarps < WARPS and -(-matrix.cells // kwarps) * registers * least > limit:
        kwarps *= 2
    most = max(limit // (-(-matrix.cells // kwarps) * registers) // least * least, least)
    if streaming:
        return Cut(kwarps, most)
    row_tiles = -(-matrix.outputs // 16)

    def cost(tiles: int) -> tuple[bool, int]:
        """Whether many multiprocessors have nothing to do; what the busiest does, a block costing two tiles besides."""
        blocks = -(-row_tiles // (WARPS // kwarps * tiles))
        return blocks < 0.8 * multiprocessors, -(-blocks // multiprocessors) * (tiles + 2)

    return Cut(kwarps, min(range(least, most + 1, least), key=cost))


@dataclass(frozen=True, slots=True)
class Product:
    """One product of the model: a matrix, what comes before and what after.

    Attributes:
        streaming: so large that its blocks go on from batch to batch (the head).
        hasty: the next kernel reads nothing before its wait that the kernel before this one writes.
        norm: RMSNorm comes before it.
        parts: statistics its input rows carry.
        stride: of an input row, in floats.
        head: the rows it is for; NONE: all of them.
    """

    matrix: Matrix
    role: Role
    norm: bool
    parts: int
    stride: int
    streaming: bool = False
    hasty: bool = False
    head: Head = Head.NONE

    def sharers(self, width: int, gpu: Gpu) -> int:
        """Blocks that quantise the rows together: 1: each does it by itself; 0: a kernel of its own has done it."""
        if width > 8 or self.matrix.step_inputs:
            return 0
        together = gpu.overlaps and width > 1 and not self.streaming
        most = FUSED_FLOATS_CLUSTERS if together else FUSED_FLOATS_ALONE if width == 1 else FUSED_FLOATS
        if width * self.matrix.inputs <= most:
            return 1
        return WARPS if together else 0

    def kernel(self, gpu: Gpu, width: int) -> Kernel:
        """Its kernel for passes of up to ``width`` rows (any number up to 8 share one)."""
        matrix, role = self.matrix, self.role
        division = cut(matrix, role, self.streaming, gpu.multiprocessors)
        tile, sharers = round_up(width, 8), self.sharers(width, gpu)
        if tile > 8:
            division = Cut(division.kwarps, 2 if role.gated else 1)
        constants = {
            "BITS": matrix.bits, "INPUTS": matrix.inputs, "OUTPUTS": matrix.outputs, "TILE": tile,
            "KWARPS": division.kwarps, "TILES": division.tiles, "ROLE": role.value,
            "SCALE_GROUPS": matrix.scale_groups, "FUSED": width if sharers else 0, "CLUSTER": max(sharers, 1),
            "HASTY": int(self.hasty), "NORM": int(self.norm),
            "BIAS": int(matrix.bias is not None), "PARTS": self.parts,
            "X_STRIDE": self.stride, "OUT_STRIDE": self.out_stride, "HEAD": int(self.head),
            "STEP_GROUPS": matrix.step_groups,
        }  # fmt: skip
        batches = -(-(matrix.outputs // 16) // division.batch)
        grid = min(batches, 2 * gpu.multiprocessors) if self.streaming else batches
        columns = division.batch * 16 + 4
        shared = division.kwarps * tile * columns * 4 + tile * 12 + 8
        if sharers:
            shared += -(-matrix.cells // sharers) * GROUP * tile
        if sharers > 1:
            shared += WARPS * division.tiles * tile * 16 * 4
        cluster = max(sharers, 1)
        return gpu.kernel(
            "product.cu", "product", constants, grid=(-(-grid // cluster),), block=WARPS * 32, shared_bytes=shared,
            cluster=cluster,
        )  # fmt: skip

    @property
    def out_stride(self) -> int:
        """Floats of an output row."""
        return self.matrix.outputs // (2 if self.role.gated else 1)
