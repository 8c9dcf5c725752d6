"""What a converted checkpoint computes, and whether that is what somebody else's implementation computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from conftest import make_backend
from numpy.typing import NDArray

from bitmtp import checkpoint
from bitmtp.backends.base import Head, causal_rows
from bitmtp.checkpoint import Checkpoint
from bitmtp.convert.convert import Options, convert
from bitmtp.sampling import GREEDY
from bitmtp.ternary import unpack

Array = NDArray[Any]
IDS = [5, 77, 210, 3, 119, 64, 288, 31, 150, 9, 240, 17]


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps: list[tuple[int, int]] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def advance(self, done: int, total: int) -> None:
        self.steps.append((done, total))


def converted(source: Path, target: Path, **options: Any) -> Checkpoint:
    """Convert without trying the result on text (random models know none), and load it."""
    convert(source, target, Options(**{"checked": False, "embedding_bits": 16} | options), Heard())
    return checkpoint.read(target)


def logits(made: Checkpoint, backend: str = "reference", ids: list[int] = IDS) -> Array:
    """``[len(ids), vocab]`` of one causal pass. K/V in float32, because that is what the others compare with."""
    exact = replace(made, config=replace(made.config, kv_type="float32"))
    running = make_backend(backend, exact, context=64)
    rows = causal_rows(running.open(), ids, 0, [Head.EXACT] * len(ids), GREEDY)
    return np.stack([output.logits for output in running.step(rows, logits=True) if output is not None])


def values(made: Checkpoint, module: str) -> Array:
    """Float values of a ternary matrix of a checkpoint."""
    weights, scale = unpack(made.tensors[f"{module}.weight"], 2), made.tensors[f"{module}.scale"]
    if scale.shape == (1,):
        return (weights * scale).astype(np.float32)
    cells = weights.reshape(len(weights), scale.shape[1], -1) * scale[..., None]
    return cells.reshape(weights.shape).astype(np.float32)


def distance(ours: Array, theirs: Array) -> float:
    """Largest difference, in standard deviations of the logits."""
    return float(np.abs(ours - theirs).max() / theirs.std())
