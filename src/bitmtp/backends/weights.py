"""Views of checkpoint tensors shared by backends: rotary tables and dequantised rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bitmtp.checkpoint import Checkpoint
from bitmtp.config import ModelConfig
from bitmtp.numerics import Float32
from bitmtp.rope import rope_frequencies
from bitmtp.ternary import unpack


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
    scale: Float32 = checkpoint.tensors[f"{name}.scale"]
    rows = unpack(weight[ids].view(np.uint8), config.embedding_bits).astype(np.float32)
    if scale.ndim == 2:
        return (rows.reshape(len(ids), scale.shape[1], -1) * scale[ids][..., None]).reshape(len(ids), -1)
    return rows * (scale if len(scale) == 1 else scale[ids][:, None])
