"""The search, on made-up speeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bitmtp.benchmark.policies import PolicyFigures
from bitmtp.core.policy import Policy
from bitmtp.engine import Engine
from bitmtp.tuning import search as searching
from bitmtp.tuning.search import best, best_threads, candidates, search, texts


def _figures(policy: Policy, ratio: float) -> PolicyFigures:
    return PolicyFigures(policy, 100 * ratio, ratio, 1.0, 1.0, 0.0, 100, (), "", 0)


def _speed(policy: Policy) -> float:
    """Best at D = 6 with a bound of 0.2."""
    if policy.block_size == 1:
        return 1.0
    return 2 - 0.1 * abs(policy.block_size - 6) - abs(policy.verify_bound - 0.2)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts each comparison wrote."""
    seen: list[int] = []

    def compare(_: Any, prompts: Sequence[Any], policies: Sequence[Policy], **options: Any) -> list[PolicyFigures]:
        seen.append(len(prompts) * len(policies) * options["rounds"])
        return [_figures(policy, _speed(policy)) for policy in policies]

    monkeypatch.setattr(searching, "compare", compare)
    return seen


def test_candidates() -> None:
    names = {policy.name for policy in candidates(16, lossy=False)}
    assert names == {"autoregressive", "speculative", "auto"}
    assert all(policy.lossless for policy in candidates(16, lossy=False))
    assert max(policy.block_size for policy in candidates(4, lossy=True)) == 4
    assert {policy.name for policy in candidates(4, lossy=True)} - names == {"confidence", "hybrid"}
    assert [policy.name for policy in candidates(1, lossy=True)] == ["autoregressive"]


def test_finds_the_best(written: list[int], tiny_engine: Engine) -> None:
    policies = candidates(16, lossy=False)
    figures = search(tiny_engine, [[3], [4]], policies, max_tokens=100)
    chosen = best(figures).policy
    assert (chosen.block_size, chosen.verify_bound) == (6, 0.2)
    assert figures[0].policy.name == "autoregressive"
    assert "auto" in {each.policy.name for each in figures}, "it is measured to the end, slow as it may begin"
    assert sum(written) == texts(len(policies), 2)
    assert written[0] > written[1]


def test_says_when_drafting_does_not_pay() -> None:
    plain, drafting = candidates(4, lossy=False)[:2]
    assert best([_figures(plain, 1.0), _figures(drafting, 0.9)]).policy is plain
    assert best([_figures(plain, 1.0), _figures(drafting, 1.01)]).policy is plain
    assert best([_figures(plain, 1.0), _figures(drafting, 1.3)]).policy is drafting
    assert best([_figures(plain, 1.0)]).policy is plain


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clockwork:
        """An engine whose texts take as long as it says."""

        now = 0.0

        def __init__(self, seconds: float) -> None:
            self._seconds = seconds

        def generate(self, _: object) -> None:
            Clockwork.now += self._seconds

    monkeypatch.setattr(searching.time, "perf_counter", lambda: Clockwork.now)
    seconds = {4: 2.0, 2: 1.0, 1: 3.0}
    load: Any = {count: Clockwork(each) for count, each in seconds.items()}.__getitem__
    assert best_threads(load, [4, 2, 1], [[1]], max_tokens=4)[0] == 2
    assert best_threads(load, [1], [[1]], max_tokens=4)[0] == 1
