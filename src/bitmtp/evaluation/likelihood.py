"""How likely a continuation is: what multiple-choice tasks are judged by. No policy takes part in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bitmtp.backends.base import MAX_WIDTH, Backend, Head, causal_rows
from bitmtp.numerics import Float32
from bitmtp.sampling import GREEDY


def log_likelihood(backend: Backend, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    """Log probability (nats) of ``continuation`` after ``context``, and whether greedy decoding would write it.

    Args:
        context: one or more tokens.
    """
    sequence = backend.open()
    try:
        if len(context) > 1:
            backend.prefill(sequence, context[:-1])
        return _score(backend, sequence, [context[-1], *continuation[:-1]], continuation)
    finally:
        backend.close(sequence)


def _score(backend: Backend, sequence: int, tokens: Sequence[int], targets: Sequence[int]) -> tuple[float, bool]:
    """``targets[i]`` is what shall come after ``tokens[i]``."""
    total, greedy = 0.0, True
    for start in range(0, len(tokens), MAX_WIDTH):
        piece, wanted = tokens[start : start + MAX_WIDTH], targets[start : start + MAX_WIDTH]
        rows = causal_rows(sequence, piece, backend.length(sequence), [Head.EXACT] * len(piece), GREEDY)
        for output, target in zip(backend.step(rows, logits=True), wanted, strict=True):
            assert output is not None
            assert output.logits is not None
            total += _log_probability(output.logits, target)
            greedy &= output.token == target
        backend.materialize(sequence, range(len(piece)))
    return total, greedy


def _log_probability(logits: Float32, token: int) -> float:
    shifted = logits.astype(np.float64) - float(logits.max())
    return float(shifted[token] - np.log(np.exp(shifted).sum()))
