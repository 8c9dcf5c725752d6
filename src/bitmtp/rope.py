"""Rotary frequencies, plain or stretched to a longer context."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from bitmtp.config import ModelConfig, RopeScaling

Float64 = NDArray[np.float64]


def rope_frequencies(config: ModelConfig) -> tuple[Float64, float]:
    """Radians a position ``[head_dim / 2]`` (arXiv:2104.09864), and what multiplies cosines and sines."""
    frequency = config.rope_theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    if config.rope_scaling is None:
        return frequency, 1.0
    return _stretched(frequency, config.rope_scaling, config), config.rope_scaling.attention_factor


def _stretched(frequency: Float64, scaling: RopeScaling, config: ModelConfig) -> Float64:
    """Slow frequencies divided by the factor, fast ones kept."""
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "yarn":
        slow = _yarn_share(len(frequency), scaling, config)
    else:
        turns = scaling.original_max_position * frequency / (2 * np.pi)
        slow = 1 - np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return frequency / scaling.factor * slow + frequency * (1 - slow)


def _yarn_share(count: int, scaling: RopeScaling, config: ModelConfig) -> Float64:
    """How far each frequency is stretched, 0 to 1: a ramp over their indices between two whole ones."""

    def index(turns: float) -> float:
        radians = scaling.original_max_position / (turns * 2 * math.pi)
        return config.head_dim * math.log(radians) / (2 * math.log(config.rope_theta))

    first = max(math.floor(index(scaling.high)), 0)
    last = min(math.ceil(index(scaling.low)), config.head_dim - 1)
    # a ramp of no length is a step
    return np.clip((np.arange(count, dtype=np.float64) - first) / max(last - first, 1e-3), 0, 1)
