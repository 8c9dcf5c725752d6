"""Views of checkpoint tensors shared by backends: rotary tables, dequantised rows, and cheaper heads for drafts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from bitmtp.checkpoint import Checkpoint, Tensor
from bitmtp.config import ModelConfig
from bitmtp.errors import BackendError
from bitmtp.layout import TABLES
from bitmtp.numerics import Float32
from bitmtp.rope import rope_frequencies
from bitmtp.ternary import Int8, pack, unpack, unpack_codes

_BLOCK = 8192  # rows that are quantised at a time
_ALL = slice(None)


def rope_table(config: ModelConfig, positions: int) -> tuple[Float32, Float32]:
    """Cosine and sine ``[positions, head_dim / 2]``, computed in float64 and rounded once."""
    frequency, factor = rope_frequencies(config)
    angle = np.arange(positions, dtype=np.float64)[:, None] * frequency
    return (factor * np.cos(angle)).astype(np.float32), (factor * np.sin(angle)).astype(np.float32)


def dequantise_rows(checkpoint: Checkpoint, name: str, ids: NDArray[np.int32]) -> Float32:
    """Float rows of ``embedding`` or ``head``: ``[len(ids), hidden]``."""
    config, weight = checkpoint.config, checkpoint.tensors[f"{name}.weight"]
    if config.embedding_bits == 16:
        return weight[ids].astype(np.float32)
    rows = integers(checkpoint, name, ids).astype(np.float32)
    factors = {part: checkpoint.tensors.get(f"{name}.{part}") for part in ("scale", "minimum")}
    scale, minimum = (None if part is None else part[ids] if len(part) > 1 else part for part in factors.values())
    assert scale is not None
    cells = rows.reshape(len(rows), scale[0].size, -1)
    values = cells * scale.reshape(len(scale), -1, 1)
    return (values if minimum is None else values + minimum.reshape(len(minimum), -1, 1)).reshape(rows.shape)


def integers(checkpoint: Checkpoint, module: str, ids: NDArray[np.int32] | slice = _ALL) -> NDArray[np.int16]:
    """Rows of a matrix as the integers that its scales multiply: ``[rows, in]``."""
    config, weight = checkpoint.config, checkpoint.tensors[f"{module}.weight"][ids]
    layout = config.layout(module)
    if layout is None:
        bits = config.embedding_bits if module in TABLES else 2
        return unpack(weight.view(np.uint8), bits).astype(np.int16)
    if layout.minimum:
        return unpack_codes(weight, layout.bits).astype(np.int16)
    return unpack(weight.view(np.uint8), layout.bits).astype(np.int16)


class DraftHead(StrEnum):
    """What rows with the draft head are multiplied with: the exact head, or a copy of fewer bits made at load."""

    EXACT = "exact"
    INT8 = "int8"
    INT4 = "int4"
    TERNARY = "ternary"

    @property
    def bits(self) -> int:
        """Bits of a weight of the copy."""
        return {"int8": 8, "int4": 4, "ternary": 2}[self.value]


@dataclass(frozen=True, slots=True, eq=False)
class HeadCopy:
    """A head of fewer bits: ``weight`` is packed as in a checkpoint, with one ``scale`` a row."""

    bits: int
    weight: Tensor
    scale: Float32


def head_name(config: ModelConfig) -> str:
    """Which tensors are the exact head."""
    return "embedding" if config.tie_embeddings else "head"


def head_copy(checkpoint: Checkpoint, kind: DraftHead) -> HeadCopy | None:
    """The draft head of a model; None if it is the exact one.

    Raises:
        BackendError: the copy would be no smaller than the exact head.
    """
    config = checkpoint.config
    if kind is DraftHead.EXACT:
        return None
    layout = config.layout(head_name(config))
    bits = layout.bits if layout else config.embedding_bits
    if kind.bits >= bits:
        raise BackendError(
            f"a draft head of {kind.bits} bits saves nothing: this model's head has {bits}; "
            "choose a smaller one or `exact`"
        )
    parts = []
    for start in range(0, config.vocab_size, _BLOCK):
        ids = np.arange(start, min(start + _BLOCK, config.vocab_size), dtype=np.int32)
        levels, scale = quantise_head(dequantise_rows(checkpoint, head_name(config), ids), kind.bits)
        parts.append((pack(levels, kind.bits), scale))
    return HeadCopy(kind.bits, np.concatenate([p for p, _ in parts]), np.concatenate([s for _, s in parts]))


def quantise_head(rows: Float32, bits: int) -> tuple[Int8, Float32]:
    """Rows ``[n, hidden]`` → int8 levels of that many bits and a scale ``[n]``.

    8 bits: absmax. 4 bits: absmax times 3/4, beyond which weights are clipped: near the least squared error for rows
    that are about normally distributed. Ternary: as in ternary weight networks (arXiv:1605.04711), weights above 0.7
    times their row's mean magnitude stand, with their own mean magnitude as the scale.
    """
    size = np.abs(rows)
    if bits == 2:
        stands = size > np.float32(0.7) * size.mean(axis=1, keepdims=True)
        scale = (size * stands).sum(axis=1) / np.maximum(stands.sum(axis=1), 1)
        return (np.sign(rows) * stands).astype(np.int8), scale.astype(np.float32)
    most = 2 ** (bits - 1) - 1
    scale = np.maximum(size.max(axis=1), np.float32(1e-12)) * np.float32((0.75 if bits == 4 else 1) / most)
    return np.clip(np.rint(rows / scale[:, None]), -most, most).astype(np.int8), scale
