"""The decoder as a state machine: random policies over a scripted backend, checked at every iteration boundary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedBackend
from shapes import RandomShaper

from bitmtp.backends.base import MAX_WIDTH, Backend, Window
from bitmtp.decoding.decoder import Decoder, Finish, Source, Token, advance
from bitmtp.decoding.policies import make_policy
from bitmtp.decoding.policy import Policy, Verify
from bitmtp.decoding.shaper import Shaper
from bitmtp.decoding.state import State
from bitmtp.decoding.topology import spine, tree
from bitmtp.sampling import Sampling

PROMPT = st.lists(st.integers(0, 5), min_size=1, max_size=9)
AUTOREGRESSIVE = make_policy("autoregressive", 1)


@st.composite
def policies(draw: st.DrawFn, lossless: bool = False) -> Policy:
    block_size = draw(st.integers(1, 32))
    return Policy(
        "any",
        block_size,
        Verify.ALWAYS if lossless else draw(st.sampled_from(list(Verify))),
        draw(st.floats(0, 1)),
        draw(st.integers(1, block_size)),
        draw(st.floats(0, 1)),
    )


@dataclass
class Listener:
    """Hears each token and ends the text at the chosen one."""

    end_at: int | None
    heard: list[Token] = field(default_factory=list)

    def __call__(self, token: Token) -> bool:
        self.heard.append(token)
        return len(self.heard) == self.end_at


def make_decoder(
    backend: ScriptedBackend,
    prompt: list[int],
    policy: Policy,
    room: int,
    eos: frozenset[int] = frozenset(),
    end_at: int | None = None,
    shaper: Shaper | None = None,
) -> Decoder:
    state = State(backend.open(), Sampling(), list(prompt), len(prompt))
    return Decoder(state, policy, len(prompt) + room, eos, ends=Listener(end_at), shaper=shaper)


def check_boundary(decoder: Decoder, backend: ScriptedBackend) -> None:
    state = decoder.state
    assert len(state.committed) == state.materialized + len(state.pending)
    assert len(state.pending) >= 1
    assert len(state.committed) <= decoder.limit
    assert backend.history[state.sequence] == state.committed[: state.materialized]


def check_stats(decoder: Decoder) -> None:
    stats, state = decoder.stats, decoder.state
    assert sum(stats.acceptance_histogram(decoder.policy.block_size)) == stats.iterations
    assert stats.tokens == sum(length * count for length, count in stats.lengths.items()) == state.generated - 1
    assert 0 <= stats.accepted <= stats.proposed
    assert stats.num_spec_steps <= stats.iterations <= stats.passes <= 2 * stats.iterations
    most = MAX_WIDTH if stats.copied else decoder.policy.block_size + 1
    assert all(1 <= length <= most for length in stats.lengths)


def check_end(decoder: Decoder) -> None:
    state, listener = decoder.state, cast(Listener, decoder.ends)
    text = state.committed[state.prompt_length :]
    assert [token.id for token in listener.heard] == text, "each token is announced once, in order"
    assert not set(text[:-1]) & decoder.eos_ids
    ended = text[-1] in decoder.eos_ids or len(text) == listener.end_at
    assert decoder.finish is (Finish.STOP if ended else Finish.LENGTH)
    assert ended or len(state.committed) == decoder.limit


def run(decoder: Decoder, backend: ScriptedBackend) -> list[int]:
    """Decode to the end; returns the text."""
    passes = cast(Backend, backend)
    decoder.start(passes)
    check_boundary(decoder, backend)
    while decoder.finish is None:
        before = decoder.state.generated
        (committed,) = advance(passes, [decoder])
        assert decoder.state.generated == before + len(committed)
        if committed:
            check_boundary(decoder, backend)
            check_stats(decoder)
    check_end(decoder)
    check_stats(decoder)
    assert decoder.stats.passes == len(backend.widths)
    return decoder.state.committed[decoder.state.prompt_length :]


@given(
    seed=st.integers(0, 1 << 20),
    skill=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    prompt=PROMPT,
    policy=policies(),
    room=st.integers(1, 50),
    eos=st.frozensets(st.integers(0, 5), max_size=1),
    end_at=st.none() | st.integers(1, 50),
)
def test_every_iteration_keeps_the_identity(
    seed: int, skill: float, prompt: list[int], policy: Policy, room: int, eos: frozenset[int], end_at: int | None
) -> None:
    backend = ScriptedBackend(seed, skill=skill)
    decoder = make_decoder(backend, prompt, policy, room, eos, end_at)
    run(decoder, backend)
    assert max(backend.widths, default=0) <= 2 * policy.block_size - 1


@given(
    seed=st.integers(0, 1 << 20),
    skill=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    prompt=PROMPT,
    policy=policies(lossless=True),
    room=st.integers(1, 50),
    eos=st.frozensets(st.integers(0, 5), max_size=1),
)
def test_verified_text_is_the_autoregressive_text(
    seed: int, skill: float, prompt: list[int], policy: Policy, room: int, eos: frozenset[int]
) -> None:
    backend = ScriptedBackend(seed, skill=skill)
    baseline = run(make_decoder(backend, prompt, AUTOREGRESSIVE, room, eos), backend)
    other = ScriptedBackend(seed, skill=skill)
    assert run(make_decoder(other, prompt, policy, room, eos), other) == baseline


@given(
    seed=st.integers(0, 1 << 20),
    skill=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    prompt=PROMPT,
    room=st.integers(1, 60),
    eos=st.frozensets(st.integers(0, 5), max_size=1),
    end_at=st.none() | st.integers(1, 50),
)
def test_any_shapes_give_the_autoregressive_text(
    seed: int, skill: float, prompt: list[int], room: int, eos: frozenset[int], end_at: int | None
) -> None:
    backend, other = ScriptedBackend(seed, skill=skill), ScriptedBackend(seed, skill=skill)
    baseline = run(make_decoder(backend, prompt, AUTOREGRESSIVE, room, eos, end_at), backend)
    shaper = RandomShaper(seed)
    decoder = make_decoder(other, prompt, make_policy("speculative", 32), room, eos, end_at, shaper)
    assert run(decoder, other) == baseline
    assert sum(width for _, _, width in shaper.heard) == sum(other.widths)
    assert sum(count for count, _, _ in shaper.heard) == decoder.stats.tokens


def test_shapes_are_followed_by_the_text() -> None:
    """Otherwise the test above would prove little: alternatives are accepted, and drafts of verify passes used."""
    used: set[str] = set()
    single_pass = alternatives = 0
    for seed in range(40):
        backend = ScriptedBackend(seed, skill=0.7)
        shaper = RandomShaper(seed)
        decoder = make_decoder(backend, [1], make_policy("speculative", 32), 60, shaper=shaper)
        run(decoder, backend)
        used |= shaper.used
        single_pass += decoder.stats.iterations * 2 - decoder.stats.passes
        alternatives += decoder.stats.accepted
    assert used == {"known", "unknown", "fused", "copied"}
    assert single_pass > 0
    assert alternatives > 0


@given(seed=st.integers(0, 1 << 20), room=st.integers(1, 40), recent=st.integers(1, 60))
def test_windowed_drafts_give_the_autoregressive_text(seed: int, room: int, recent: int) -> None:
    backend = ScriptedBackend(seed)
    window = Window(2, recent)
    policy = Policy("windowed", 8, Verify.ALWAYS, window=window)
    decoder = make_decoder(backend, [1, 2, 3, 4, 5], policy, room)
    assert run(decoder, backend) == backend.continuation([1, 2, 3, 4, 5], room)


@given(seed=st.integers(0, 1 << 20), room=st.integers(1, 40), bound=st.floats(0, 1))
def test_a_tree_gives_the_autoregressive_text(seed: int, room: int, bound: float) -> None:
    backend = ScriptedBackend(seed, skill=0.5)
    policy = Policy("tree", 6, Verify.ALWAYS, verify_bound=bound, topology=spine(5, (0, 2, 2, 1)))
    decoder = make_decoder(backend, [1], policy, room)
    assert run(decoder, backend) == backend.continuation([1], room)


def test_alternatives_raise_acceptance() -> None:
    lengths = []
    for topology in (None, tree("t", [(0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0)])):
        backend = ScriptedBackend(5, skill=0.5)
        decoder = make_decoder(backend, [1], Policy("tree", 4, Verify.ALWAYS, topology=topology), 600)
        run(decoder, backend)
        lengths.append(decoder.stats.mean_acceptance_length)
    assert lengths[1] > lengths[0] * 1.05


@given(seed=st.integers(0, 1 << 20), room=st.integers(2, 60), block_size=st.integers(2, 16))
def test_perfect_drafts_are_all_accepted(seed: int, room: int, block_size: int) -> None:
    backend = ScriptedBackend(seed, skill=1.0)
    decoder = make_decoder(backend, [1], make_policy("speculative", 16, block_size=block_size, verify_bound=0), room)
    run(decoder, backend)
    assert decoder.stats.accepted == decoder.stats.proposed
    assert decoder.stats.iterations == -(-(room - 1) // (block_size + 1))


def test_sources_of_tokens() -> None:
    backend = ScriptedBackend(3, skill=1.0)
    decoder = make_decoder(backend, [1, 2], make_policy("speculative", 8, block_size=4, verify_bound=0), 6)
    run(decoder, backend)
    exact, accepted = Source.EXACT, Source.ACCEPTED
    heard = [token.source for token in cast(Listener, decoder.ends).heard]
    assert heard == [exact, exact, accepted, accepted, accepted, exact]
    assert decoder.stats.acceptance_histogram(4) == [0, 0, 0, 0, 1]


def test_confident_tokens_are_pending_and_run_again() -> None:
    backend = ScriptedBackend(3, skill=1.0)
    decoder = make_decoder(backend, [1, 2], make_policy("confidence", 8, block_size=4, tau=0), 30)
    passes = cast(Backend, backend)
    decoder.start(passes)
    for width in (4, 7, 7):
        (tokens,) = advance(passes, [decoder])
        assert [token.source for token in tokens] == [Source.EXACT] + [Source.CONFIDENT] * 3
        assert backend.widths[-1] == width
        assert len(decoder.state.pending) == 4


def test_a_prefix_that_is_reused_is_not_run_again() -> None:
    backend = ScriptedBackend(1)
    sequence = backend.open()
    backend.history[sequence] = [3, 4]
    decoder = Decoder(State(sequence, Sampling(), [3, 4, 5], 3, materialized=2), AUTOREGRESSIVE, 9, frozenset())
    assert decoder.start(cast(Backend, backend)).id == backend.next_token([3, 4, 5])
    assert backend.history[sequence] == [3, 4, 5]


@given(
    seed=st.integers(0, 1 << 20),
    texts=st.lists(st.tuples(PROMPT, policies(lossless=True), st.integers(1, 25)), min_size=1, max_size=6),
)
def test_a_batch_is_its_texts(seed: int, texts: list[tuple[list[int], Policy, int]]) -> None:
    backend = ScriptedBackend(seed)
    passes = cast(Backend, backend)
    decoders = [make_decoder(backend, prompt, policy, room) for prompt, policy, room in texts]
    for decoder in decoders:
        decoder.start(passes)
    while any(decoder.finish is None for decoder in decoders):
        committed = advance(passes, decoders)
        assert len(committed) == len(decoders)
        for decoder, tokens in zip(decoders, committed, strict=True):
            if tokens:
                check_boundary(decoder, backend)
    assert max(backend.widths, default=0) <= MAX_WIDTH
    for decoder, (prompt, _, room) in zip(decoders, texts, strict=True):
        check_end(decoder)
        check_stats(decoder)
        assert decoder.state.committed[len(prompt) :] == backend.continuation(prompt, room)


def run_in_widths(decoder: Decoder, backend: ScriptedBackend, widths: list[int]) -> list[int]:
    """Decode from the unread prompt on, each pass as wide as it is told, 64 when the text asks for more room."""
    passes = cast(Backend, backend)
    turn = 0
    while decoder.finish is None:
        width = widths[turn % len(widths)]
        rows = decoder.rows(width) or decoder.rows(MAX_WIDTH)
        assert rows
        turn += 1
        decoder.absorb(passes, backend.step(rows))
        assert len(decoder.state.committed) <= decoder.limit
    check_end(decoder)
    return decoder.state.committed[decoder.state.prompt_length :]


@given(
    seed=st.integers(0, 1 << 20),
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=150),
    policy=policies(),
    room=st.integers(1, 30),
    widths=st.lists(st.integers(0, MAX_WIDTH), min_size=1, max_size=8),
)
def test_the_width_of_passes_does_not_change_a_text(
    seed: int, prompt: list[int], policy: Policy, room: int, widths: list[int]
) -> None:
    backend, other = ScriptedBackend(seed), ScriptedBackend(seed)
    free = run(make_decoder(backend, prompt, policy, room), backend)
    decoder = make_decoder(other, prompt, policy, room)
    assert run_in_widths(decoder, other, widths) == free
    assert other.history[decoder.state.sequence] == decoder.state.committed[: decoder.state.materialized]
    if policy.lossless:
        assert free == backend.continuation(prompt, room)


def test_a_finished_text_takes_no_more_rows() -> None:
    backend = ScriptedBackend(0)
    decoder = make_decoder(backend, [1], AUTOREGRESSIVE, 1)
    decoder.start(cast(Backend, backend))
    assert decoder.finish is Finish.LENGTH
    assert advance(cast(Backend, backend), [decoder]) == [[]]
    assert backend.widths == []


def test_a_draft_that_is_not_worth_verifying_is_still_a_draft() -> None:
    """Otherwise a model whose drafts are hopeless shows no drafting at all, and nobody is warned."""
    backend = ScriptedBackend(0, skill=0.0)
    decoder = make_decoder(backend, [1], make_policy("speculative", 8, verify_bound=1), 30)
    run(decoder, backend)
    assert max(backend.widths) == 8
    assert decoder.stats.num_spec_steps > 0
