"""What the core decides, against brute force, and which options a policy takes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitmtp.backends.base import Output, Window
from bitmtp.core.costs import Calibration, CostTable
from bitmtp.core.policies import POLICIES, make_policy
from bitmtp.core.policy import Policy, Verify
from bitmtp.core.text import Text
from bitmtp.core.topology import chain
from bitmtp.errors import RequestError
from bitmtp.sampling import Sampling

PROBABILITIES = st.lists(st.sampled_from([0.0, 0.125, 0.5, 0.75, 0.875, 1.0]), min_size=1, max_size=9)
THRESHOLD = st.sampled_from([0.0, 0.125, 0.375, 0.5, 0.75, 0.875, 1.0])


def decision(policy: Policy, probabilities: list[float], room: int) -> tuple[int, int]:
    """What the core does with a draft of these probabilities: how many tokens it commits, how many it verifies."""
    costs = CostTable((1,), (1.0,)).core()
    text = Text(1, [1, 2], 0, policy, Sampling(), 3 + room, frozenset(), costs)
    text.core.plan(64)
    text.absorb([None, Output(3, 0.5, 1.0)])
    before = text.core.committed
    text.core.plan(64)
    text.absorb([Output(10 + place, p, 1.0) for place, p in enumerate(probabilities[: text.core.width])])
    return text.core.committed - before, len(text.core.proposals()[0])


@given(
    probabilities=PROBABILITIES,
    verify=st.sampled_from(list(Verify)),
    tau=THRESHOLD,
    bound=THRESHOLD,
    min_prefix=st.integers(1, 9),
    room=st.integers(1, 12),
)
def test_what_a_draft_leads_to(
    probabilities: list[float], verify: Verify, tau: float, bound: float, min_prefix: int, room: int
) -> None:
    """By brute force over all prefixes. The anchor's own probability counts nowhere."""
    size = len(probabilities)
    policy, drafted = Policy("any", size, verify, tau, min(min_prefix, size), bound), min(size, room)
    prefixes = range(1, drafted + 1)
    confident = max(n for n in prefixes if all(p >= tau for p in probabilities[1:n]))
    worth = max(n for n in prefixes if n == 1 or math.prod(probabilities[1:n]) >= bound)
    commits = verify is Verify.NEVER or (verify is Verify.IF_SHORT and confident >= policy.min_prefix)
    if drafted == 1:
        expected = (1, 0)
    elif commits:
        expected = (confident, 0)
    else:
        expected = (0, min(worth, room - 1))
    assert decision(policy, probabilities, room) == expected


def test_defaults() -> None:
    assert make_policy("speculative", 16).block_size == 8
    assert make_policy("speculative", 4).block_size == 4
    assert make_policy("autoregressive", 16).block_size == 1
    assert make_policy("confidence", 8, tau=None).tau == 0.9
    assert make_policy("hybrid", 8, min_prefix=5).min_prefix == 5


def test_which_are_lossless() -> None:
    lossless = {name for name in POLICIES if make_policy(name, 8).lossless}
    assert lossless == {"autoregressive", "speculative", "auto"}


@pytest.mark.parametrize(
    ("name", "size", "options", "message"),
    [
        ("greedy", 8, {}, "unknown policy 'greedy'; choose one of autoregressive, speculative"),
        ("autoregressive", 8, {"block_size": 4}, "block_size has no meaning under the autoregressive policy"),
        ("autoregressive", 8, {"tau": 0.5}, "tau has no meaning"),
        ("speculative", 8, {"tau": 0.5}, "tau has no meaning under the speculative policy"),
        ("speculative", 8, {"min_prefix": 2}, "min_prefix has no meaning"),
        ("confidence", 8, {"verify_bound": 0.5}, "verify_bound has no meaning"),
        ("speculative", 8, {"block_size": 9}, "block size 9 asked for, but this model drafts blocks of up to 8"),
        ("speculative", 1, {"block_size": 2}, "was never taught to draft"),
        ("speculative", 8, {"block_size": 0}, "block size is 0"),
        ("confidence", 8, {"tau": 1.5}, "tau is 1.5"),
        ("confidence", 8, {"tau": -0.1}, "tau is -0.1"),
        ("confidence", 8, {"tau": float("nan")}, "tau is nan"),
        ("speculative", 8, {"verify_bound": 2.0}, "verify_bound is 2.0"),
        ("hybrid", 8, {"min_prefix": 9}, "min_prefix 9 is larger than the block size 8"),
        ("hybrid", 8, {"min_prefix": 0}, "min_prefix is 0"),
    ],
)
def test_refusals(name: str, size: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        make_policy(name, size, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", [{"topology": chain(3)}, {"window": Window()}, {"adaptive": True}])
@pytest.mark.parametrize("verify", [Verify.NEVER, Verify.IF_SHORT])
def test_shapes_need_every_draft_verified(field: dict[str, Any], verify: Verify) -> None:
    with pytest.raises(RequestError, match="choose a lossless policy"):
        Policy("any", 8, verify, **field)
    assert Policy("any", 8, Verify.ALWAYS, **field).lossless


@pytest.mark.parametrize(
    ("name", "block_size"),
    [(name, size) for name in POLICIES for size in range(1, 9)],
)
def test_the_defaults_fit_every_model(name: str, block_size: int) -> None:
    assert make_policy(name, block_size).block_size <= block_size


def test_calibrated_probabilities_are_compared_with_tau() -> None:
    modest = Calibration((0.5, 1.0), (0.0, 1.0))  # the first mask's odds are squared, the second's raised by e
    policy = Policy("confidence", 3, Verify.NEVER, tau=0.9, calibration=modest)
    assert decision(policy, [0.5, 0.8, 0.8], 9) == (3, 0)
    assert decision(policy, [0.1, 0.8, 0.7], 9) == (2, 0)
    assert decision(replace(policy, calibration=None), [0.5, 0.8, 0.8], 9) == (1, 0)
