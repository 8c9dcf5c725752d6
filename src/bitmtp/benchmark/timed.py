"""One text, timed: for measurements that need neither tokenizer nor engine."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bitmtp.backends.base import Backend
from bitmtp.decoding.decoder import Decoder, advance
from bitmtp.decoding.policy import Policy
from bitmtp.decoding.resident import can_reside, decode_resident
from bitmtp.decoding.state import State
from bitmtp.decoding.stats import Stats
from bitmtp.sampling import Sampling


def timed_text(
    backend: Backend, policy: Policy, prompt: Sequence[int], tokens: int, sampling: Sampling
) -> tuple[float, Stats]:
    """Seconds of decoding ``tokens`` tokens, prefill and the first one left out, and what was counted.

    In the resident loop if the backend takes the text.
    """
    state = State(backend.open(), sampling, list(prompt), len(prompt))
    decoder = Decoder(state, policy, len(prompt) + tokens, frozenset())
    resident = can_reside(backend, decoder)
    decoder.start(backend)
    begun = time.perf_counter()
    if resident:
        for _ in decode_resident(backend, decoder):
            pass
    while decoder.finish is None:
        advance(backend, [decoder])
    taken = time.perf_counter() - begun
    backend.close(state.sequence)
    return taken, decoder.stats
