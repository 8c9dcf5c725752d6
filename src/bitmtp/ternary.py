"""Low-bit weights in NumPy: quantise, pack and unpack codes, and the exact integer product.

Codes are unsigned: ternary ``w + 1`` in 2 bits, 4-bit ``w + 8``; byte ``j`` of a row holds inputs ``n*j … n*j + n-1``,
lowest bits first (``docs/format.md``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt8 = NDArray[np.uint8]
Int8 = NDArray[np.int8]
Float32 = NDArray[np.float32]

ZERO_POINT = {2: 1, 4: 8, 8: 0}
ABSMAX_FLOOR = np.float32(1e-5)


def pack(weights: Int8, bits: int) -> UInt8:
    """Pack ``[out, in]`` integers into ``[out, in * bits / 8]`` bytes (8 bits: a copy of the int8 array).

    Raises:
        ValueError: ``in`` does not fill whole bytes, or a weight does not fit.
    """
    if bits == 8:
        return weights.view(np.uint8)
    per_byte = 8 // bits
    out, inputs = weights.shape
    if inputs % per_byte:
        raise ValueError(f"{inputs} inputs do not fill whole bytes at {bits} bits")
    codes = weights.astype(np.int16) + ZERO_POINT[bits]
    if codes.min(initial=0) < 0 or codes.max(initial=0) > (2 if bits == 2 else 15):
        raise ValueError(f"a weight does not fit {bits} bits")
    cells: UInt8 = codes.astype(np.uint8).reshape(out, inputs // per_byte, per_byte)
    packed = np.zeros(cells.shape[:2], np.uint8)
    for place in range(per_byte):
        packed |= cells[..., place] << np.uint8(bits * place)
    return packed


def unpack(packed: UInt8, bits: int) -> Int8:
    """Inverse of :func:`pack`: ``[out, bytes]`` → int8 ``[out, bytes * 8 / bits]``."""
    if bits == 8:
        return packed.view(np.int8)
    mask = np.uint8((1 << bits) - 1)
    places = [(packed >> np.uint8(shift)) & mask for shift in range(0, 8, bits)]
    codes = np.stack(places, axis=-1).reshape(packed.shape[0], -1)
    return codes.astype(np.int8) - np.int8(ZERO_POINT[bits])


def ternarise(weights: Float32, layout: str, group_size: int = 128) -> tuple[Int8, Float32]:
    """Absmean ternary quantisation of ``[out, in]`` floats (BitNet b1.58, arXiv:2402.17764).

    Returns int8 weights in {-1, 0, 1} and float32 scales ``[1]``, ``[out]`` or ``[out, in / group_size]``.
    """
    out, inputs = weights.shape
    shape = {"tensor": (1, 1, -1), "row": (out, 1, -1), "group": (out, inputs // group_size, group_size)}[layout]
    cells = weights.reshape(shape)
    scale = np.maximum(np.abs(cells).mean(axis=-1, keepdims=True, dtype=np.float64), ABSMAX_FLOOR).astype(np.float32)
    ternary = np.clip(np.rint(cells / scale), -1, 1).astype(np.int8).reshape(out, inputs)
    return ternary, scale[..., 0] if layout == "group" else scale.reshape(-1)


def quantise_rows(rows: Float32) -> tuple[Int8, Float32]:
    """Per-row absmax to int8, half to even: ``[n, in]`` → (int8 ``[n, in]``, float32 step ``[n, 1]``)."""
    absmax = np.maximum(np.abs(rows).max(axis=-1, keepdims=True), ABSMAX_FLOOR)
    levels = np.rint(rows * (np.float32(127) / absmax))
    return np.clip(levels, -127, 127).astype(np.int8), absmax / np.float32(127)
