"""Which policies are compared, and what their figures mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bitmtp.backends.base import Output, Row
from bitmtp.benchmark.policies import Settings, compare
from bitmtp.core.policies import make_policy
from bitmtp.engine import Engine, Request
from bitmtp.errors import RequestError


def test_every_policy_with_every_block_size() -> None:
    names = ("speculative", "auto", "confidence", "hybrid")
    drafting = [make_policy(name, 8, block_size=size) for name in names for size in (4, 8)]
    assert Settings(block_sizes=(4, 8)).policies(8) == [make_policy("autoregressive", 8), *drafting]


def test_autoregressive_decoding_always_takes_part() -> None:
    assert [policy.name for policy in Settings(names=("hybrid",)).policies(8)] == ["autoregressive", "hybrid"]


@pytest.mark.parametrize(
    "settings",
    [Settings(block_sizes=(9,)), Settings(names=("guess",))],
)
def test_settings_without_meaning_are_refused(settings: Settings) -> None:
    with pytest.raises(RequestError):
        settings.policies(8)


def test_figures_are_those_of_the_texts(tiny_model: Path) -> None:
    engine = Engine.load(tiny_model, backend="reference")
    prompts = [engine.tokenizer.encode(text) for text in ("Hello", "Why not?")]
    policies = Settings(names=("speculative", "confidence"), block_sizes=(4,)).policies(16)
    policies[2] = make_policy("confidence", 16, block_size=4, tau=0.1)
    ticks: list[None] = []
    figures = compare(engine, prompts, policies, max_tokens=12, rounds=2, tick=lambda: ticks.append(None))
    assert len(ticks) == 2 * len(prompts) * len(policies)
    texts = [[engine.generate(Request(prompt, 12, policy)) for prompt in prompts] for policy in policies]
    for each, results in zip(figures, texts, strict=True):
        assert each.tokens == 2 * sum(result.num_tokens - 1 for result in results)
        iterations = sum(sum(result.acceptance_histogram) for result in results)
        assert each.tokens_per_iteration == pytest.approx(each.tokens / 2 / iterations)
        differing = [i for i, result in enumerate(results) if result.token_ids != texts[0][i].token_ids]
        assert list(each.mismatches) == differing
    assert figures[0].ratio == 1
    assert figures[1].ratio == pytest.approx(figures[1].tokens_per_second / figures[0].tokens_per_second)
    assert not figures[1].mismatches


def test_graphs_are_counted_with_the_passes_they_run(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(tiny_model, backend="reference")
    policies, prompts = Settings(names=("speculative",)).policies(16), [engine.tokenizer.encode("Hello")]
    plain = compare(engine, prompts, policies, max_tokens=8, rounds=1)
    backend: Any = engine.backend
    step, backend.graph_replays = backend.step, 0

    def replay(rows: Sequence[Row], **options: Any) -> list[Output | None]:
        backend.graph_replays += all(row.head for row in rows)  # prompts are not replayed
        return step(rows, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(backend, "step", replay)
    graphed = compare(engine, prompts, policies, max_tokens=8, rounds=1)
    assert [each.graph_replays for each in plain] == [0, 0]
    assert [each.graph_replays for each in graphed] == [round(each.tokens / each.tokens_per_pass) for each in graphed]
    assert [each.digest for each in graphed] == [each.digest for each in plain]
