"""The rungs of the runtime write the same texts, and a profile accounts for every launch of a pass."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import make_engine, random_checkpoint, random_tokens, tiny_config, write_tokenizer

from bitmtp.backends.cuda.profile import Part, history_bytes, profile_pass
from bitmtp.backends.cuda.runtime import Runtime
from bitmtp.benchmark.host import host_costs
from bitmtp.decoding.policies import make_policy
from bitmtp.engine import Request
from bitmtp.sampling import Sampling

FIGURES = ("token_ids", "finish", "passes", "acceptance_histogram", "num_spec_steps", "draft_acceptance_rate")


@pytest.fixture(scope="module")
def engine(gpu, tmp_path_factory):  # noqa: ARG001  (`gpu` skips where there is none)
    made = random_checkpoint(tiny_config(chain_rank=4, max_position=2048))
    return make_engine("cuda", made, write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9)])
@pytest.mark.parametrize(("name", "block_size"), [("autoregressive", None), ("speculative", 4), ("hybrid", 8)])
def test_every_rung_writes_the_same_text(engine, name, block_size, sampling):
    options = {} if block_size is None else {"block_size": block_size}
    prompt = random_tokens(np.random.default_rng(), 30, engine.config)
    request = Request(prompt, 150, make_policy(name, engine.config.block_size, **options), sampling, seed=5)
    results = []
    for runtime in Runtime:
        engine.backend.runtime = runtime
        results.append([getattr(engine.generate(request), figure) for figure in FIGURES])
    assert all(each == results[0] for each in results)


def test_a_rung_that_begins_each_iteration_grows_across_capacity_classes(engine):
    prompt = random_tokens(np.random.default_rng(1), 450, engine.config)
    request = Request(prompt, 700, make_policy("speculative", 16))
    whole = engine.generate(request).token_ids
    engine.backend.runtime = Runtime.ITERATION
    assert engine.generate(request).token_ids == whole
    engine.backend.runtime = Runtime.RESIDENT


@pytest.mark.parametrize("runtime", list(Runtime))
def test_graphs_that_the_host_launched_are_counted(engine, runtime):
    engine.backend.runtime = runtime
    begun = engine.backend.graph_replays
    result = engine.generate(Request(random_tokens(np.random.default_rng(2), 30, engine.config), 60))
    replays, iterations = engine.backend.graph_replays - begun, sum(result.acceptance_histogram)
    engine.backend.runtime = Runtime.RESIDENT
    assert replays == result.graph_replays + (runtime >= Runtime.GRAPHS)  # and prefill's
    if runtime is Runtime.ITERATION:
        assert iterations < result.graph_replays <= 3 * (iterations + 1)  # some find the text ended, or begin again
    else:
        assert result.graph_replays == {Runtime.GRAPHS: result.passes, Runtime.RESIDENT: 1}.get(runtime, 0)


@pytest.mark.parametrize(("width", "masks"), [(1, False), (8, False), (8, True)])
def test_a_profile_accounts_for_the_whole_pass(engine, width, masks):
    backend, config = engine.backend, engine.config
    found = profile_pass(backend, width, 300, masks)
    products = {each.name: each for each in found.kernels if each.name.startswith("product")}
    assert set(products) == {"product qkv", "product o", "product gate_up", "product down", "product head"}
    assert products["product qkv"].launches == config.num_layers
    assert products["product head"].part is Part.HEAD
    assert found.bytes == backend.network.weight_bytes + history_bytes(backend, 300)
    assert sum(found.parts().values()) == pytest.approx(found.total)
    assert found.parts()[Part.CHOICE] > 0
    assert all(each.microseconds > 0 for each in found.kernels)
    assert ("chain" in {each.name for each in found.kernels}) == masks


def test_the_host_s_share_is_measured_on_every_rung_with_graphs(engine):
    costs = host_costs(engine.backend, random_tokens(np.random.default_rng(3), 20, engine.config), tokens=60)
    assert [each.runtime for each in costs] == [Runtime.GRAPHS, Runtime.ITERATION, Runtime.RESIDENT]
    assert all(each.passes > 0 for each in costs)
    assert costs[0].added == costs[0].iteration - costs[0].passes
    assert engine.backend.runtime is Runtime.RESIDENT
