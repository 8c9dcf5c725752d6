"""What to expect of well-known models on this machine, without the models: some layers of their shape are run."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from bitmtp.backends import load_backend
from bitmtp.backends.base import Backend, Head, causal_rows
from bitmtp.benchmark.shapes import SHAPES, random_checkpoint
from bitmtp.checkpoint import linear_shapes
from bitmtp.config import ModelConfig
from bitmtp.errors import BackendError
from bitmtp.sampling import GREEDY

EXPECTED = ("bonsai-1.7b", "bitnet-2b", "bonsai-4b", "bonsai-8b")
CONTEXT = 4096  # tokens whose K/V are counted
LAYER_BYTES = 128e6  # more than most caches hold, so that layers come from memory as a whole model's do
VOCABULARY = 32_768  # entries of the head that is timed
HISTORY, CHECKED = 64, 8
PASSES = {1: 7, CHECKED: 3}  # how often each width is timed


@dataclass(frozen=True, slots=True)
class Expectation:
    """Of one model.

    Attributes:
        weight_bytes: in memory, as the backend packs them.
        kv_bytes: of a context of :data:`CONTEXT` tokens.
        tokens_per_second: one text, without drafts, behind :data:`HISTORY` tokens.
        prompt_tokens_per_second: of a prompt of :data:`HISTORY` tokens.
        checked_ratio: a pass that verifies :data:`CHECKED` tokens ÷ one of a single token.
        bytes_per_second: that layers read in passes of one token.
    """

    name: str
    weight_bytes: int
    kv_bytes: int
    tokens_per_second: float
    prompt_tokens_per_second: float
    checked_ratio: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class _Parts:
    """Bytes or seconds of one layer, and of what a vocabulary of :data:`VOCABULARY` entries takes."""

    layer: float
    vocabulary: float

    def whole(self, config: ModelConfig) -> float:
        """Of a whole model."""
        return self.layer * config.num_layers + self.vocabulary * config.vocab_size / VOCABULARY


def expect(name: str, backend: str, threads: int | None) -> Expectation:
    """Time some layers and a part of the head of a shape, and count up to the whole model.

    Raises:
        BackendError: the backend cannot run here.
    """
    config = SHAPES[name]
    layers = _enough_layers(config)
    small = _load(config, layers, backend, threads)
    weights, (prompt, times) = _weights(config, small, backend, threads), _times(small)
    kv_bytes = 2 * config.kv_size * (2 if config.kv_type == "float16" else 4)  # of a token in a layer
    one, checked = (times[width].whole(config) for width in (1, CHECKED))
    return Expectation(
        name=name,
        weight_bytes=round(weights.whole(config)),
        kv_bytes=CONTEXT * config.num_layers * kv_bytes,
        tokens_per_second=1 / one,
        prompt_tokens_per_second=HISTORY / (prompt / layers * config.num_layers),
        checked_ratio=checked / one,
        bytes_per_second=(weights.layer + HISTORY * kv_bytes) / times[1].layer,
    )


def _enough_layers(config: ModelConfig) -> int:
    packed = sum(out * inputs for out, inputs in linear_shapes(config).values()) / 4
    return min(math.ceil(LAYER_BYTES / packed), config.num_layers)


def _load(config: ModelConfig, layers: int, backend: str, threads: int | None) -> Backend:
    cut = replace(config, num_layers=layers, vocab_size=VOCABULARY)
    return load_backend(backend, random_checkpoint(cut, "layers"), threads=threads, context=HISTORY + CHECKED + 1)


def _weights(config: ModelConfig, small: Backend, backend: str, threads: int | None) -> _Parts:
    """Bytes, from what some layers take and what one takes."""
    layers = small.config.num_layers
    some, one = (_weight_bytes(each) for each in (small, _load(config, 1, backend, threads)))
    layer = (some - one) / (layers - 1)
    return _Parts(layer, one - layer)


def _weight_bytes(backend: Backend) -> int:
    if (told := backend.describe().get("weight bytes")) is None:
        raise BackendError(f"the {backend.name} backend does not say what its weights take; use cpu or cuda")
    return int(told)


def _times(backend: Backend) -> tuple[float, dict[int, _Parts]]:
    """Seconds of a prompt, and of passes by width, with the head and without."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, HISTORY + CHECKED).tolist()
    sequence = backend.open()
    begun = time.perf_counter()
    backend.prefill(sequence, ids[:HISTORY])
    prompt, found = time.perf_counter() - begun, dict[int, _Parts]()
    for width, repeats in PASSES.items():
        tokens = ids[HISTORY : HISTORY + width]
        _time(backend, sequence, tokens, Head.EXACT)  # buffers grow
        pairs = [[_time(backend, sequence, tokens, head) for head in (Head.NONE, Head.EXACT)] for _ in range(repeats)]
        layers, whole = (median(each) for each in zip(*pairs, strict=True))
        found[width] = _Parts(layers / backend.config.num_layers, max(whole - layers, 0.0))
    backend.close(sequence)
    return prompt, found


def _time(backend: Backend, sequence: int, tokens: Sequence[int], head: Head) -> float:
    """Seconds of one pass; its rows are not kept."""
    rows = causal_rows(sequence, tokens, HISTORY, [head] * len(tokens), GREEDY)
    begun = time.perf_counter()
    backend.step(rows)
    return time.perf_counter() - begun
