"""Hugging Face folders and GGUF files, written here and read back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from bitmtp.config import ModelConfig
from bitmtp.convert import read_source
from bitmtp.convert.huggingface import _GLOBAL_NAMES, _LAYER_NAMES, model_config, read_safetensors
from bitmtp.convert.source import float_shapes
from bitmtp.errors import CheckpointError, ConfigError

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
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
THEIRS = {ours: theirs for theirs, ours in _LAYER_NAMES.items()}


def random_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in float_shapes(config).items()}


def their_name(name: str) -> str:
    globals_ = {ours: theirs for theirs, ours in _GLOBAL_NAMES.items()}
    if name in globals_:
        return globals_[name]
    _, index, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    return f"model.layers.{index}.{THEIRS[module]}.{kind}"


def write_folder(folder: Path, shape: dict[str, Any], shards: int = 1) -> dict[str, np.ndarray]:
    tensors = random_tensors(model_config(shape))
    (folder / "config.json").write_text(json.dumps(shape))
    theirs = {their_name(name): tensor for name, tensor in tensors.items()}
    if shards == 1:
        save_file(theirs, folder / "model.safetensors")
        return tensors
    weight_map = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(theirs)}
    for file in set(weight_map.values()):
        save_file({name: theirs[name] for name in theirs if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


@pytest.mark.parametrize(
    ("changes", "shards"),
    [
        ({}, 1),
        ({}, 3),
        ({"tie_word_embeddings": False}, 1),
        ({"model_type": "qwen2"}, 2),
        ({"model_type": "qwen3", "head_dim": 32}, 1),
    ],
)
def test_huggingface_folders(tmp_path: Path, changes: dict[str, Any], shards: int) -> None:
    tensors = write_folder(tmp_path, SHAPE | changes, shards)
    source = read_source(tmp_path)
    assert set(source.tensors) == set(tensors)
    assert all(np.array_equal(source.tensors[name], tensor) for name, tensor in tensors.items())
    assert source.config.attention_bias == (changes.get("model_type") == "qwen2")
    assert source.config.qk_norm == (changes.get("model_type") == "qwen3")
    assert source.config.eos_token_ids == (2,)


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
    ((name, tensor),) = read_safetensors(file)
    assert name == "w"
    assert tensor[0, :3].tolist() == [1.0, -2.5, 0.15625]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut off inside w"):
        list(read_safetensors(file))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_unsupported_models_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config(SHAPE | changes)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, SHAPE)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"head.weight is missing"):
        read_source(tmp_path)
    with pytest.raises(CheckpointError, match=r"config.json: missing"):
        read_source(tmp_path / "nowhere")


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order, row by row: pair i of a head is (i, i + half), stored next to each other."""
    size = len(weight) // heads
    order = [head * size + i + side * size // 2 for head in range(heads) for i in range(size // 2) for side in (0, 1)]
    return weight[order]


def write_gguf(file: Path, tensors: dict[str, np.ndarray], config: ModelConfig, architecture: str = "llama") -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed (pip install bitmtp[convert])")
    from bitmtp.convert.gguf_file import _GLOBAL_NAMES as GLOBALS
    from bitmtp.convert.gguf_file import _LAYER_NAMES as LAYERS

    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(12345.0)
    writer.add_eos_token_id(2)
    short = {ours: theirs for theirs, ours in (LAYERS | GLOBALS).items()}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[0] != "layers":
            writer.add_tensor(f"{short[parts[0]]}.weight", tensor)
            continue
        heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(parts[-2])
        stored = permute(tensor, heads) if heads else tensor
        theirs = f"blk.{parts[1]}.{short['.'.join(parts[2:-1])]}.weight"
        if stored.ndim == 2 and parts[-2] == "down":
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(theirs, gguf.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(theirs, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_is_dequantised_and_unpermuted(tmp_path: Path, tied: bool) -> None:
    config = model_config(SHAPE | {"tie_word_embeddings": tied})
    tensors = random_tensors(config)
    write_gguf(tmp_path / "m.gguf", tensors, config)
    source = read_source(tmp_path / "m.gguf")
    assert source.config == replace(config, rope_theta=12345.0)
    assert set(source.tensors) == set(tensors)
    for name, tensor in tensors.items():
        tolerance = np.abs(tensor).max() / 127 if ".down." in name else 0.0
        assert np.abs(source.tensors[name] - tensor).max() <= tolerance, name


def test_other_gguf_files_are_refused(tmp_path: Path) -> None:
    config = model_config(SHAPE)
    write_gguf(tmp_path / "m.gguf", random_tensors(config), config, architecture="falcon")
    with pytest.raises(ConfigError, match="architecture is 'falcon'"):
        read_source(tmp_path / "m.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUX" + bytes(64))
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        read_source(tmp_path / "bad.gguf")
    with pytest.raises(CheckpointError, match="no such file"):
        read_source(tmp_path / "none.gguf")
