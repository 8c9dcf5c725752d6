"""A full-precision Llama-family model in memory, whatever file it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bitmtp.checkpoint import linear_shapes
from bitmtp.config import ModelConfig
from bitmtp.errors import CheckpointError

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A float model to start training from.

    ``config`` gives the shape (``sub_norm`` off, 16-bit embedding); ``tensors`` are float32 under the names of
    :func:`float_shapes`: ``embedding.weight [vocab, hidden]``, ``layers.N.attention.q.weight [out, in]`` …
    """

    config: ModelConfig
    tensors: Mapping[str, Float32]


def float_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every float tensor of a model without sub-norms, masks and chain."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, hidden), "norm.weight": (hidden,)}
    if not config.tie_embeddings:
        shapes["head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"layers.{index}"
        for name, shape in linear_shapes(config).items():
            shapes[f"{prefix}.{name}.weight"] = shape
            if config.attention_bias and name in ("attention.q", "attention.k", "attention.v"):
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
        for name in ("attention_norm", "mlp_norm"):
            shapes[f"{prefix}.{name}.weight"] = (hidden,)
        if config.qk_norm:
            for name in ("attention.q_norm", "attention.k_norm"):
                shapes[f"{prefix}.{name}.weight"] = (config.head_dim,)
    return shapes


def checked(origin: Path, config: ModelConfig, tensors: Mapping[str, Float32]) -> SourceModel:
    """A :class:`SourceModel` whose tensors are exactly those the config calls for.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of another shape.
    """
    shapes = float_shapes(config)
    if wrong := sorted(set(shapes) ^ set(tensors)):
        raise CheckpointError(f"{origin}: tensor {wrong[0]} is missing or unexpected")
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise CheckpointError(f"{origin}: {name} has shape {list(tensors[name].shape)}; expected {list(shape)}")
    return SourceModel(config, tensors)


def read_source(path: str | Path) -> SourceModel:
    """Read a ``.gguf`` file, or a Hugging Face folder.

    Raises:
        CheckpointError: the path holds neither, or a tensor is wrong.
        ConfigError: the model needs something this project does not have.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        from bitmtp.convert.gguf_file import read_gguf

        return read_gguf(path)
    from bitmtp.convert.huggingface import read_huggingface

    return read_huggingface(path)
