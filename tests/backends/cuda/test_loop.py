"""A text's loop on the card beside the host-driven text: the same tokens and figures, wherever it is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import END, HostDriven, make_engine, random_checkpoint, random_tokens, tiny_config

from bitmtp.backends.base import MAX_WIDTH, Window
from bitmtp.core import _core
from bitmtp.core.costs import CostTable, Tuning
from bitmtp.core.policies import make_policy
from bitmtp.core.policy import Policy, Verify
from bitmtp.core.text import Finish, Text
from bitmtp.core.topology import spine
from bitmtp.engine import Engine, Request
from bitmtp.loop import Loop
from bitmtp.sampling import Sampling

sys.path.insert(0, str(Path(__file__).parents[2] / "core"))
from texts import make_text

BACKEND = "cuda"
STEPS = Tuning(
    CostTable((1, 2, 4, 8, 9, 16, 17, 32, 33, 64), (0.311, 0.317, 0.32, 0.33, 0.37, 0.38, 0.47, 0.48, 0.7, 0.71))
)
DEAR = Tuning(CostTable((1, 2, 64), (3.013, 5.017, 191.1), per_position=(0.0013, 0.00017)))
POLICIES = {
    "autoregressive": (make_policy("autoregressive", 16), STEPS),
    "speculative 4": (make_policy("speculative", 16, block_size=4), STEPS),
    "speculative 16": (make_policy("speculative", 16, block_size=16, verify_bound=0.0), STEPS),
    "confidence": (make_policy("confidence", 16, block_size=6, tau=0.05), STEPS),
    "hybrid": (make_policy("hybrid", 16, block_size=6, tau=0.3, min_prefix=2), STEPS),
    "auto 1": (make_policy("auto", 16, block_size=1), STEPS),
    "auto 5": (make_policy("auto", 16, block_size=5), STEPS),
    "auto 16": (make_policy("auto", 16), STEPS),
    "auto 16, dear": (make_policy("auto", 16), DEAR),
}
AUTOREGRESSIVE, SPECULATIVE, AUTO = (POLICIES[name][0] for name in ("autoregressive", "speculative 16", "auto 16"))
SAMPLINGS = {
    "greedy": Sampling(),
    "temperature 1": Sampling(1.0, seed=3),
    "top-p": Sampling(0.8, top_p=0.9, seed=4),
    "biased": Sampling(logit_bias=((40, 2.0), (41, -3.0))),
}
NO_END = ((END, -1e9),)  # keeps a random model from ending its text early
FIGURES = ("passes", "iterations", "num_spec_steps", "proposed", "accepted", "copied", "lengths")


@pytest.fixture(scope="module")
def engine(gpu: Any, tokenizer_folder: Path) -> Engine:  # noqa: ARG001  (`gpu` skips where there is none)
    made = random_checkpoint(tiny_config(chain_rank=4, max_position=2048))
    return make_engine(BACKEND, made, tokenizer_folder)


@pytest.fixture
def backend(engine: Engine) -> Any:
    return engine.backend


def text_for(backend: Any, prompt: Sequence[int], policy: Policy, room: int, **options: Any) -> Text:
    """A text that draws no more than the card does: under `auto` the host alone may do with trees and windows."""
    text = make_text(backend, prompt, policy, room, **options)
    text.core.linear = policy.adaptive
    return text


def finish(backend: Any, text: Text, tuning: Tuning = STEPS) -> Text:
    """Write a text to its end."""
    loop = Loop(backend, tuning.costs.core())
    while text.finish is None:
        loop.run([text], 5.0)
        drain([text])
    return text


def drain(texts: Iterable[Text]) -> None:
    for text in texts:
        while text.take():
            pass


def check_same(backend: Any, card: Text, host: Text) -> None:
    """Tokens, figures, and where both stand."""
    assert card.written == host.written
    assert card.finish is host.finish
    for figure in FIGURES:
        assert getattr(card.stats, figure) == getattr(host.stats, figure), figure
    assert backend.length(card.sequence) == card.core.materialized, "what the backend holds, once its loop has ended"
    assert card.core.materialized == host.core.materialized == backend.length(host.sequence)
    assert card.core.tokens == host.core.tokens
    assert card.core.estimate == host.core.estimate, "to the last bit"


def loop_graphs(text: Text) -> int:
    """Graphs that the host launched for a text, less those of its prompt."""
    return text.stats.graph_replays - -(-len(text.prompt) // MAX_WIDTH)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(("policy", "tuning"), POLICIES.values(), ids=POLICIES)
def test_the_card_writes_the_host_s_text(backend: Any, policy: Policy, tuning: Tuning, sampling: Sampling) -> None:
    luck = np.random.default_rng(policy.block_size)
    for _ in range(3):
        prompt = random_tokens(luck, int(luck.integers(1, 80)), backend.config) * int(luck.integers(1, 3))
        room = int(luck.integers(100, 250))
        made = [text_for(backend, prompt, policy, room, sampling=sampling, tuning=tuning) for _ in range(2)]
        card, host = finish(backend, made[0], tuning), finish(HostDriven(backend), made[1], tuning)
        check_same(backend, card, host)
        assert loop_graphs(card) == 1, "nothing but the loop itself"
        if policy.lossless:
            plain = text_for(backend, prompt, AUTOREGRESSIVE, room, sampling=sampling)
            assert card.written == finish(HostDriven(backend), plain).written
            backend.close(plain.sequence)
        for text in (card, host):
            backend.close(text.sequence)


@pytest.mark.parametrize(("policy", "tuning"), POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("room", [1, 2, 3, 17])
def test_short_rooms_and_ends_of_texts(backend: Any, policy: Policy, tuning: Tuning, room: int) -> None:
    ends, luck = frozenset(range(END, 90, 3)), np.random.default_rng(room)
    for seed in range(3):
        options = {"sampling": Sampling(1.0, seed=seed), "tuning": tuning, "eos": frozenset() if seed == 0 else ends}
        if len(options["eos"]) > 16:
            options["eos"] = frozenset(sorted(ends)[:16])
        prompt = random_tokens(luck, int(luck.integers(1, 30)), backend.config)
        made = [text_for(backend, prompt, policy, room, **options) for _ in range(2)]
        check_same(backend, finish(backend, made[0], tuning), finish(HostDriven(backend), made[1], tuning))
        for text in made:
            backend.close(text.sequence)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=6)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", [AUTOREGRESSIVE, SPECULATIVE, AUTO], ids=lambda policy: policy.name)
@pytest.mark.parametrize("count", [1, 2, 7, 60])
def test_a_text_left_in_the_middle_stands_where_it_was_heard(
    backend: Any, policy: Policy, sampling: Sampling, count: int
) -> None:
    prompt = random_tokens(np.random.default_rng(count), 20, backend.config)
    whole = finish(HostDriven(backend), text_for(backend, prompt, policy, 300, sampling=sampling)).written
    text, loop = text_for(backend, prompt, policy, 300, sampling=sampling), Loop(backend, STEPS.costs.core())
    while len(text.written) < count:
        loop.run([text], 5.0)
        while len(text.written) < count and text.take():
            pass
    loop.leave(text)
    heard = len(text.written)
    assert text.written == whole[:heard]
    assert not text.take()
    assert heard <= count + 16, "no more than the iteration that it was left in"
    assert 0 < text.materialized < len(text.committed)
    # What is materialized serves the text that goes on from here.
    backend.truncate(text.sequence, text.materialized)
    costs, limit = STEPS.costs.core(), len(prompt) + 300
    rest = Text(
        text.sequence, text.committed, text.materialized, policy, sampling, limit, frozenset(), costs, tuning=STEPS
    )
    rest.core.linear = policy.adaptive
    assert finish(backend, rest).written == whole[heard:]


@pytest.mark.parametrize("policy", [AUTOREGRESSIVE, SPECULATIVE, AUTO], ids=lambda policy: policy.name)
def test_a_text_across_capacity_classes(backend: Any, policy: Policy) -> None:
    prompt = random_tokens(np.random.default_rng(1), 400, backend.config)
    card, host = (text_for(backend, prompt, policy, 1100) for _ in range(2))
    check_same(backend, finish(backend, card), finish(HostDriven(backend), host))
    assert loop_graphs(card) >= 3, "capacities of 512, 1,024 and 2,048"


@pytest.mark.parametrize("policy", [AUTOREGRESSIVE, SPECULATIVE, AUTO], ids=lambda policy: policy.name)
def test_a_reader_that_rests_finds_the_whole_text(gpu: Any, tokenizer_folder: Path, policy: Policy) -> None:  # noqa: ARG001
    made = random_checkpoint(tiny_config(chain_rank=4, max_position=16384))
    backend: Any = make_engine(BACKEND, made, tokenizer_folder).backend
    prompt, room = random_tokens(np.random.default_rng(3), 10, backend.config), 14_000
    text, loop = text_for(backend, prompt, policy, room), Loop(backend, STEPS.costs.core())
    while len(text.written) < 8300:  # memory is mapped for all that follows
        loop.run([text], 5.0)
        drain([text])
    graphs = text.stats.graph_replays
    time.sleep(3.0)  # the ring is full by then
    finish_with(loop, text)
    assert text.stats.graph_replays > graphs, "it rested where the ring was full"
    plain = text_for(backend, prompt, AUTOREGRESSIVE, room)
    assert text.written == finish(HostDriven(backend), plain).written


def finish_with(loop: Loop, *texts: Text) -> None:
    while any(text.finish is None for text in texts):
        loop.run(texts, 5.0)
        drain(texts)


@pytest.mark.parametrize(
    "policies", [(SPECULATIVE, SPECULATIVE), (AUTO, AUTOREGRESSIVE), (AUTO, AUTO)], ids=lambda pair: pair[0].name
)
def test_two_texts_that_take_turns_are_each_alone(backend: Any, policies: Sequence[Policy]) -> None:
    """A loop that goes on is settled before another text's; what it committed meanwhile is not lost."""
    luck, loop = np.random.default_rng(7), Loop(backend, STEPS.costs.core())
    prompts = [random_tokens(luck, 30, backend.config) for _ in policies]
    texts, hosts = (
        [
            text_for(backend, p, policy, 300, sampling=Sampling(1.0, seed=2))
            for p, policy in zip(prompts, policies, strict=True)
        ]
        for _ in range(2)
    )
    while any(text.finish is None for text in texts):
        for text in texts:
            if text.finish is None:
                loop.run([text], 5.0)
                drain([text])
    for text, host in zip(texts, hosts, strict=True):
        check_same(backend, text, finish(HostDriven(backend), host))


