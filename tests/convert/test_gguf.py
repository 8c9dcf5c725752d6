"""GGUF files: every ternary type, both meanings of type 42, the architectures, and what damage does."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import write_tokenizer

from bitmtp.checkpoint import linear_shapes
from bitmtp.config import ModelConfig, RopeScaling
from bitmtp.errors import CheckpointError, ConfigError

from .files import (
    TYPES,
    Array,
    Stored,
    dense,
    encode_blocks,
    encode_i2_s,
    f16,
    f32,
    gguf_fields,
    gguf_name,
    hf_name,
    random_floats,
    random_ternary,
    write_gguf,
)
from .reading import IDS, converted, distance, logits, values

gguf: Any = pytest.importorskip("gguf", reason="the gguf package is not installed (pip install gguf)")
from bitmtp.convert.gguf_tensors import open_gguf_tensors  # noqa: E402 (it needs the package)

SHAPE = ModelConfig(
    vocab_size=320,
    hidden_size=256,
    intermediate_size=256,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position=128,
    eos_token_ids=(2,),
    rope_theta=1e6,
    norm_eps=1e-6,
    qk_norm=True,
    embedding_bits=16,
    head_activation_bits=16,
)
# What each architecture of llama.cpp and bitnet.cpp is, as a change of SHAPE.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"qk_norm": False, "attention_bias": True},
    "llama": {"qk_norm": False, "tie_embeddings": False},
    "bitnet": {"qk_norm": False, "sub_norm": True},
    "bitnet-b1.58": {"qk_norm": False, "sub_norm": True, "activation": "relu2"},
}


def permuted(weight: Array, heads: int) -> Array:
    """llama.cpp's order, row by row: pair i of a head is (i, i + half), stored next to each other."""
    size = len(weight) // heads
    order = [head * size + i + side * size // 2 for head in range(heads) for i in range(size // 2) for side in (0, 1)]
    return weight[order]


def encode(kind: str, weights: Array, scales: Array) -> Stored:
    if kind == "I2_S":
        return 36, weights.shape, encode_i2_s(weights, float(scales.reshape(-1)[0]))
    return TYPES[kind].type_id, weights.shape, encode_blocks(kind, weights, scales)


def ternary_matrix(kind: str, random: np.random.Generator, shape: tuple[int, ...]) -> tuple[Array, Array]:
    if kind == "I2_S":
        return random.integers(-1, 2, shape, dtype=np.int8), np.array([0.0371], np.float32)
    weights, scales = random_ternary(random, *shape, TYPES[kind].group)
    if kind == "Q1_0":  # knows no zero
        weights = np.where(weights == 0, 1, weights).astype(np.int8)
    return weights, scales


def write_model(
    file: Path, kind: str, architecture: str = "qwen3", table: str | None = None, **fields: Any
) -> tuple[ModelConfig, dict[str, Array]]:
    """A model whose layers are of a ternary type; its embedding and head too, or of type ``table`` if that is given."""
    config = replace(SHAPE, **ARCHITECTURES[architecture])
    random = np.random.default_rng(5)
    tensors, stored = random_floats(config), {}
    for name, tensor in tensors.items():
        is_table = name in ("embedding.weight", "head.weight")
        if is_table and table == "F16":
            tensors[name] = tensor.astype(np.float16).astype(np.float32)
            stored[gguf_name(name)] = f16(tensors[name])
            continue
        if tensor.ndim == 1:
            stored[gguf_name(name)] = f32(tensor)
            continue
        weights, scales = ternary_matrix(kind, random, tensor.shape)
        scales = scales * np.float32(16 if is_table else 1)
        tensors[name] = dense(weights, scales)
        heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(name.split(".")[-2])
        if architecture == "llama" and heads:
            weights, scales = permuted(weights, heads), scales if scales.size == 1 else permuted(scales, heads)
        stored[gguf_name(name)] = encode(kind, weights, scales)
    write_gguf(file, gguf_fields(architecture, config, **fields), stored)
    write_tokenizer(file.parent)
    return config, tensors


def convert_file(file: Path, **options: Any) -> Any:
    return converted(file, file.parent / "model", tokenizer=file.parent, **options)


@pytest.mark.parametrize("kind", [*TYPES, "I2_S"])
def test_every_type_keeps_its_values(tmp_path: Path, kind: str) -> None:
    _, tensors = write_model(tmp_path / "m.gguf", kind)
    made = convert_file(tmp_path / "m.gguf")
    expected = ("tensor", 128) if kind == "I2_S" else ("group", TYPES[kind].group)
    assert (made.config.ternary_scale, made.config.group_size) == expected
    assert made.config.embedding_bits == 2
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            assert np.array_equal(values(made, name.removesuffix(".weight")), tensor), name


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_the_writers_here_are_right(kind: str) -> None:
    """The package's own dequantiser reads what :mod:`files` writes: for the types that it knows."""
    weights, scales = ternary_matrix(kind, np.random.default_rng(0), (3, 512))
    raw = np.frombuffer(encode_blocks(kind, weights, scales), np.uint8).reshape(3, -1)
    theirs = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(theirs, dense(weights, scales))


def test_two_types_in_one_file_share_the_finer_group(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    config, tensors = write_model(file, "TQ2_0", table="F16")
    random = np.random.default_rng(9)
    stored = {gguf_name(n): f16(t) if n.startswith("embedding") else f32(t) for n, t in tensors.items() if t.ndim == 1}
    stored[gguf_name("embedding.weight")] = f16(tensors["embedding.weight"])
    for index, name in enumerate(linear_shapes(config)):
        kind = ("TQ2_0", "PQ2_0", "I2_S")[index % 3]
        full = f"layers.0.{name}.weight"
        weights, scales = ternary_matrix(kind, random, tensors[full].shape)
        tensors[full], stored[gguf_name(full)] = dense(weights, scales), encode(kind, weights, scales)
    write_gguf(file, gguf_fields("qwen3", config), stored)
    made = convert_file(file)
    assert made.config.group_size == 128
    for name in linear_shapes(config):
        assert np.array_equal(values(made, f"layers.0.{name}"), tensors[f"layers.0.{name}.weight"]), name


# Against transformers

THEIR_TYPE = {"qwen3": "qwen3", "qwen2": "qwen2", "llama": "llama", "bitnet": "bitnet", "bitnet-b1.58": "bitnet"}


def their_logits(architecture: str, config: ModelConfig, tensors: dict[str, Array], **rope: Any) -> Array:
    from . import others

    data = {
        "model_type": THEIR_TYPE[architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": config.activation,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta} | rope,
    }
    theirs = others.load(others.model(data), {hf_name(name): tensor for name, tensor in tensors.items()})
    with others.int8_inputs(theirs, None):
        return others.logits(theirs, IDS)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("qwen3", "PQ2_0"),
        ("qwen3", "PTQ1_0"),
        ("qwen2", "Q2_0 (group 64)"),
        ("llama", "TQ2_0"),
        ("llama", "Q1_0"),
        ("llama", "I2_S"),
        ("bitnet", "TQ1_0"),
        ("bitnet-b1.58", "I2_S"),
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, architecture: str, kind: str) -> None:
    config, tensors = write_model(tmp_path / "m.gguf", kind, architecture)
    made = convert_file(tmp_path / "m.gguf")
    assert made.config.activation == config.activation
    assert distance(logits(made), their_logits(architecture, config, tensors)) < 0.03


def test_yarn_in_the_file(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    config, tensors = write_model(
        tmp_path / "m.gguf", "PQ2_0", **{f"qwen3__rope__scaling__{key}": value for key, value in scaling.items()}
    )
    made = convert_file(tmp_path / "m.gguf")
    assert made.config.rope_scaling == RopeScaling("yarn", 4.0, 32, 1.0, 32.0, 0.1 * math.log(4) + 1)
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert distance(logits(made), their_logits("qwen3", config, tensors, **rope)) < 0.03
    assert distance(logits(made), their_logits("qwen3", config, tensors)) > 0.1


# Wrong guesses and damage


@pytest.mark.parametrize("kind", ["Q2_0 (group 64)", "Q2_0 (group 128)"])
def test_type_42_is_told_by_size(tmp_path: Path, kind: str) -> None:
    _, tensors = write_model(tmp_path / "m.gguf", kind, table="F16")
    made = convert_file(tmp_path / "m.gguf")
    assert made.config.group_size == TYPES[kind].group
    assert np.array_equal(values(made, "layers.0.mlp.up"), tensors["layers.0.mlp.up.weight"])


def test_type_42_of_neither_size_is_loud(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_model(file, "Q2_0 (group 64)", table="F16")
    header = file.read_bytes()
    place = header.index(b"blk.0.ffn_down.weight") + len(b"blk.0.ffn_down.weight") + 4
    file.write_bytes(header[:place] + (512).to_bytes(8, "little") + header[place + 8 :])
    with pytest.raises(CheckpointError, match="type 42 are not those of"):
        convert_file(file)


@pytest.mark.parametrize("kind", ["PQ2_0", "PTQ1_0", "TQ2_0", "I2_S"])
@pytest.mark.parametrize("cut", [64, 9_000, 60_000])
def test_a_file_cut_off_is_loud(tmp_path: Path, kind: str, cut: int) -> None:
    file = tmp_path / "m.gguf"
    write_model(file, kind)
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match="cut off"):
        convert_file(file)


def write_uniform(
    file: Path, kind: str, weights: Array, scales: Array, change: tuple[int, bytes] | None = None
) -> None:
    """A model whose matrices all hold the same weights; ``change`` overwrites bytes of attention.q at a place."""
    config = replace(SHAPE, **ARCHITECTURES["qwen3"])
    stored: dict[str, Stored] = {"token_embd.weight": f16(np.ones((config.vocab_size, config.hidden_size)))}
    stored |= {gguf_name(name): f32(each) for name, each in random_floats(config).items() if each.ndim == 1}
    for name, (out, _) in linear_shapes(config).items():
        part = scales if scales.size == 1 else scales[:out]
        stored[gguf_name(f"layers.0.{name}.weight")] = encode(kind, weights[:out], part)
    if change is not None:
        type_id, shape, data = stored["blk.0.attn_q.weight"]
        place, new = change
        stored["blk.0.attn_q.weight"] = type_id, shape, data[:place] + new + data[place + len(new) :]
    write_gguf(file, gguf_fields("qwen3", config), stored)
    write_tokenizer(file.parent)


@pytest.mark.parametrize(("kind", "place"), [("PQ2_0", 0), ("TQ2_0", 64), ("PTQ1_0", 26), ("I2_S", 256 * 256 // 4)])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -0.03, 60_000.0])
def test_a_corrupted_scale_is_loud(tmp_path: Path, kind: str, place: int, scale: float) -> None:
    if kind == "I2_S" and scale == 60_000.0:
        pytest.skip("one scale in one layer has no other to compare it with; test_bitnet.py has five layers")
    weights, scales = ternary_matrix(kind, np.random.default_rng(2), (256, 256))
    bad = np.array([scale], "<f4" if kind == "I2_S" else "<f2").tobytes()
    write_uniform(tmp_path / "good.gguf", kind, weights, np.maximum(scales, np.float32(0.01)))
    write_uniform(tmp_path / "bad.gguf", kind, weights, np.maximum(scales, np.float32(0.01)), (place, bad))
    convert_file(tmp_path / "good.gguf")
    with pytest.raises(CheckpointError, match=r"attn_q\.weight has a scale|layers\.0\.attention\.q has a scale"):
        convert_file(tmp_path / "bad.gguf", overwrite=True)


def test_the_code_three_is_loud(tmp_path: Path) -> None:
    """llama.cpp's Q2_0 can hold +2, which no ternary model uses."""
    weights, scales = ternary_matrix("Q2_0 (group 64)", np.random.default_rng(2), (256, 256))
    write_uniform(tmp_path / "m.gguf", "Q2_0 (group 64)", weights, scales, (18 * 40 + 2, b"\xff"))
    with pytest.raises(CheckpointError, match=r"attn_q\.weight holds the code 3"):
        convert_file(tmp_path / "m.gguf")


def test_the_rotated_generation_is_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", "PQ2_0", prism__hadamard__version=1)
    with pytest.raises(ConfigError, match=r"second generation .*Hadamard"):
        convert_file(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general__architecture": "qwen35"}, "architecture is 'qwen35'"),
        ({"qwen3__rope__dimension_count": 32}, "rope.dimension_count is 32"),
        ({"qwen3__rope__scaling__type": "longrope"}, "rope_scaling is 'longrope'"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write_model(tmp_path / "m.gguf", "PQ2_0", **fields)
    with pytest.raises(ConfigError, match=message):
        convert_file(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "key",
    [
        "general__architecture",
        "tokenizer__ggml__eos_token_id",
        "qwen3__attention__layer_norm_rms_epsilon",
        "qwen3__attention__head_count",
        "qwen3__block_count",
        "qwen3__context_length",
    ],
)
def test_what_the_format_requires_is_not_made_up(tmp_path: Path, key: str) -> None:
    write_model(tmp_path / "m.gguf", "PQ2_0", **{key: None})
    with pytest.raises(CheckpointError, match=rf"m\.gguf: {key.replace('__', '.')} is missing"):
        convert_file(tmp_path / "m.gguf")
    write_model(tmp_path / "m.gguf", "PQ2_0", **{key: [1, 2]})
    with pytest.raises(CheckpointError, match=rf"m\.gguf: {key.replace('__', '.')} is '\[1, 2\]'; expected"):
        convert_file(tmp_path / "m.gguf")


def move(file: Path, tensor: str, offset: int) -> None:
    """Write another offset into a tensor's header."""
    data, key = file.read_bytes(), tensor.encode()
    place = data.index(struct.pack("<Q", len(key)) + key) + 8 + len(key)
    place += 4 + 8 * int.from_bytes(data[place : place + 4], "little") + 4
    file.write_bytes(data[:place] + struct.pack("<Q", offset % 2**64) + data[place + 8 :])


def offset_of(file: Path, tensor: str) -> int:
    reader = open_gguf_tensors(file)
    return reader.entries[tensor].offset - reader.begin


@pytest.mark.parametrize("kind", ["PQ2_0", "I2_S"])
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("the same as another", "by the sizes of the tensors before it, it must begin at"),
        ("within another", "begins at byte|not those of|must begin at"),
        ("not aligned", "must begin at|not those of"),
        ("before the data", "begins beyond the end"),
        ("behind the data", "begins beyond the end"),
    ],
)
def test_an_offset_that_is_not_its_own_is_loud(tmp_path: Path, kind: str, where: str, message: str) -> None:
    file = tmp_path / "m.gguf"
    write_model(file, kind)
    up, gate = offset_of(file, "blk.0.ffn_up.weight"), offset_of(file, "blk.0.ffn_gate.weight")
    places = {"the same as another": gate, "within another": gate + 32, "not aligned": up + 1, "before the data": -32}
    move(file, "blk.0.ffn_up.weight", places.get(where, 1 << 40))
    with pytest.raises(CheckpointError, match=message):
        convert_file(file)


def test_a_gap_is_loud(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_model(file, "PQ2_0")
    last = max(open_gguf_tensors(file).entries.values(), key=lambda entry: entry.offset)
    move(file, last.name, offset_of(file, last.name) + 32)
    file.write_bytes(file.read_bytes() + bytes(32))
    with pytest.raises(CheckpointError, match=rf"{last.name} begins at byte"):
        convert_file(file)


def test_a_length_beyond_the_end_is_not_counted_through(tmp_path: Path) -> None:
    header = struct.pack("<IIQQ", 0x46554747, 3, 0, 1) + struct.pack("<Q", 1) + b"a"
    (tmp_path / "m.gguf").write_bytes(header + struct.pack("<IIQ", 9, 4, 1 << 60))
    with pytest.raises(CheckpointError, match="cut off inside its header"):
        open_gguf_tensors(tmp_path / "m.gguf")


def test_one_matrix_of_another_kind_is_loud(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    config, tensors = write_model(file, "PQ2_0", table="F16")
    weights, scales = ternary_matrix("PQ2_0", np.random.default_rng(2), (256, 256))
    stored = {gguf_name(n): f32(t) for n, t in tensors.items()}
    for name, shape in linear_shapes(config).items():
        if name != "mlp.down":
            stored[gguf_name(f"layers.0.{name}.weight")] = encode("PQ2_0", weights[: shape[0]], scales[: shape[0]])
    write_gguf(file, gguf_fields("qwen3", config), stored)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down\.weight is missing or not ternary"):
        convert_file(file)
