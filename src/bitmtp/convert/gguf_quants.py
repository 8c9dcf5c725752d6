"""Block types of llama.cpp that are exactly a layout: bytes → codes, scales, minimums.

The arithmetic is that of the ``gguf`` package's ``dequantize``: the same values to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bitmtp.convert.lowbit import LowBit, from_codes
from bitmtp.layout import Layout
from bitmtp.ternary import Float32, UInt8

Parts = tuple[UInt8, Float32, Float32 | None]  # codes [n, block], scales and minimums [n, block / group]
_NIBBLE, _SIX = np.uint8(15), np.uint8(63)


@dataclass(frozen=True, slots=True)
class ExactType:
    """``block`` weights in ``size`` bytes; integers are what ``split`` gives less ``zero``."""

    block: int
    size: int
    layout: Layout
    zero: int
    split: Callable[[UInt8], Parts]

    def rows(self, raw: UInt8) -> LowBit:
        """Rows of bytes ``[out, bytes]`` as a matrix."""
        codes, scale, minimum = self.split(np.ascontiguousarray(raw).reshape(-1, self.size))
        out = len(raw)
        least = None if minimum is None else minimum.reshape(out, -1)
        return from_codes(self.layout, codes.reshape(out, -1), self.zero, scale.reshape(out, -1), least)


def _half(blocks: UInt8, place: int) -> Float32:
    """The float16 at a byte of each block: ``[n, 1]``."""
    return np.ascontiguousarray(blocks[:, place : place + 2]).view("<f2").astype(np.float32)


def _nibbles(cells: UInt8) -> UInt8:
    """``[…, m]`` bytes: all low halves, then all high halves."""
    return np.concatenate([cells & _NIBBLE, cells >> np.uint8(4)], axis=-1)


def _fifth_bits(blocks: UInt8, place: int) -> UInt8:
    """32 bits in order, at the place of a code's fifth bit."""
    return np.unpackbits(blocks[:, place : place + 4], axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: UInt8) -> Parts:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None


def _q4_1(blocks: UInt8) -> Parts:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: UInt8) -> Parts:
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2), _half(blocks, 0), None


def _q5_1(blocks: UInt8) -> Parts:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: UInt8) -> Parts:
    return blocks[:, 2:] ^ np.uint8(128), _half(blocks, 0), None


def _k_factors(blocks: UInt8) -> tuple[Float32, Float32]:
    """Scales and minimums of eight groups: two float16 times six bits each, packed into bytes 4 to 15."""
    first, second, third = (blocks[:, place : place + 4] for place in (4, 8, 12))
    high = np.uint8(6)
    scale = np.concatenate([first & _SIX, third & _NIBBLE | (first >> high) << np.uint8(4)], axis=1)
    least = np.concatenate([second & _SIX, third >> np.uint8(4) | (second >> high) << np.uint8(4)], axis=1)
    return _half(blocks, 0) * scale.astype(np.float32), -(_half(blocks, 2) * least.astype(np.float32))


def _q4_k(blocks: UInt8) -> Parts:
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256), *_k_factors(blocks)


def _q5_k(blocks: UInt8) -> Parts:
    places = np.arange(8, dtype=np.uint8).reshape(8, 1)
    fifth = (blocks[:, None, 16:48] >> places & np.uint8(1)) << np.uint8(4)
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 256)
    return low | fifth.reshape(-1, 256), *_k_factors(blocks)


def _q6_k(blocks: UInt8) -> Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    places = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> places & np.uint8(3)) << np.uint8(4)
    scale = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (low | high).reshape(-1, 256), _half(blocks, 208) * scale, None


# By the type's name in the ``gguf`` package.
EXACT_TYPES = {
    "Q4_0": ExactType(32, 18, Layout(4, 32), 8, _q4_0),
    "Q4_1": ExactType(32, 20, Layout(4, 32, minimum=True), 0, _q4_1),
    "Q5_0": ExactType(32, 22, Layout(8, 32), 16, _q5_0),
    "Q5_1": ExactType(32, 24, Layout(8, 32, minimum=True), 0, _q5_1),
    "Q8_0": ExactType(32, 34, Layout(8, 32), 128, _q8_0),
    "Q4_K": ExactType(256, 144, Layout(4, 32, minimum=True), 0, _q4_k),
    "Q5_K": ExactType(256, 176, Layout(8, 32, minimum=True), 0, _q5_k),
    "Q6_K": ExactType(256, 210, Layout(8, 16), 32, _q6_k),
}
