"""Ternary block types of GGUF files: bytes → codes 0, 1, 2 and one scale a block.

Layouts: ``Q1_0``, ``Q2_0``, ``TQ1_0`` and ``TQ2_0`` as in llama.cpp; ``PQ2_0``, ``PTQ1_0`` and the older ``Q2_0``
of 128 weights as in PrismML's fork of it; ``I2_S`` as in bitnet.cpp on x86. A weight is (code - 1) · scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bitmtp.ternary import Float32, UInt8

Codes = UInt8
I2_S = 36
I2_S_BLOCK = 128
I2_S_TAIL = 32  # bytes behind the codes; the tensor's float32 scale is the first four
_LOW = np.uint8(3)
TWO_MEANINGS = 42  # Q2_0: blocks of 64 in llama.cpp, of 128 in files that PrismML's fork wrote earlier


@dataclass(frozen=True, slots=True)
class BlockType:
    """``group`` weights in ``size`` bytes; ``split``: ``[n, size]`` bytes → codes ``[n, group]``, scales ``[n]``."""

    name: str
    group: int
    size: int
    split: Callable[[UInt8], tuple[Codes, Float32]]


def _halves(blocks: UInt8, place: int) -> Float32:
    """The float16 at byte ``place`` of each block."""
    pairs = np.ascontiguousarray(blocks[:, place : place + 2])
    return pairs.view("<f2")[:, 0].astype(np.float32)


def _signs(blocks: UInt8) -> tuple[Codes, Float32]:
    """Scale, then one bit a weight, lowest first: 0 is -1, 1 is +1."""
    return np.unpackbits(blocks[:, 2:], axis=1, bitorder="little") * np.uint8(2), _halves(blocks, 0)


def _pairs(blocks: UInt8) -> tuple[Codes, Float32]:
    """Scale, then two bits a weight in order, lowest first."""
    codes: Codes = np.stack([blocks[:, 2:] >> np.uint8(shift) & _LOW for shift in (0, 2, 4, 6)], axis=2)
    return codes.reshape(len(blocks), -1), _halves(blocks, 0)


def _planes(blocks: UInt8) -> tuple[Codes, Float32]:
    """32 bytes hold 128 weights: byte b has weights b, b + 32, b + 64, b + 96, lowest bits first; the scale is last."""
    cells = blocks[:, :-2].reshape(len(blocks), -1, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    return (cells >> shifts & _LOW).reshape(len(blocks), -1), _halves(blocks, blocks.shape[1] - 2)


def _digits(cells: UInt8, count: int) -> Codes:
    """Base-3 digits ``[n, count * bytes]``, the first of every byte first, of bytes that hold ceil(number · 256 / 243).

    Multiplying by 3 moves the next digit above the byte.
    """
    powers = np.array([1, 3, 9, 27, 81][:count], np.uint8).reshape(count, 1)
    moved = (cells[:, None, :] * powers).astype(np.uint16)
    return (moved * 3 >> 8).astype(np.uint8).reshape(len(cells), -1)


def _trits(*stages: tuple[int, int]) -> Callable[[UInt8], tuple[Codes, Float32]]:
    """A block of base-3 bytes in stages of (bytes, digits in each), the scale behind them."""

    def split(blocks: UInt8) -> tuple[Codes, Float32]:
        parts, place = [], 0
        for size, count in stages:
            parts.append(_digits(blocks[:, place : place + size], count))
            place += size
        return np.concatenate(parts, axis=1), _halves(blocks, place)

    return split


# Type id → its possible layouts.
BLOCK_TYPES: dict[int, tuple[BlockType, ...]] = {
    34: (BlockType("TQ1_0", 256, 54, _trits((32, 5), (16, 5), (4, 4))),),
    35: (BlockType("TQ2_0", 256, 66, _planes),),
    41: (BlockType("Q1_0", 128, 18, _signs),),
    TWO_MEANINGS: (BlockType("Q2_0 (group 64)", 64, 18, _pairs), BlockType("Q2_0 (group 128)", 128, 34, _pairs)),
    142: (BlockType("PQ2_0", 128, 34, _pairs),),
    143: (BlockType("PTQ1_0", 128, 28, _trits((16, 5), (8, 5), (2, 4))),),
}


def split_i2_s(codes: UInt8) -> Codes:
    """I2_S codes of whole rows: 32 bytes hold 128 weights as :func:`_planes`, but from the highest bits down."""
    cells = codes.reshape(-1, 1, 32)
    shifts = np.array([6, 4, 2, 0], np.uint8).reshape(4, 1)
    return (cells >> shifts & _LOW).reshape(-1)
