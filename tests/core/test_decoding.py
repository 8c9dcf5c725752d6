"""Texts as state machines: random policies over a scripted backend, checked at every iteration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedBackend
from shapes import policies, topologies
from texts import CHEAP, DEAR, USUAL, Listener, iterations, make_text, written

from bitmtp.backends.base import MAX_WIDTH
from bitmtp.core import _core
from bitmtp.core.costs import Tuning
from bitmtp.core.policies import make_policy
from bitmtp.core.policy import Policy, Verify
from bitmtp.core.text import Finish, Source, Text
from bitmtp.core.topology import Topology, chain, spine, tree, with_block

PROMPT = st.lists(st.integers(0, 5), min_size=1, max_size=9)
TUNINGS = st.sampled_from([CHEAP, DEAR, USUAL])
AUTOREGRESSIVE = make_policy("autoregressive", 1)


def check_identity(backend: ScriptedBackend, text: Text) -> None:
    """Between two passes, what is in the store is the text's beginning, and the rest of it is pending."""
    core = text.core
    assert core.tokens[: core.materialized] == backend.history[text.sequence]
    assert core.committed - core.materialized >= (0 if core.drafted else 1)


@given(st.integers(), PROMPT, policies(), st.integers(1, 60), st.none() | st.integers(1, 30), TUNINGS)
def test_every_iteration_keeps_the_identity(
    seed: int, prompt: list[int], policy: Policy, room: int, end_at: int | None, tuning: Tuning
) -> None:
    backend, listener = ScriptedBackend(seed), Listener(end_at)
    text = make_text(backend, prompt, policy, room, eos=frozenset([0]), tuning=tuning, ends=listener)
    for _ in iterations(backend, [text], tuning):
        if text.finish is None:
            check_identity(backend, text)
    assert [token.id for token in listener.heard] == text.written
    assert len(text.written) <= room
    ended = text.written[-1] == 0 or len(text.written) == end_at
    assert text.finish is (Finish.STOP if ended else Finish.LENGTH)
    assert 0 not in text.written[:-1]
    stats = text.stats
    assert stats.tokens == len(text.written) - 1
    assert sum(stats.lengths.values()) == stats.iterations
    assert 0 <= stats.accepted <= stats.proposed
    assert stats.accepted == sum(token.source is not Source.EXACT for token in listener.heard)


@given(st.integers(), PROMPT, policies(lossless=True), st.integers(1, 60), st.floats(0, 1), TUNINGS)
def test_verified_text_is_the_autoregressive_text(
    seed: int, prompt: list[int], policy: Policy, room: int, skill: float, tuning: Tuning
) -> None:
    backend = ScriptedBackend(seed, skill=skill)
    text = make_text(backend, prompt, policy, room, tuning=tuning)
    assert written(backend, text, tuning=tuning) == [backend.continuation(prompt, room)]


@given(st.integers(), st.lists(st.tuples(PROMPT, policies(lossless=True), st.integers(1, 40)), min_size=2, max_size=9))
def test_a_batch_is_its_texts(seed: int, asked: list[tuple[list[int], Policy, int]]) -> None:
    backend = ScriptedBackend(seed)
    texts = [make_text(backend, prompt, policy, room) for prompt, policy, room in asked]
    assert written(backend, *texts) == [backend.continuation(prompt, room) for prompt, _, room in asked]
    assert max(backend.widths) <= MAX_WIDTH


@given(st.integers(), PROMPT, policies(), st.integers(1, 30), st.lists(st.integers(1, MAX_WIDTH), min_size=1))
def test_the_width_of_passes_does_not_change_a_text(
    seed: int, prompt: list[int], policy: Policy, room: int, widths: list[int]
) -> None:
    backend = ScriptedBackend(seed)
    (wide,) = written(backend, make_text(backend, prompt, policy, room))
    text, turn = make_text(backend, prompt, policy, room), 0
    batch = _core.Batch(CHEAP.costs.core())
    while text.finish is None:
        width = widths[turn % len(widths)] if turn < 200 else MAX_WIDTH
        turn += 1
        if batch.plan([text.core], width, width):
            assert text.core.width <= width
            backend.materialize(text.sequence, text.absorb(backend.step(text.rows(), top=text.core.ranks)))
            text.take()
    assert text.written == wide


@given(st.integers(), st.integers(1, 60), st.integers(1, 32))
def test_perfect_drafts_are_all_accepted(seed: int, room: int, block_size: int) -> None:
    backend = ScriptedBackend(seed, skill=1.0)
    text = make_text(backend, [1], Policy("any", block_size, Verify.ALWAYS), room)
    written(backend, text)
    assert text.stats.accepted == text.stats.proposed
    if room > block_size + 1:
        assert text.stats.lengths[block_size + 1 if block_size > 1 else 1] >= (room - 1) // (block_size + 1)


def test_alternatives_raise_acceptance() -> None:
    lengths = []
    for shape in (chain(6), spine(6, (2, 2, 2, 2, 2, 2))):
        backend = ScriptedBackend(3)
        text = make_text(backend, [1, 2], Policy("any", 8, Verify.ALWAYS, topology=shape), 400)
        written(backend, text)
        lengths.append(text.stats.mean_acceptance_length)
    assert lengths[1] > 1.1 * lengths[0]


