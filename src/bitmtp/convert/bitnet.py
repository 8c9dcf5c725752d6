"""BitNet b1.58 weights as Hugging Face stores them: packed two bits each, or full precision to be quantised."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from bitmtp.convert.rows import Rows, StoredTernary, Ternary, pack_codes, pieces
from bitmtp.convert.safetensors_file import StoredTensor
from bitmtp.errors import CheckpointError
from bitmtp.ternary import ABSMAX_FLOOR


def packed_matrix(
    tensors: Mapping[str, StoredTensor], module: str, shape: tuple[int, int], *, inverse: bool
) -> StoredTernary:
    """``module``'s uint8 weight ``[out / 4, in]`` and its ``weight_scale``, which ``inverse`` says is 1/scale.

    Byte row r holds output rows r, r + out/4, r + out/2 and r + 3 out/4, the first in its lowest bits; code = w + 1.
    """
    weight, scale = tensors[f"{module}.weight"], tensors.get(f"{module}.weight_scale")
    out, inputs = shape
    if weight.stored_as != "U8" or weight.shape != (out // 4, inputs) or out % 4:
        found, expected = f"{weight.stored_as} {list(weight.shape)}", f"U8 {[out // 4, inputs]}"
        raise CheckpointError(f"{weight.file}: {weight.name} is {found}; expected {expected} (four output rows a byte)")
    if scale is None:
        raise CheckpointError(f"{weight.file}: {weight.name} has no weight_scale beside it")
    return StoredTernary(shape, partial(_read_packed, weight, scale, inverse))


def _read_packed(weight: StoredTensor, stored_scale: StoredTensor, inverse: bool) -> Ternary:
    raw = weight.bytes()
    if (raw & (raw >> 1) & 0x55).any():
        raise CheckpointError(f"{weight.file}: {weight.name} holds the code 3; expected only 0, 1 and 2")
    codes = np.concatenate([(raw >> np.uint8(shift)) & 3 for shift in (0, 2, 4, 6)])
    scale = stored_scale.read().reshape(-1)
    if scale.shape != (1,) or not np.isfinite(scale[0]) or scale[0] <= 0:
        raise CheckpointError(f"{stored_scale.file}: {stored_scale.name} is {scale.tolist()}; expected one above 0")
    return Ternary(pack_codes(codes), (np.float32(1) / scale if inverse else scale).astype(np.float32))


def online_matrix(weight: Rows, shape: tuple[int, int]) -> StoredTernary:
    """A float matrix that the model quantises by its mean magnitude whenever it runs (arXiv:2402.17764)."""
    return StoredTernary(shape, partial(_read_online, weight, shape))


def _read_online(weight: Rows, shape: tuple[int, int]) -> Ternary:
    out, inputs = shape
    ranges = pieces(out, inputs)
    total = sum(np.abs(weight.read(piece.start, piece.stop)).sum(dtype=np.float64) for piece in ranges)
    scale = np.maximum(np.float32(total / (out * inputs)), ABSMAX_FLOOR)
    packed = np.empty((out, inputs // 4), np.uint8)
    for piece in ranges:
        levels = np.clip(np.rint(weight.read(piece.start, piece.stop) / scale), -1, 1)
        packed[piece] = pack_codes((levels + 1).astype(np.uint8))
    return Ternary(packed, np.array([scale], np.float32))
