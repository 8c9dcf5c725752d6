"""ModelConfig: what it refuses, and its round trip through config.json."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import tiny_config
from hypothesis import given
from hypothesis import strategies as st

from bitmtp.config import ModelConfig, RopeScaling
from bitmtp.errors import ConfigError


@given(
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3), (9, 3)]),
    layout=st.sampled_from(["tensor", "row", "group"]),
    bits=st.sampled_from([2, 4, 8, 16]),
    block=st.integers(1, 32),
    eos=st.lists(st.integers(0, 319), max_size=3),
)
def test_round_trip(heads: tuple[int, int], layout: str, bits: int, block: int, eos: list[int]) -> None:
    config = tiny_config(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        ternary_scale=layout,
        group_size=8,
        embedding_bits=bits,
        head_activation_bits=16 if bits == 16 else 8,
        block_size=block,
        eos_token_ids=tuple(eos),
    )
    assert ModelConfig.from_json(config.to_json()) == config


def test_scaled_positions_round_trip() -> None:
    config = tiny_config(rope_scaling=RopeScaling("yarn", 4.0, 8192, attention_factor=1.14))
    assert ModelConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "longrope"}, "rope_scaling is 'longrope'"),
        ({"factor": 0.5}, "factor is 0.5"),
        ({"factor": float("nan")}, "factor is nan"),
        ({"original_max_position": 0}, "original_max_position is 0"),
        ({"original_max_position": 64.0}, "original_max_position is 64.0; expected int"),
        ({"low": 32.0}, "low is 32.0; it must be below high 32.0"),
        ({"attention_factor": -1.0}, "attention_factor is -1.0"),
    ],
)
def test_scaled_positions_are_checked(changes: dict[str, Any], message: str) -> None:
    data = json.loads(tiny_config(rope_scaling=RopeScaling("yarn", 4.0, 8192)).to_json())
    data["rope_scaling"] |= changes
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_json(json.dumps(data))


def test_an_unknown_part_of_scaled_positions_is_named() -> None:
    data = json.loads(tiny_config().to_json()) | {"rope_scaling": {"kind": "linear", "colour": "red"}}
    with pytest.raises(ConfigError, match="colour"):
        ModelConfig.from_json(json.dumps(data))


def test_the_file_names_its_format() -> None:
    data = json.loads(tiny_config().to_json())
    assert (data["format"], data["format_version"]) == ("bitmtp", 1)


def test_a_file_without_format_is_version_1() -> None:
    data = json.loads(tiny_config().to_json())
    del data["format"], data["format_version"]
    assert ModelConfig.from_json(json.dumps(data)) == tiny_config()


def test_sizes() -> None:
    config = tiny_config(num_heads=6, num_kv_heads=3, head_dim=10, hidden_size=32)
    assert (config.attention_size, config.kv_size) == (60, 30)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gpt2"}, "architecture is 'gpt2'"),
        ({"activation": "gelu"}, "activation is 'gelu'"),
        ({"ternary_scale": "column"}, "ternary_scale is 'column'"),
        ({"activation_bits": 4}, "activation_bits is 4"),
        ({"embedding_bits": 3}, "embedding_bits is 3"),
        ({"kv_type": "int8"}, "kv_type is 'int8'"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0"),
        ({"num_layers": True}, "num_layers is True"),
        ({"max_position": -1}, "max_position is -1"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 33}, "block_size is 33"),
        ({"chain_rank": -1}, "chain_rank is -1"),
        ({"drafter": "eagle"}, "drafter is 'eagle'"),
        ({"drafter": "medusa", "chain_rank": 4}, "drafter 'medusa' has no chain"),
        ({"num_heads": 3}, "num_heads 3 is not a multiple of num_kv_heads 2"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"embedding_bits": 16}, "go together"),
        ({"head_activation_bits": 16}, "go together"),
        ({"hidden_size": 30}, "hidden_size is 30"),
        ({"intermediate_size": 50}, "intermediate_size is 50"),
        ({"ternary_scale": "group", "group_size": 24}, "group_size 24"),
        ({"eos_token_ids": (320,)}, "special token 320"),
        ({"bos_token_id": -1}, "special token -1"),
        ({"activation_scale": "column"}, "activation_scale is 'column'"),
        ({"activation_scale": "group", "group_size": 24}, "group_size 24"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; expected RopeScaling"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(**changes)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"colour": "red"}, "unknown field 'colour'"),
        ({"format": "gguf"}, "format is 'gguf'"),
        ({"format_version": 3}, "version 3"),
        ({"eos_token_ids": 2}, "int"),
        ({"block_size": "8"}, "expected int"),
    ],
)
def test_files_refused(edit: dict[str, Any], message: str) -> None:
    data = json.loads(tiny_config().to_json()) | edit
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_json(json.dumps(data))
    assert "\n" not in str(caught.value)


def test_a_missing_field_is_named() -> None:
    data = json.loads(tiny_config().to_json())
    del data["hidden_size"]
    with pytest.raises(ConfigError, match="hidden_size"):
        ModelConfig.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"bitmtp"'])
def test_not_an_object(text: str) -> None:
    with pytest.raises(ConfigError):
        ModelConfig.from_json(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 2.5},
        {"chain_rank": 0.5},
        {"eos_token_ids": (2.5,)},
        {"rope_theta": 0.0},
        {"rope_theta": float("nan")},
        {"norm_eps": -1.0},
        {"norm_eps": "small"},
        {"sub_norm": "no"},
    ],
    ids=str,
)
def test_wrong_types_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        tiny_config(**changes)


@pytest.mark.parametrize("name", ["num_layers", "max_position"])
def test_a_number_that_would_take_all_memory_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is 2147483648; supported: up to"):
        tiny_config(**{name: 1 << 31})
