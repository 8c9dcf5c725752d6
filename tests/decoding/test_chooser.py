"""Adaptive shapes: the same text, deep drafts where they stand, none where they never do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedBackend
from test_decoder import PROMPT, make_decoder, run

from bitmtp.backends.base import Output
from bitmtp.decoding.chooser import AdaptiveShaper
from bitmtp.decoding.costs import Calibration, CostTable, Tuning
from bitmtp.decoding.plans import WINDOW, verify_gains
from bitmtp.decoding.policies import make_policy
from bitmtp.decoding.shaper import Verified
from bitmtp.decoding.topology import Kind, Topology
from bitmtp.decoding.tree import Guess

POLICY = make_policy("auto", 16)
CHEAP = CostTable((1, 64), (3.0, 3.5))  # rows are nearly free
DEAR = CostTable((1, 2, 64), (3.0, 6.0, 192.0))  # a row costs as much as a pass
USUAL = CostTable((1, 2, 8, 16), (3.7, 4.4, 7.4, 13.2), per_position=(0.0, 0.001))
TRUE = Calibration((1.0,), (0.0,))


def shaper_of(costs: CostTable, linear: bool = False) -> AdaptiveShaper:
    return AdaptiveShaper(POLICY, Tuning(costs, TRUE), linear=linear)


def guesses(*probabilities: Sequence[float]) -> list[Guess]:
    return [Guess(tuple(range(len(own))), tuple(own)) for own in probabilities]


@given(
    seed=st.integers(0, 1 << 20),
    skill=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    prompt=PROMPT,
    room=st.integers(1, 60),
    costs=st.sampled_from([CHEAP, DEAR, USUAL]),
    linear=st.booleans(),
)
def test_the_text_is_the_autoregressive_text(
    seed: int, skill: float, prompt: list[int], room: int, costs: CostTable, linear: bool
) -> None:
    backend = ScriptedBackend(seed, skill=skill)
    decoder = make_decoder(backend, prompt, POLICY, room, shaper=shaper_of(costs, linear))
    assert run(decoder, backend) == backend.continuation(prompt, room)


def test_perfect_drafts_become_deep() -> None:
    backend = ScriptedBackend(1, skill=1.0)
    decoder = make_decoder(backend, [1], POLICY, 400, shaper=shaper_of(USUAL))
    run(decoder, backend)
    assert decoder.stats.mean_acceptance_length > 4.5


def test_hopeless_drafts_stop_and_are_tried_again() -> None:
    backend = ScriptedBackend(1, vocab_size=50, skill=0.0)
    decoder = make_decoder(backend, [1], POLICY, 600, shaper=shaper_of(USUAL))
    run(decoder, backend)
    rows_per_token = sum(backend.widths) / decoder.stats.tokens
    assert rows_per_token < 1.2, "nearly all passes have one row"
    late = backend.widths[len(backend.widths) // 2 :]
    assert max(late) > 1, "drafting is probed again"


def test_where_rows_are_dear_nothing_is_drafted() -> None:
    backend = ScriptedBackend(1, skill=0.9)
    decoder = make_decoder(backend, [1], POLICY, 100, shaper=shaper_of(DEAR))
    run(decoder, backend)
    assert set(backend.widths) == {1}


def test_alternatives_are_verified_where_rows_are_cheap() -> None:
    doubtful = guesses([1.0], [0.5, 0.4, 0.05], [0.5, 0.3, 0.1])
    shape = shaper_of(CHEAP).judge(doubtful, True, 50, 100)
    assert isinstance(shape, Topology)
    places = {(node.depth, node.rank) for node in shape.nodes}
    assert {(1, 0), (2, 0), (2, 1), (3, 0), (3, 1)} <= places
    narrow = shaper_of(USUAL).judge(doubtful, True, 50, 100)
    assert not isinstance(narrow, Topology) or narrow.width < shape.width


def test_what_will_hardly_stand_is_not_verified() -> None:
    shaper = shaper_of(USUAL)
    assert shaper.judge(guesses([1.0], [0.01]), True, 50, 100) == 1
    shape = shaper.judge(guesses([1.0], [0.95], [0.95], [0.01], [0.9]), True, 50, 100)
    assert isinstance(shape, Topology)
    assert shape.depth == 3
    unknown = shaper.judge(guesses([0.01]), False, 50, 100)
    assert isinstance(unknown, Topology)
    assert unknown.width == 0, "only the anchor runs"


def test_nothing_reaches_beyond_the_limit() -> None:
    sure = guesses([1.0], [0.99], [0.99], [0.99])
    shape = shaper_of(CHEAP).judge(sure, True, 3, 100)
    assert isinstance(shape, Topology)
    assert shape.depth == 2
    assert shaper_of(CHEAP).judge(sure, True, 1, 100) == 1
    assert shaper_of(CHEAP).draft([1], 3, 100).size <= 3


def test_windows_once_the_history_is_long() -> None:
    steep = CostTable((1, 8), (3.7, 7.4), per_position=(0.002, 0.0002))
    assert shaper_of(steep).draft([1], 50, 500).window is None
    long = shaper_of(steep).draft([1], 50, 30_000)
    assert long.size > 1
    assert long.window == WINDOW


def test_windows_whose_drafts_fall_are_given_up() -> None:
    shaper = shaper_of(CostTable((1, 8), (3.7, 7.4), per_position=(0.001, 0.0001)))
    drafts = []
    for _ in range(40):
        drafts.append(shaper.draft([1], 50, 30_000))
        stood = drafts[-1].window is None
        shaper.learn(
            [Output(1, 0.5, 1.0)] * (5 if stood else 1), [Verified(1, 0.8, stood)] * (4 if stood else 1), [6, 6]
        )
    assert drafts[0].window == WINDOW
    assert sum(draft.window is None and draft.size > 1 for draft in drafts[-20:]) > 15


def test_entropy_shortens_the_next_draft() -> None:
    sizes = []
    for entropy in (0.1, 1.0, 3.0, 6.0):
        shaper = shaper_of(USUAL)
        for _ in range(4):
            shaper.learn([Output(1, 0.5, entropy)], [], [1])
        sizes.append(shaper.draft([1], 50, 100).size)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] == 1


def test_what_stands_lengthens_it() -> None:
    sizes = []
    for stood in (True, False):
        shaper = shaper_of(USUAL)
        for _ in range(6):
            shaper.learn([Output(1, 0.5, 1.0)] * 3, [Verified(1, 0.8, stood)] * (3 if stood else 1), [4, 4])
        sizes.append(shaper.draft([1], 50, 100).size)
    assert sizes[0] > sizes[1]


@pytest.mark.parametrize("acceptance", [0.3, 0.9])
def test_gains_of_drafts(acceptance: float) -> None:
    costs = [1.1 + 0.2 * rows for rows in range(12)]
    gains = list(verify_gains(acceptance, costs))
    assert gains == sorted(gains), "a longer draft never brings less"
    assert gains[0] == 0, "to run the first row alone brings its own token and costs more"
    expected = [sum(acceptance**i for i in range(rows)) - costs[rows - 1] for rows in range(1, 13)]
    knowing = [
        sum(acceptance**i * (1 - acceptance if i < rows - 1 else 1) * max(i + 1 - costs[i], 0) for i in range(rows))
        for rows in range(1, 13)
    ]
    for rows, gain in enumerate(gains):
        low, high = sorted((max(0.0, *expected[: rows + 1], 0.0), knowing[rows]))
        assert low - 1e-9 <= gain <= high + 1e-9


def test_the_next_draft_rides_along_where_rows_are_cheap() -> None:
    sure = guesses([1.0], *[[0.99]] * 9)
    shaper = shaper_of(CHEAP)
    for _ in range(20):  # a text whose tokens are cheap: the time of a pass buys several
        shaper.learn([Output(1, 0.9, 0.1)] * 10, [Verified(1, 0.9, True)] * 8, [8, 8])
    fused = shaper.judge(sure, True, 50, 100)
    assert isinstance(fused, Topology)
    assert {node.kind for node in fused.nodes} == {Kind.PROPOSAL, Kind.MASK}
    plain = shaper_of(DEAR).judge(sure, False, 50, 100)
    assert isinstance(plain, Topology)
    assert Kind.MASK not in {node.kind for node in plain.nodes}
    doubtful = shaper_of(USUAL).judge(guesses([1.0], [0.6], [0.6]), True, 50, 100)
    assert isinstance(doubtful, Topology)
    assert Kind.MASK not in {node.kind for node in doubtful.nodes}


def test_a_pass_that_drafts_as_well_saves_passes() -> None:
    backend = ScriptedBackend(1, skill=1.0)
    decoder = make_decoder(backend, [1], POLICY, 400, shaper=shaper_of(CHEAP))
    assert run(decoder, backend) == backend.continuation([1], 400)
    assert decoder.stats.passes < 1.5 * decoder.stats.iterations


def test_the_text_tells_of_what_was_not_verified() -> None:
    sizes = []
    for came in (0, 7):
        shaper = shaper_of(USUAL)
        for _ in range(8):
            assert shaper.judge(guesses([1.0], [0.01]), True, 50, 100) == 1
            shaper.learn([Output(9, 0.5, 1.0)], [], [4])
            shaper.learn([Output(came, 0.5, 1.0)], [], [1])
        sizes.append(shaper.draft([1], 50, 100).size)
    assert sizes[0] > sizes[1]


def test_sampled_texts_begin_with_shorter_drafts() -> None:
    tuning = Tuning(USUAL)
    sizes = [AdaptiveShaper(POLICY, tuning, heat).draft([1], 50, 100).size for heat in (0.0, 0.5, 1.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


def test_a_text_that_repeats_itself_is_copied() -> None:
    text = list(range(20)) * 3
    draft = shaper_of(USUAL).draft(text, 50, 60)
    assert [guess.tokens[0] for guess in draft.copied] == [index % 20 for index in range(len(draft.copied))]
    assert len(draft.copied) > 8
    assert len(shaper_of(USUAL).draft(text, 5, 60).copied) <= 4, "the verifier's own token needs room as well"
    assert not shaper_of(USUAL).draft(list(range(60)), 50, 60).copied


def test_copies_that_fall_are_given_up() -> None:
    shaper, text = shaper_of(USUAL), list(range(5)) * 10
    lengths = []
    for _ in range(12):
        draft = shaper.draft(text, 50, 50)
        lengths.append(len(draft.copied))
        if draft.copied:
            fell = Verified(1, draft.copied[0].probabilities[0], stood=False)
            shaper.learn([Output(1, 0.5, 1.0)], [fell], [1 + lengths[-1]])
        else:
            shaper.learn([Output(1, 0.5, 1.0)] * 4, [Verified(1, 0.8, True)] * 3, [4, 4])
    assert lengths[0] > lengths[-1]


def test_copies_need_no_draft_pass() -> None:
    class Looping(ScriptedBackend):
        """Writes the same seven tokens over and over."""

        def next_token(self, path: Sequence[int]) -> int:
            return len(path) % 7

    backend = Looping(1, vocab_size=50, skill=0.0)
    decoder = make_decoder(backend, [0], POLICY, 200, shaper=shaper_of(USUAL))
    assert run(decoder, backend) == backend.continuation([0], 200)
    assert decoder.stats.copied > 5
    assert decoder.stats.tokens_per_pass > 5


def test_second_choices_are_asked_for_where_rows_are_cheap() -> None:
    assert shaper_of(CHEAP).ranks > 1
    assert shaper_of(USUAL).ranks == 1


def test_linear_shapes_are_chains_that_see_all() -> None:
    shaper = shaper_of(CHEAP, linear=True)
    assert shaper.ranks == 1
    for _ in range(20):  # where a shaper that may would let the next draft ride along
        shaper.learn([Output(1, 0.9, 0.1)] * 10, [Verified(1, 0.9, True)] * 8, [8, 8])
    shape = shaper.judge(guesses([1.0], *[[0.99]] * 9), True, 50, 100)
    assert isinstance(shape, Topology)
    assert [(node.kind, node.depth, node.rank) for node in shape.nodes] == [
        (Kind.PROPOSAL, depth, 0) for depth in range(1, 11)
    ]
    steep = CostTable((1, 8), (3.7, 7.4), per_position=(0.002, 0.0002))
    assert shaper_of(steep, linear=True).draft([1], 50, 30_000).window is None


def test_what_a_resident_loop_is_told() -> None:
    tuning = Tuning(USUAL, Calibration((0.5, 2.0), (1.0, 0.0)), Calibration((3.0,), (0.1,)))
    greedy = AdaptiveShaper(make_policy("auto", 4), tuning).resident([7, 8])
    assert greedy.milliseconds == USUAL.near
    assert (greedy.temperatures, greedy.offsets) == ((0.5, 2.0, 2.0, 2.0), (1.0, 0.0, 0.0, 0.0))
    assert (greedy.per_position, greedy.history, greedy.row) == (USUAL.per_position, USUAL.history, USUAL.row)
    assert greedy.text == (7, 8)
    sampled = AdaptiveShaper(make_policy("auto", 4), tuning, 1.0).resident([])
    assert sampled.temperatures == (3.0,) * 4
    assert sampled.ease < greedy.ease
    assert sampled.faith < greedy.faith
