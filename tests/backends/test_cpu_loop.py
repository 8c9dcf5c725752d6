"""The CPU backend's own loop: passes of many texts in C++, as the host would drive them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import (
    END,
    HostDriven,
    backend_or_skip,
    make_engine,
    random_checkpoint,
    random_tokens,
    tiny_config,
    why_unavailable,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitmtp.backends.base import Backend
from bitmtp.core.costs import CostTable, Tuning
from bitmtp.core.policies import make_policy
from bitmtp.core.policy import Policy, Verify
from bitmtp.core.text import Text
from bitmtp.core.topology import spine
from bitmtp.engine import Engine, Request
from bitmtp.loop import Loop
from bitmtp.sampling import Sampling

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from shapes import policies
from texts import CHEAP, make_text

pytestmark = pytest.mark.skipif(why_unavailable("cpu") is not None, reason=str(why_unavailable("cpu")))
SAMPLINGS = [
    Sampling(),
    Sampling(1.0, seed=3),
    Sampling(0.9, top_k=20, top_p=0.9, seed=4),
    Sampling(1.0, seed=5, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias=((END, -1e9), (40, 2.0))),
]
POLICIES = [
    make_policy("autoregressive", 16),
    make_policy("speculative", 16, block_size=16, verify_bound=0.0),
    make_policy("auto", 16),
    make_policy("hybrid", 16, tau=0.3),
    make_policy("confidence", 16, tau=0.05),
    Policy("spine", 8, Verify.ALWAYS, topology=spine(6, (0, 2, 2, 1))),
]
FIGURES = ("passes", "iterations", "num_spec_steps", "proposed", "accepted", "copied", "lengths")


@pytest.fixture(scope="module")
def backend() -> Backend:
    return backend_or_skip("cpu", random_checkpoint(tiny_config(chain_rank=4), seed=3))


def prompts(backend: Backend, count: int) -> list[list[int]]:
    luck = np.random.default_rng(1)
    return [random_tokens(luck, int(luck.integers(1, 90)), backend.config) for _ in range(count)]


def finish(backend: Any, texts: Sequence[Text], milliseconds: float) -> list[Any]:
    """Tokens and figures of texts that share passes."""
    loop, order = Loop(backend, CHEAP.costs.core()), list(texts)
    tokens: dict[int, list[Any]] = {id(text): [] for text in texts}
    while any(text.finish is None for text in texts):
        order = loop.run(order, milliseconds)
        for text in texts:
            while taken := text.take():
                tokens[id(text)] += taken
    return [(tokens[id(text)], [getattr(text.stats, name) for name in FIGURES]) for text in texts]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "filtered", "penalised"])
def test_a_text_is_the_one_that_the_host_would_write(backend: Backend, policy: Policy, sampling: Sampling) -> None:
    for prompt in prompts(backend, 2):
        host = make_text(backend, prompt, policy, 40, sampling=sampling, eos=frozenset({END}))
        own = make_text(backend, prompt, policy, 40, sampling=sampling, eos=frozenset({END}))
        assert finish(HostDriven(backend), [host], 0.0) == finish(backend, [own], 5.0)
        assert own.finish is host.finish
        assert backend.length(own.sequence) == own.core.materialized


PROMPT = st.lists(st.integers(10, 90), min_size=1, max_size=70)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    PROMPT, policies(largest=16) | policies(lossless=True, largest=16), st.sampled_from(SAMPLINGS), st.integers(1, 50)
)
def test_any_text_is_the_one_that_the_host_would_write(
    backend: Backend, prompt: list[int], policy: Policy, sampling: Sampling, room: int
) -> None:
    made = [make_text(backend, prompt, policy, room, sampling=sampling, eos=frozenset({END})) for _ in range(2)]
    assert finish(HostDriven(backend), made[:1], 0.0) == finish(backend, made[1:], 5.0)
    for text in made:
        backend.close(text.sequence)


def test_many_texts_are_each_alone(backend: Backend) -> None:
    asked = [(p, policy, s) for p, policy in zip(prompts(backend, 6), POLICIES, strict=True) for s in SAMPLINGS]
    alone = [finish(backend, [make_text(backend, p, policy, 30, sampling=s)], 5.0)[0] for p, policy, s in asked]
    together = finish(backend, [make_text(backend, p, policy, 30, sampling=s) for p, policy, s in asked], 5.0)
    ids = [[[token.id for token in tokens] for tokens, _ in each] for each in (together, alone)]
    assert ids[0] == ids[1]


def test_log_probabilities_ride_along(backend: Backend) -> None:
    for policy in POLICIES[:4]:
        prompt = prompts(backend, 1)[0]
        (host, _), *_ = finish(HostDriven(backend), [make_text(backend, prompt, policy, 20, top=5)], 0.0)
        (own, _), *_ = finish(backend, [make_text(backend, prompt, policy, 20, top=5)], 5.0)
        assert [token.id for token in own] == [token.id for token in host]
        for mine, theirs in zip(own, host, strict=True):
            assert mine.logprobs is not None
            assert theirs.logprobs is not None
            assert mine.logprobs.chosen == pytest.approx(theirs.logprobs.chosen, abs=1e-5)
            assert [token for token, _ in mine.logprobs.top] == [token for token, _ in theirs.logprobs.top]


def test_log_probabilities_of_many_texts_are_those_of_each_alone(backend: Backend) -> None:
    asked = list(zip(prompts(backend, 4), POLICIES, SAMPLINGS, strict=False))
    alone = [finish(backend, [make_text(backend, p, policy, 20, sampling=s, top=4)], 5.0)[0] for p, policy, s in asked]
    texts = [make_text(backend, p, policy, 20, sampling=s, top=4) for p, policy, s in asked]
    for (together, _), (single, _) in zip(finish(backend, texts, 5.0), alone, strict=True):
        assert [(token.id, token.logprobs) for token in together] == [(token.id, token.logprobs) for token in single]


def test_a_first_token_is_heard_of_at_once(backend: Backend) -> None:
    first, second = (make_text(backend, p, POLICIES[1], 400) for p in prompts(backend, 2))
    loop = Loop(backend, CHEAP.costs.core())
    while not first.begun:
        loop.run([first], 1e6)
        first.take()
    loop.run([first, second], 1e6)
    assert second.take()
    assert first.core.status == 0, "it did not run to its end meanwhile"


def test_a_run_is_bounded(backend: Backend) -> None:
    text = make_text(backend, [5, 6], POLICIES[0], 400)
    loop = Loop(backend, CHEAP.costs.core())
    for _ in range(3):
        loop.run([text], 0.0)
        assert len(loop.widths) == 1
    assert loop.milliseconds["exact"] > 0


class Interrupted:
    """A model whose run is interrupted as it returns."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def run(self, *arguments: Any) -> Any:
        self._model.run(*arguments)
        raise KeyboardInterrupt


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_an_interrupt_leaves_a_text_that_can_go_on(
    backend: Backend, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, own = (make_text(backend, [5, 6, 7], policy, 60) for _ in range(2))
    loop = Loop(backend, CHEAP.costs.core())
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_model", Interrupted(backend._model))  # type: ignore[attr-defined]
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                loop.run([own])
    assert backend.length(own.sequence) == own.core.materialized
    assert finish(backend, [own], 5.0) == finish(HostDriven(backend), [host], 0.0)


@pytest.fixture
def engine(tokenizer_folder: Path) -> Engine:
    made = make_engine("cpu", random_checkpoint(tiny_config()), tokenizer_folder)
    return Engine(made.backend, made.tokenizer, made.context, Tuning(CostTable((1, 64), (3.0, 30.0))))


@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_a_stream_that_is_left_stands_where_it_was_heard(engine: Engine, count: int) -> None:
    request = Request([5, 9, 44], 200, make_policy("speculative", 16, verify_bound=0.0), Sampling(1.0), seed=3)
    whole = engine.generate(request)
    with engine.session() as session:
        generation = session.generate(request)
        heard = [chunk.token.id for _, chunk in zip(range(count), generation, strict=False)]
        generation.leave()
        assert generation.result.token_ids[: len(heard)] == heard == whole.token_ids[:count]
        again = session.generate(request)
        assert [chunk.token.id for chunk in again] == whole.token_ids


def test_texts_that_are_left_are_freed(engine: Engine) -> None:
    request = Request([5, 9, 44], 400, seed=3)
    for _ in range(20):
        next(iter(engine.stream(request)))
    gc.collect()
    assert engine.backend.describe()["kv bytes"] == "0"


def test_a_pass_that_fails_leaves_texts_as_they_were(backend: Backend) -> None:
    text = make_text(backend, [5, 6, 7], POLICIES[0], 20)
    text.core.sequence = 10_000
    loop = Loop(backend, CHEAP.costs.core())
    with pytest.raises(ValueError, match="is not open"):
        loop.run([text])
    text.core.sequence = text.sequence
    assert finish(backend, [text], 0.0)[0][0]
