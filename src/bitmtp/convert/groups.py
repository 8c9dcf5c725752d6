"""Float models whose weights are already ternary, one scale per 128 inputs (Bonsai "unpacked"): found by looking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bitmtp.checkpoint import linear_shapes
from bitmtp.config import ModelConfig
from bitmtp.convert.rows import Rows, StoredTernary, Ternary, pack_codes, pieces
from bitmtp.errors import CheckpointError
from bitmtp.ternary import Float32

GROUP = 128
_PROBE_ROWS = 64


def find_ternary(
    config: ModelConfig, tensors: Mapping[str, Rows]
) -> tuple[str, ModelConfig, dict[str, StoredTernary]] | None:
    """Words, config and matrices of a model whose first layer is ternary in groups of 128; None for any other.

    The whole of every matrix is checked when it is read: a model that is ternary only in part is an error, not a guess.
    """
    first = [f"layers.0.{name}.weight" for name in linear_shapes(config)]
    if any(size % GROUP for size in (config.hidden_size, config.attention_size, config.intermediate_size)):
        return None
    if not all(name in tensors and _looks_ternary(tensors[name]) for name in first):
        return None
    shapes: dict[str, tuple[int, int]] = {
        f"layers.{index}.{name}": shape
        for index in range(config.num_layers)
        for name, shape in linear_shapes(config).items()
    }
    config = replace(config, ternary_scale="group", group_size=GROUP)
    tables = ["embedding"] if config.tie_embeddings else ["embedding", "head"]
    if all(f"{table}.weight" in tensors and _looks_ternary(tensors[f"{table}.weight"]) for table in tables):
        shapes |= dict.fromkeys(tables, (config.vocab_size, config.hidden_size))
        config = replace(config, embedding_bits=2, head_activation_bits=8)
    matrices = {
        module: StoredTernary(shape, partial(_read_groups, module, tensors[f"{module}.weight"]))
        for module, shape in shapes.items()
        if f"{module}.weight" in tensors
    }
    return f"unpacked ternary weights (one scale per {GROUP} inputs)", config, matrices


def _looks_ternary(weight: Rows) -> bool:
    return len(weight.shape) == 2 and weight.shape[1] % GROUP == 0 and _split(weight.read(0, _PROBE_ROWS)) is not None


def _split(rows: Float32) -> tuple[NDArray[np.uint8], Float32] | None:
    """Codes ``[out, in]`` and scales ``[out, in / 128]`` of rows that are ternary in groups; None if they are not."""
    cells = rows.reshape(len(rows), -1, GROUP)
    size = np.abs(cells)
    scale = size.max(axis=2, keepdims=True)
    if not ((size == scale) | (size == 0)).all():
        return None
    codes = np.where(size == 0, 1, np.where(cells < 0, 0, 2)).astype(np.uint8)
    return codes.reshape(rows.shape), scale[..., 0]


def _read_groups(module: str, weight: Rows) -> Ternary:
    out, inputs = weight.shape
    packed = np.empty((out, inputs // 4), np.uint8)
    scale = np.empty((out, inputs // GROUP), np.float32)
    for piece in pieces(out, inputs):
        found = _split(weight.read(piece.start, piece.stop))
        if found is None:
            where = f"rows {piece.start} to {piece.stop - 1}"
            raise CheckpointError(f"{module}: {where} are not -s, 0, s in groups of {GROUP}, as layer 0 is; damaged?")
        packed[piece], scale[piece] = pack_codes(found[0]), found[1]
    return Ternary(packed, scale)
