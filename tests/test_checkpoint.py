"""The packed checkpoint: round trip, shards, and every kind of damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import random_checkpoint, tiny_config, write_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save, save_file

from bitmtp import checkpoint
from bitmtp.checkpoint import Checkpoint, tensor_specs
from bitmtp.errors import CheckpointError

VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_embeddings": True, "ternary_scale": "tensor", "embedding_bits": 2},
    {"ternary_scale": "group", "embedding_bits": 2, "attention_bias": True},
    {"embedding_bits": 4, "qk_norm": True, "sub_norm": False, "block_size": 1},
    {"embedding_bits": 16, "head_activation_bits": 16, "chain_rank": 4, "kv_type": "float32"},
    {"drafter": "medusa", "block_size": 4},
]
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


def change_tensors(folder: Path, edit: Edit) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def assert_equal(read: Checkpoint, made: Checkpoint) -> None:
    assert read.config == made.config
    assert set(read.tensors) == set(made.tensors)
    for name, tensor in made.tensors.items():
        assert read.tensors[name].dtype == tensor.dtype, name
        assert np.array_equal(read.tensors[name], tensor), name


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_round_trip(changes: dict[str, Any], tmp_path: Path, tokenizer_folder: Path) -> None:
    made = random_checkpoint(tiny_config(**changes))
    folder = write_model(tmp_path / "new" / "model", made, tokenizer_folder)
    assert_equal(checkpoint.read(folder), made)
    assert (folder / "tokenizer.json").read_bytes() == (tokenizer_folder / "tokenizer.json").read_bytes()
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_round_trip_in_shards(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 4000)
    made = random_checkpoint(tiny_config())
    folder = write_model(tmp_path / "model", made, tokenizer_folder)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 3
    assert not (folder / "model.safetensors").exists()
    for shard in shards:
        tensors = load_file(shard)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 4000
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in made.tensors.values())
    assert all(name in load_file(folder / file) for name, file in index["weight_map"].items())
    assert_equal(checkpoint.read(folder), made)


def test_shapes_of_the_specification() -> None:
    specs = tensor_specs(tiny_config(ternary_scale="group", attention_bias=True, qk_norm=True, chain_rank=4))
    assert specs["layers.1.mlp.down.weight"].shape == (32, 12)
    assert specs["layers.1.mlp.down.scale"].shape == (32, 3)
    assert specs["layers.0.attention.k.weight"].shape == (16, 8)
    assert specs["layers.0.attention.k.bias"].shape == (16,)
    assert specs["layers.0.attention.q_norm.weight"].shape == (8,)
    assert specs["layers.0.mlp.sub_norm.weight"].shape == (48,)
    assert specs["mask_embedding.weight"].shape == (15, 32)
    assert specs["chain.hidden.weight"].shape == (4, 64)
    assert specs["head.scale"].shape == (320,)
    assert "mask_embedding.weight" not in tensor_specs(tiny_config(block_size=1))
    heads = tensor_specs(tiny_config(drafter="medusa", block_size=3))
    assert {name for name in heads if name.startswith(("mask", "medusa"))} == {
        f"medusa.{index}.{kind}" for index in range(2) for kind in ("weight", "bias")
    }
    assert (heads["medusa.1.weight"].shape, heads["medusa.1.weight"].dtype) == ((32, 32), "float16")
    assert (heads["medusa.1.bias"].shape, heads["medusa.1.bias"].dtype) == ((32,), "float32")
    assert "head.weight" not in tensor_specs(tiny_config(tie_embeddings=True))


# Damage


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_cut_off_anywhere(share: float, folder: Path, tiny_model: Path) -> None:
    whole = (tiny_model / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: int(share * len(whole))])
    assert "model.safetensors: damaged or cut off" in refusal(folder)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 400), value=st.integers(0, 255))
def test_a_damaged_header_never_crashes(place: int, value: int, folder: Path, tiny_model: Path) -> None:
    data = bytearray((tiny_model / "model.safetensors").read_bytes())
    data[place] = value
    (folder / "model.safetensors").write_bytes(data)
    try:
        read = checkpoint.read(folder)
    except CheckpointError:
        return
    assert set(read.tensors) == set(tensor_specs(read.config))


@pytest.mark.parametrize("name", ["layers.1.attention.o.weight", "head.scale", "mask_embedding.weight"])
def test_a_missing_tensor(name: str, folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop(name))
    message = refusal(folder)
    assert f"tensor {name} is missing; expected" in message
    assert str(folder) in message


def test_an_extra_tensor(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update(extra=np.zeros(3, np.float32)))
    assert "model.safetensors: unexpected tensor extra" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("norm.weight", np.zeros(31, np.float32), "float32 [31]; expected float32 [32]"),
        ("norm.weight", np.zeros(32, np.float64), "float64 [32]; expected float32 [32]"),
        ("head.weight", np.zeros((320, 32), np.uint8), "uint8 [320, 32]; expected int8 [320, 32]"),
        ("layers.0.mlp.up.weight", np.zeros((8, 48), np.uint8), "uint8 [8, 48]; expected uint8 [48, 8]"),
        ("layers.0.mlp.up.scale", np.zeros((48, 1), np.float32), "float32 [48, 1]; expected float32 [48]"),
    ],
)
def test_a_wrong_shape_or_type(name: str, tensor: np.ndarray, expected: str, folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({name: tensor}))
    assert f"model.safetensors: tensor {name} is {expected}" in refusal(folder)


def test_a_type_that_numpy_lacks(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["norm.weight"] = np.zeros(32, np.int16)
    data = save(tensors)
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].replace(b'"I16"', b'"BF16"')
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    message = refusal(folder)
    assert "model.safetensors" in message
    assert "norm.weight" in message


@pytest.mark.parametrize("byte", [0b11, 0b1100, 0b110000, 0b11000000])
def test_the_code_3(byte: int, folder: Path) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        tensors["layers.1.mlp.gate.weight"][5, 3] = byte

    change_tensors(folder, edit)
    assert "model.safetensors: tensor layers.1.mlp.gate.weight holds the code 3" in refusal(folder)


def damaged_vocabulary(tmp_path: Path, tokenizer_folder: Path, value: Any, **changes: Any) -> Path:
    folder = write_model(tmp_path / "model", random_checkpoint(tiny_config(**changes)), tokenizer_folder)

    def edit(tensors: dict[str, Any]) -> None:
        tensors["embedding.weight"][7, 1] = value

    change_tensors(folder, edit)
    return folder


def test_the_code_3_in_a_ternary_embedding(tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = damaged_vocabulary(tmp_path, tokenizer_folder, 0b11, embedding_bits=2)
    assert "embedding.weight holds the code 3" in refusal(folder)


def test_a_nan_in_a_float16_embedding(tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = damaged_vocabulary(tmp_path, tokenizer_folder, np.nan, embedding_bits=16, head_activation_bits=16)
    assert "embedding.weight holds values that are not finite" in refusal(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["layers.0.attention.v.scale", "embedding.scale", "norm.weight"])
def test_numbers_that_are_not_finite(name: str, value: float, folder: Path) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        tensors[name][-1] = value

    change_tensors(folder, edit)
    assert f"model.safetensors: tensor {name} holds values that are not finite" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": "red"}, "unknown field 'colour'"),
        ({"format_version": 3}, "version 3"),
        ({"format": "other"}, "format is 'other'"),
        ({"hidden_size": -4}, "hidden_size is -4"),
    ],
    ids=str,
)
def test_a_config_that_is_not_accepted(changes: dict[str, Any], message: str, folder: Path) -> None:
    change_config(folder, **changes)
    assert f"{folder / 'config.json'}: " in refusal(folder)
    assert message in refusal(folder)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe{}", b"[]"])
def test_a_config_that_is_not_json(data: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(data)
    assert "config.json: " in refusal(folder)


def test_missing_files(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "model.safetensors: missing" in refusal(folder)
    (folder / "config.json").unlink()
    assert "config.json: cannot be read (No such file" in refusal(folder)
    assert "no such model folder" in refusal(tmp_path / "nowhere")


@pytest.fixture
def sharded(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model in several shards."""
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 20_000)
    return write_model(tmp_path / "model", random_checkpoint(tiny_config()), tokenizer_folder)


