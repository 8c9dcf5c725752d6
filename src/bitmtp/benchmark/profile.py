"""Where time goes: kernels of a pass, and parts of the time to the first token, as far as a backend can tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from bitmtp.backends.base import Backend, Head, causal_rows
from bitmtp.sampling import GREEDY

if TYPE_CHECKING:
    from bitmtp.backends.cuda.profile import PassProfile

WIDTHS = (1, 8)
PROMPTS = (64, 512, 2048)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The time to the first token of a prompt, in milliseconds.

    Attributes:
        prompt: its tokens.
        total: of :meth:`Backend.prefill`.
        head: of the output head, on the prompt's last row.
        sampling: of choosing the token; None where the backend chooses inside its head.
    """

    prompt: int
    total: float
    head: float
    sampling: float | None

    @property
    def prefill(self) -> float:
        """The rest: every row of the prompt through the layers."""
        return self.total - self.head - (self.sampling or 0.0)


@dataclass(frozen=True, slots=True)
class Profile:
    """Passes are known in parts on ``cuda`` only; elsewhere there are none."""

    passes: list[PassProfile]
    first_token: list[FirstToken]


def measure_profile(
    backend: Backend, *, context: int, history: int, rounds: int, tick: Callable[[], None] = lambda: None
) -> Profile:
    """Passes of one row and of eight, and, if the model drafts, a draft of eight; prompts that fit the context.

    Args:
        tick: called after each prompt.
    """
    passes, first_token = _passes(backend, history), []
    for prompt in PROMPTS:
        if prompt < context:
            first_token.append(_first_token(backend, prompt, rounds))
        tick()
    return Profile(passes, first_token)


def _passes(backend: Backend, history: int) -> list[PassProfile]:
    if backend.name != "cuda":
        return []
    from bitmtp.backends.cuda.backend import CudaBackend
    from bitmtp.backends.cuda.profile import profile_pass

    assert isinstance(backend, CudaBackend)
    found = [profile_pass(backend, width, history) for width in WIDTHS]
    draft = min(WIDTHS[-1], backend.config.block_size)
    return found if draft == 1 else [*found, profile_pass(backend, draft, history, masks=True)]


def _first_token(backend: Backend, prompt: int, rounds: int) -> FirstToken:
    ids = np.random.default_rng(0).integers(0, backend.config.vocab_size, prompt).tolist()
    sequence = backend.open()
    backend.prefill(sequence, ids)
    totals = [_prefill(backend, sequence, ids) for _ in range(rounds)]
    backend.truncate(sequence, prompt - 1)
    if backend.name == "cuda":
        head, sampling = _parts_of_kernels(backend, prompt - 1)
    else:
        head, sampling = _head_by_difference(backend, sequence, ids[-1], rounds), None
    backend.close(sequence)
    return FirstToken(prompt, median(totals), head, sampling)


def _prefill(backend: Backend, sequence: int, ids: Sequence[int]) -> float:
    backend.truncate(sequence, 0)
    begun = time.perf_counter()
    backend.prefill(sequence, ids)
    return (time.perf_counter() - begun) * 1e3


def _head_by_difference(backend: Backend, sequence: int, token: int, rounds: int) -> float:
    """A pass over the last row with the head, less one without it."""
    taken: dict[Head, list[float]] = {Head.EXACT: [], Head.NONE: []}
    for _ in range(3 * rounds):
        for head, times in taken.items():
            rows = causal_rows(sequence, [token], backend.length(sequence), [head], GREEDY)
            begun = time.perf_counter()
            backend.step(rows)
            times.append((time.perf_counter() - begun) * 1e3)
    return max(median(taken[Head.EXACT]) - median(taken[Head.NONE]), 0.0)


def _parts_of_kernels(backend: Backend, history: int) -> tuple[float, float]:
    from bitmtp.backends.cuda.backend import CudaBackend
    from bitmtp.backends.cuda.profile import Part, profile_pass

    assert isinstance(backend, CudaBackend)
    parts = profile_pass(backend, 1, history).parts()
    return parts[Part.HEAD] / 1e3, parts[Part.CHOICE] / 1e3
