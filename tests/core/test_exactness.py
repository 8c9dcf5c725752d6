"""Whatever shapes a text's passes take, it is the autoregressive text: on tiny models, and on the one that ships."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from conftest import END, backend_or_skip, random_checkpoint, tiny_config, why_unavailable
from texts import CHEAP, DEAR, make_text, written

from bitmtp.backends.base import Backend, Row, Window
from bitmtp.core.costs import Tuning, measure_costs
from bitmtp.core.policies import make_policy
from bitmtp.core.policy import Policy, Verify
from bitmtp.core.topology import chain, spine, tree, with_block
from bitmtp.engine import Engine
from bitmtp.numerics import UInt32
from bitmtp.sampling import Sampling

NO_END = ((END, -1e9),)  # keeps a random model from ending its text early
SAMPLINGS = {
    "greedy": Sampling(logit_bias=NO_END),
    "temperature 1": Sampling(1.0, seed=7, logit_bias=NO_END),
    "hot, may end": Sampling(3.0, seed=8),
    "penalties, top-p": Sampling(1.0, top_p=0.9, seed=9, repetition_penalty=1.2, frequency_penalty=0.3),
}
AUTOREGRESSIVE = make_policy("autoregressive", 16)
POLICIES = {
    "speculative": make_policy("speculative", 16, block_size=16, verify_bound=0.0),
    "hybrid, never sure enough": make_policy("hybrid", 16, tau=1.0, min_prefix=8),
    "spine": Policy("spine", 8, Verify.ALWAYS, topology=spine(6, (0, 2, 2, 1))),
    "tree": Policy("tree", 16, Verify.ALWAYS, topology=tree("t", [(0,) * 9, (0, 1, 0, 0), (0, 0, 1), (0, 2)])),
    "window": Policy("window", 8, Verify.ALWAYS, window=Window(1, 3)),
    "fused": Policy("fused", 16, Verify.ALWAYS, topology=with_block(chain(5), 4, 6)),
    "fused tree": Policy("fused", 16, Verify.ALWAYS, topology=with_block(spine(4, (0, 2, 1)), 2, 8)),
    "auto": make_policy("auto", 16),
    "window and tree": Policy("both", 8, Verify.ALWAYS, window=Window(2, 4), topology=spine(4, (2, 1, 1))),
}


def write(
    backend: Backend, prompt: Sequence[int], sampling: Sampling, policy: Policy, tuning: Tuning = CHEAP
) -> list[int]:
    """The ids of a text of up to 24 tokens."""
    text = make_text(backend, prompt, policy, 24, sampling=sampling, eos=frozenset({END}), tuning=tuning)
    (ids,) = written(backend, text, tuning=tuning)
    backend.close(text.sequence)
    return ids


@pytest.fixture(params=[{}, {"chain_rank": 4}, {"drafter": "medusa"}], ids=["plain", "chain", "medusa"])
def backend(request: pytest.FixtureRequest, backend_name: str) -> Backend:
    return backend_or_skip(backend_name, random_checkpoint(tiny_config(**request.param), seed=3))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_shape_gives_the_same_text(backend: Backend, sampling: str) -> None:
    prompt, chosen = [5, 9, 44, 17, 80, 9], SAMPLINGS[sampling]
    baseline = write(backend, prompt, chosen, AUTOREGRESSIVE)
    for name, policy in POLICIES.items():
        assert write(backend, prompt, chosen, policy) == baseline, name
    assert write(backend, prompt, chosen, make_policy("auto", 16), DEAR) == baseline


class Odd:
    """A grammar: odd ids only, and the fifth token ends it all but one."""

    def __init__(self) -> None:
        self.text: list[int] = []

    def allowed(self, path: Sequence[int]) -> UInt32 | None:
        if self.accepts(path) < len(path):
            return None
        return np.full(10, 0x2 if len(self.text) + len(path) == 5 else 0xAAAAAAAA, np.uint32)

    def accepts(self, path: Sequence[int]) -> int:
        fits = [
            token % 32 == 1 if place == 5 else token % 2 == 1 for place, token in enumerate(path, start=len(self.text))
        ]
        return [*fits, False].index(False)

    def commit(self, tokens: Sequence[int]) -> None:
        self.text += tokens


@pytest.mark.parametrize("sampling", ["greedy", "penalties, top-p"])
def test_under_a_grammar(backend: Backend, sampling: str) -> None:
    prompt, texts = [5, 9, 44], []
    for policy in (AUTOREGRESSIVE, *POLICIES.values()):
        text = make_text(backend, prompt, policy, 17, sampling=SAMPLINGS[sampling], grammar=Odd())
        texts += written(backend, text)
    assert all(text == texts[0] for text in texts)
    assert all(token % 2 for token in texts[0])


def test_texts_with_and_without_a_grammar_share_passes(backend: Backend) -> None:
    prompt, alone = [5, 9, 44], []
    for shared in (False, True):
        texts = [
            make_text(backend, prompt, policy, 17, sampling=sampling, grammar=Odd() if guarded else None)
            for policy in (POLICIES["auto"], POLICIES["speculative"])
            for sampling in SAMPLINGS.values()
            for guarded in (False, True)
        ]
        alone.append(written(backend, *texts) if shared else [ids for each in texts for ids in written(backend, each)])
    assert alone[0] == alone[1]


def test_a_given_tuning_is_not_measured_again(tiny_engine: Engine) -> None:
    assert Engine(tiny_engine.backend, tiny_engine.tokenizer, tiny_engine.context, CHEAP).tuning is CHEAP


def test_costs_grow_with_the_width(backend: Backend) -> None:
    table = measure_costs(backend, 512)
    assert table.widths[0] == 1
    assert table.cost(24, 16) > table.cost(1, 16) > 0
    assert measure_costs(backend, 30).widths[-1] <= 14, "no pass beyond the context"
    assert measure_costs(backend, 2).widths == (1,)


class Slow:
    """A backend whose passes take a millisecond a row, by its own clock."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.config, self.rows = backend.config, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def time_step(self, rows: Sequence[Row]) -> float:
        self.rows.append(len(rows))
        return float(len(rows))


def test_wide_passes_that_cost_too_much_are_timed_once(backend: Backend) -> None:
    slow = Slow(backend)
    table = measure_costs(cast(Backend, slow), 512)
    assert table.widths == table.milliseconds == (1, 2, 3, 4, 5, 8, 64)
    assert slow.rows.count(64) == slow.rows.count(9) == 1 < slow.rows.count(5)


PROMPTS = ("def is_prime(n):\n", "Once upon a time there was a fox who")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_shipped_model_too(temperature: float) -> None:
    if reason := why_unavailable("cpu"):
        pytest.skip(reason)
    engine = Engine.load(backend="cpu")
    for number, text in enumerate(PROMPTS):
        prompt, sampling = engine.tokenizer.encode(text), Sampling(temperature, seed=number)
        baseline = write(engine.backend, prompt, sampling, AUTOREGRESSIVE)
        for policy in POLICIES.values():
            assert write(engine.backend, prompt, sampling, policy) == baseline
