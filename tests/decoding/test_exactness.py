"""Whatever shapes a text's passes take, it is the autoregressive text: on tiny models, and on the one that ships."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from conftest import END, backend_or_skip, random_checkpoint, tiny_config, why_unavailable
from shapes import RandomShaper

from bitmtp.backends.base import Backend, Row, Window
from bitmtp.decoding.chooser import AdaptiveShaper
from bitmtp.decoding.costs import CostTable, Tuning, measure_costs
from bitmtp.decoding.decoder import Decoder, advance
from bitmtp.decoding.policies import make_policy
from bitmtp.decoding.policy import Policy, Verify
from bitmtp.decoding.shaper import Shaper
from bitmtp.decoding.state import State
from bitmtp.decoding.topology import spine, tree
from bitmtp.engine import Engine, Request
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
CHEAP = Tuning(CostTable((1, 64), (3.0, 3.5)))
POLICIES = {
    "speculative": make_policy("speculative", 16, block_size=16, verify_bound=0.0),
    "hybrid, never sure enough": make_policy("hybrid", 16, tau=1.0, min_prefix=8),
    "spine": Policy("spine", 8, Verify.ALWAYS, topology=spine(6, (0, 2, 2, 1))),
    "tree": Policy("tree", 16, Verify.ALWAYS, topology=tree("t", [(0,) * 9, (0, 1, 0, 0), (0, 0, 1), (0, 2)])),
    "window": Policy("window", 8, Verify.ALWAYS, window=Window(1, 3)),
    "window and tree": Policy("both", 8, Verify.ALWAYS, window=Window(2, 4), topology=spine(4, (2, 1, 1))),
}


def write(
    backend: Backend, prompt: Sequence[int], sampling: Sampling, policy: Policy, shaper: Shaper | None = None
) -> list[int]:
    """The ids of a text of up to 24 tokens."""
    state = State(backend.open(), sampling, list(prompt), len(prompt))
    decoder = Decoder(state, policy, len(prompt) + 24, frozenset({END}), shaper=shaper)
    decoder.start(backend)
    while decoder.finish is None:
        advance(backend, [decoder])
    backend.close(state.sequence)
    return state.committed[len(prompt) :]


@pytest.fixture(params=[{}, {"chain_rank": 4}, {"drafter": "medusa"}], ids=["plain", "chain", "medusa"])
def backend(request: pytest.FixtureRequest, backend_name: str) -> Backend:
    return backend_or_skip(backend_name, random_checkpoint(tiny_config(**request.param), seed=3))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_shape_gives_the_same_text(backend: Backend, sampling: str) -> None:
    prompt, chosen = [5, 9, 44, 17, 80, 9], SAMPLINGS[sampling]
    baseline = write(backend, prompt, chosen, AUTOREGRESSIVE)
    for name, policy in POLICIES.items():
        assert write(backend, prompt, chosen, policy) == baseline, name
    auto = make_policy("auto", 16)
    assert write(backend, prompt, chosen, auto, AdaptiveShaper(auto, CHEAP)) == baseline
    for seed in range(3):
        assert write(backend, prompt, chosen, auto, RandomShaper(seed)) == baseline, seed


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
    texts = []
    shapers: list[Shaper | None] = [None, AdaptiveShaper(make_policy("auto", 16), CHEAP), *map(RandomShaper, range(3))]
    for shaper in shapers:
        prompt = [5, 9, 44]
        state = State(backend.open(), SAMPLINGS[sampling], prompt.copy(), len(prompt), grammar=Odd())
        policy = AUTOREGRESSIVE if shaper is None else make_policy("auto", 16)
        decoder = Decoder(state, policy, 20, frozenset(), shaper=shaper)
        decoder.start(backend)
        while decoder.finish is None:
            advance(backend, [decoder])
        texts.append(state.committed)
    assert all(text == texts[0] for text in texts)
    assert all(token % 2 for token in texts[0][3:])


def test_the_adaptive_policy_measures_what_it_needs(tiny_engine: Engine) -> None:
    request = Request("The harbour", 20, AUTOREGRESSIVE, SAMPLINGS["temperature 1"], seed=3)
    auto = Request("The harbour", 20, make_policy("auto", 16), SAMPLINGS["temperature 1"], seed=3)
    assert tiny_engine.generate(auto).token_ids == tiny_engine.generate(request).token_ids
    assert tiny_engine.tuning is tiny_engine.tuning, "once"


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
        for shaper in (AdaptiveShaper(make_policy("auto", 16), CHEAP), RandomShaper(number)):
            assert write(engine.backend, prompt, sampling, make_policy("auto", 16), shaper) == baseline
