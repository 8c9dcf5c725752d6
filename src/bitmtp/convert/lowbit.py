"""Low-bit matrices: taken from a file as they are, or made from floats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitmtp.convert.rows import Rows, pieces
from bitmtp.layout import Layout
from bitmtp.ternary import Float32, UInt8, pack, pack_codes, unpack, unpack_codes

GROUP = 32
_SHRINK = np.linspace(1.0, 0.78, 9, dtype=np.float32)  # of the scale that holds the largest weight, tried in turn


@dataclass(frozen=True, slots=True)
class LowBit:
    """A matrix as a checkpoint holds it (``docs/format.md``)."""

    layout: Layout
    weight: NDArray[np.uint8]
    scale: Float32
    minimum: Float32 | None = None

    def values(self) -> Float32:
        """The floats ``[out, in]`` that it stands for."""
        integers = unpack_codes(self.weight, self.layout.bits) if self.layout.minimum else self._signed()
        cells = integers.astype(np.float32).reshape(len(integers), -1, self.layout.group_size or integers.shape[1])
        values = cells * self.scale.reshape(len(cells), -1, 1)
        if self.minimum is not None:
            values = values + self.minimum.reshape(len(cells), -1, 1)
        return values.reshape(integers.shape)

    def _signed(self) -> NDArray[np.int8]:
        return unpack(self.weight, self.layout.bits)

    def tensors(self, module: str) -> dict[str, NDArray[np.generic]]:
        """By the names of the format."""
        signed = self.layout.bits == 8 and not self.layout.minimum
        found: dict[str, NDArray[np.generic]] = {f"{module}.weight": self.weight.view(np.int8 if signed else np.uint8)}
        found[f"{module}.scale"] = self.scale
        if self.minimum is not None:
            found[f"{module}.minimum"] = self.minimum
        return found


@dataclass(frozen=True, slots=True)
class StoredLowBit:
    """A matrix in a file whose type is exactly a layout; ``read`` gives rows ``start … stop``."""

    shape: tuple[int, int]
    layout: Layout
    read: Callable[[int, int], LowBit]


def read_exactly(stored: StoredLowBit) -> LowBit:
    """The whole of a stored matrix."""
    return _join([stored.read(piece.start, piece.stop) for piece in pieces(*stored.shape)])


@dataclass(frozen=True, slots=True)
class Rounded:
    """A matrix made from floats, and its error: root mean square, relative to that of the floats."""

    matrix: LowBit
    error: float


def round_rows(rows: Rows, bits: int) -> Rounded:
    """A float matrix in 4 or 8 bits, symmetric, a float16 scale for each 32 inputs."""
    parts, error, power = [], 0.0, 0.0
    for piece in pieces(*rows.shape):
        values = rows.read(piece.start, piece.stop)
        parts.append(round_values(values, bits))
        error += float(np.square(values - parts[-1].values(), dtype=np.float64).sum())
        power += float(np.square(values, dtype=np.float64).sum())
    return Rounded(_join(parts), (error / power) ** 0.5 if power else 0.0)


def round_values(values: Float32, bits: int) -> LowBit:
    """Floats ``[out, in]`` in 4 or 8 bits, as :func:`round_rows`.

    8 bits: the largest magnitude is level 127. 4 bits: the weight of largest magnitude is level -8, and of some smaller
    scales too the one with the least squared error is taken.
    """
    cells = values.reshape(len(values), -1, GROUP)
    lowest, highest = -(1 << bits - 1), (1 << bits - 1) - 1
    extreme = np.take_along_axis(cells, np.abs(cells).argmax(axis=2)[..., None], axis=2)
    whole = extreme / np.float32(lowest if bits == 4 else highest)
    best, least = _levels(cells, whole, lowest, highest), np.full(whole.shape, np.inf, np.float32)
    scale = whole
    for share in _SHRINK if bits == 4 else _SHRINK[:1]:
        tried = (whole * share).astype(np.float16).astype(np.float32)
        levels = _levels(cells, tried, lowest, highest)
        error = np.square(cells - levels * tried).sum(axis=2, keepdims=True)
        better = error < least
        best, scale = np.where(better, levels, best), np.where(better, tried, scale)
        least = np.minimum(error, least)
    weight = pack(best.astype(np.int8).reshape(values.shape), bits)
    return LowBit(Layout(bits, GROUP), weight, scale[..., 0].astype(np.float32))


def _levels(cells: Float32, scale: Float32, lowest: int, highest: int) -> Float32:
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    levels: Float32 = np.clip(np.rint(cells * inverse), lowest, highest)
    return levels


def _join(parts: list[LowBit]) -> LowBit:
    minimums = [part.minimum for part in parts if part.minimum is not None]
    weight, scale = np.concatenate([p.weight for p in parts]), np.concatenate([p.scale for p in parts])
    return LowBit(parts[0].layout, weight, scale, np.concatenate(minimums) if minimums else None)


def from_codes(layout: Layout, codes: UInt8, zero: int, scale: Float32, minimum: Float32 | None = None) -> LowBit:
    """Rows ``[out, in]`` whose integers are ``codes - zero``, factors ``[out, in / group]``."""
    if layout.minimum:
        return LowBit(layout, pack_codes(codes, layout.bits), scale, minimum)
    return LowBit(layout, pack((codes.astype(np.int16) - zero).astype(np.int8), layout.bits), scale)
