"""Rotary frequencies: the plain ones in closed form, the stretched ones against transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import tiny_config

from bitmtp.backends.weights import rope_table
from bitmtp.config import RopeScaling
from bitmtp.rope import rope_frequencies

SHAPE = replace(tiny_config(), head_dim=64, rope_theta=1e6, max_position=4096)
YARN = RopeScaling("yarn", 4.0, 1024, 1.0, 32.0, 1.2)


def test_plain() -> None:
    frequency, factor = rope_frequencies(SHAPE)
    assert factor == 1
    assert frequency[0] == 1
    assert np.allclose(frequency[1:] / frequency[:-1], 1e6 ** (-1 / 32))


@pytest.mark.parametrize(
    ("scaling", "theirs"),
    [
        (RopeScaling("linear", 2.0, 2048), {"rope_type": "linear", "factor": 2.0}),
        (YARN, {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.2}),
        (
            RopeScaling("yarn", 8.0, 1024, 2.0, 16.0),
            {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2},
        ),
        (
            RopeScaling("llama3", 8.0, 1024, 1.0, 4.0),
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        ),
    ],
)
def test_stretched_as_in_transformers(scaling: RopeScaling, theirs: dict[str, Any]) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed (pip install torch)")
    utilities = pytest.importorskip("transformers.modeling_rope_utils", reason="transformers is not installed")
    from transformers import LlamaConfig

    rope = theirs | {"rope_theta": SHAPE.rope_theta, "original_max_position_embeddings": 1024}
    config = LlamaConfig(head_dim=64, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=rope)
    expected, _ = utilities.ROPE_INIT_FUNCTIONS[scaling.kind](config, "cpu")
    frequency, _ = rope_frequencies(replace(SHAPE, rope_scaling=scaling))
    if scaling.kind == "linear":
        assert np.allclose(frequency, expected.numpy() if scaling.factor == 1 else rope_frequencies(SHAPE)[0] / 2)
    assert np.allclose(frequency, expected.numpy(), rtol=1e-5)


def test_fast_frequencies_stay_and_slow_ones_are_divided() -> None:
    plain, _ = rope_frequencies(SHAPE)
    for scaling in (YARN, RopeScaling("llama3", 4.0, 1024, 1.0, 4.0)):
        ratio = plain / rope_frequencies(replace(SHAPE, rope_scaling=scaling))[0]
        assert ratio[0] == pytest.approx(1)
        assert ratio[-1] == pytest.approx(4)
        assert (np.diff(ratio) >= -1e-9).all()


def test_the_attention_factor_multiplies_the_table() -> None:
    cos, sin = rope_table(replace(SHAPE, rope_scaling=YARN), 8)
    assert np.allclose(cos * cos + sin * sin, 1.2**2, rtol=1e-6)


def test_a_ramp_of_no_length_is_a_step() -> None:
    scaling = RopeScaling("yarn", 4.0, 16, 30.0, 31.0)
    frequency, _ = rope_frequencies(replace(SHAPE, rope_scaling=scaling))
    assert np.isfinite(frequency).all()