def test_whatever_needs_the_card_ends_the_loop_first(backend: Any) -> None:
    """Other passes, forks and lengths in the middle of a text, and two texts that share passes in between."""
    luck, loop = np.random.default_rng(8), Loop(backend, STEPS.costs.core())
    prompts = [random_tokens(luck, 30, backend.config) for _ in range(2)]
    whole = [finish(HostDriven(backend), text_for(backend, prompt, AUTO, 300)).written for prompt in prompts]
    first, second = (text_for(backend, prompt, AUTO, 300) for prompt in prompts)
    while first.finish is None or second.finish is None:
        loop.run([first], 5.0)
        assert backend.length(first.sequence) == first.core.materialized
        drain([first])
        loop.run([first, second], 5.0)
        drain([first, second])
        loop.run([second], 5.0)
        backend.close(backend.fork(second.sequence, min(backend.length(second.sequence), 40)))
        backend.prefill(backend.open(), prompts[0])
        drain([second])
    assert [first.written, second.written] == whole


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["autoregressive", "speculative 16", "confidence", "hybrid", "auto 16"])
def test_stop_strings_cut_text_and_figures(engine: Engine, name: str, temperature: float) -> None:
    (policy, tuning), sampling = POLICIES[name], Sampling(temperature, logit_bias=NO_END)
    card = Engine(engine.backend, engine.tokenizer, engine.context, tuning)
    host = Engine(HostDriven(engine.backend), engine.tokenizer, engine.context, tuning)
    whole = host.generate(Request("The harbour", 80, policy, sampling, seed=9))
    for at in range(0, len(whole.text) - 8, 5):
        request = Request("The harbour", 80, policy, sampling, seed=9, stop=(whole.text[at : at + 3],))
        found, expected = card.generate(request), host.generate(request)
        assert (found.text, found.token_ids, found.finish) == (expected.text, expected.token_ids, expected.finish)
        assert found.finish is Finish.STOP
        if not policy.adaptive:  # the host may verify trees
            assert (found.passes, found.acceptance_histogram) == (expected.passes, expected.acceptance_histogram)
    held = card.generate(Request("The harbour", 80, policy, sampling, seed=9, stop=(whole.text[-1] + "never",)))
    assert held.text == whole.text


