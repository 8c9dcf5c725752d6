"""The CPU backend's resident loop beside the host-driven loop: same tokens, same sources, same figures, wherever it is
left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from conftest import END, backend_or_skip, make_engine, random_checkpoint, tiny_config, why_unavailable
from hypothesis import given, settings
from hypothesis import strategies as st

from bitmtp.backends.base import Backend
from bitmtp.backends.cpu import backend as cpu
from bitmtp.decoding.chooser import AdaptiveShaper
from bitmtp.decoding.costs import Calibration, CostTable, Tuning
from bitmtp.decoding.decoder import Decoder, Token, advance
from bitmtp.decoding.policies import make_policy
from bitmtp.decoding.policy import Policy, Verify
from bitmtp.decoding.resident import can_reside, decode_resident
from bitmtp.decoding.state import State
from bitmtp.engine import Engine, Request, Result
from bitmtp.sampling import Sampling

pytestmark = pytest.mark.skipif(bool(why_unavailable("cpu")), reason=why_unavailable("cpu") or "")

CONTEXT = 320
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chain": {"chain_rank": 4},
    "medusa": {"drafter": "medusa"},
    "largest block": {"block_size": 32},
}
TIMES = {"ttft_ms", "tpot_ms", "tokens_per_second"}


@cache
def backend_of(model: str) -> Backend:
    made = random_checkpoint(tiny_config(max_position=CONTEXT, vocab_size=40, **MODELS[model]), seed=len(model))
    return backend_or_skip("cpu", made)


@dataclass(frozen=True)
class Text:
    """What a decoder is made of."""

    model: str
    policy: Policy
    sampling: Sampling
    prompt: tuple[int, ...]
    room: int
    eos_ids: frozenset[int]

    def begin(self) -> Decoder:
        state = State(backend_of(self.model).open(), self.sampling, list(self.prompt), len(self.prompt))
        decoder = Decoder(state, self.policy, min(len(self.prompt) + self.room, CONTEXT), self.eos_ids)
        decoder.start(backend_of(self.model))
        return decoder


probabilities = st.one_of(st.sampled_from([0.0, 0.05, 1.0]), st.floats(0, 1))


@st.composite
def policies(draw: st.DrawFn, largest: int) -> Policy:
    block_size = draw(st.integers(1, largest))
    calibration = draw(st.sampled_from([None, Calibration(), Calibration((0.5, 2.0), (2.5, -0.5))]))
    min_prefix, bound = draw(st.integers(1, block_size)), draw(probabilities)
    verify = draw(st.sampled_from(list(Verify)))
    return Policy("any", block_size, verify, draw(probabilities), min_prefix, bound, calibration=calibration)


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    if draw(st.booleans()):
        return Sampling(logit_bias=draw(st.sampled_from([(), ((3, 2.0), (5, -1.0))])))
    return Sampling(
        draw(st.floats(0.2, 4)),
        draw(st.sampled_from([0, 3])),
        draw(st.sampled_from([1.0, 0.8])),
        draw(st.sampled_from([0.0, 0.1])),
        draw(st.integers(0, (1 << 64) - 1)),
    )


@st.composite
def texts(draw: st.DrawFn) -> Text:
    model = draw(st.sampled_from(sorted(MODELS)))
    long = draw(st.integers(1, 8)) == 1
    prompt = draw(st.lists(st.integers(3, 39), min_size=280 if long else 1, max_size=310 if long else 24))
    eos_ids = draw(st.frozensets(st.integers(0, 39), max_size=4))
    policy = draw(policies(backend_of(model).config.block_size))
    return Text(model, policy, draw(samplings()), tuple(prompt), draw(st.integers(1, 70)), eos_ids)


def by_the_host(decoder: Decoder, backend: Backend, iterations: int = 1000) -> list[list[Token]]:
    """So many iterations, or all of them."""
    taken: list[list[Token]] = []
    while decoder.finish is None and len(taken) < iterations:
        committed = advance(backend, [decoder])[0]
        taken += [committed] if committed else []
    return taken


def by_itself(decoder: Decoder, backend: Backend, iterations: int = 1000) -> list[list[Token]]:
    """As :func:`by_the_host`, in the resident loop; what it yields are iterations."""
    if decoder.finish is not None:
        return []
    assert can_reside(backend, decoder)
    taken, running = list[list[Token]](), decode_resident(backend, decoder)
    for batch in running:
        taken.append(batch)
        if len(taken) == iterations:
            break
    running.close()
    return taken


def check_same(ours: Decoder, host: Decoder, backend: Backend) -> None:
    assert ours.finish == host.finish
    assert ours.stats == host.stats
    assert ours.state.committed == host.state.committed
    assert ours.state.materialized == host.state.materialized
    assert backend.length(ours.state.sequence) == backend.length(host.state.sequence) == host.state.materialized


@settings(max_examples=300)
@given(texts())
def test_the_resident_loop_is_the_host_loop(text: Text) -> None:
    backend, ours, host = backend_of(text.model), text.begin(), text.begin()
    assert by_itself(ours, backend) == by_the_host(host, backend)
    check_same(ours, host, backend)
    for decoder in (ours, host):
        backend.close(decoder.state.sequence)


@settings(max_examples=200)
@given(texts(), st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=6))
def test_it_may_be_left_and_begun_anywhere(text: Text, turns: list[tuple[bool, int]]) -> None:
    """The loops take turns in one text, which is compared wherever they meet."""
    backend, ours, host = backend_of(text.model), text.begin(), text.begin()
    for resident, iterations in [*turns, (True, 1000)]:
        run = by_itself if resident else by_the_host
        assert run(ours, backend, iterations) == by_the_host(host, backend, iterations)
        check_same(ours, host, backend)
    for decoder in (ours, host):
        backend.close(decoder.state.sequence)


@pytest.mark.parametrize("frame", [0.0, 0.3, 1e6])
def test_how_many_iterations_a_call_runs_does_not_matter(frame: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_FRAME", frame)
    policy = make_policy("speculative", 16, block_size=6)
    text = Text("chain", policy, Sampling(1.0, seed=4), tuple(range(3, 20)), 200, frozenset())
    backend, ours, host = backend_of("chain"), text.begin(), text.begin()
    assert by_itself(ours, backend, 7) == by_the_host(host, backend, 7)
    check_same(ours, host, backend)
    assert by_itself(ours, backend) == by_the_host(host, backend)
    check_same(ours, host, backend)


class Interrupted:
    """A model whose second call is interrupted as it returns."""

    def __init__(self, model: Any) -> None:
        self._model, self._calls = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def iterate(self, *arguments: Any) -> Any:
        iterations, self._calls = self._model.iterate(*arguments), self._calls + 1
        if self._calls == 2:
            raise KeyboardInterrupt
        return iterations


def test_an_interrupt_forgets_what_nobody_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy("speculative", 16, block_size=6)
    text = Text("plain", policy, Sampling(), tuple(range(3, 20)), 200, frozenset())
    backend, ours, host = cast(Any, backend_of("plain")), text.begin(), text.begin()
    monkeypatch.setattr(backend, "_model", Interrupted(backend._model))
    with pytest.raises(KeyboardInterrupt):
        by_itself(ours, backend)
    by_the_host(host, backend, 1)
    check_same(ours, host, backend)
    assert by_itself(ours, backend) == by_the_host(host, backend)


def test_what_stays_with_the_host() -> None:
    backend = backend_of("plain")
    policy = make_policy("auto", 16)
    adaptive = Text("plain", policy, Sampling(), (5, 6), 20, frozenset()).begin()
    adaptive.shaper = AdaptiveShaper(policy, Tuning(CostTable((1, 64), (1.0, 2.0))))
    assert not can_reside(backend, adaptive)
    ended = Text("plain", make_policy("speculative", 16), Sampling(), (5, 6), 20, frozenset(range(17))).begin()
    assert not can_reside(backend, ended)


# Through the engine


@pytest.fixture(scope="module")
def engine(tokenizer_folder: Path) -> Engine:
    return make_engine("cpu", random_checkpoint(tiny_config(chain_rank=4)), tokenizer_folder)


def timeless(result: Result) -> Result:
    return replace(result, **dict.fromkeys(TIMES, 0.0))


def request_of(policy: str, stop: Sequence[str] = (), **options: Any) -> Request:
    return Request("the cat", 60, make_policy(policy, 16, **options), Sampling(1.0, seed=9), stop=tuple(stop))


@pytest.mark.parametrize("policy", ["autoregressive", "speculative", "confidence", "hybrid"])
def test_a_stop_string_cuts_text_and_figures(engine: Engine, policy: str) -> None:
    options = {"verify_bound": 0.0} if policy in ("speculative", "hybrid") else {}
    options |= {"tau": 0.02} if policy in ("confidence", "hybrid") else {}
    whole = engine.generate(request_of(policy, **options))
    for at in range(len(whole.text) - 2):
        request = request_of(policy, [whole.text[at : at + 3]], **options)
        assert timeless(engine.generate(request)) == timeless(engine.generate_batch([request])[0])


def test_what_a_stop_string_held_back_is_shown_at_the_end(engine: Engine) -> None:
    whole = engine.generate_batch([request_of("speculative")])[0]
    request = request_of("speculative", [whole.text[-1] + "never"])
    assert engine.generate(request).text == whole.text


def test_leaving_a_stream_counts_what_was_taken(engine: Engine) -> None:
    request = replace(request_of("speculative"), sampling=Sampling(logit_bias=((END, -1e9),)))
    with engine.session() as session:
        generation = session.generate(request)
        for _ in zip(range(20), generation, strict=False):
            pass
        result = generation.result
    whole = engine.generate_batch([request])[0]
    assert result.token_ids == whole.token_ids[: result.num_tokens]
    assert 20 <= result.num_tokens < 40
    assert sum(length * count for length, count in enumerate(result.acceptance_histogram, 1)) == result.num_tokens - 1


def test_a_stream_left_open_does_not_disturb_the_next(engine: Engine) -> None:
    request = replace(request_of("speculative"), sampling=Sampling(logit_bias=((END, -1e9),)))
    whole = engine.generate(request)
    with engine.session() as session:
        left = iter(session.generate(request))
        taken = [next(left).token.id for _ in range(8)]
        again = iter(session.generate(replace(request, prompt=[*engine.encode(request), *taken], max_tokens=52)))
        rest = [next(again).token.id for _ in range(9)]
        del left
        assert [*taken, *rest, *(chunk.token.id for chunk in again)] == whole.token_ids
