"""Hugging Face folders: ``config.json``, safetensors, and what kind of model they hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bitmtp.checkpoint import linear_shapes
from bitmtp.config import ModelConfig, RopeScaling
from bitmtp.convert.bitnet import online_matrix, packed_matrix
from bitmtp.convert.groups import find_ternary
from bitmtp.convert.rows import Opened, Rows, StoredTernary
from bitmtp.convert.safetensors_file import StoredTensor, open_folder, read_json
from bitmtp.convert.tokenizer_files import copy_tokenizer
from bitmtp.errors import BitMTPError, CheckpointError, ConfigError

ACTIVATIONS = {"llama": "silu", "qwen2": "silu", "qwen3": "silu", "bitnet": "relu2"}
_NAMES = {"llama": "Llama-family", "qwen2": "Qwen2", "qwen3": "Qwen3", "bitnet": "BitNet b1.58"}
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
# Microsoft's names, and those of 1bitLLM's reproduction.
_SUB_NORMS = {
    "self_attn.attn_sub_norm": "attention.sub_norm",
    "self_attn.inner_attn_ln": "attention.sub_norm",
    "mlp.ffn_sub_norm": "mlp.sub_norm",
    "mlp.ffn_layernorm": "mlp.sub_norm",
}
_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}


def open_huggingface(folder: Path) -> Opened:
    """Recognise a folder: BitNet (packed, or full precision quantised on the fly), Bonsai unpacked, or a float model.

    Raises:
        CheckpointError: a file is missing or damaged.
        ConfigError: an architecture, quantisation or option this project does not have.
    """
    try:
        return _open(folder)
    except BitMTPError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error.args[0]} is missing") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: a value is of a wrong kind ({error})") from None


def _open(folder: Path) -> Opened:
    data = read_json(folder / "config.json")
    tensors = {our_name(name): tensor for name, tensor in open_folder(folder).items()}
    _refuse_rotated(data, tensors)
    config = model_config(data, _generation_eos(folder), sub_norm="layers.0.mlp.sub_norm.weight" in tensors)
    if config.tie_embeddings:
        tensors.pop("head.weight", None)  # some exports repeat the tied matrix
    kind, config, ternary = _ternary_matrices(data, config, tensors)
    taken = {f"{module}.{part}" for module in ternary for part in ("weight", "weight_scale")}
    floats: dict[str, Rows] = {name: tensor for name, tensor in tensors.items() if name not in taken}
    kind = f"{_NAMES[data['model_type']]}, {kind}; Hugging Face folder"
    return Opened(folder, kind, config, floats, ternary, partial(copy_tokenizer, folder))


def _ternary_matrices(
    data: Mapping[str, Any], config: ModelConfig, tensors: Mapping[str, StoredTensor]
) -> tuple[str, ModelConfig, dict[str, StoredTernary]]:
    """What the weights are, the config's scale layout for them, and the ternary matrices (none: a float model)."""
    mode = _bitnet_mode(data)
    if mode is None:
        found = find_ternary(config, dict(tensors))
        return found if found else ("full precision", config, {})
    shapes = {
        f"layers.{index}.{name}": shape
        for index in range(config.num_layers)
        for name, shape in linear_shapes(config).items()
    }
    for module in shapes:
        if f"{module}.weight" not in tensors:
            raise CheckpointError(f"tensor {module}.weight is missing")
    config = replace(config, ternary_scale="tensor")
    if mode == "online":
        kind = "full-precision weights of a ternary model, quantised here by absmean per tensor"
        return kind, config, {m: online_matrix(tensors[f"{m}.weight"], shape) for m, shape in shapes.items()}
    inverse = mode == "bitlinear"
    word = "divides (1/s is stored)" if inverse else "multiplies"
    kind = f"packed 2-bit weights ({mode}: the stored scale {word})"
    return kind, config, {m: packed_matrix(tensors, m, shape, inverse=inverse) for m, shape in shapes.items()}


def _bitnet_mode(data: Mapping[str, Any]) -> str | None:
    """``autobitlinear``, ``bitlinear`` (both packed), ``online``, or None where nothing says that this is a BitNet."""
    quantised = data.get("quantization_config")
    if quantised is None:
        if data.get("weight_bits") == 1:  # 1bitLLM's own code, before transformers knew of it
            return "online"
        if data["model_type"] == "bitnet":
            raise ConfigError("a bitnet model without quantization_config: nothing says how its weights are to be read")
        return None
    if (method := quantised.get("quant_method")) != "bitnet":
        raise ConfigError(f"quant_method is {method!r}; supported: 'bitnet'")
    if quantised.get("use_rms_norm"):
        raise ConfigError("use_rms_norm (a norm inside every linear layer, as in Falcon-Edge) is not supported")
    linear_class = quantised.get("linear_class", "bitlinear")
    if linear_class not in ("bitlinear", "autobitlinear"):
        raise ConfigError(f"linear_class is {linear_class!r}; supported: 'bitlinear', 'autobitlinear'")
    mode = quantised.get("quantization_mode", "offline")
    if mode not in ("offline", "online"):
        raise ConfigError(f"quantization_mode is {mode!r}; supported: 'offline', 'online'")
    return "online" if mode == "online" and linear_class == "autobitlinear" else str(linear_class)


