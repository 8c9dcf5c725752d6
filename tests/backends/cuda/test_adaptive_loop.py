"""The adaptive policy in the resident loop on a GPU, against the host-driven loop with the same shapes."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from conftest import make_engine, random_checkpoint, random_tokens, tiny_config, write_tokenizer

from bitmtp.backends.cuda.runtime import Runtime
from bitmtp.decoding.chooser import AdaptiveShaper
from bitmtp.decoding.costs import CostTable, Tuning
from bitmtp.decoding.decoder import Decoder, advance
from bitmtp.decoding.policies import make_policy
from bitmtp.decoding.resident import can_reside
from bitmtp.decoding.state import State
from bitmtp.engine import Engine, Request
from bitmtp.sampling import Sampling

# Milliseconds that no sum meets exactly: the card's exp and log may differ in their last bits.
STEPS = CostTable((1, 2, 4, 8, 9, 16, 17, 32, 33, 64), (0.311, 0.317, 0.32, 0.33, 0.37, 0.38, 0.47, 0.48, 0.7, 0.71))
DEAR = CostTable((1, 2, 64), (3.013, 5.017, 191.1), per_position=(0.0013, 0.00017))
SAMPLINGS = [Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.8, top_p=0.9)]
FIGURES = ("passes", "iterations", "num_spec_steps", "proposed", "accepted", "copied", "lengths")


@pytest.fixture(scope="module")
def plain(gpu, tmp_path_factory):  # noqa: ARG001  (`gpu` skips where there is none)
    made = random_checkpoint(tiny_config(chain_rank=4, max_position=2048))
    return make_engine("cuda", made, write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def tuned(plain, costs):
    return Engine(plain.backend, plain.tokenizer, plain.context, Tuning(costs))


def generated(engine, request):
    """A text by the engine: its ids and figures."""
    with engine.session() as session:
        generation = session.generate(request)
        list(generation)
        return generation.result.token_ids, generation.decoder.stats


def by_the_host(engine, request):
    """The same text with linear shapes, host-driven."""
    backend, prompt = engine.backend, list(request.prompt)
    state = State(backend.open(), replace(request.sampling, seed=request.seed), prompt, len(prompt))
    shaper = AdaptiveShaper(request.policy, engine.tuning, request.sampling.temperature, linear=True)
    limit = min(len(prompt) + request.max_tokens, engine.context)
    decoder = Decoder(state, request.policy, limit, frozenset(engine.config.eos_token_ids), shaper=shaper)
    decoder.start(backend)
    while decoder.finish is None:
        advance(backend, [decoder])
    backend.close(state.sequence)
    return state.committed[len(request.prompt) :], decoder.stats


def plainly(engine, request):
    return engine.generate(replace(request, policy=make_policy("autoregressive", 1))).token_ids


@pytest.mark.parametrize("costs", [STEPS, DEAR], ids=["steps", "dear"])
@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_loop_writes_the_host_loop_s_text(plain, costs, block_size, sampling):
    random, engine = np.random.default_rng(block_size), tuned(plain, costs)
    policy, copied = make_policy("auto", engine.config.block_size, block_size=block_size), 0
    for seed in range(3):
        prompt = random_tokens(random, int(random.integers(1, 80)), engine.config) * int(random.integers(1, 3))
        request = Request(prompt, int(random.integers(50, 300)), policy, sampling, seed=seed)
        (ids, stats), (expected, host) = generated(engine, request), by_the_host(engine, request)
        assert ids == expected == plainly(engine, request)
        assert stats.graph_replays < stats.passes, "it was resident"
        for figure in FIGURES:
            assert getattr(stats, figure) == getattr(host, figure), figure
        copied += stats.copied
    assert copied or sampling.temperature or costs is DEAR


def test_a_text_across_capacity_classes(plain):
    engine, prompt = tuned(plain, STEPS), random_tokens(np.random.default_rng(1), 400, plain.config)
    request = Request(prompt, 1100, make_policy("auto", 16), seed=1)
    (ids, stats), (expected, host) = generated(engine, request), by_the_host(engine, request)
    assert ids == expected
    assert stats.lengths == host.lengths
    assert stats.graph_replays >= 3, "capacities of 512, 1,024 and 2,048"


def test_a_reader_that_rests_finds_the_whole_text(gpu, tokenizer_folder):  # noqa: ARG001
    made = random_checkpoint(tiny_config(chain_rank=4, max_position=16384, eos_token_ids=()))
    engine = tuned(make_engine("cuda", made, tokenizer_folder), STEPS)
    request = Request(random_tokens(np.random.default_rng(3), 10, engine.config), 14_000, make_policy("auto", 16))
    taken = []
    with engine.session() as session:
        generation = session.generate(request)
        for chunk in generation:
            taken.append(chunk.token.id)
            if len(taken) == 8300:  # memory is mapped for all that follows
                time.sleep(3.0)  # the ring is full by then
        assert generation.result.graph_replays > 6, "a pause besides those of memory"
    assert taken == plainly(engine, request)


def test_longer_texts_get_more_memory_and_none_is_captured_once_a_text_has_begun(plain):
    engine, loops = tuned(plain, STEPS), plain.backend._resident.atlas
    for room in (20, 1500, 60):
        request = Request(random_tokens(np.random.default_rng(room), 40, engine.config), room, make_policy("auto", 16))
        with engine.session() as session:
            chunks = iter(session.generate(request))
            next(chunks)
            count = len(loops), len(engine.backend.atlas)
            list(chunks)
        assert (len(loops), len(engine.backend.atlas)) == count


def test_lower_rungs_and_penalties_stay_with_the_host(plain):
    engine, policy = tuned(plain, STEPS), make_policy("auto", 8)
    prompt = random_tokens(np.random.default_rng(4), 30, engine.config)
    with engine.session() as session:
        penalised = session.generate(Request(prompt, 20, policy, Sampling(presence_penalty=0.5)))
        assert not can_reside(engine.backend, penalised.decoder)
        resident = session.generate(Request(prompt, 60, policy))
        assert can_reside(engine.backend, resident.decoder)
        ids = [chunk.token.id for chunk in resident]
    for runtime in (Runtime.GENERIC, Runtime.WIDTHS, Runtime.GRAPHS, Runtime.ITERATION):
        engine.backend.runtime = runtime
        assert engine.generate(Request(prompt, 60, policy)).token_ids == ids
    engine.backend.runtime = Runtime.RESIDENT


def test_passes_are_timed_on_the_card(plain):
    costs = Engine(plain.backend, plain.tokenizer, plain.context).tuning.costs
    assert costs.widths[-1] == 64
    assert 0.01 < costs.milliseconds[0] < 50
