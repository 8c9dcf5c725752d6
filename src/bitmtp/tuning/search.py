"""Which settings are fastest here: many on a little text, then the better ones on more (successive halving).

Every figure is a ratio to autoregressive decoding within one round of texts that take turns, so that a machine which is
slower at times still tells the settings apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

from bitmtp.benchmark.policies import WORTH, PolicyFigures, compare
from bitmtp.core.policies import make_policy
from bitmtp.core.policy import Policy
from bitmtp.engine import Engine, Request

BLOCK_SIZES = (2, 3, 4, 6, 8, 12, 16)
BOUNDS = (0.05, 0.1, 0.2, 0.4)
TAUS = (0.5, 0.7, 0.9)
MIN_PREFIX = 3


@dataclass(frozen=True, slots=True)
class Stage:
    """One round of the search: how much text each setting writes, and how many settings stay (beside the baseline and
    the adaptive policy)."""

    share: float  # of the longest text
    rounds: int
    kept: int


STAGES = (Stage(0.3, 1, 8), Stage(1.0, 1, 3), Stage(1.0, 3, 1))


def candidates(model_block_size: int, *, lossy: bool) -> list[Policy]:
    """Settings to choose from, autoregressive decoding first; lossy policies only if asked for."""
    sizes = [size for size in BLOCK_SIZES if size <= model_block_size]
    found = [make_policy("autoregressive", model_block_size)]
    for size, bound in product(sizes, BOUNDS):
        found.append(make_policy("speculative", model_block_size, block_size=size, verify_bound=bound))
    if sizes:
        found.append(make_policy("auto", model_block_size))
    for size, tau in product(sizes if lossy else (), TAUS):
        found.append(make_policy("confidence", model_block_size, block_size=size, tau=tau))
        found.append(
            make_policy("hybrid", model_block_size, block_size=size, tau=tau, min_prefix=min(MIN_PREFIX, size))
        )
    return found


def texts(settings: int, prompts: int) -> int:
    """How many texts :func:`search` writes at most."""
    total, left = 0, settings
    for stage in STAGES:
        total += left * prompts * stage.rounds
        left = min(left, stage.kept + 2)  # the baseline stays, and the adaptive policy
    return total


def search(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    policies: Sequence[Policy],
    *,
    max_tokens: int,
    tick: Callable[[], None] = lambda: None,
) -> list[PolicyFigures]:
    """Figures of the last stage: autoregressive decoding (the first of ``policies``), then the best, best first."""
    baseline, left, figures = policies[0], list(policies[1:]), list[PolicyFigures]()
    for stage in STAGES:
        length = max(int(max_tokens * stage.share), 2)
        figures = compare(engine, prompts, [baseline, *left], max_tokens=length, rounds=stage.rounds, tick=tick)
        ranked = sorted(figures[1:], key=lambda each: -each.ratio)
        # The adaptive policy learns as a text goes on: a short one says little of it.
        left = [each.policy for rank, each in enumerate(ranked) if rank < stage.kept or each.policy.adaptive]
    return [figures[0], *sorted(figures[1:], key=lambda each: -each.ratio)]


def best(figures: Sequence[PolicyFigures]) -> PolicyFigures:
    """What to use: the fastest, or autoregressive decoding if drafting does not pay."""
    fastest = max(figures, key=lambda each: each.ratio)
    return fastest if fastest.ratio >= WORTH else figures[0]


def best_threads(
    load: Callable[[int], Engine],
    counts: Sequence[int],
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    rounds: int = 3,
    tick: Callable[[], None] = lambda: None,
) -> tuple[int, Engine]:
    """The number of threads with which the engine's default policy is fastest, and the engine that has it.

    Args:
        load: the engine with so many threads.
    """
    engines = {count: load(count) for count in counts}
    if len(engines) == 1:
        return next(iter(engines.items()))
    times: Mapping[int, list[float]] = {count: [] for count in engines}
    for turn in range(rounds + 1):
        for count, engine in engines.items():
            begun = time.perf_counter()
            for prompt in prompts:
                engine.generate(Request(prompt, max_tokens))
            if turn:  # the first one warms up
                times[count].append(time.perf_counter() - begun)
            tick()
    fastest = min(times, key=lambda count: median(times[count]))
    return fastest, engines[fastest]
