"""The ladder of the runtime: what is run on each rung, and that a text which differs is seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bitmtp.backends.cuda.runtime import Runtime
from bitmtp.benchmark.ablation import BLOCK_SIZES, NAMES, ablate, changed
from bitmtp.benchmark.policies import Settings
from bitmtp.engine import Engine
from bitmtp.errors import RequestError


@pytest.fixture
def engine(tiny_model: Path) -> Engine:
    return Engine.load(tiny_model, backend="reference")


def test_every_rung_runs_every_policy(engine: Engine) -> None:
    engine.backend.runtime = Runtime.RESIDENT  # type: ignore[attr-defined]
    seen: list[Runtime] = []
    policies = Settings(NAMES, (2, 4)).policies(16)
    prompts = [engine.tokenizer.encode("Hello")]
    rungs = ablate(
        engine, prompts, policies, max_tokens=6, rounds=1, tick=lambda: seen.append(engine.backend.runtime)  # type: ignore[attr-defined]
    )  # fmt: skip
    assert seen == [runtime for runtime in Runtime for _ in policies]
    assert engine.backend.runtime is Runtime.RESIDENT  # type: ignore[attr-defined]
    assert [rung.runtime for rung in rungs] == list(Runtime)
    assert [each.policy.block_size for each in rungs[0].figures] == [1, 2, 4]
    assert rungs[0].baseline == rungs[0].figures[0].tokens_per_second
    assert changed(rungs) == []

    broken = replace(rungs[2], figures=[*rungs[2].figures[:2], replace(rungs[2].figures[2], digest="other")])
    assert changed([*rungs[:2], broken, *rungs[3:]]) == [(Runtime.GRAPHS, policies[2])]


def test_other_backends_have_no_such_runtime(engine: Engine) -> None:
    with pytest.raises(RequestError, match="--backend cuda"):
        ablate(engine, [[5]], Settings(NAMES, BLOCK_SIZES).policies(16), max_tokens=4, rounds=1)


def test_lossy_texts_are_compared_with_their_own(engine: Engine) -> None:
    engine.backend.runtime = Runtime.RESIDENT  # type: ignore[attr-defined]
    policies = Settings(("confidence",), (8,)).policies(16)
    rungs = ablate(engine, [engine.tokenizer.encode("Hello")], policies, max_tokens=12, rounds=1)
    assert changed(rungs) == []
