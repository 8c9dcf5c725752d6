"""How likely a continuation is: what multiple-choice tasks are judged by. No policy takes part in it."""

from __future__ import annotations

from collections.abc import Sequence

from bitmtp.core.policies import make_policy
from bitmtp.core.text import Logprobs
from bitmtp.engine import Engine, Generation, Request


def log_likelihood(engine: Engine, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    """Log probability (nats) of ``continuation`` after ``context``, and whether greedy decoding would write it.

    Args:
        context: one or more tokens.
    """
    scores = _read(engine, [*context, *continuation], len(context))
    greedy = all(score.top[0][0] == token for score, token in zip(scores, continuation, strict=True))
    return sum(score.chosen for score in scores), greedy


def _read(engine: Engine, ids: list[int], scored: int) -> list[Logprobs]:
    """Run tokens as a prompt behind which nothing is written; of those from ``scored`` on, how likely each was."""
    request = Request(ids, 0, make_policy("autoregressive", engine.config.block_size))
    sequence = engine.backend.open()
    try:
        generation = Generation(engine, sequence, request, ids, 0, top=1, scored=scored)
        for _ in generation:
            pass
        return generation.text.take_scores()
    finally:
        engine.backend.close(sequence)
