"""A full-precision Llama-family model in memory, whatever file it came from: a start for training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bitmtp.checkpoint import linear_shapes
from bitmtp.config import ModelConfig
from bitmtp.convert.rows import Opened
from bitmtp.errors import CheckpointError, ConfigError

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A model to start training from, as floats.

    ``config`` gives the shape (16-bit embedding); ``tensors`` are float32 under the names of :func:`float_shapes`:
    ``embedding.weight [vocab, hidden]``, ``layers.N.attention.q.weight [out, in]`` … ``ternary`` names the products
    whose every row holds only -s, 0 and s.
    """

    config: ModelConfig
    tensors: Mapping[str, Float32]
    ternary: frozenset[str] = frozenset()


def float_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model without masks and chain, its matrices not packed."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, hidden), "norm.weight": (hidden,)}
    if not config.tie_embeddings:
        shapes["head.weight"] = (config.vocab_size, hidden)
    norms = {"attention_norm": hidden, "mlp_norm": hidden}
    if config.sub_norm:
        norms |= {"attention.sub_norm": config.attention_size, "mlp.sub_norm": config.intermediate_size}
    if config.qk_norm:
        norms |= {"attention.q_norm": config.head_dim, "attention.k_norm": config.head_dim}
    for index in range(config.num_layers):
        prefix = f"layers.{index}"
        for name, shape in linear_shapes(config).items():
            shapes[f"{prefix}.{name}.weight"] = shape
            if config.attention_bias and name in ("attention.q", "attention.k", "attention.v"):
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
        shapes |= {f"{prefix}.{name}.weight": (size,) for name, size in norms.items()}
    return shapes


def check_shapes(opened: Opened) -> None:
    """Make sure that a model holds exactly the tensors its config calls for.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of another shape.
    """
    expected = float_shapes(opened.config)
    found = {name: tuple(rows.shape) for name, rows in opened.floats.items()}
    found |= {f"{module}.weight": stored.shape for module, stored in opened.ternary.items()}
    if wrong := sorted(set(expected) ^ set(found)):
        word = "missing" if wrong[0] in expected else "unexpected"
        raise CheckpointError(f"{opened.origin}: tensor {wrong[0]} is {word}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise CheckpointError(f"{opened.origin}: {name} has shape {list(found[name])}; expected {list(shape)}")


def open_model(path: str | Path) -> Opened:
    """Recognise a ``.gguf`` file or a Hugging Face folder and check its shapes; no weight is read.

    Raises:
        CheckpointError: the path holds neither, or a tensor is missing, unexpected or of another shape.
        ConfigError: the model needs something this project does not have.
    """
    path = Path(path)
    if path.suffix == ".gguf" or path.is_file():
        try:
            from bitmtp.convert.gguf_file import open_gguf
        except ModuleNotFoundError as error:
            raise ConfigError(f"{path}: GGUF needs {error.name}; install it with `pip install gguf`") from None
        opened = open_gguf(path)
    else:
        from bitmtp.convert.huggingface import open_huggingface

        opened = open_huggingface(path)
    if not opened.config.eos_token_ids:
        raise CheckpointError(f"{path}: nothing says which token ends a text (eos_token_id)")
    check_shapes(opened)
    return opened


def read_source(path: str | Path) -> SourceModel:
    """Read a model whole, a ternary one as the floats that its weights stand for.

    Raises:
        CheckpointError: as :func:`open_model`.
        ConfigError: as :func:`open_model`.
    """
    opened = open_model(path)
    tensors = {name: rows.read() for name, rows in opened.floats.items()}
    tensors |= {f"{module}.weight": stored.read().values() for module, stored in opened.ternary.items()}
    by_row = frozenset(opened.ternary if opened.config.ternary_scale != "group" else ())
    config = replace(opened.config, ternary_scale="row", embedding_bits=16, head_activation_bits=16)
    return SourceModel(config, tensors, by_row)
