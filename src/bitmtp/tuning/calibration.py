"""What the probabilities of a model's drafts mean, fitted on sample prompts.

A text is written one token at a time, and at every token a draft is made and compared with what came. That shows each
depth on many more occasions than decoding would, all of them at the places that decoding could draft from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bitmtp.backends.base import Head, Output, causal_rows, mask, prefill_by_steps
from bitmtp.core.costs import Calibration, Tuning, logit
from bitmtp.engine import Engine
from bitmtp.numerics import gumbel
from bitmtp.sampling import Choice, Sampling

Float64 = NDArray[np.float64]
ENOUGH = 100  # occasions below which nothing is fitted


@dataclass(frozen=True, slots=True)
class Occasion:
    """A mask's candidates where all of the draft before it stood.

    Attributes:
        depth: of the mask.
        probability: of its own choice.
        rank: of the token that came; None if it was no candidate.
    """

    depth: int
    probability: float
    rank: int | None


@dataclass(frozen=True, slots=True)
class Guess:
    """What a draft says of a place: tokens, its own choice first, and that one's probability."""

    tokens: tuple[int, ...]
    probability: float

    @classmethod
    def of(cls, output: Output, position: int, sampling: Sampling) -> Guess:
        """Alternatives are ranked as the sample is drawn: with the noise of the place where the token will stand."""
        score = dict(output.top)
        if sampling.temperature:
            ids = np.array(list(score), np.int32)
            noise = gumbel(sampling.seed, sampling.choice, position, ids).tolist()
            score = {i: score[i] / sampling.temperature + more for i, more in zip(score, noise, strict=True)}
        others = sorted((token for token in score if token != output.token), key=score.__getitem__, reverse=True)
        return cls((output.token, *others), output.probability)


def calibrate(
    engine: Engine, prompts: Sequence[Sequence[int]], *, max_tokens: int, tick: Callable[[], None] = lambda: None
) -> Tuning:
    """This machine's pass costs, with calibrations fitted on a greedy text for each prompt and a sampled one for every
    other, with a draft at each token.

    Args:
        tick: called after each text.
    """
    costs, usual = engine.tuning.costs, Tuning(engine.tuning.costs)
    greedy = _observe(engine, prompts, Sampling(), max_tokens, tick)
    sampled = _observe(engine, prompts[::2], Sampling(temperature=1.0, seed=1), max_tokens, tick)
    return Tuning(costs, _fit(greedy, usual.calibration), _fit(sampled, usual.sampled))


def _observe(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, max_tokens: int, tick: Callable[[], None]
) -> list[Occasion]:
    found: list[Occasion] = []
    for prompt in prompts:
        size = engine.config.block_size
        found += observe(engine, [prompt], max_tokens=max_tokens, block_size=size, sampling=sampling)
        tick()
    return found


def _fit(occasions: Sequence[Occasion], usual: Calibration) -> Calibration:
    return fit_calibration(occasions) if len(occasions) >= ENOUGH else usual


def observe(
    engine: Engine, prompts: Iterable[Sequence[int]], *, max_tokens: int, block_size: int, ranks: int = 4,
    sampling: Sampling | None = None,
) -> list[Occasion]:  # fmt: skip
    """Write texts and compare the drafts at every token with what came.

    Args:
        prompts: token ids.
        ranks: candidates of a depth that are compared.
    """
    found: list[Occasion] = []
    for number, prompt in enumerate(prompts):
        own = replace(sampling or Sampling(), seed=number + 1)
        drafts, text = _drafts(engine, list(prompt), own, max_tokens, block_size, ranks)
        for start, guesses in enumerate(drafts[: len(text) - block_size + 1]):
            found += _compare(guesses, text[start:])
    return found


def _drafts(
    engine: Engine, prompt: list[int], sampling: Sampling, max_tokens: int, block_size: int, ranks: int
) -> tuple[list[list[Guess]], list[int]]:
    """For each token of a text behind its first, the draft that was made before it; and those tokens."""
    backend, limit = engine.backend, min(engine.context - block_size, len(prompt) + max_tokens)
    sequence, choice, drafts = backend.open(), Choice(sampling), list[list[Guess]]()
    text = [*prompt, prefill_by_steps(backend, sequence, prompt, choice).token]
    masks = [mask(depth) for depth in range(1, block_size)]
    while len(text) < limit and text[-1] not in engine.config.eos_token_ids:
        rows = causal_rows(sequence, [text[-1], *masks], len(text) - 1, [Head.EXACT] * block_size, choice)
        outputs = backend.step(rows, top=2 * ranks)
        backend.materialize(sequence, [0])
        drafts.append([Guess.of(each, len(text) + i, sampling) for i, each in enumerate(outputs) if each is not None])
        text.append(drafts[-1][0].tokens[0])
    backend.close(sequence)
    return drafts, text[len(prompt) + 1 :]


def _compare(guesses: Sequence[Guess], text: Sequence[int]) -> list[Occasion]:
    found = []
    for depth, (guess, token) in enumerate(zip(guesses[1:], text[1:], strict=False), start=1):
        rank = guess.tokens.index(token) if token in guess.tokens else None
        found.append(Occasion(depth, guess.probability, rank))
        if rank != 0:
            break
    return found


def fit_calibration(occasions: Sequence[Occasion]) -> Calibration:
    """Temperature and offset of each depth, by maximum likelihood (Platt scaling).

    A depth of few occasions stays near to no change.
    """
    fits = []
    for depth in range(1, max(each.depth for each in occasions) + 1):
        own = [each for each in occasions if each.depth == depth]
        x = np.array([[logit(each.probability), 1.0] for each in own])
        fits.append(_logistic(x, np.array([each.rank == 0 for each in own], np.float64)))
    slopes = [max(slope, 0.1) for slope, _ in fits]
    return Calibration(tuple(1 / slope for slope in slopes), tuple(offset for _, offset in fits))


def _logistic(x: Float64, y: Float64) -> tuple[float, float]:
    """Slope and offset of a logistic regression, drawn a little towards (1, 0): Newton's method, its steps halved until
    they help."""
    start = np.array([1.0, 0.0])

    def loss(weights: Float64) -> float:
        z = x @ weights
        return float(np.sum(np.logaddexp(0, z) - y * z) + np.sum((weights - start) ** 2) / 2)

    weights = start
    for _ in range(30):
        p = 1 / (1 + np.exp(-(x @ weights)))
        slope = x.T @ (y - p) - (weights - start)
        step = np.linalg.solve((x.T * (p * (1 - p))) @ x + np.eye(2), slope)
        while loss(weights + step) > loss(weights) and np.abs(step).max() > 1e-9:
            step = step / 2
        weights = weights + step
    return float(weights[0]), float(weights[1])
