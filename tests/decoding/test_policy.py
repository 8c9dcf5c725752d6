"""The pure decisions against their definitions, and which options a policy takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitmtp.backends.base import Window
from bitmtp.decoding.costs import Calibration
from bitmtp.decoding.policies import POLICIES, make_policy
from bitmtp.decoding.policy import (
    Decision,
    Policy,
    Verify,
    confidence_bars,
    confident_prefix,
    decide,
    worth_verifying,
)
from bitmtp.decoding.topology import chain
from bitmtp.errors import RequestError

PROBABILITIES = st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.8, 0.9, 1.0]), min_size=1, max_size=9)
THRESHOLD = st.sampled_from([0.0, 0.1, 0.4, 0.5, 0.81, 0.9, 1.0])


def product(values: list[float]) -> float:
    result = 1.0
    for value in values:
        result *= value
    return result


@given(probabilities=PROBABILITIES, tau=THRESHOLD)
def test_confident_prefix(probabilities: list[float], tau: float) -> None:
    lengths = range(1, len(probabilities) + 1)
    bars = confidence_bars(9, tau, None)
    assert confident_prefix(probabilities, bars) == max(n for n in lengths if all(p >= tau for p in probabilities[1:n]))


@given(probabilities=PROBABILITIES, bound=THRESHOLD)
def test_worth_verifying(probabilities: list[float], bound: float) -> None:
    fits = [n for n in range(2, len(probabilities) + 1) if product(probabilities[1:n]) >= bound]
    assert worth_verifying(probabilities, bound) == max(fits, default=1)


def test_the_anchor_s_own_probability_does_not_count() -> None:
    assert confident_prefix([0.0, 1.0, 1.0], confidence_bars(3, 0.9, None)) == 3
    assert worth_verifying([0.0, 1.0, 1.0], 0.9) == 3


@given(
    probabilities=PROBABILITIES,
    verify=st.sampled_from(list(Verify)),
    tau=THRESHOLD,
    bound=THRESHOLD,
    min_prefix=st.integers(1, 9),
    room=st.integers(1, 12),
)
def test_decide(
    probabilities: list[float], verify: Verify, tau: float, bound: float, min_prefix: int, room: int
) -> None:
    policy = Policy("any", 9, verify, tau, min_prefix, bound)
    decision = decide(policy, probabilities, room)
    assert (decision.commit == 0) != (decision.verify == 0)
    assert 0 <= decision.commit <= min(room, len(probabilities))
    assert decision.verify + 1 <= room or not decision.verify
    confident = min(confident_prefix(probabilities, policy.bars), room)
    if len(probabilities) == 1 or room == 1:
        assert decision == Decision(commit=1)
    elif verify is Verify.NEVER or (verify is Verify.IF_SHORT and confident >= min_prefix):
        assert decision == Decision(commit=confident)
    else:
        assert decision == Decision(verify=min(worth_verifying(probabilities, bound), room - 1))


def test_decisions_by_hand() -> None:
    probabilities = [0.2, 0.95, 0.92, 0.3]
    assert decide(make_policy("confidence", 8), probabilities, 10) == Decision(commit=3)
    assert decide(make_policy("speculative", 8), probabilities, 10) == Decision(verify=4)
    assert decide(make_policy("speculative", 8, verify_bound=0.5), probabilities, 10) == Decision(verify=3)
    assert decide(make_policy("hybrid", 8), probabilities, 10) == Decision(commit=3)
    assert decide(make_policy("hybrid", 8, min_prefix=4), probabilities, 10) == Decision(verify=4)
    assert decide(make_policy("autoregressive", 8), probabilities[:1], 10) == Decision(commit=1)


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
    assert confident_prefix([0.1, 0.8, 0.8], confidence_bars(3, 0.9, None)) == 1
    assert confident_prefix([0.1, 0.8, 0.8], confidence_bars(3, 0.9, modest)) == 3
    assert confident_prefix([0.1, 0.8, 0.7], confidence_bars(3, 0.9, modest)) == 2
    policy = Policy("confidence", 8, Verify.NEVER, tau=0.9, calibration=modest)
    assert decide(policy, [0.5, 0.8, 0.8], 9).commit == 3
    assert decide(replace(policy, calibration=None), [0.5, 0.8, 0.8], 9).commit == 1
