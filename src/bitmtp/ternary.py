"""Low-bit weights in NumPy: quantise, pack and unpack codes, and the exact integer product.

Codes are unsigned: ``w + 1`` in 2 bits, ``w + 8`` in 4, or, beside a minimum, the integer itself; byte ``j`` of a row
holds inputs ``n*j … n*j + n-1``, lowest bits first (``docs/format.md``).
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
    inputs = weights.shape[1]
    if inputs % per_byte:
        raise ValueError(f"{inputs} inputs do not fill whole bytes at {bits} bits")
    codes = weights.astype(np.int16) + ZERO_POINT[bits]
    if codes.min(initial=0) < 0 or codes.max(initial=0) > (2 if bits == 2 else 15):
        raise ValueError(f"a weight does not fit {bits} bits")
    return pack_codes(codes.astype(np.uint8), bits)


def pack_codes(codes: UInt8, bits: int) -> UInt8:
    """Pack unsigned ``[out, in]`` codes into ``[out, in * bits / 8]`` bytes, the first in the lowest bits."""
    if bits == 8:
        return codes
    cells = codes.reshape(len(codes), -1, 8 // bits)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    packed: UInt8 = np.bitwise_or.reduce(cells << shifts, axis=2)
    return packed


def unpack(packed: UInt8, bits: int) -> Int8:
    """Inverse of :func:`pack`: ``[out, bytes]`` → int8 ``[out, bytes * 8 / bits]``."""
    if bits == 8:
        return packed.view(np.int8)
    return unpack_codes(packed, bits).astype(np.int8) - np.int8(ZERO_POINT[bits])


def unpack_codes(packed: UInt8, bits: int) -> UInt8:
    """Inverse of :func:`pack_codes`."""
    if bits == 8:
        return packed
    mask = np.uint8((1 << bits) - 1)
    places = [(packed >> np.uint8(shift)) & mask for shift in range(0, 8, bits)]
    return np.stack(places, axis=-1).reshape(packed.shape[0], -1)


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
