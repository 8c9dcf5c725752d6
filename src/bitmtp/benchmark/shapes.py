"""Well-known model shapes with random ternary weights, to measure speed without the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitmtp.checkpoint import Checkpoint, TensorSpec, tensor_specs
from bitmtp.config import ModelConfig
from bitmtp.errors import RequestError

_BONSAI: dict[str, Any] = {
    "vocab_size": 151_669,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
    "qk_norm": True,
    "ternary_scale": "group",
    "group_size": 128,
    "embedding_bits": 2,
}
_COMMON: dict[str, Any] = {"max_position": 8192, "eos_token_ids": ()}

SHAPES: Mapping[str, ModelConfig] = {
    # Qwen3-1.7B and Qwen3-4B with every matrix ternary, the tied embedding too.
    "bonsai-1.7b": ModelConfig(
        hidden_size=2048, intermediate_size=6144, num_layers=28, num_heads=16, **_BONSAI, **_COMMON
    ),
    "bonsai-4b": ModelConfig(
        hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32, **_BONSAI, **_COMMON
    ),
    # Qwen3-8B, whose head is a matrix of its own.
    "bonsai-8b": ModelConfig(
        hidden_size=4096,
        intermediate_size=12_288,
        num_layers=36,
        num_heads=32,
        tie_embeddings=False,
        **_BONSAI,
        **_COMMON,
    ),
    # microsoft/bitnet-b1.58-2B-4T (arXiv:2504.12285), its embedding at 8 bits.
    "bitnet-2b": ModelConfig(
        vocab_size=128_256,
        hidden_size=2560,
        intermediate_size=6912,
        num_layers=30,
        num_heads=20,
        num_kv_heads=5,
        head_dim=128,
        rope_theta=5e5,
        activation="relu2",
        sub_norm=True,
        ternary_scale="tensor",
        **_COMMON,
    ),
    "smollm2-135m": ModelConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope_theta=1e5,
        sub_norm=True,
        **_COMMON,
    ),
}


def random_model(name: str) -> Checkpoint:
    """An in-memory checkpoint of a named shape.

    All layers share the arrays of one, which keeps memory and start-up small; backends repack each layer for itself,
    so a pass still reads every byte.

    Raises:
        RequestError: no such shape.
    """
    if name not in SHAPES:
        raise RequestError(f"unknown shape {name!r}; choose one of {', '.join(SHAPES)}")
    return random_checkpoint(SHAPES[name], name)


def random_checkpoint(config: ModelConfig, name: str) -> Checkpoint:
    """As :func:`random_model`, for a config with 2-bit or 8-bit embedding and no drafting."""
    random = np.random.default_rng(0)
    tensors: dict[str, NDArray[Any]] = {}
    for tensor, spec in tensor_specs(config).items():
        twin = re.sub(r"^layers\.\d+\.", "layers.0.", tensor)
        tensors[tensor] = tensors[twin] if twin in tensors else _random_tensor(random, tensor, spec, config)
    return Checkpoint(Path(name), config, tensors)


def _random_tensor(random: np.random.Generator, name: str, spec: TensorSpec, config: ModelConfig) -> NDArray[Any]:
    if name.endswith("norm.weight"):
        return np.ones(spec.shape, np.float32)
    if name.endswith(".scale"):
        # Outputs about as large as inputs: activations stay finite through any number of layers.
        inputs = config.intermediate_size if "mlp.down" in name else config.hidden_size
        size = 1 / 127 if spec.shape == (config.vocab_size,) else (inputs * 2 / 3) ** -0.5
        return np.full(
            spec.shape, np.float16(size), np.float32
        )  # as in published checkpoints, whose scales are float16
    if spec.dtype == "int8":
        return random.integers(-127, 128, spec.shape, dtype=np.int8)
    return _TERNARY_BYTES[random.integers(0, len(_TERNARY_BYTES), spec.shape, dtype=np.uint8)]


def _ternary_bytes() -> NDArray[np.uint8]:
    """The 81 bytes whose four 2-bit codes are 0, 1 or 2."""
    return np.array([byte for byte in range(256) if not byte & (byte >> 1) & 0x55], np.uint8)


_TERNARY_BYTES = _ternary_bytes()
