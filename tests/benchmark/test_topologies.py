"""Occasions by hand, the calibration of a known distortion, and trees against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from bitmtp.benchmark.topologies import Occasion, acceptance, best_trees, fit_calibration, likelihood, observe
from bitmtp.core.costs import Calibration, CostTable, logit, sigmoid
from bitmtp.engine import Engine

FLAT = CostTable((1, 64), (3.0, 3.5))


def test_acceptance_by_hand() -> None:
    occasions = [Occasion(1, 0.5, rank) for rank in (0, 0, 1, None)] + [Occasion(2, 0.5, rank) for rank in (0, 2)]
    assert acceptance(occasions, 3) == [[0.5, 0.25, 0.0], [0.5, 0.0, 0.5]]
    assert acceptance([]) == []


def test_a_known_distortion_is_found() -> None:
    random = np.random.default_rng(0)
    occasions = []
    for depth, (temperature, offset) in enumerate([(0.5, 1.0), (1.0, -0.5)], start=1):
        for p in random.uniform(0.05, 0.95, 4000):
            stood = random.random() < sigmoid(logit(p) / temperature + offset)
            occasions.append(Occasion(depth, float(p), 0 if stood else None))
    found = fit_calibration(occasions)
    assert found.temperatures == pytest.approx((0.5, 1.0), rel=0.1)
    assert found.offsets == pytest.approx((1.0, -0.5), abs=0.15)
    assert likelihood(occasions, found) < likelihood(occasions, Calibration((1.0,), (0.0,)))


def test_few_occasions_change_little() -> None:
    found = fit_calibration([Occasion(1, 0.9, 0), Occasion(1, 0.8, 0)])
    assert found.temperatures[0] == pytest.approx(1, abs=0.6)
    assert abs(found.offsets[0]) < 1


def test_the_likeliest_trees() -> None:
    table = [[0.6, 0.3, 0.05], [0.5, 0.4, 0.0]]
    found = {each.topology.width: each for each in best_trees(table, FLAT, 16)}
    assert found[2].tokens == pytest.approx(1 + 1 + 0.6)
    assert found[4].tokens == pytest.approx(1 + 1 + 0.6 + 0.3 + 0.3)
    assert max(found) == 6, "what never stood is no node"
    shape = found[4].topology
    assert {(node.depth, node.rank) for node in shape.nodes} == {(1, 0), (2, 0), (2, 1), (3, 0)}


def test_no_tree_beats_another_in_both() -> None:
    dear = CostTable((1, 2, 64), (3.0, 6.0, 192.0))
    found = best_trees([[0.6, 0.3], [0.5, 0.4]], dear, 16)
    assert [each.milliseconds for each in found] == sorted(each.milliseconds for each in found)
    assert [each.tokens for each in found] == sorted(each.tokens for each in found)


def test_what_is_observed_is_what_came(tiny_engine: Engine) -> None:
    prompts = [tiny_engine.tokenizer.encode("The harbour"), tiny_engine.tokenizer.encode("One")]
    occasions = observe(tiny_engine, prompts, max_tokens=24, block_size=4)
    assert {each.depth for each in occasions} <= {1, 2, 3}
    first = [each for each in occasions if each.depth == 1]
    assert len(first) > 10
    assert len([each for each in occasions if each.depth == 2]) == sum(each.rank == 0 for each in first)