def test_a_stopped_text_leaves_a_sound_session(engine: Engine) -> None:
    sampling = Sampling(logit_bias=NO_END)
    whole = engine.generate(Request([5, 9, 44], 300, SPECULATIVE, sampling, seed=1))
    with engine.session() as session:
        stopped = session.generate(Request([5, 9, 44], 300, SPECULATIVE, sampling, seed=1, stop=(whole.text[20:23],)))
        ids = [chunk.token.id for chunk in stopped]
        assert ids == whole.token_ids[: len(ids)]
        again = session.generate(Request([5, 9, 44, *ids], 300 - len(ids), SPECULATIVE, sampling, seed=1))
        assert [chunk.token.id for chunk in again] == whole.token_ids[len(ids) :]


OTHERS = {
    "penalties": (SPECULATIVE, {"sampling": Sampling(presence_penalty=0.5)}),
    "log-probabilities": (SPECULATIVE, {"top": 3}),
    "trees": (Policy("spine", 8, Verify.ALWAYS, topology=spine(6, (0, 2, 2, 1))), {}),
    "windows": (Policy("window", 8, Verify.ALWAYS, window=Window(1, 3)), {}),
}


@pytest.mark.parametrize(("policy", "options"), OTHERS.values(), ids=OTHERS)
def test_what_stays_with_the_host(backend: Any, policy: Policy, options: dict[str, Any]) -> None:
    text, plain = text_for(backend, [5, 9, 44], policy, 60, **options), text_for(backend, [5, 9, 44], SPECULATIVE, 60)
    for each in (text, plain):
        assert not backend.can_run([each.core]), "the first token comes from a pass that the host drives"
        Loop(HostDriven(backend), STEPS.costs.core()).run([each])
        drain([each])
        assert each.begun
    assert not backend.can_run([text.core])
    assert backend.can_run([plain.core])
    assert not backend.can_run([plain.core, text.core])
    finish(backend, text)
    assert text.stats.graph_replays >= text.stats.passes
    baseline = text_for(backend, [5, 9, 44], AUTOREGRESSIVE, 60, **options)
    assert text.written == finish(HostDriven(backend), baseline).written


