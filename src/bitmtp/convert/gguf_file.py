"""GGUF files of the ``llama`` architecture, dequantised to float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

from bitmtp.config import ModelConfig
from bitmtp.convert.source import Float32, SourceModel, checked
from bitmtp.errors import CheckpointError, ConfigError

_LAYER_NAMES = {
    "attn_q": "attention.q",
    "attn_k": "attention.k",
    "attn_v": "attention.v",
    "attn_output": "attention.o",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
    "attn_norm": "attention_norm",
    "ffn_norm": "mlp_norm",
}
_GLOBAL_NAMES = {"token_embd": "embedding", "output_norm": "norm", "output": "head"}


def read_gguf(file: Path) -> SourceModel:
    """Read a GGUF file; the tokenizer in it is not read.

    Raises:
        CheckpointError: no such file, damaged, or a tensor is wrong.
        ConfigError: another architecture than ``llama``, or scaled rotary positions.
    """
    if not file.exists():
        raise CheckpointError(f"{file}: no such file")
    try:
        reader = GGUFReader(file)
    except ValueError as error:
        raise CheckpointError(f"{file}: not a GGUF file ({error})") from None
    # the token lists are long and of no use here
    wanted = {name: field for name, field in reader.fields.items() if not name.startswith("tokenizer.ggml.t")}
    fields = {name: field.contents() for name, field in wanted.items()}
    names = {our_name(tensor.name): tensor for tensor in reader.tensors}
    if "rope_freqs.weight" in names:
        raise ConfigError(f"{file}: scaled rotary positions are not supported")
    vocab = int(names["embedding.weight"].shape[1]) if "embedding.weight" in names else 0
    config = _model_config(fields, vocab, tied="head.weight" not in names)
    tensors: dict[str, Float32] = {}
    for name, tensor in names.items():
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(name.split(".")[-2:][0])
        tensors[name] = unpermute(values, heads) if heads else values
    return checked(file, config, tensors)


def our_name(name: str) -> str:
    """``blk.3.ffn_up.weight`` → ``layers.3.mlp.up.weight``; an unknown name is returned as it is."""
    *path, kind = name.split(".")
    if len(path) == 1 and path[0] in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[path[0]]}.{kind}"
    if len(path) == 3 and path[0] == "blk" and path[2] in _LAYER_NAMES:
        return f"layers.{path[1]}.{_LAYER_NAMES[path[2]]}.{kind}"
    return name


def unpermute(weight: Float32, heads: int) -> Float32:
    """Undo llama.cpp's row order of q and k: it rotates neighbouring pairs, this project rotates halves."""
    rows = weight.shape[0]
    pairs = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def _model_config(fields: dict[str, Any], vocab: int, *, tied: bool) -> ModelConfig:
    if (architecture := fields.get("general.architecture")) != "llama":
        raise ConfigError(f"GGUF architecture is {architecture!r}; supported: 'llama'")
    if fields.get("llama.rope.scaling.type", "none") != "none":
        raise ConfigError("scaled rotary positions are not supported")
    get = {name.removeprefix("llama."): value for name, value in fields.items()}.get
    heads, hidden = int(get("attention.head_count", 0)), int(get("embedding_length", 0))
    eos = fields.get("tokenizer.ggml.eos_token_id")
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=int(get("feed_forward_length", 0)),
        num_layers=int(get("block_count", 0)),
        num_heads=heads,
        num_kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=int(get("attention.key_length") or hidden // max(heads, 1)),
        max_position=int(get("context_length", 0)),
        eos_token_ids=() if eos is None else (int(eos),),
        rope_theta=float(get("rope.freq_base", 10_000.0)),
        # stored in binary32; the seven digits it was written with give the decimal back
        norm_eps=float(f"{get('attention.layer_norm_rms_epsilon', 1e-5):.6g}"),
        tie_embeddings=tied,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        pad_token_id=fields.get("tokenizer.ggml.padding_token_id"),
        embedding_bits=16,
        head_activation_bits=16,
    )
