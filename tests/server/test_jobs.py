"""What a trace is made of."""

from __future__ import annotations

import pytest

from bitmtp.core.policies import make_policy
from bitmtp.core.policy import Policy, Verify
from bitmtp.core.topology import NAMED, Topology
from bitmtp.engine import Engine, Generation, Request


@pytest.mark.parametrize("shape", [shape for shape in NAMED if shape.depth], ids=lambda shape: shape.name)
def test_a_trace_tells_of_every_proposal_and_of_what_it_follows(tiny_engine: Engine, shape: Topology) -> None:
    policy, ids = Policy("shaped", 16, Verify.ALWAYS, topology=shape), tiny_engine.tokenizer.encode("The harbour")
    generation = Generation(tiny_engine, tiny_engine.backend.open(), Request(ids, 40, policy, seed=1), ids, 0)
    generation.text.core.traced = True
    seen = 0
    while generation.text.finish is None:
        tiny_engine.loop.run([generation.text])
        while generation.take():
            checked = generation.text.checked
            seen += len(checked)
            assert all(-1 <= after < number for number, (_, after) in enumerate(checked))
            assert len(checked) <= shape.width
    assert seen > 0


def test_without_a_draft_nothing_is_checked(tiny_engine: Engine) -> None:
    ids = tiny_engine.tokenizer.encode("The harbour")
    request = Request(ids, 5, make_policy("autoregressive", 1))
    generation = Generation(tiny_engine, tiny_engine.backend.open(), request, ids, 0)
    generation.text.core.traced = True
    assert not any(generation.text.checked for _ in generation)
