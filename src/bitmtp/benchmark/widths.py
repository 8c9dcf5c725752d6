"""The cost of one pass by its width: what every multi-token method must pay for its extra rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from bitmtp.backends.base import Backend, Head, causal_rows
from bitmtp.benchmark.timed import timed_text
from bitmtp.core.policies import make_policy
from bitmtp.sampling import GREEDY, Sampling

WIDTHS = (1, 2, 4, 8, 9, 16, 32)
PASSES_PER_ROUND = 7


@dataclass(frozen=True, slots=True)
class WidthCost:
    """Median milliseconds of a pass, and how many times that of one row it is."""

    width: int
    milliseconds: float
    ratio: float


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Costs of passes with the exact head on every row.

    Attributes:
        history: positions before the pass.
        bytes: of weights and K/V that a pass of one row reads; 0 if the backend does not say.
        memory_speed: bytes a second of a large copy on the device, read and written; None: not measured.
        decoded_tokens_per_second: autoregressive decoding as measured, from the same history on.
    """

    history: int
    bytes: int
    memory_speed: float | None
    costs: tuple[WidthCost, ...]
    decoded_tokens_per_second: float


def needed_context(history: int, tokens: int) -> int:
    """Positions that :func:`measure_passes` uses."""
    return history + max(tokens, *WIDTHS) + 1


def measure_passes(
    backend: Backend, *, history: int, tokens: int, rounds: int, tick: Callable[[], None] = lambda: None
) -> PassCosts:
    """Time passes of causal rows behind a history of random tokens, the widths taking turns.

    Args:
        tokens: how many to decode autoregressively, once a round.
        tick: called after each round.
    """
    random = np.random.default_rng(0)
    ids = random.integers(0, backend.config.vocab_size, history + max(WIDTHS)).tolist()
    sequence = backend.open()
    backend.prefill(sequence, ids[:history])
    times: dict[int, list[float]] = {width: [] for width in WIDTHS}
    rates = []
    for width in WIDTHS:  # warm-up: buffers grow to the widest pass
        _time_pass(backend, sequence, ids[history : history + width])
    for _ in range(rounds):
        for _ in range(PASSES_PER_ROUND):
            for width in WIDTHS:
                times[width].append(_time_pass(backend, sequence, ids[history : history + width]))
        rates.append(_decode_rate(backend, ids[:history], tokens))
        tick()
    backend.close(sequence)
    return _summary(backend, history, times, rates)


def pass_bytes(backend: Backend, history: int) -> int:
    """Bytes of weights and K/V that a pass of one row reads; 0 if the backend does not say what its weights take."""
    config = backend.config
    weights = int(backend.describe().get("weight bytes", 0))
    number = 2 if config.kv_type == "float16" else 4
    return weights and weights + history * config.num_layers * 2 * config.kv_size * number


def memory_speed(backend: Backend) -> float | None:
    """Bytes a second of a large copy on the backend's device, if it has one of its own."""
    if backend.name != "cuda":
        return None
    from bitmtp.backends.cuda.backend import CudaBackend
    from bitmtp.backends.cuda.profile import copy_speed

    assert isinstance(backend, CudaBackend)
    return copy_speed(backend.gpu)


def _time_pass(backend: Backend, sequence: int, tokens: Sequence[int]) -> float:
    """Milliseconds of one pass; its rows are not kept."""
    start = backend.length(sequence)
    rows = causal_rows(sequence, tokens, start, [Head.EXACT] * len(tokens), GREEDY)
    begun = time.perf_counter()
    backend.step(rows)
    return (time.perf_counter() - begun) * 1e3


def _decode_rate(backend: Backend, prompt: Sequence[int], tokens: int) -> float:
    """Tokens a second of autoregressive decoding, the first token left out; no token ends the text."""
    seconds, stats = timed_text(backend, make_policy("autoregressive", 1), prompt, tokens, Sampling())
    return stats.tokens / seconds


def _summary(backend: Backend, history: int, times: dict[int, list[float]], rates: Sequence[float]) -> PassCosts:
    medians = {width: median(values) for width, values in times.items()}
    costs = tuple(WidthCost(width, value, value / medians[1]) for width, value in medians.items())
    moved, speed = pass_bytes(backend, history), memory_speed(backend)
    return PassCosts(history, moved, speed, costs, median(rates))
