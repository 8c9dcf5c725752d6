"""A text's loop on a GPU, against the same core driven by the host."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import END, make_engine, random_checkpoint, random_tokens, tiny_config, write_tokenizer

from bitmtp.backends.cuda.store import spans
from bitmtp.core.costs import CostTable, Tuning
from bitmtp.core.policies import make_policy
from bitmtp.engine import Engine, Request
from bitmtp.loop import Loop
from bitmtp.sampling import Sampling

sys.path.insert(0, str(Path(__file__).parents[2] / "core"))
from texts import make_text

# Milliseconds that no sum meets exactly: the card's exp and log may differ in their last bits.
STEPS = Tuning(
    CostTable((1, 2, 4, 8, 9, 16, 17, 32, 33, 64), (0.311, 0.317, 0.32, 0.33, 0.37, 0.38, 0.47, 0.48, 0.7, 0.71))
)
FIGURES = ("passes", "iterations", "num_spec_steps", "proposed", "accepted", "copied", "lengths")
SAMPLINGS = [Sampling(), Sampling(1.0, seed=2), Sampling(0.8, top_p=0.9, seed=3, logit_bias=((END, -1e9),))]
POLICIES = [
    make_policy("autoregressive", 16),
    make_policy("speculative", 16, block_size=8, verify_bound=0.0),
    make_policy("speculative", 16, block_size=16),
    make_policy("auto", 16),
    make_policy("hybrid", 16, tau=0.3),
    make_policy("confidence", 16, tau=0.05),
]


@pytest.mark.parametrize(
    ("size", "ends", "expected"),
    [
        (10, [[4], [10]], [(0, 4), (4, 10)]),
        (10, [[4, 8], [6, 12]], [(0, 4), (4, 6), (6, 8), (8, 10)]),
        (4, [[4], [4]], [(0, 4)]),
        (3, [[8], [16]], [(0, 3)]),
    ],
)
def test_a_copy_is_cut_where_a_mapping_ends(size, ends, expected):
    assert spans(size, *ends) == expected


@pytest.fixture(scope="module")
def engine(gpu, tmp_path_factory):  # noqa: ARG001  (`gpu` skips where there is none)
    made = random_checkpoint(tiny_config(chain_rank=4, max_position=2048))
    plain = make_engine("cuda", made, write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    return Engine(plain.backend, plain.tokenizer, plain.context, STEPS)


def finish(backend, text, *, card):
    """Tokens and figures of a text; where the host drives it, log-probabilities that nobody reads keep it there."""
    if not card:
        text.core.traced = True
    loop = Loop(backend, STEPS.costs.core())
    while text.finish is None:
        loop.run([text])
        while text.take():
            pass
    loop.leave(text)
    return text.written, [getattr(text.stats, name) for name in FIGURES], text.finish


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.name}-{policy.block_size}")
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "filtered"])
def test_the_card_decides_as_the_host_does(engine, policy, sampling):
    luck = np.random.default_rng(4)
    for room in (1, 2, 120):
        prompt, made = random_tokens(luck, int(luck.integers(1, 90)), engine.config), []
        for card in (False, True):
            text = make_text(
                engine.backend, prompt, policy, room, sampling=sampling, tuning=STEPS, eos=frozenset({END})
            )
            text.core.linear = True
            made.append(finish(engine.backend, text, card=card))
            assert engine.backend.length(text.sequence) == text.core.materialized
        assert made[0] == made[1]


def test_a_text_grows_across_capacity_classes(engine):
    prompt = random_tokens(np.random.default_rng(1), 450, engine.config)
    texts = [
        engine.generate(Request(prompt, 700, policy, Sampling(logit_bias=((END, -1e9),)))).token_ids
        for policy in POLICIES[:4]
    ]
    assert all(len(text) == 700 and text == texts[0] for text in texts)


@pytest.mark.parametrize("policy", POLICIES[:4], ids=lambda policy: f"{policy.name}-{policy.block_size}")
def test_a_text_that_is_left_and_one_that_cuts_in(engine, policy):
    prompts = [random_tokens(np.random.default_rng(seed), 40, engine.config) for seed in (2, 3)]
    requests = [Request(prompt, 200, policy, Sampling(1.0), seed=5) for prompt in prompts]
    whole = [engine.generate(request).token_ids for request in requests]
    with engine.session() as one, engine.session() as other:
        first, second = one.generate(requests[0]), other.generate(requests[1])
        heard = [[], []]
        streams = [iter(first), iter(second)]
        for turn in range(60):  # each ends the loop of the other
            for place in (0, 1):
                if (chunk := next(streams[place], None)) is not None:
                    heard[place].append(chunk.token.id)
            time.sleep(0.001 * (turn % 3))
        first.leave()
        second.leave()
        for place in (0, 1):
            assert heard[place] == whole[place][: len(heard[place])]
        assert [chunk.token.id for chunk in one.generate(requests[0])] == whole[0]


def test_a_slow_reader_fills_the_ring(engine):
    request = Request([5, 6, 7], 1900, POLICIES[3], Sampling(logit_bias=((END, -1e9),)))
    whole = engine.generate(request).token_ids
    slow = []
    for chunk in engine.stream(request):
        slow.append(chunk.token.id)
        if len(slow) in (10, 500):
            time.sleep(0.5)
    assert slow == whole


def test_a_stop_string_ends_a_text_where_it_stands(engine):
    plain = engine.generate(Request([5, 6, 7], 100, POLICIES[1], Sampling(1.0), seed=3))
    stop = plain.text[len(plain.text) // 2 :][:3]
    cut = engine.generate(Request([5, 6, 7], 100, POLICIES[1], Sampling(1.0), seed=3, stop=(stop,)))
    assert cut.text == plain.text[: plain.text.index(stop)]
    assert cut.token_ids == plain.token_ids[: len(cut.token_ids)]


def test_forks_at_lengths_around_every_border_of_true_size(gpu):  # noqa: ARG001
    engine = Engine.load(backend="cuda", context=2048)
    backend, tokens = engine.backend, random_tokens(np.random.default_rng(1), 1500, engine.config)
    source = backend.open()
    backend.prefill(source, tokens)
    for length in (1, 63, 64, 65, 127, 128, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 1499):
        branch, fresh = backend.fork(source, length), backend.open()
        assert backend.prefill(branch, tokens[length : length + 3]) == backend.prefill(fresh, tokens[: length + 3])
        backend.close(branch)
        backend.close(fresh)
    backend.close(source)
