"""Model files in the layouts of others, written from the definitions of those layouts: slow, element by element."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from conftest import write_tokenizer
from numpy.typing import NDArray
from safetensors.numpy import save_file

from bitmtp.config import ModelConfig
from bitmtp.convert.huggingface import _GLOBAL_NAMES, _LAYER_NAMES
from bitmtp.convert.source import float_shapes

Array = NDArray[Any]
ALIGNMENT = 32
BITNET_SUB_NORMS = {"self_attn.attn_sub_norm": "attention.sub_norm", "mlp.ffn_sub_norm": "mlp.sub_norm"}


# Ternary weights


def random_ternary(random: np.random.Generator, out: int, inputs: int, group: int) -> tuple[Array, Array]:
    """Weights -1, 0, 1 ``[out, in]`` and float16-exact scales ``[out, in / group]``; some groups are all zero."""
    weights = random.integers(-1, 2, (out, inputs), dtype=np.int8)
    scales = random.uniform(0.02, 0.05, (out, inputs // group)).astype(np.float16).astype(np.float32)
    for row in range(0, out, 7):
        column = row % scales.shape[1]
        scales[row, column] = 0
        weights[row, column * group : (column + 1) * group] = 0
    return weights, scales


def dense(weights: Array, scales: Array) -> Array:
    """Float values ``[out, in]`` of weights with scales ``[out, in / group]``, or one for all."""
    out, inputs = weights.shape
    if scales.size == 1:
        return (weights * scales.reshape(1)).astype(np.float32)
    return (weights.reshape(out, scales.shape[1], -1) * scales[..., None]).reshape(out, inputs).astype(np.float32)


# Block types of GGUF files: weights of one block and its scale → bytes


def _half(scale: float) -> bytes:
    return struct.pack("<e", scale)


def block_q1_0(weights: Array, scale: float) -> bytes:
    bits = [0] * 16
    for i, weight in enumerate(weights):
        assert weight in (-1, 1)
        bits[i // 8] |= (weight == 1) << (i % 8)
    return _half(scale) + bytes(bits)


def block_q2_0(weights: Array, scale: float) -> bytes:
    """Of 64 weights (llama.cpp) or of 128 (the fork, and PQ2_0)."""
    codes = [0] * (len(weights) // 4)
    for i, weight in enumerate(weights):
        codes[i // 4] |= (int(weight) + 1) << (2 * (i % 4))
    return _half(scale) + bytes(codes)


def _base3(digits: list[int]) -> int:
    """A byte whose digits come out one after another when it is multiplied by 3: the number scaled up to 256ths."""
    value = sum(digit * 3 ** (4 - place) for place, digit in enumerate(digits))
    return (value * 256 + 242) // 243


def block_ptq1_0(weights: Array, scale: float) -> bytes:
    codes = [int(weight) + 1 for weight in weights]
    first = [_base3([codes[16 * n + byte] for n in range(5)]) for byte in range(16)]
    second = [_base3([codes[80 + 8 * n + byte] for n in range(5)]) for byte in range(8)]
    last = [_base3([codes[120 + 2 * n + byte] for n in range(4)]) for byte in range(2)]
    return bytes(first + second + last) + _half(scale)


def block_tq1_0(weights: Array, scale: float) -> bytes:
    codes = [int(weight) + 1 for weight in weights]
    first = [_base3([codes[32 * n + byte] for n in range(5)]) for byte in range(32)]
    second = [_base3([codes[160 + 16 * n + byte] for n in range(5)]) for byte in range(16)]
    last = [_base3([codes[240 + 4 * n + byte] for n in range(4)]) for byte in range(4)]
    return bytes(first + second + last) + _half(scale)


def block_tq2_0(weights: Array, scale: float) -> bytes:
    codes = [0] * 64
    for i, weight in enumerate(weights):
        half, place = divmod(i, 128)
        codes[32 * half + place % 32] |= (int(weight) + 1) << (2 * (place // 32))
    return bytes(codes) + _half(scale)


@dataclass(frozen=True)
class Blocks:
    """A ternary type: its id, weights a block, and the encoder of one block."""

    type_id: int
    group: int
    encode: Callable[[Array, float], bytes]


TYPES = {
    "TQ1_0": Blocks(34, 256, block_tq1_0),
    "TQ2_0": Blocks(35, 256, block_tq2_0),
    "Q1_0": Blocks(41, 128, block_q1_0),
    "Q2_0 (group 64)": Blocks(42, 64, block_q2_0),
    "Q2_0 (group 128)": Blocks(42, 128, block_q2_0),
    "PQ2_0": Blocks(142, 128, block_q2_0),
    "PTQ1_0": Blocks(143, 128, block_ptq1_0),
}


def encode_blocks(kind: str, weights: Array, scales: Array) -> bytes:
    """A matrix as blocks, row after row."""
    group, encode = TYPES[kind].group, TYPES[kind].encode
    cells = weights.reshape(-1, group)
    return b"".join(encode(cell, float(scale)) for cell, scale in zip(cells, scales.reshape(-1), strict=True))


def encode_i2_s(weights: Array, scale: float, shifts: tuple[int, ...] = (6, 4, 2, 0)) -> bytes:
    """bitnet.cpp on x86: 32 bytes for 128 weights, byte b with weights b, b + 32 … from the highest bits down."""
    flat = weights.reshape(-1)
    codes = bytearray(len(flat) // 4)
    for i, weight in enumerate(flat):
        block, place = divmod(i, 128)
        codes[32 * block + place % 32] |= (int(weight) + 1) << shifts[place // 32]
    return bytes(codes) + struct.pack("<f", scale) + bytes(28)


def pack_bitnet(weights: Array) -> Array:
    """Hugging Face's BitNet: byte row r holds rows r, r + R, r + 2R, r + 3R from the lowest bits up."""
    rows = len(weights) // 4
    packed = np.zeros((rows, weights.shape[1]), np.uint8)
    for row, values in enumerate(weights):
        packed[row % rows] |= (values + 1).astype(np.uint8) << np.uint8(2 * (row // rows))
    return packed


# Files

Stored = tuple[int, tuple[int, ...], bytes]  # GGUF type id, shape, bytes


def f32(values: Array) -> Stored:
    """A float32 tensor of a GGUF file."""
    return 0, values.shape, np.ascontiguousarray(values, "<f4").tobytes()


def f16(values: Array) -> Stored:
    """A float16 tensor of a GGUF file."""
    return 1, values.shape, np.ascontiguousarray(values, "<f2").tobytes()


def _value(value: Any) -> tuple[int, bytes]:
    if isinstance(value, str):
        text = value.encode()
        return 8, struct.pack("<Q", len(text)) + text
    if isinstance(value, list):
        kind = _value(value[0])[0]
        return 9, struct.pack("<IQ", kind, len(value)) + b"".join(_value(each)[1] for each in value)
    return (6, struct.pack("<f", value)) if isinstance(value, float) else (4, struct.pack("<I", value))


def write_gguf(file: Path, fields: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Path:
    """A GGUF file, version 3; the type ids may be any."""
    header = struct.pack("<IIQQ", 0x46554747, 3, len(tensors), len(fields))
    for name, value in fields.items():
        kind, data = _value(value)
        header += _value(name)[1] + struct.pack("<I", kind) + data
    offset, body = 0, b""
    for name, (type_id, shape, data) in tensors.items():
        header += _value(name)[1] + struct.pack("<I", len(shape))
        header += b"".join(struct.pack("<Q", size) for size in reversed(shape)) + struct.pack("<IQ", type_id, offset)
        body += data + bytes(-len(data) % ALIGNMENT)
        offset = len(body)
    file.write_bytes(header + bytes(-len(header) % ALIGNMENT) + body)
    return file


def gguf_fields(architecture: str, config: ModelConfig, **more: Any) -> dict[str, Any]:
    """Metadata of a model; ``more`` is added as it is, ``__`` standing for a dot; None takes a field away."""
    fields: dict[str, Any] = {
        "general.architecture": architecture,
        f"{architecture}.block_count": config.num_layers,
        f"{architecture}.context_length": config.max_position,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_heads,
        f"{architecture}.attention.head_count_kv": config.num_kv_heads,
        f"{architecture}.attention.key_length": config.head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": float(config.norm_eps),
        f"{architecture}.rope.freq_base": float(config.rope_theta),
        "tokenizer.ggml.eos_token_id": config.eos_token_ids[0],
    }
    fields |= {name.replace("__", "."): value for name, value in more.items()}
    return {name: value for name, value in fields.items() if value is not None}


def gguf_name(name: str) -> str:
    """This project's tensor name → llama.cpp's."""
    from bitmtp.convert.gguf_file import _GLOBAL_NAMES, _LAYER_NAMES  # needs the gguf package

    short = {ours: theirs for theirs, ours in (_LAYER_NAMES | _GLOBAL_NAMES).items()}
    parts = name.split(".")
    if parts[0] != "layers":
        return f"{short[parts[0]]}.{parts[-1]}"
    return f"blk.{parts[1]}.{short['.'.join(parts[2:-1])]}.{parts[-1]}"


def hf_name(name: str, sub_norms: Mapping[str, str] = BITNET_SUB_NORMS) -> str:
    """This project's tensor name → Hugging Face's."""
    globals_ = {ours: theirs for theirs, ours in _GLOBAL_NAMES.items()}
    if name in globals_:
        return globals_[name]
    layers = {ours: theirs for theirs, ours in (_LAYER_NAMES | dict(sub_norms)).items()}
    _, index, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    return f"model.layers.{index}.{layers[module]}.{kind}"


def write_hf(folder: Path, data: Mapping[str, Any], tensors: Mapping[str, Array], shards: int = 1) -> Path:
    """A folder with config, tokenizer and safetensors; tensor names are Hugging Face's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data), encoding="utf-8")
    write_tokenizer(folder)
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return folder


def random_floats(config: ModelConfig, seed: int = 0) -> dict[str, Array]:
    """Float tensors of a shape by this project's names: norms near 1, matrices of such a size that nothing explodes."""
    random = np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    for name, shape in float_shapes(config).items():
        if name.endswith("norm.weight"):
            tensors[name] = random.uniform(0.7, 1.3, shape).astype(np.float32)
        else:
            spread = shape[-1] ** -0.5 if len(shape) == 2 else 0.3
            tensors[name] = random.normal(0, spread, shape).astype(np.float32)
    return tensors
