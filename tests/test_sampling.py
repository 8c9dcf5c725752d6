"""How a token is chosen, against a definition written with loops and against the softmax."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitmtp.errors import RequestError
from bitmtp.numerics import blocked_sum, exp, gumbel
from bitmtp.sampling import GREEDY, Choice, Sampling, adjust, choose

F = np.float32


def ids_of(raw: np.ndarray) -> np.ndarray:
    return np.arange(len(raw), dtype=np.int32)


def kept_by_definition(z: np.ndarray, sampling: Sampling) -> set[int]:
    """The filters, one token at a time."""
    ranked = sorted(range(len(z)), key=lambda i: (-z[i], i))
    kept = ranked[: sampling.top_k] if sampling.top_k else ranked
    weights = {i: exp(np.array([F(z[i] - z[ranked[0]])]))[0] for i in kept}
    if sampling.top_p < 1:
        bound = F(F(sampling.top_p) * blocked_sum(np.array([weights.get(i, 0) for i in range(len(z))], F)))
        total, short = F(0), []
        for i in kept:
            if total < bound:
                short.append(i)
            total = F(total + weights[i])
        kept = short
    return {i for i in kept if weights[i] >= F(sampling.min_p)} | {ranked[0]}


def chosen_by_definition(raw: np.ndarray, sampling: Sampling, position: int) -> int:
    z = (raw / F(sampling.temperature)).astype(F)
    noise = gumbel(sampling.seed, sampling.choice, position, ids_of(raw))
    return max(kept_by_definition(z, sampling), key=lambda i: (F(z[i] + noise[i]), -i))


@given(
    seed=st.integers(0, 10_000),
    size=st.integers(1, 60),
    coarse=st.booleans(),
    temperature=st.sampled_from([0.3, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 59, 1000]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_filters(
    seed: int, size: int, coarse: bool, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    random = np.random.default_rng(seed)
    raw = random.integers(-3, 4, size).astype(F) if coarse else random.normal(0, 2, size).astype(F)
    sampling = Sampling(temperature, top_k, top_p, min_p, seed=seed)
    assert choose(ids_of(raw), raw, Choice(sampling), 9) == chosen_by_definition(raw, sampling, 9)


@pytest.mark.parametrize(
    ("filters", "allowed"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.6}, {1, 3}),
        ({"min_p": 0.3}, {1, 3}),
        ({"top_p": 0.0}, {1}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 1}, {1}),
        ({}, {0, 1, 2, 3}),
    ],
    ids=str,
)
def test_filters_by_hand(filters: dict[str, Any], allowed: set[int]) -> None:
    raw = np.log(np.array([0.05, 0.55, 0.1, 0.3])).astype(F)
    found = {choose(ids_of(raw), raw, Choice(Sampling(1.0, **filters)), position) for position in range(300)}
    assert found == allowed


def test_top_k_breaks_ties_by_the_lowest_id() -> None:
    raw = np.array([1, 2, 2, 2, 0], F)
    found = {choose(ids_of(raw), raw, Choice(Sampling(1.0, top_k=2)), position) for position in range(100)}
    assert found == {1, 2}


def test_top_p_stops_when_its_share_is_reached() -> None:
    raw = np.zeros(4, F)
    found = {choose(ids_of(raw), raw, Choice(Sampling(1.0, top_p=0.5)), position) for position in range(100)}
    assert found == {0, 1}


def test_greedy_breaks_ties_by_the_lowest_id() -> None:
    raw = np.array([0, 3, 1, 3], F)
    assert choose(ids_of(raw), raw, GREEDY, 0) == 1
    # As candidates in another order: the id counts, not the place.
    assert choose(np.array([9, 40, 7, 30], np.int32), raw, GREEDY, 0) == 3


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_samples_follow_the_softmax(temperature: float) -> None:
    raw = np.array([1.2, -0.3, 0.4, 2.0, -1.5, 0.0], F)
    draws = 4_000
    choice = Choice(Sampling(temperature, seed=11))
    counts = np.bincount([choose(ids_of(raw), raw, choice, p) for p in range(draws)], minlength=len(raw))
    weights = np.exp(raw.astype(np.float64) / temperature)
    expected = draws * weights / weights.sum()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 20.5  # 5 degrees of freedom: 0.1%


def test_filtered_samples_follow_what_is_left() -> None:
    raw = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(F)
    choice = Choice(Sampling(1.0, top_k=3, seed=2))
    counts = np.bincount([choose(ids_of(raw), raw, choice, p) for p in range(3600)], minlength=4)
    expected = np.array([1600, 1200, 800])
    assert counts[3] == 0
    assert ((counts[:3] - expected) ** 2 / expected).sum() < 13.8  # 2 degrees of freedom: 0.1%


@pytest.mark.parametrize("change", [{"seed": 1}, {"choice": 1}, {"position": 1}], ids=str)
def test_each_key_of_the_noise_counts(change: dict[str, int]) -> None:
    raw = np.zeros(500, F)
    shift = change.pop("position", 0)
    base, other = Choice(Sampling(1.0)), Choice(Sampling(1.0, **change))
    same = [choose(ids_of(raw), raw, base, p) == choose(ids_of(raw), raw, other, p + shift) for p in range(40)]
    assert sum(same) <= 3


def test_a_sample_ignores_tokens_that_cannot_win() -> None:
    """The token chosen among candidates is the one of the whole row, if it is among them."""
    raw = np.random.default_rng(0).normal(0, 1, 300).astype(F)
    choice = Choice(Sampling(1.0, seed=4))
    for position in range(30):
        winner = choose(ids_of(raw), raw, choice, position)
        some = np.unique([winner, 5, 100, 250]).astype(np.int32)
        assert some[choose(some, raw[some], choice, position)] == winner


def test_penalties_by_hand() -> None:
    sampling = Sampling(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((0, 1.0), (3, -2.0))
    )
    choice = Choice.with_counts(sampling, {1: 0, 2: 3, 3: 1})
    raw = np.array([4, 4, 4, -4, 4], F)
    # id 0: unseen, bias. 1: prompt only. 2: three times in the text. 3: once, negative, bias. 4: untouched.
    assert adjust(ids_of(raw), raw, choice).tolist() == [5, 2, 2 - 0.75 - 0.5, -8 - 0.25 - 0.5 - 2, 4]
    assert raw.tolist() == [4, 4, 4, -4, 4]


def test_penalties_look_ids_up() -> None:
    choice = Choice.with_counts(Sampling(repetition_penalty=2.0), {10: 0, 500: 1})
    ids = np.array([500, 3, 10, 900], np.int32)
    assert adjust(ids, np.full(4, 8, F), choice).tolist() == [4, 8, 4, 8]


def test_penalties_change_the_greedy_choice() -> None:
    raw = np.array([3, 2], F)
    choice = Choice.with_counts(Sampling(presence_penalty=2.0), {0: 1})
    assert choose(ids_of(raw), raw, GREEDY, 0) == 0
    assert choose(ids_of(raw), raw, choice, 0) == 1


def test_a_grammar_by_hand() -> None:
    raw = np.array([5, 4, 3, 2], F)
    only = Choice(allowed=np.array([0b1100], np.uint32))
    assert choose(ids_of(raw), raw, only, 0) == 2
    sampled = Choice(Sampling(50.0), allowed=np.array([0b1100], np.uint32))
    assert {choose(ids_of(raw), raw, sampled, p) for p in range(60)} == {2, 3}


def test_a_bias_can_forbid_and_force() -> None:
    raw = np.random.default_rng(0).normal(0, 1, 50).astype(F)
    best = int(raw.argmax())
    forbid = Choice(Sampling(1.0, logit_bias=((best, -1e9),)))
    force = Choice(Sampling(1.0, logit_bias=((7, 1e9),)))
    assert all(choose(ids_of(raw), raw, forbid, p) != best for p in range(100))
    assert all(choose(ids_of(raw), raw, force, p) == 7 for p in range(100))


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 1.1},
        {"top_p": -0.1},
        {"min_p": 1.5},
        {"seed": -1},
        {"seed": 1 << 64},
        {"choice": -1},
        {"repetition_penalty": 0},
        {"presence_penalty": float("inf")},
        {"frequency_penalty": -101},
        {"logit_bias": ((1, float("nan")),)},
    ],
    ids=str,
)
def test_values_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(bad))):
        Sampling(**bad)


@pytest.mark.parametrize("temperature", [1e-3, 1e-2])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    raw = np.array([2.0, 5.0, 3.0, 1.0], F)
    assert {choose(ids_of(raw), raw, Choice(Sampling(temperature)), p) for p in range(20)} == {1}


@pytest.mark.parametrize("temperature", [1e-60, 9e-4])
def test_a_temperature_that_float32_cannot_divide_by_is_refused(temperature: float) -> None:
    with pytest.raises(RequestError, match="temperature"):
        Sampling(temperature)
