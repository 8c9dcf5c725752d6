"""A model in a form that C++ test programs read (``backends/model_file.hpp``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bitmtp.backends.weights import rope_table
from bitmtp.checkpoint import Checkpoint


def write_model_file(path: Path, made: Checkpoint, tokens: list[int]) -> None:
    """Write a model and some tokens."""
    config = made.config
    step_inputs = config.group_size if config.activation_scale == "group" else 0
    shape = (
        config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads,
        config.num_kv_heads, config.head_dim, config.block_size, config.chain_rank, step_inputs,
        config.embedding_bits == 16,
    )  # fmt: skip
    cos, sin = rope_table(config, config.max_position)
    extra: dict[str, NDArray[np.generic]] = {"rope.cos": cos, "rope.sin": sin}
    extra |= {"shape": np.array(shape, np.int32), "tokens": np.array(tokens, np.int32)}
    with path.open("wb") as file:
        for name, tensor in {**made.tensors, **extra}.items():
            dimensions = " ".join(map(str, tensor.shape))
            file.write(f"{name} {dimensions} : {tensor.nbytes}\n".encode() + tensor.tobytes())
