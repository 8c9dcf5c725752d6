"""The calibration of a known distortion, and what is observed for it."""

from __future__ import annotations

import numpy as np
import pytest

from bitmtp.core.costs import CostTable, Tuning, logit, sigmoid
from bitmtp.engine import Engine
from bitmtp.tuning import calibration
from bitmtp.tuning.calibration import Occasion, calibrate, fit_calibration, observe

COSTS = CostTable((1, 2, 8, 16), (3.7, 4.4, 7.4, 13.2))


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


def test_few_occasions_change_little() -> None:
    found = fit_calibration([Occasion(1, 0.9, 0), Occasion(1, 0.8, 0)])
    assert found.temperatures[0] == pytest.approx(1, abs=0.6)
    assert abs(found.offsets[0]) < 1


def test_what_is_observed_is_what_came(tiny_engine: Engine) -> None:
    prompts = [tiny_engine.tokenizer.encode("The harbour"), tiny_engine.tokenizer.encode("One")]
    occasions = observe(tiny_engine, prompts, max_tokens=24, block_size=4)
    assert {each.depth for each in occasions} <= {1, 2, 3}
    first = [each for each in occasions if each.depth == 1]
    assert len(first) > 10
    assert len([each for each in occasions if each.depth == 2]) == sum(each.rank == 0 for each in first)


def test_little_text_fits_nothing(tiny_engine: Engine) -> None:
    engine = Engine(tiny_engine.backend, tiny_engine.tokenizer, tiny_engine.context, Tuning(COSTS))
    ticks: list[None] = []
    found = calibrate(engine, [[5, 6, 7], [8, 9], [10]], max_tokens=12, tick=lambda: ticks.append(None))
    assert len(ticks) == 5, "three greedy texts and two sampled ones"
    assert found == Tuning(COSTS), "too little was seen to fit anything"


def test_with_enough_text_something_is_fitted(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "ENOUGH", 1)
    engine = Engine(tiny_engine.backend, tiny_engine.tokenizer, tiny_engine.context, Tuning(COSTS))
    found = calibrate(engine, [[5, 6, 7]], max_tokens=12)
    assert found.calibration != Tuning(COSTS).calibration
    assert found.costs == COSTS
