"""Hugging Face folders: ``config.json`` with one safetensors file, or shards and their index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bitmtp.config import ModelConfig
from bitmtp.convert.source import Float32, SourceModel, checked
from bitmtp.errors import CheckpointError, ConfigError

MODEL_TYPES = ("llama", "qwen2", "qwen3")
_LAYER_NAMES = {
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.o",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}
_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def read_huggingface(folder: Path) -> SourceModel:
    """Read a Llama, SmolLM2, Qwen2 or Qwen3 folder into float32.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor is wrong.
        ConfigError: an architecture or option this project does not have.
    """
    config = model_config(_read_json(folder / "config.json"), _generation_eos(folder))
    tensors: dict[str, Float32] = {}
    for file in _weight_files(folder):
        for name, tensor in read_safetensors(file):
            own = our_name(name)
            if own == "head.weight" and config.tie_embeddings:
                continue  # some exports repeat the tied matrix
            tensors[own] = tensor
    return checked(folder, config, tensors)


def model_config(data: dict[str, Any], eos: Any = None) -> ModelConfig:
    """Our config from Hugging Face's; ``eos`` (an id or a list) overrides its end-of-text ids."""
    kind = data.get("model_type")
    if kind not in MODEL_TYPES:
        raise ConfigError(f"model_type is {kind!r}; supported: {', '.join(MODEL_TYPES)}")
    if scaling := data.get("rope_scaling"):
        raise ConfigError(f"rope_scaling {scaling} is not supported")
    if data.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act is {data['hidden_act']!r}; supported: 'silu'")
    heads = data["num_attention_heads"]
    eos = data.get("eos_token_id") if eos is None else eos
    return ModelConfig(
        vocab_size=data["vocab_size"],
        hidden_size=data["hidden_size"],
        intermediate_size=data["intermediate_size"],
        num_layers=data["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=data.get("num_key_value_heads") or heads,
        head_dim=data.get("head_dim") or data["hidden_size"] // heads,
        max_position=data["max_position_embeddings"],
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        rope_theta=float(_rope_theta(data)),
        norm_eps=data["rms_norm_eps"],
        qk_norm=kind == "qwen3",
        attention_bias=bool(data.get("attention_bias", kind == "qwen2")),
        tie_embeddings=bool(data.get("tie_word_embeddings", False)),
        bos_token_id=data.get("bos_token_id"),
        pad_token_id=data.get("pad_token_id"),
        embedding_bits=16,
        head_activation_bits=16,
    )


def _rope_theta(data: dict[str, Any]) -> Any:
    # Newer exports nest the same number under rope_parameters.
    nested = data.get("rope_parameters") or {}
    if nested.get("rope_type", "default") != "default":
        raise ConfigError(f"rope_parameters {nested} are not supported")
    return nested.get("rope_theta", data.get("rope_theta", 10_000.0))


def our_name(name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` → ``layers.3.mlp.up.weight``; an unknown name is returned as it is."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    module = ".".join(parts[3:-1])
    if parts[:2] != ["model", "layers"] or module not in _LAYER_NAMES:
        return name
    return f"layers.{parts[2]}.{_LAYER_NAMES[module]}.{parts[-1]}"


def read_safetensors(file: Path) -> Iterator[tuple[str, Float32]]:
    """Every tensor of a safetensors file as float32.

    Read by hand because NumPy has no bfloat16, in which most of these models are published.
    """
    raw = np.memmap(file, np.uint8, "r")
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    try:
        header = json.loads(raw[8:start].tobytes())
    except ValueError:
        raise CheckpointError(f"{file}: not a safetensors file") from None
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(f"{file}: {name} is {entry['dtype']}; supported: {', '.join(_DTYPES)}")
        begin, end = (start + offset for offset in entry["data_offsets"])
        if end > raw.size:
            raise CheckpointError(f"{file}: cut off inside {name}; copy the file again")
        values = np.frombuffer(raw[begin:end].tobytes(), _DTYPES[entry["dtype"]])
        if entry["dtype"] == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        yield name, values.astype(np.float32).reshape(entry["shape"])


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / name for name in sorted(set(_read_json(index)["weight_map"].values()))]
    if not (folder / "model.safetensors").exists():
        raise CheckpointError(f"{folder}: holds no model.safetensors and no index of shards")
    return [folder / "model.safetensors"]


def _generation_eos(folder: Path) -> Any:
    # Chat models name their end of turn only here.
    file = folder / "generation_config.json"
    return _read_json(file).get("eos_token_id") if file.exists() else None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing; give a Hugging Face folder or a .gguf file") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file}: expected a JSON object")
    return data
