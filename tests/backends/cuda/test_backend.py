"""What is the CUDA backend's own: memory, graphs, the resident loop. test_contract.py tests what all backends share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import (
    HostDriven,
    make_backend,
    make_engine,
    random_checkpoint,
    random_tokens,
    tiny_config,
    why_unavailable,
    write_tokenizer,
)

from bitmtp import backends
from bitmtp.backends.base import Head, Window, Workload, causal_rows
from bitmtp.core.policies import make_policy
from bitmtp.engine import Engine, Request
from bitmtp.errors import BackendError
from bitmtp.sampling import GREEDY, Sampling

POLICIES = [
    ("autoregressive", {}),
    ("speculative", {"block_size": 4}),
    ("speculative", {"block_size": 16, "verify_bound": 0.0}),
    ("confidence", {"block_size": 6, "tau": 0.3}),
    ("hybrid", {"block_size": 6, "tau": 0.3, "min_prefix": 2}),
]
FIGURES = ("token_ids", "finish", "passes", "acceptance_histogram", "num_spec_steps", "draft_acceptance_rate")


@pytest.fixture(scope="module")
def engine(gpu, tmp_path_factory):  # noqa: ARG001  (`gpu` skips where there is none)
    made = random_checkpoint(tiny_config(chain_rank=4, max_position=2048))
    return make_engine("cuda", made, write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def host_loop(engine, request):
    """The same text, every pass driven by the host."""
    return Engine(HostDriven(engine.backend), engine.tokenizer, engine.context).generate(request)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.8, top_p=0.9)])
@pytest.mark.parametrize(("name", "options"), POLICIES)
def test_the_resident_loop_writes_the_host_loop_s_text(engine, name, options, sampling):
    random = np.random.default_rng()
    for _ in range(3):
        prompt = random_tokens(random, int(random.integers(1, 80)), engine.config)
        policy = make_policy(name, engine.config.block_size, **options)
        request = Request(prompt, int(random.integers(1, 200)), policy, sampling, seed=int(random.integers(1 << 40)))
        ours, host = engine.generate(request), host_loop(engine, request)
        for field in FIGURES:
            assert getattr(ours, field) == getattr(host, field), field


def test_a_text_across_capacity_classes(engine):
    prompt = random_tokens(np.random.default_rng(1), 450, engine.config)
    request = Request(prompt, 1100, make_policy("speculative", 16))
    ours, host = engine.generate(request), host_loop(engine, request)
    assert ours.token_ids == host.token_ids


@pytest.mark.parametrize("name", ["speculative", "auto"])
def test_leaving_a_stream_leaves_a_sound_session(engine, name):
    prompt = random_tokens(np.random.default_rng(2), 20, engine.config)
    policy = make_policy(name, 16)
    whole = engine.generate(Request(prompt, 300, policy)).token_ids
    with engine.session() as session:
        generation, taken = session.generate(Request(prompt, 300, policy)), []
        for chunk in generation:
            taken.append(chunk.token.id)
            if len(taken) == 10:
                break
        del generation
        assert taken == whole[:10]
        again = session.generate(Request([*prompt, *taken], 290, policy))
        assert [chunk.token.id for chunk in again] == whole[10:]


def test_memory_returns_on_close(engine):
    backend = engine.backend
    tokens = random_tokens(np.random.default_rng(3), 100, engine.config)

    def open_and_close(count):
        sequences = [backend.open() for _ in range(count)]
        for sequence in sequences:
            backend.prefill(sequence, tokens)
        least = backend.gpu.free_bytes()
        for sequence in sequences:
            backend.close(sequence)
        return least

    open_and_close(200)  # tables that the driver keeps
    lost = []
    for _ in range(3):  # other processes may take memory meanwhile, but a leak shows every time
        free = backend.gpu.free_bytes()
        assert open_and_close(200) < free
        lost.append(free - backend.gpu.free_bytes())
    assert min(lost) <= 0


def test_growth_keeps_what_was_written(engine):
    """K/V mapped before a sequence grew are read through the same addresses after it."""
    backend, random = engine.backend, np.random.default_rng(4)
    tokens = random_tokens(random, 1500, engine.config)
    grown, whole = backend.open(), backend.open()
    backend.prefill(grown, tokens[:40])
    address = backend.sequence(grown).store.address
    backend.prefill(grown, tokens[40:])
    backend.reserve(whole, 1600)
    backend.prefill(whole, tokens)
    row = [causal_rows(s, [9], 1500, [Head.EXACT], GREEDY)[0] for s in (grown, whole)]
    assert backend.sequence(grown).store.address == address
    a, b = backend.step(row, logits=True)
    np.testing.assert_array_equal(a.logits, b.logits)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("heads", [(3, 1), (4, 2), (12, 2)])
def test_short_histories_have_a_kernel_of_the_same_bits(monkeypatch, heads):
    """attention_short.cu against attention.cu, which takes over where histories are long, through whole models."""
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 64, "qk_norm": heads[1] == 2}
    made = random_checkpoint(tiny_config(max_position=1024, **sizes))
    short = make_backend("cuda", made)
    monkeypatch.setattr("bitmtp.backends.cuda.attention.MAX_SLOTS", 0)
    general = make_backend("cuda", made)
    random = np.random.default_rng()
    tokens, done = random_tokens(random, 960, made.config), 0
    pair = [(backend, backend.open()) for backend in (short, general)]
    while done < len(tokens):
        width = int(random.choice([1, 2, 3, 8, 13, 31, 64]))
        piece = tokens[done : done + width]
        outputs = []
        for backend, sequence in pair:
            rows = causal_rows(sequence, piece, done, [Head.EXACT] * len(piece), GREEDY)
            outputs.append([output.logits.tobytes() for output in backend.step(rows, logits=True)])
            backend.materialize(sequence, range(len(piece)))
        assert outputs[0] == outputs[1], (done, width)
        done += len(piece)


def test_nothing_is_captured_once_a_text_has_begun(engine):
    backend = engine.backend
    engine.generate(Request(random_tokens(np.random.default_rng(5), 30, engine.config), 30))
    count = len(backend.atlas)
    engine.generate(Request(random_tokens(np.random.default_rng(6), 900, engine.config), 900))
    assert len(backend.atlas) == count
    assert int(backend.describe()["graphs"]) >= count


@pytest.mark.parametrize(
    ("name", "options"), [("speculative", {}), ("auto", {}), ("speculative", {"window": Window(4, 32)})], ids=str
)
@pytest.mark.parametrize("sampling", [Sampling(0.8, top_p=0.9), Sampling(0.8, repetition_penalty=1.2)], ids=str)
def test_graphs_of_filters_and_shapes_are_there_before_the_first_token(engine, name, options, sampling):
    random, policy = np.random.default_rng(), replace(make_policy(name, 8), **options)
    with engine.session() as session:
        chunks = iter(session.generate(Request(random_tokens(random, 40, engine.config), 60, policy, sampling, seed=3)))
        next(chunks)
        count = len(engine.backend.atlas)
        assert len(list(chunks)) > 20
    assert len(engine.backend.atlas) == count


def test_graphs_of_several_texts_are_there_before_they_begin(engine):
    engine.prepare(Workload(several=True, filtered=True))
    count, random = len(engine.backend.atlas), np.random.default_rng()
    prompts = [random_tokens(random, int(random.integers(1, 90)), engine.config) for _ in range(5)]
    samplings = [Sampling(), Sampling(0.9, top_k=20), Sampling(1.0), Sampling(presence_penalty=0.5), Sampling()]
    engine.generate_batch([Request(p, 40, sampling=s, seed=2) for p, s in zip(prompts, samplings, strict=True)])
    assert len(engine.backend.atlas) == count


WIDE = [
    {"ternary_scale": "group", "group_size": 64, "qk_norm": True, "embedding_bits": 2},
    {"ternary_scale": "group", "group_size": 32, "activation": "relu2"},
    {"embedding_bits": 16, "head_activation_bits": 16},
    {"activation_scale": "group", "group_size": 64},
    {"activation_scale": "group", "group_size": 32, "ternary_scale": "group", "embedding_bits": 2},
]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("changes", WIDE, ids=str)
def test_models_of_other_layouts_give_the_reference_s_logits_nearly(changes):
    sizes = {"hidden_size": 192, "num_heads": 4, "num_kv_heads": 2, "head_dim": 48, "intermediate_size": 320}
    made = random_checkpoint(tiny_config(**sizes, **changes), seed=7)
    tokens = random_tokens(np.random.default_rng(), 13, made.config)
    logits = []
    for name in ("cuda", "reference"):
        backend = make_backend(name, made)
        rows = causal_rows(backend.open(), tokens, 0, [Head.EXACT] * len(tokens), GREEDY)
        logits.append(np.stack([output.logits for output in backend.step(rows, logits=True)]))
    ours, exact = logits
    # A level of int8 that rounds the other way shows a little in a whole row, a wrong scale much in all of them.
    assert np.abs(ours - exact).max() < 0.1 * np.abs(exact).max()
    assert np.median(np.abs(ours - exact)) < 0.05 * exact.std()


def test_medusa_heads_are_refused_and_auto_takes_the_cpu(monkeypatch, caplog):
    made = random_checkpoint(tiny_config(drafter="medusa"))
    with pytest.raises(BackendError, match="the cuda backend does not run Medusa heads; use --backend cpu"):
        make_backend("cuda", made)
    if reason := why_unavailable("cpu"):
        pytest.skip(reason)
    monkeypatch.setattr(backends, "_has_driver", lambda: True)
    assert make_backend("auto", made).name == "cpu"
    assert "running on the CPU: the cuda backend does not run Medusa heads" in caplog.text