def _refuse_rotated(data: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Weights stored in a rotated basis look like any others, and give noise unless the inputs are rotated too."""
    if any("hadamard" in name.lower() for name in (*data, *tensors)):
        raise ConfigError("Bonsai of the second generation (weights rotated by Hadamard matrices) is not supported")


def model_config(data: Mapping[str, Any], eos: Any = None, *, sub_norm: bool = False) -> ModelConfig:
    """Our config from Hugging Face's; ``eos`` (an id or a list) overrides its end-of-text ids."""
    kind = data.get("model_type")
    if kind not in ACTIVATIONS:
        raise ConfigError(f"model_type is {kind!r}; supported: {', '.join(ACTIVATIONS)}")
    activation = data.get("hidden_act", ACTIVATIONS[kind])
    if activation != ACTIVATIONS[kind]:
        raise ConfigError(f"hidden_act is {activation!r}; supported: {ACTIVATIONS[kind]!r}")
    if data.get("use_sliding_window"):
        raise ConfigError("use_sliding_window is not supported")
    heads = data["num_attention_heads"]
    eos = data.get("eos_token_id") if eos is None else eos
    rope = data.get("rope_parameters") or {}  # newer exports nest rope_theta and rope_scaling there
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
        rope_theta=float(rope.get("rope_theta", data.get("rope_theta", 500_000.0 if kind == "bitnet" else 10_000.0))),
        rope_scaling=rope_scaling(rope or data.get("rope_scaling") or {}, data["max_position_embeddings"]),
        norm_eps=data["rms_norm_eps"],
        activation=ACTIVATIONS[kind],  # type: ignore[arg-type]
        sub_norm=sub_norm,
        qk_norm=kind == "qwen3",
        attention_bias=bool(data.get("attention_bias", kind == "qwen2")),
        tie_embeddings=bool(data.get("tie_word_embeddings", False)),
        bos_token_id=data.get("bos_token_id"),
        pad_token_id=data.get("pad_token_id"),
        embedding_bits=16,
        head_activation_bits=16,
    )


def rope_scaling(data: Mapping[str, Any], max_position: int) -> RopeScaling | None:
    """Our form of Hugging Face's ``rope_scaling`` or ``rope_parameters``; None for plain rotary positions."""
    kind = data.get("rope_type") or data.get("type") or "default"
    if data.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(f"partial_rotary_factor is {data['partial_rotary_factor']}; supported: 1")
    if kind == "default":
        return None
    factor = float(data.get("factor") or 0)
    original = int(data.get("original_max_position_embeddings") or max_position)
    if kind == "yarn":
        if data.get("truncate") is False:
            raise ConfigError("YaRN without truncate is not supported")
        low, high = float(data.get("beta_slow") or 1), float(data.get("beta_fast") or 32)
        return RopeScaling("yarn", factor, original, low, high, _yarn_attention(data, factor))
    if kind == "llama3":
        return RopeScaling("llama3", factor, original, float(data["low_freq_factor"]), float(data["high_freq_factor"]))
    return RopeScaling(str(kind), factor, original)


def _yarn_attention(data: Mapping[str, Any], factor: float) -> float:
    if (given := data.get("attention_factor")) is not None:
        return float(given)
    if data.get("mscale") and data.get("mscale_all_dim"):
        return yarn_attention(factor, data["mscale"]) / yarn_attention(factor, data["mscale_all_dim"])
    return yarn_attention(factor)


def yarn_attention(factor: float, scale: float = 1.0) -> float:
    """What YaRN multiplies cosines and sines by (arXiv:2309.00071, section 3.4)."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def our_name(name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` → ``layers.3.mlp.up.weight``; an unknown name is returned as it is."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    module = ".".join(parts[3:-1])
    own = _LAYER_NAMES.get(module) or _SUB_NORMS.get(module)
    if parts[:2] != ["model", "layers"] or own is None:
        return name
    return f"layers.{parts[2]}.{own}.{parts[-1]}"


def _generation_eos(folder: Path) -> Any:
    # Chat models name their end of turn only here.
    file = folder / "generation_config.json"
    return read_json(file).get("eos_token_id") if file.exists() else None
