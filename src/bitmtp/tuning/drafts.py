"""What the drafts of a model are worth on sample prompts: calibration, acceptance, trees."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bitmtp.benchmark.topologies import Occasion, Worth, acceptance, best_trees, fit_calibration, observe
from bitmtp.core.costs import Calibration, Tuning
from bitmtp.engine import Engine
from bitmtp.sampling import Sampling

RANKS = 4
ENOUGH = 100  # occasions below which nothing is fitted


@dataclass(frozen=True, slots=True)
class Drafts:
    """What was found.

    Attributes:
        tuning: this machine's pass costs, with calibrations fitted on the prompts.
        acceptance: see :func:`bitmtp.benchmark.topologies.acceptance`.
        trees: see :func:`bitmtp.benchmark.topologies.best_trees`.
    """

    tuning: Tuning
    acceptance: list[list[float]]
    trees: list[Worth]


def study_drafts(
    engine: Engine, prompts: Sequence[Sequence[int]], *, max_tokens: int, tick: Callable[[], None] = lambda: None
) -> Drafts:
    """Write a greedy text for each prompt and a sampled one for every other, with a draft at each token.

    Args:
        tick: called after each text.
    """
    costs, usual = engine.tuning.costs, Tuning(engine.tuning.costs)
    greedy = _observe(engine, prompts, Sampling(), max_tokens, tick)
    sampled = _observe(engine, prompts[::2], Sampling(temperature=1.0, seed=1), max_tokens, tick)
    tuning = Tuning(costs, _fit(greedy, usual.calibration), _fit(sampled, usual.sampled))
    table = acceptance(greedy, RANKS)
    return Drafts(tuning, table, best_trees(table, costs, costs.history) if table else [])


def _observe(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, max_tokens: int, tick: Callable[[], None]
) -> list[Occasion]:
    found: list[Occasion] = []
    for prompt in prompts:
        size = engine.config.block_size
        found += observe(engine, [prompt], max_tokens=max_tokens, block_size=size, ranks=RANKS, sampling=sampling)
        tick()
    return found


def _fit(occasions: Sequence[Occasion], usual: Calibration) -> Calibration:
    return fit_calibration(occasions) if len(occasions) >= ENOUGH else usual


def tree_table(trees: Sequence[Worth]) -> list[dict[str, Any]]:
    """As a profile keeps them."""
    return [
        {"topology": json.loads(each.topology.to_json()), "tokens": each.tokens, "milliseconds": each.milliseconds}
        for each in trees
    ]
