"""What tune finds out about drafts."""

from __future__ import annotations

import json

import pytest

from bitmtp.core.costs import CostTable, Tuning
from bitmtp.core.topology import Topology
from bitmtp.engine import Engine
from bitmtp.tuning import drafts
from bitmtp.tuning.drafts import study_drafts, tree_table

COSTS = CostTable((1, 2, 8, 16), (3.7, 4.4, 7.4, 13.2))


def test_study_of_a_tiny_model(tiny_engine: Engine) -> None:
    engine = Engine(tiny_engine.backend, tiny_engine.tokenizer, tiny_engine.context, Tuning(COSTS))
    ticks: list[None] = []
    found = study_drafts(engine, [[5, 6, 7], [8, 9], [10]], max_tokens=12, tick=lambda: ticks.append(None))
    assert len(ticks) == 5, "three greedy texts and two sampled ones"
    assert found.tuning == Tuning(COSTS), "too little was seen to fit anything"
    assert all(0 <= share <= 1 for row in found.acceptance for share in row)
    assert [each.milliseconds for each in found.trees] == sorted(each.milliseconds for each in found.trees)
    kept = tree_table(found.trees)
    assert Topology.from_json(json.dumps(kept[0]["topology"])) == found.trees[0].topology


def test_with_enough_text_something_is_fitted(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "ENOUGH", 1)
    engine = Engine(tiny_engine.backend, tiny_engine.tokenizer, tiny_engine.context, Tuning(COSTS))
    found = study_drafts(engine, [[5, 6, 7]], max_tokens=12)
    assert found.tuning.calibration != Tuning(COSTS).calibration
    assert found.tuning.costs == COSTS
