"""Full-precision starts for training: folders and GGUF files read as floats, against transformers' logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitmtp.config import RopeScaling
from bitmtp.convert import read_source
from bitmtp.convert.huggingface import model_config, rope_scaling
from bitmtp.convert.safetensors_file import open_file
from bitmtp.errors import CheckpointError, ConfigError

from .files import Array, f16, f32, gguf_fields, gguf_name, hf_name, random_floats, write_gguf, write_hf
from .reading import IDS, distance
from .test_bitnet import BITNET, LLAMA, packed, quantised, ternary_tensors

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
LLAMA_TURNS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
# As published: Llama, SmolLM2 (Llama, tied), Qwen2 (biases), Qwen3 (norms of q and k; heads wider than hidden / heads).
MODELS: list[dict[str, Any]] = [
    {"tie_word_embeddings": False},
    {},
    {"model_type": "qwen2", "rope_theta": 1e6},
    {"model_type": "qwen3", "head_dim": 32, "rope_theta": 1e6},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, **LLAMA_TURNS}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
]


def write_folder(folder: Path, data: dict[str, Any], shards: int = 1) -> dict[str, Array]:
    tensors = random_floats(model_config(data))
    write_hf(folder, data, {hf_name(name): tensor for name, tensor in tensors.items()}, shards)
    return tensors


@pytest.mark.parametrize("changes", MODELS)
@pytest.mark.parametrize("shards", [1, 3])
def test_folders_are_read_whole(tmp_path: Path, changes: dict[str, Any], shards: int) -> None:
    tensors = write_folder(tmp_path, SHAPE | changes, shards)
    source = read_source(tmp_path)
    assert set(source.tensors) == set(tensors)
    assert all(np.array_equal(source.tensors[name], tensor) for name, tensor in tensors.items())
    assert source.config.attention_bias == (changes.get("model_type") == "qwen2")
    assert source.config.qk_norm == (changes.get("model_type") == "qwen3")
    assert source.config.eos_token_ids == (2,)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "rms_norm_eps", "eos_token_id"])
def test_what_the_format_requires_is_not_made_up(tmp_path: Path, key: str) -> None:
    write_folder(tmp_path, SHAPE)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({name: value for name, value in SHAPE.items() if name != key}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"{tmp_path}.*{key}"):
        read_source(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": [64]},
        {"hidden_size": "64"},
        {"num_attention_heads": 0},
        {"rope_scaling": [1]},
        {"rope_scaling": {"rope_type": "llama3", "factor": "a"}},
        {"quantization_config": [1]},
        {"eos_token_id": {"a": 1}},
        {"max_position_embeddings": 1e999},
    ],
)
def test_values_of_a_wrong_kind_are_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_folder(tmp_path, SHAPE)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | changes), encoding="utf-8")
    with pytest.raises((CheckpointError, ConfigError)):
        read_source(tmp_path)


@pytest.mark.parametrize("offsets", [[[0, 8], [0, 8]], [[0, 8], [4, 12]], [[0, 8], [16, 24]], [[-8, 0], [0, 8]]])
def test_extents_that_overlap_or_leave_a_gap_are_loud(tmp_path: Path, offsets: list[list[int]]) -> None:
    header = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": each} for name, each in zip("ab", offsets, strict=True)
    }
    text = json.dumps(header).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(max(end for _, end in offsets)))
    with pytest.raises(CheckpointError, match="damaged or cut off"):
        open_file(file)


@pytest.mark.parametrize("changes", MODELS)
def test_a_start_computes_what_transformers_computes(tmp_path: Path, changes: dict[str, Any]) -> None:
    torch: Any = pytest.importorskip("torch", reason="pip install 'bitmtp[train]'")
    from bitmtp.training.model import Model, load

    from . import others

    data = SHAPE | changes
    tensors = write_folder(tmp_path, data)
    source = read_source(tmp_path)
    ours = Model(source.config, torch.float32)
    load(ours, source.tensors)
    tokens = torch.tensor([IDS])
    head = ours.embedding.weight if source.config.tie_embeddings else ours.head.weight
    with torch.no_grad():
        logits = (ours(tokens, ours.embedding.weight, None, None) @ head.T)[0].numpy()
    theirs = others.load(others.model(data), {hf_name(name): tensor for name, tensor in tensors.items()})
    assert distance(logits, others.logits(theirs, IDS)) < 1e-3


def test_generation_config_names_the_end_of_turn(tmp_path: Path) -> None:
    write_folder(tmp_path, SHAPE)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert read_source(tmp_path).config.eos_token_ids == (5, 2)


def test_half_precision_tensors(tmp_path: Path) -> None:
    values = np.array([[1.0, -2.5, 0.15625, 3e38]], np.float32)
    bfloat = (values.view(np.uint32) >> 16).astype(np.uint16)
    header = {"w": {"dtype": "BF16", "shape": [1, 4], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bfloat.tobytes())
    tensor = open_file(file)["w"]
    assert tensor.read()[0, :3].tolist() == [1.0, -2.5, 0.15625]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged or cut off"):
        open_file(file)


def test_rows_of_a_tensor(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path, SHAPE)
    stored = open_file(tmp_path / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    assert np.array_equal(stored.read(10, 20), tensors["layers.1.mlp.up.weight"][10:20])
    assert np.array_equal(stored.read(90), tensors["layers.1.mlp.up.weight"][90:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling is 'dynamic'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "truncate": False}}, "truncate"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ],
)
def test_unsupported_models_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config(SHAPE | changes)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, None),
        ({"rope_type": "default", "rope_theta": 1e6}, None),
        ({"type": "linear", "factor": 2}, RopeScaling("linear", 2.0, 4096)),
        ({"type": "yarn", "factor": 1, "attention_factor": 0.7}, RopeScaling("yarn", 1.0, 4096, attention_factor=0.7)),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
            | {"original_max_position_embeddings": 8192},
            RopeScaling("llama3", 8.0, 8192, 1.0, 4.0),
        ),
    ],
)
def test_scaled_positions_are_read(data: dict[str, Any], expected: RopeScaling | None) -> None:
    assert rope_scaling(data, 4096) == expected


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, SHAPE)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"head.weight is missing"):
        read_source(tmp_path)
    with pytest.raises(CheckpointError, match=r"config.json: missing"):
        read_source(tmp_path / "nowhere")


def test_a_bitnet_is_a_start_with_its_sub_norms(tmp_path: Path) -> None:
    data = BITNET | quantised("autobitlinear")
    tensors = ternary_tensors(data, sub_norm=True, inverse=False)
    source = read_source(write_hf(tmp_path, data, packed(tensors)))
    assert (source.config.sub_norm, source.config.activation) == (True, "relu2")
    name = "model.layers.1.mlp.ffn_sub_norm.weight"
    assert np.array_equal(source.tensors["layers.1.mlp.sub_norm.weight"], tensors[name])
    assert len(source.ternary) == 7 * 2
    module = "model.layers.0.self_attn.q_proj.weight"
    assert np.array_equal(source.tensors["layers.0.attention.q.weight"], tensors[module] * tensors[f"{module}_scale"])


def test_a_ternary_model_is_a_start_by_its_values(tmp_path: Path) -> None:
    data = LLAMA | quantised("bitlinear")
    tensors = ternary_tensors(data, sub_norm=False, inverse=True)
    source = read_source(write_hf(tmp_path, data, packed(tensors)))
    name = "model.layers.1.mlp.up_proj.weight"
    expected = tensors[name] / tensors[f"{name}_scale"]
    assert np.array_equal(source.tensors["layers.1.mlp.up.weight"], expected)


def permuted(weight: Array, heads: int) -> Array:
    """llama.cpp's order, row by row: pair i of a head is (i, i + half), stored next to each other."""
    size = len(weight) // heads
    order = [head * size + i + side * size // 2 for head in range(heads) for i in range(size // 2) for side in (0, 1)]
    return weight[order]


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_is_dequantised_and_unpermuted(tmp_path: Path, tied: bool) -> None:
    gguf: Any = pytest.importorskip("gguf", reason="the gguf package is not installed (pip install gguf)")
    config = model_config(SHAPE | {"tie_word_embeddings": tied})
    tensors, stored = random_floats(config), {}
    for name, tensor in tensors.items():
        heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(name.split(".")[-2])
        theirs = permuted(tensor, heads) if heads else tensor
        stored[gguf_name(name)] = f16(theirs) if ".up." in name else f32(theirs)
        if ".down." in name:
            raw = gguf.quantize(theirs, gguf.GGMLQuantizationType.Q8_0).tobytes()
            stored[gguf_name(name)] = int(gguf.GGMLQuantizationType.Q8_0), theirs.shape, raw
    write_gguf(tmp_path / "m.gguf", gguf_fields("llama", replace(config, rope_theta=12345.0)), stored)
    source = read_source(tmp_path / "m.gguf")
    assert source.config == replace(config, rope_theta=12345.0)
    assert set(source.tensors) == set(tensors)
    for name, tensor in tensors.items():
        tolerance = np.abs(tensor).max() / 127 if ".down." in name else 1e-3 if ".up." in name else 0.0
        assert np.abs(source.tensors[name] - tensor).max() <= tolerance, name


def test_other_gguf_files_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf package is not installed (pip install gguf)")
    config = model_config(SHAPE)
    tensors = {gguf_name(name): f32(tensor) for name, tensor in random_floats(config).items()}
    write_gguf(tmp_path / "m.gguf", gguf_fields("falcon", config), tensors)
    with pytest.raises(ConfigError, match="architecture is 'falcon'"):
        read_source(tmp_path / "m.gguf")
    write_gguf(tmp_path / "odd.gguf", gguf_fields("llama", config), tensors | {"rope_freqs.weight": f32(np.ones(8))})
    with pytest.raises(ConfigError, match="rope_freqs"):
        read_source(tmp_path / "odd.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUX" + bytes(64))
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        read_source(tmp_path / "bad.gguf")
    with pytest.raises(CheckpointError, match="no such file"):
        read_source(tmp_path / "none.gguf")
