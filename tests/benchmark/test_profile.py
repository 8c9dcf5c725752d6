"""The parts of the time to the first token."""

from __future__ import annotations

from pathlib import Path

from bitmtp.benchmark.profile import FirstToken, measure_profile
from bitmtp.engine import Engine


def test_prompts_that_fit_are_measured(tiny_model: Path) -> None:
    backend = Engine.load(tiny_model, backend="reference").backend
    ticks: list[None] = []
    found = measure_profile(backend, context=100, history=8, rounds=1, tick=lambda: ticks.append(None))
    assert found.passes == []
    assert [each.prompt for each in found.first_token] == [64]
    assert len(ticks) == 3
    assert found.first_token[0].sampling is None
    assert found.first_token[0].total > 0


def test_prefill_is_the_rest() -> None:
    assert FirstToken(8, 10.0, 3.0, 0.5).prefill == 6.5
    assert FirstToken(8, 10.0, 3.0, None).prefill == 7
