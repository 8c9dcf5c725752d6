"""Everything that changes over a run, as a function of its progress (0 to 1)."""

from __future__ import annotations

import math

from bitmtp.training.config import TrainConfig


def rate_factor(config: TrainConfig, progress: float) -> float:
    """Learning rate relative to its peak: linear warm-up, then a cosine down to ``final_rate``."""
    if progress < config.warmup:
        # never 0: the first step should count
        return max(progress / config.warmup, 1e-2)
    angle = math.pi * min((progress - config.warmup) / (1 - config.warmup), 1.0)
    return config.final_rate + (1 - config.final_rate) * 0.5 * (1 + math.cos(angle))


def blend_factor(config: TrainConfig, progress: float) -> float:
    """How much of the quantisation is in: linear, whole from ``blend`` on, and always in a frozen model."""
    return 1.0 if config.frozen or config.blend <= 0 else min(progress / config.blend, 1.0)
