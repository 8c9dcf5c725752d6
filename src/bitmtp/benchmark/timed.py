"""One text, timed: for measurements that need neither tokenizer nor engine."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bitmtp.backends.base import Backend, prefill_by_steps
from bitmtp.core.costs import Tuning
from bitmtp.core.policy import Policy
from bitmtp.core.stats import Stats
from bitmtp.core.text import Text
from bitmtp.loop import Loop
from bitmtp.sampling import GREEDY, Sampling

_TURN = 16.0


def timed_text(
    backend: Backend,
    policy: Policy,
    prompt: Sequence[int],
    tokens: int,
    sampling: Sampling,
) -> tuple[float, Stats]:
    """Seconds of decoding ``tokens`` tokens, prefill and the first one left out, and what was counted."""
    sequence = backend.open()
    if len(prompt) > 1:
        prefill_by_steps(backend, sequence, prompt[:-1], GREEDY)
    costs = Tuning.usual().costs.core()
    text = Text(sequence, prompt, len(prompt) - 1, policy, sampling, len(prompt) + tokens, frozenset(), costs)
    loop = Loop(backend, costs)
    while not text.begun:
        loop.run([text])
        text.take()
    begun = time.perf_counter()
    while text.finish is None:
        loop.run([text], _TURN)
        while text.take():
            pass
    taken = time.perf_counter() - begun
    backend.close(sequence)
    return taken, text.stats
