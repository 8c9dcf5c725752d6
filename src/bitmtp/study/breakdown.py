"""Time by class of kernel and by part of the first token, as far as the backend can tell."""

from __future__ import annotations

from dataclasses import dataclass

from bitmtp.backends.base import Backend
from bitmtp.benchmark.profile import measure_profile

HISTORY = 256  # positions before the passes
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Parts of typical passes and prompts.

    Attributes:
        passes: kind of pass → class of kernel → microseconds; empty where the backend cannot tell.
        first_token: length of a prompt, as text → ``prefill``, ``head`` and ``sampling`` → milliseconds.
    """

    passes: dict[str, dict[str, float]]
    first_token: dict[str, dict[str, float]]


def break_down(backend: Backend, context: int) -> Breakdown:
    """Measure both on a backend that nothing else uses meanwhile."""
    profile = measure_profile(backend, context=context, history=min(HISTORY, context // 2), rounds=_ROUNDS)
    passes = {
        f"{'draft' if each.masks else 'exact'}, width {each.width}": {
            kernel.name: kernel.microseconds for kernel in each.kernels
        }
        for each in profile.passes
    }
    first = {
        str(each.prompt): {"prefill": each.prefill, "head": each.head, "sampling": each.sampling or 0.0}
        for each in profile.first_token
    }
    return Breakdown(passes, first)
