"""Bonsai: Qwen3 with everything ternary, from folders of unpacked weights, against transformers' Qwen3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitmtp.convert.huggingface import model_config
from bitmtp.errors import CheckpointError, ConfigError

from .files import Array, dense, hf_name, random_floats, random_ternary, write_hf
from .reading import IDS, converted, distance, logits, values

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
BONSAI: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 333,  # like the real 151,669: no multiple of anything
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_scaling": YARN,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def bonsai_tensors(data: dict[str, Any]) -> dict[str, Array]:
    """By this project's names; every matrix ternary in groups of 128, some groups all zero."""
    random = np.random.default_rng(3)
    tensors = random_floats(model_config(data))
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            weights, scales = random_ternary(random, *tensor.shape, 128)
            tensors[name] = dense(weights, scales * (20 if name.startswith(("embedding", "head")) else 1))
    return tensors


def as_theirs(tensors: dict[str, Array]) -> dict[str, Array]:
    return {hf_name(name): tensor for name, tensor in tensors.items()}


def their_model(data: dict[str, Any], tensors: dict[str, Array]) -> Any:
    from . import others

    # the spelling of newer configs, which transformers reads too
    rope = data["rope_scaling"] | {"rope_theta": data["rope_theta"]}
    plain = {key: value for key, value in data.items() if key not in ("rope_scaling", "rope_theta")}
    return others.load(others.model(plain | {"rope_parameters": rope}), as_theirs(tensors))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_values_are_kept_exactly(tmp_path: Path, dtype: Any, tied: bool) -> None:
    data = BONSAI | {"tie_word_embeddings": tied}
    tensors = bonsai_tensors(data)
    stored = {name: tensor.astype(dtype) for name, tensor in as_theirs(tensors).items()}
    made = converted(write_hf(tmp_path / "source", data, stored, shards=2), tmp_path / "model")
    assert (made.config.ternary_scale, made.config.group_size, made.config.embedding_bits) == ("group", 128, 2)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            assert np.array_equal(values(made, name.removesuffix(".weight")), tensor.astype(dtype)), name


@pytest.mark.parametrize(("scale", "group"), [("row", None), ("group", 128)])
def test_logits_equal_those_of_rounded_inputs(tmp_path: Path, scale: str, group: int | None) -> None:
    """transformers' Qwen3 (YaRN, q/k norms), the inputs of its linear layers rounded as this runtime rounds them."""
    from . import others

    tensors = bonsai_tensors(BONSAI)
    source = write_hf(tmp_path / "source", BONSAI, as_theirs(tensors))
    ours = logits(converted(source, tmp_path / "model", activation_scale=scale))
    theirs = their_model(BONSAI, tensors)
    exact = others.logits(theirs, IDS)
    with others.int8_inputs(theirs, group):
        rounded = others.logits(theirs, IDS)
    assert distance(ours, rounded) < 0.03
    assert 0 < distance(rounded, exact) < 0.3  # what 8-bit activations change of a model made for 16 bits
    assert distance(ours, exact) < 0.3


def test_the_cpu_backend_agrees(tmp_path: Path, backend_name: str) -> None:
    source = write_hf(tmp_path / "source", BONSAI, as_theirs(bonsai_tensors(BONSAI)))
    made = converted(source, tmp_path / "model")
    assert np.array_equal(logits(made, backend_name), logits(made, "reference"))


def test_the_cpu_backend_has_a_step_for_each_group_too(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "source", BONSAI, as_theirs(bonsai_tensors(BONSAI)))
    made = converted(source, tmp_path / "model", activation_scale="group")
    assert np.array_equal(logits(made, "cpu"), logits(made, "reference"))


def test_scaled_positions_matter(tmp_path: Path) -> None:
    """The comparison above would notice if YaRN were left out."""
    tensors = as_theirs(bonsai_tensors(BONSAI))
    plain = {key: value for key, value in BONSAI.items() if key != "rope_scaling"}
    made = [
        converted(write_hf(tmp_path / name, data, tensors), tmp_path / f"{name}.out")
        for name, data in (("yarn", BONSAI), ("plain", plain))
    ]
    assert distance(logits(made[0]), logits(made[1])) > 0.1


def test_a_weight_between_the_levels_is_loud(tmp_path: Path) -> None:
    tensors = as_theirs(bonsai_tensors(BONSAI))
    row = tensors["model.layers.1.mlp.down_proj.weight"][200]
    row[np.flatnonzero(row)[0]] *= np.float32(0.5)
    source = write_hf(tmp_path / "source", BONSAI, tensors)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down: rows 0 to 255 are not -s, 0, s"):
        converted(source, tmp_path / "model")


def test_a_scale_out_of_all_proportion_is_loud(tmp_path: Path) -> None:
    tensors = as_theirs(bonsai_tensors(BONSAI))
    tensors["model.layers.0.self_attn.q_proj.weight"][8, 128:256] *= np.float32(2**14)  # one flipped exponent bit
    source = write_hf(tmp_path / "source", BONSAI, tensors)
    with pytest.raises(CheckpointError, match=r"layers\.0\.attention\.q has a scale of .* damaged"):
        converted(source, tmp_path / "model")


def test_the_rotated_generation_is_refused_by_name(tmp_path: Path) -> None:
    source = write_hf(
        tmp_path / "source", BONSAI | {"hadamard": {"block_size": 1024}}, as_theirs(bonsai_tensors(BONSAI))
    )
    with pytest.raises(ConfigError, match=r"second generation .*Hadamard"):
        converted(source, tmp_path / "model")


def test_a_float_embedding_stays_float(tmp_path: Path) -> None:
    tensors = bonsai_tensors(BONSAI)
    tensors["embedding.weight"] = random_floats(model_config(BONSAI))["embedding.weight"].astype(np.float16)
    made = converted(write_hf(tmp_path / "source", BONSAI, as_theirs(tensors)), tmp_path / "model")
    assert made.config.embedding_bits == 16
    assert np.array_equal(made.tensors["embedding.weight"], tensors["embedding.weight"])