def test_no_graph_is_captured_once_a_text_has_begun(engine: Engine, backend: Any) -> None:
    tuned, loops = Engine(backend, engine.tokenizer, engine.context, STEPS), backend._resident
    for room in (20, 1500, 60):
        request = Request(random_tokens(np.random.default_rng(room), 40, engine.config), room, AUTO)
        with tuned.session() as session:
            chunks = iter(session.generate(request))
            next(chunks)
            count = len(loops.atlas), len(backend.atlas)
            list(chunks)
        assert (len(loops.atlas), len(backend.atlas)) == count


def test_graphs_that_the_host_launched_are_counted(engine: Engine, backend: Any) -> None:
    begun, sampling = backend.graph_replays, Sampling(logit_bias=NO_END)
    prompt = random_tokens(np.random.default_rng(2), 30, engine.config)
    result = engine.generate(Request(prompt, 60, SPECULATIVE, sampling))
    assert backend.graph_replays - begun == result.graph_replays == 2, "the prompt's and the loop's"
    assert result.passes > 2


def test_costs_are_learned_on_the_card(backend: Any) -> None:
    """A text under `auto` on a machine of which nothing is known: drafts of each width are tried, and timed there."""
    costs = _core.Costs([], (0.0, 0.0), 0, True, [0.0] * len(_core.KNOTS), [0] * len(_core.KNOTS))
    prompt = random_tokens(np.random.default_rng(5), 40, backend.config)
    text = Text(backend.open(), prompt, 0, AUTO, Sampling(1.0, seed=1), 440, frozenset(), costs)
    text.core.linear = True
    finish_with(Loop(backend, costs), text)
    backend.settle()
    plain = text_for(backend, prompt, AUTOREGRESSIVE, 400, sampling=Sampling(1.0, seed=1))
    assert text.written == finish(HostDriven(backend), plain).written
    assert costs.reach >= 16
    assert 0.001 < costs.cost(1, 0) < 50


def test_passes_are_timed_on_the_card(engine: Engine) -> None:
    costs = Engine(engine.backend, engine.tokenizer, engine.context).tuning.costs
    assert costs.widths[-1] == 64
    assert 0.01 < costs.milliseconds[0] < 50


def test_another_thread_writes_texts_too(gpu: Any) -> None:  # noqa: ARG001
    """As a server does: the model is loaded in one thread and used in another, whose first text captures graphs."""
    own = Engine.load(backend=BACKEND, context=1024)
    with ThreadPoolExecutor(1) as pool:
        request = Request("The harbour", 20, AUTO, seed=1)
        assert pool.submit(own.generate, request).result().token_ids == own.generate(request).token_ids
        two = [request, Request("The sea", 20, SPECULATIVE, Sampling(1.0), seed=2)]
        found = [each.token_ids for each in pool.submit(own.generate_batch, two).result()]
    assert found == [own.generate(each).token_ids for each in two]
