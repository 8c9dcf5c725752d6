"""The float primitives of ``docs/numerics.md`` in NumPy float32: fixed orders, one rounding an operation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
UInt32 = NDArray[np.uint32]

LANES = 16
BLOCK = 4096
_F = np.float32


def fold(terms: Float32) -> Float32:
    """Sum over the first axis, strictly in order."""
    result: Float32 = np.add.accumulate(terms, axis=0, dtype=np.float32)[-1]
    return result


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """``a * b + c`` rounded once.

    The product is exact in float64. Its sum with ``c`` is rounded there to odd, which rounding again to float32 cannot
    spoil (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    to_odd = np.where((error > 0) == (total > 0), 1, -1) * ((error != 0) & (bits & 1 == 0))
    result: Float32 = (bits + to_odd).view(np.float64).astype(np.float32)
    return result


def dot_chain(a: Float32, b: Float32) -> Float32:
    """Sum over the first axis of ``a * b`` as a chain of :func:`fma` from 0, strictly in order."""
    total = np.zeros(np.broadcast_shapes(a.shape[1:], b.shape[1:]), np.float32)
    for left, right in zip(a, b, strict=True):
        total = fma(np.broadcast_to(left, total.shape), np.broadcast_to(right, total.shape), total)
    return total


def lane_sum(x: Float32) -> Float32:
    """Sum over the last axis: 16 lanes in order, then the upper half onto the lower, down to one."""
    padding = -x.shape[-1] % LANES
    if padding:
        x = np.concatenate([x, np.zeros((*x.shape[:-1], padding), np.float32)], axis=-1)
    lanes = fold(np.moveaxis(x.reshape(*x.shape[:-1], -1, LANES), -2, 0))
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    return lanes[..., 0]


def blocked_sum(x: Float32) -> np.float32:
    """Sum of a vector over the vocabulary: ``lane_sum`` of each 4,096 entries, added in order."""
    return _F(fold(np.array([lane_sum(x[start : start + BLOCK]) for start in range(0, len(x), BLOCK)], np.float32)))


def exp(x: Float32) -> Float32:
    """e^x by range reduction and a polynomial (Cephes coefficients); 0 below -87, constant above 88."""
    clamped = np.clip(x, _F(-87), _F(88))
    n = (clamped * _F(1.44269504) + _F(12582912)) - _F(12582912)
    r = (clamped - n * _F(0.693359375)) - n * _F(-2.12194440e-4)
    p = np.full_like(r, _F(1.9875691500e-4))
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + _F(coefficient)
    y = (p * (r * r) + r) + _F(1)
    power = ((n.astype(np.int32) + 127) << 23).view(np.float32)
    result: Float32 = np.where(x < _F(-87), _F(0), y * power)
    return result


def log(x: Float32) -> Float32:
    """Natural logarithm of positive normal numbers (Cephes coefficients)."""
    bits = np.asarray(x, np.float32).view(np.int32)
    exponent = ((bits >> 23) - 126).astype(np.float32)
    m = ((bits & 0x007FFFFF) | 0x3F000000).view(np.float32)
    low = m < _F(0.707106781186547524)
    e = np.where(low, exponent - _F(1), exponent)
    f = np.where(low, (m + m) - _F(1), m - _F(1))
    z = f * f
    p = np.full_like(f, _F(7.0376836292e-2))
    for coefficient in (
        -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    ):  # fmt: skip
        p = p * f + _F(coefficient)
    y = (p * f) * z
    y = y + e * _F(-2.12194440e-4)
    y = y - _F(0.5) * z
    result: Float32 = (f + y) + e * _F(0.693359375)
    return result


def norm(x: Float32, weight: Float32, eps: float) -> Float32:
    """RMSNorm over the last axis."""
    mean = lane_sum(x * x) / _F(x.shape[-1])
    scale = _F(1) / np.sqrt(mean + _F(eps))
    result: Float32 = (x * scale[..., None]) * weight
    return result


def mix32(x: UInt32) -> UInt32:
    """A bijective 32-bit hash (the "lowbias32" constants)."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def mix64(x: int) -> int:
    """SplitMix64's finaliser on a 64-bit integer."""
    mask = (1 << 64) - 1
    x &= mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def gumbel(seed: int, choice: int, position: int, ids: NDArray[np.int32]) -> Float32:
    """Noise of each token id for the token to stand at ``position``: a function of its arguments alone."""
    key = mix64(mix64(seed + 0x9E3779B97F4A7C15 * (choice + 1)) + position)
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    h = mix32(mix32(ids.astype(np.uint32) * np.uint32(0x9E3779B1) + low) ^ high)
    u = ((h >> np.uint32(9)).astype(np.float32) + _F(0.5)) * _F(2.0**-23)
    return -log(-log(u))