def test_sources_of_tokens() -> None:
    backend = ScriptedBackend(1, skill=1.0)
    text = make_text(backend, [1], Policy("any", 4, Verify.ALWAYS), 11)
    sources = [[token.source for token in tokens] for _, tokens in iterations(backend, [text])]
    assert sources == [[Source.EXACT]] + 2 * [[Source.EXACT, *[Source.ACCEPTED] * 3, Source.EXACT]]
    text = make_text(backend, [1], Policy("any", 4, Verify.NEVER, tau=0.0), 9)
    sources = [[token.source for token in tokens] for _, tokens in iterations(backend, [text])]
    assert sources == [[Source.EXACT]] + 2 * [[Source.EXACT, *[Source.CONFIDENT] * 3]]


def test_confident_tokens_are_pending_and_run_again() -> None:
    backend = ScriptedBackend(1, skill=1.0)
    text = make_text(backend, [1, 2, 3], Policy("any", 4, Verify.NEVER, tau=0.0), 9)
    written(backend, text)
    assert backend.widths == [3, 4, 4 + 3]


def test_a_prefix_that_is_reused_is_not_run_again() -> None:
    backend = ScriptedBackend(1)
    text = make_text(backend, [1, 2, 3, 4], AUTOREGRESSIVE, 3)
    again = Text(text.sequence, [1, 2, 3, 4], 3, AUTOREGRESSIVE, text.sampling, 7, frozenset(), CHEAP.costs.core())
    backend.history[text.sequence] = [1, 2, 3]
    assert written(backend, again) == [backend.continuation([1, 2, 3, 4], 3)]
    assert backend.widths == [1, 1, 1]


def test_a_prompt_comes_in_pieces_and_its_last_one_drafts_nothing() -> None:
    backend, prompt = ScriptedBackend(1), [index % 6 for index in range(150)]
    text = make_text(backend, prompt, make_policy("speculative", 8), 1)
    assert written(backend, text) == [backend.continuation(prompt, 1)]
    assert backend.widths == [64, 64, 22]
    assert text.stats.passes == 0


def test_a_text_that_is_left_stands_where_it_was_taken() -> None:
    backend = ScriptedBackend(1)
    text = make_text(backend, [1], AUTOREGRESSIVE, 20)
    for _ in iterations(backend, [text]):
        if len(text.written) == 5:
            break
    text.leave()
    assert text.core.committed == len(text.committed) == 6
    assert text.materialized == 5
    assert text.take() == []


@pytest.mark.parametrize("verify", list(Verify))
@pytest.mark.parametrize("end", ["eos", "ends"])
def test_what_lies_behind_the_end_was_never_proposed(verify: Verify, end: str) -> None:
    backend = ScriptedBackend(2, skill=1.0)
    tokens = backend.continuation([1], 40)
    place = next(i for i in range(3, 40) if tokens[i] not in tokens[:i])
    policy = Policy("any", 32, verify, tau=0.0)
    options = {"eos": frozenset([tokens[place]])} if end == "eos" else {"ends": Listener(place + 1)}
    text = make_text(backend, [1], policy, 60, **options)  # type: ignore[arg-type]
    assert written(backend, text) == [tokens[: place + 1]]
    assert text.finish is Finish.STOP
    assert text.stats.accepted == text.stats.proposed > 0


@given(topologies(), st.integers(), st.integers(0, 5))
def test_the_longest_path(shape: Topology, seed: int, first: int) -> None:
    """What a verify pass commits, against the longest of all proposed paths that the scripted model itself writes."""
    backend, policy = ScriptedBackend(seed, skill=0.3), Policy("any", 16, Verify.ALWAYS, topology=shape)
    text = make_text(backend, [first, first], policy, 40)
    while text.finish is None:
        text.core.plan(MAX_WIDTH)
        before, paths = text.core.committed, text.core.proposals()[0]
        right = backend.continuation(text.core.tokens, 40)
        backend.materialize(text.sequence, text.absorb(backend.step(text.rows(), top=text.core.ranks)))
        if paths:
            longest = max([len(path) for path in paths if path == right[: len(path)]], default=0)
            assert text.core.committed - before == min(longest + 1, 42 - before)
        text.take()


def test_a_draft_that_is_not_worth_verifying_is_still_a_draft() -> None:
    backend = ScriptedBackend(1)
    text = make_text(backend, [1], Policy("any", 4, Verify.ALWAYS, verify_bound=1.0), 9)
    written(backend, text)
    assert text.stats.num_spec_steps > 0


def test_named_shapes_keep_the_text() -> None:
    backend = ScriptedBackend(5)
    shapes = [tree("t", [(0,) * 9, (0, 1, 0, 0), (0, 0, 1), (0, 2)]), with_block(spine(4, (0, 2, 1)), 3, 6)]
    for shape in shapes:
        text = make_text(backend, [3, 1], Policy("any", 16, Verify.ALWAYS, topology=shape), 120)
        assert written(backend, text) == [backend.continuation([3, 1], 120)]
    assert text.stats.ahead > text.stats.ahead_used > 0


@pytest.mark.parametrize("size", [2, 5, 8])
def test_no_row_stands_beyond_the_limit(size: int) -> None:
    """Masks that hang from a proposal count their depth from it; their place is further behind the text."""
    backend = ScriptedBackend(5, skill=1.0)
    shape = with_block(chain(4), 3, size)
    text = make_text(backend, [3, 1], Policy("any", 16, Verify.ALWAYS, topology=shape), 23)
    furthest = 0
    while text.finish is None:
        text.core.plan(MAX_WIDTH)
        rows = text.rows()
        furthest = max(furthest, *(row.position for row in rows))
        backend.materialize(text.sequence, text.absorb(backend.step(rows, top=text.core.ranks)))
        text.take()
    assert text.written == backend.continuation([3, 1], 23)
    assert furthest < 25
