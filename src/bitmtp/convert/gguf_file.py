"""GGUF files of Llama, Qwen and BitNet models: names, config, and which tensors are ternary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from bitmtp.checkpoint import linear_shapes
from bitmtp.config import ModelConfig, RopeScaling
from bitmtp.convert.gguf_blocks import I2_S, BlockType
from bitmtp.convert.gguf_metadata import Metadata
from bitmtp.convert.gguf_tensors import (
    Entry,
    GgufRows,
    Order,
    Reader,
    block_types,
    is_ternary,
    open_gguf_tensors,
    read_blocks,
    read_i2_s,
)
from bitmtp.convert.gguf_tokenizer import write_tokenizer
from bitmtp.convert.groups import find_ternary
from bitmtp.convert.huggingface import yarn_attention
from bitmtp.convert.lowbit import StoredLowBit
from bitmtp.convert.rows import Opened, StoredTernary, Ternary
from bitmtp.errors import CheckpointError, ConfigError
from bitmtp.ternary import Float32

T = TypeVar("T")
_LAYER_NAMES = {
    "attn_q": "attention.q",
    "attn_k": "attention.k",
    "attn_v": "attention.v",
    "attn_output": "attention.o",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "attn_sub_norm": "attention.sub_norm",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
    "ffn_sub_norm": "mlp.sub_norm",
    "attn_norm": "attention_norm",
    "ffn_norm": "mlp_norm",
}
_GLOBAL_NAMES = {"token_embd": "embedding", "output_norm": "norm", "output": "head"}
# llama.cpp's "bitnet" is 1bitLLM's model (SiLU); bitnet.cpp's other two are Microsoft's (squared ReLU).
ACTIVATIONS = {
    "llama": "silu",
    "qwen2": "silu",
    "qwen3": "silu",
    "bitnet": "silu",
    "bitnet-25": "relu2",
    "bitnet-b1.58": "relu2",
}


def open_gguf(file: Path) -> Opened:
    """Recognise a GGUF file: ternary blocks, or floats and ordinary quantised types.

    Raises:
        CheckpointError: no such file, damaged, or cut off.
        ConfigError: an architecture or option this project does not have.
    """
    reader = open_gguf_tensors(file)
    if any(name.startswith("prism.hadamard") for name in reader.fields):
        raise ConfigError(
            f"{file}: Bonsai of the second generation (weights rotated by Hadamard matrices), not supported"
        )
    entries = {our_name(name): entry for name, entry in reader.entries.items()}
    if "rope_freqs.weight" in entries:
        raise ConfigError(f"{file}: frequencies stretched by a table (rope_freqs) are not supported")
    if "embedding.weight" not in entries:
        raise CheckpointError(f"{file}: tensor token_embd.weight is missing")
    architecture = Metadata(file, reader.fields).need("general.architecture", str)
    try:
        config = _model_config(architecture, Metadata(file, reader.fields, architecture), entries)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    orders = _orders(config) if architecture == "llama" else {}
    kind, config, ternary = _ternary_matrices(file, reader, config, entries, orders)
    taken = {f"{module}.weight" for module in ternary}
    floats = {name: entry for name, entry in entries.items() if name not in taken}
    rows = {name: GgufRows(file, reader.data, entry, _order(orders, name)) for name, entry in floats.items()}
    if not ternary and (found := find_ternary(config, rows)) is not None:
        kind, config, ternary = found
        rows = {name: each for name, each in rows.items() if name.removesuffix(".weight") not in ternary}
    exact = {} if ternary else _exact(rows)
    write = partial(write_tokenizer, Metadata(file, reader.fields), config.vocab_size)
    return Opened(file, f"{architecture}, {kind}; GGUF file", config, rows, ternary, write, exact)


def _exact(rows: Mapping[str, GgufRows]) -> dict[str, StoredLowBit]:
    found = {name.removesuffix(".weight"): each.exact() for name, each in rows.items()}
    return {module: stored for module, stored in found.items() if stored is not None}


def _ternary_matrices(
    file: Path, reader: Reader, config: ModelConfig, entries: Mapping[str, Entry], orders: Mapping[str, Order]
) -> tuple[str, ModelConfig, dict[str, StoredTernary]]:
    layouts = block_types(file, reader)
    tables = [table for table in ("embedding", "head") if f"{table}.weight" in entries]
    modules = [f"layers.{i}.{name}" for i in range(config.num_layers) for name in linear_shapes(config)]
    found = [module for module in modules if (entry := entries.get(f"{module}.weight")) and is_ternary(entry)]
    if not found:
        types = {entries[f"{module}.weight"].type_name for module in modules if f"{module}.weight" in entries}
        return f"weights of type {' and '.join(sorted(types))}", config, {}
    if len(found) < len(modules):
        odd = next(module for module in modules if module not in found)
        raise CheckpointError(f"{file}: {odd}.weight is missing or not ternary, as the others are")
    if all(is_ternary(entries[f"{table}.weight"]) for table in tables):
        found += tables
        config = replace(config, embedding_bits=2, head_activation_bits=8)
    used = {entries[f"{module}.weight"].type_id for module in found}
    names = sorted(layouts[each].name if each in layouts else "I2_S (order of x86)" for each in used)
    group = min((layouts[each].group for each in used if each in layouts), default=0)
    config = (
        replace(config, ternary_scale="group", group_size=group) if group else replace(config, ternary_scale="tensor")
    )
    matrices = {
        module: _stored(file, reader, entries[f"{module}.weight"], layouts, _order(orders, f"{module}.weight"), group)
        for module in found
    }
    return f"ternary blocks of type {' and '.join(names)}", config, matrices


def _stored(
    file: Path, reader: Reader, entry: Entry, layouts: Mapping[int, BlockType], order: Order | None, group: int
) -> StoredTernary:
    if len(entry.shape) != 2:
        raise CheckpointError(f"{file}: {entry.name} has shape {list(entry.shape)}; expected a matrix")
    out, inputs = entry.shape
    if entry.type_id == I2_S:
        read = partial(_read_i2_s, file, reader, entry, order, group)
    else:
        read = partial(read_blocks, file, reader.data, entry, layouts[entry.type_id], order, group)
    return StoredTernary((out, inputs), read)


def _read_i2_s(file: Path, reader: Reader, entry: Entry, order: Order | None, group: int) -> Ternary:
    matrix = read_i2_s(file, reader.data, entry, order)
    if not group:
        return matrix
    out, inputs = entry.shape
    return Ternary(matrix.packed, np.full((out, inputs // group), matrix.scale[0], np.float32))


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
    return weight[_unpermuted(len(weight), heads)]


def _unpermuted(rows: int, heads: int) -> Order:
    pairs = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    return pairs.swapaxes(1, 2).reshape(rows)


def _orders(config: ModelConfig) -> dict[str, Order]:
    """Row order of q and k in files of the ``llama`` architecture; the others rotate halves already."""
    return {
        "q": _unpermuted(config.attention_size, config.num_heads),
        "k": _unpermuted(config.kv_size, config.num_kv_heads),
    }


def _order(orders: Mapping[str, Order], name: str) -> Order | None:
    return orders.get(name.split(".")[-2])


def _model_config(architecture: str, metadata: Metadata, entries: Mapping[str, Entry]) -> ModelConfig:
    """What may be left out, and what then holds, is as in the definition of the format."""
    if architecture not in ACTIVATIONS:
        raise ConfigError(f"GGUF architecture is {architecture!r}; supported: {', '.join(ACTIVATIONS)}")
    need, find = metadata.need, metadata.find
    heads, hidden = need(".attention.head_count", int), need(".embedding_length", int)
    head_dim = find(".attention.key_length", int) or hidden // max(heads, 1)
    if (rotated := find(".rope.dimension_count", int)) not in (None, head_dim):
        raise ConfigError(f"rope.dimension_count is {rotated}; supported: the head's {head_dim}")
    ends = [need("tokenizer.ggml.eos_token_id", int), find("tokenizer.ggml.eot_token_id", int)]
    return ModelConfig(
        vocab_size=entries["embedding.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=need(".feed_forward_length", int),
        num_layers=need(".block_count", int),
        num_heads=heads,
        num_kv_heads=_or(find(".attention.head_count_kv", int), heads),
        head_dim=head_dim,
        max_position=need(".context_length", int),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        rope_theta=_or(find(".rope.freq_base", float), 10_000.0),
        rope_scaling=_rope_scaling(metadata),
        # stored in binary32; the seven digits it was written with give the decimal back
        norm_eps=float(f"{need('.attention.layer_norm_rms_epsilon', float):.6g}"),
        activation=ACTIVATIONS[architecture],  # type: ignore[arg-type]
        sub_norm="layers.0.mlp.sub_norm.weight" in entries,
        qk_norm="layers.0.attention.q_norm.weight" in entries,
        attention_bias="layers.0.attention.q.bias" in entries,
        tie_embeddings="head.weight" not in entries,
        bos_token_id=find("tokenizer.ggml.bos_token_id", int),
        pad_token_id=find("tokenizer.ggml.padding_token_id", int),
        embedding_bits=16,
        head_activation_bits=16,
    )


def _or(found: T | None, default: T) -> T:
    return default if found is None else found


def _rope_scaling(metadata: Metadata) -> RopeScaling | None:
    find = metadata.find
    kind = _or(find(".rope.scaling.type", str), "none")
    if kind == "none":
        return None
    factor = _or(find(".rope.scaling.factor", float), 0.0)  # which no kind takes
    original = _or(find(".rope.scaling.original_context_length", int), metadata.need(".context_length", int))
    if kind != "yarn":
        return RopeScaling(kind, factor, original)
    # llama.cpp multiplies what the file names by YaRN's own factor
    attention = _or(find(".rope.scaling.attn_factor", float), 1.0) * yarn_attention(factor)
    low = _or(find(".rope.scaling.yarn_beta_slow", float), 1.0)
    high = _or(find(".rope.scaling.yarn_beta_fast", float), 32.0)
    return RopeScaling("yarn", factor, original, low, high, attention)
