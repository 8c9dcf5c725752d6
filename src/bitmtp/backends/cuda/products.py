"""How a product is cut into blocks, and its kernel for a number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from bitmtp.backends.cuda.device import Gpu, Kernel
from bitmtp.backends.cuda.matrices import GROUP, Matrix, round_up

WARPS = 8
# Floats that every block of a product may read to quantise its rows by itself; more are quantised once, by a kernel.
FUSED_FLOATS = 5 << 10
FUSED_FLOATS_ALONE = 6 << 10  # of a row that is alone
# Registers that a lane may fill with weights and scales in flight.
_IN_FLIGHT = 72
_IN_FLIGHT_HEAD = 64


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
    registers, least = matrix.bits * 2 + (2 if matrix.scale_groups else 0), 2 if role.gated else 1
    limit = _IN_FLIGHT_HEAD if streaming else _IN_FLIGHT
    kwarps = 1 if streaming else WARPS
    while kwarps < WARPS and -(-matrix.cells // kwarps) * registers * least > limit:
        kwarps *= 2
    most = max(limit // (-(-matrix.cells // kwarps) * registers), least)
    wanted = most if streaming else -(-matrix.outputs // 16 // multiprocessors)
    return Cut(kwarps, max(min(wanted, most) // least * least, least))


@dataclass(frozen=True, slots=True)
class Product:
    """One product of the model: a matrix, what comes before and what after.

    Attributes:
        streaming: so large that its blocks go on from batch to batch (the head).
        norm: RMSNorm comes before it.
        parts: statistics its input rows carry.
        stride: of an input row, in floats.
    """

    matrix: Matrix
    role: Role
    norm: bool
    parts: int
    stride: int
    streaming: bool = False

    def fused(self, width: int) -> bool:
        """Whether its blocks quantise the rows themselves."""
        return width <= 8 and width * self.matrix.inputs <= (FUSED_FLOATS_ALONE if width == 1 else FUSED_FLOATS)

    def kernel(self, gpu: Gpu, width: int) -> Kernel:
        """Its kernel for passes of up to ``width`` rows (any number up to 8 share one)."""
        matrix, role = self.matrix, self.role
        division = cut(matrix, role, self.streaming, gpu.multiprocessors)
        tile, fused = round_up(width, 8), self.fused(width)
        if tile > 8:
            division = Cut(division.kwarps, 2 if role.gated else 1)
        constants = {
            "BITS": matrix.bits, "INPUTS": matrix.inputs, "OUTPUTS": matrix.outputs, "TILE": tile,
            "KWARPS": division.kwarps, "TILES": division.tiles, "ROLE": role.value,
            "SCALE_GROUPS": matrix.scale_groups, "FUSED": width if fused else 0, "NORM": int(self.norm),
            "BIAS": int(matrix.bias is not None), "PARTS": self.parts,
            "X_STRIDE": self.stride, "OUT_STRIDE": self.out_stride,
        }  # fmt: skip
        batches = -(-(matrix.outputs // 16) // division.batch)
        grid = min(batches, 2 * gpu.multiprocessors) if self.streaming else batches
        columns = division.batch * 16 + 4
        shared = division.kwarps * tile * columns * 4 + tile * 12 + (matrix.cells * GROUP * tile if fused else 0)
        return gpu.kernel("product.cu", "product", constants, grid=(grid,), block=WARPS * 32, shared_bytes=shared)

    @property
    def out_stride(self) -> int:
        """Floats of an output row."""
        return self.matrix.outputs // (2 if self.role.gated else 1)