def test_a_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"{shard}: missing" in refusal(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)
    assert f"{second}: tensor {name} stands in another shard too" in refusal(sharded)


@pytest.mark.parametrize(
    "index",
    ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../b"}}', '{"weight_map": {"a": 3}}'],
)
def test_a_damaged_index(index: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json: " in refusal(sharded)


# Writing is all or nothing


def test_an_existing_folder_is_left_alone(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        write_model(tmp_path / "model", random_checkpoint(tiny_config()), tokenizer_folder)
    assert [file.name for file in (tmp_path / "model").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("stage", ["save_file", "copyfile", "rename"])
def test_a_failure_leaves_nothing(
    stage: str, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    owner = {"save_file": checkpoint, "copyfile": checkpoint.shutil, "rename": checkpoint.os}[stage]
    monkeypatch.setattr(owner, stage, fail)
    with pytest.raises(OSError, match="disk full"):
        write_model(tmp_path / "model", random_checkpoint(tiny_config()), tokenizer_folder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "edit",
    [
        lambda tensors: tensors.pop("norm.weight"),
        lambda tensors: tensors.update(extra=np.zeros(1, np.float32)),
        lambda tensors: tensors.update({"norm.weight": np.zeros(32, np.float64)}),
        lambda tensors: tensors.update({"norm.weight": np.full(32, np.nan, np.float32)}),
    ],
)
def test_wrong_tensors_are_not_written(edit: Edit, tmp_path: Path, tokenizer_folder: Path) -> None:
    made = random_checkpoint(tiny_config())
    tensors = dict(made.tensors)
    edit(tensors)
    with pytest.raises(CheckpointError):
        checkpoint.write(tmp_path / "model", made.config, tensors, tokenizer_folder)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tokenizer_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        write_model(tmp_path / "model", random_checkpoint(tiny_config()), tmp_path / "empty")
    assert not (tmp_path / "model").exists()
