"""`auto`: what it copies, how it learns what passes cost, and how it behaves until it knows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedBackend
from texts import CHEAP, DEAR, make_text, written

from bitmtp.backends.base import Output
from bitmtp.core import _core
from bitmtp.core.costs import Calibration, CostTable, Tuning
from bitmtp.core.learned import LearnedCosts
from bitmtp.core.policies import make_policy
from bitmtp.core.text import Text
from bitmtp.engine import Engine, Request
from bitmtp.loop import Loop
from bitmtp.sampling import Sampling

AUTO = make_policy("auto", 16)
TRUE = Calibration((1.0,), (0.0,))
NARROW = Tuning(CostTable((1, 2, 8, 16), (3.7, 4.4, 7.4, 13.2), per_position=(0.0, 0.001)), TRUE)
GRAM, LONGEST = 3, 32
NOTHING = [0.0] * len(_core.KNOTS), [0] * len(_core.KNOTS)


def latest(text: list[int]) -> int:
    """Where the text's last three tokens stood before, the latest place: by looking everywhere. 0: nowhere."""
    return max([end for end in range(GRAM, len(text)) if text[end - GRAM : end] == text[-GRAM:]], default=0)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=150), st.integers(20, 60))
def test_copies_are_what_followed_the_latest_place(prompt: list[int], room: int) -> None:
    costs = CostTable((1, 64), (1.0, 1.0001)).core()  # rows are free
    text = Text(1, prompt, len(prompt) - 1, make_policy("auto", 1), Sampling(), len(prompt) + room, frozenset(), costs)
    text.core.plan(64)
    text.absorb([Output(0, 0.5, 1.0)])
    text.core.plan(64)
    paths, _ = text.core.proposals()
    end = latest(text.core.tokens)
    assert bool(paths) == bool(end)
    if end:
        written, period = text.core.tokens, len(text.core.tokens) - end
        assert paths[-1] == [written[end + place % period] for place in range(len(paths[-1]))]


def test_perfect_drafts_become_deep() -> None:
    backend = ScriptedBackend(1, skill=1.0)
    text = make_text(backend, [1], AUTO, 400, tuning=NARROW)
    written(backend, text, tuning=NARROW)
    assert text.stats.mean_acceptance_length > 4.5


def test_hopeless_drafts_stop_and_are_tried_again() -> None:
    backend = ScriptedBackend(1, vocab_size=50, skill=0.0)
    text = make_text(backend, [1], AUTO, 600, tuning=NARROW)
    written(backend, text, tuning=NARROW)
    assert sum(backend.widths) / text.stats.tokens < 1.2, "nearly all passes have one row"
    assert max(backend.widths[len(backend.widths) // 2 :]) > 1, "drafting is probed again"


def test_where_rows_are_dear_nothing_is_drafted() -> None:
    backend = ScriptedBackend(1, vocab_size=1000)
    text = make_text(backend, [1], AUTO, 100, tuning=DEAR)
    written(backend, text, tuning=DEAR)
    assert text.stats.passes == text.stats.iterations == 99
    assert max(backend.widths) == 1


def test_a_pass_that_drafts_as_well_saves_passes() -> None:
    backend = ScriptedBackend(1, skill=1.0)
    tuning = Tuning(CHEAP.costs, TRUE)
    text = make_text(backend, [1], AUTO, 400, tuning=tuning)
    assert written(backend, text, tuning=tuning) == [backend.continuation([1], 400)]
    assert text.core.ranks > 1
    assert text.stats.ahead_used > 0
    assert text.stats.passes < 1.5 * text.stats.iterations


def test_many_texts_take_fewer_rows_each() -> None:
    """A further row costs little in a narrow pass and much in a wide one."""
    steep = Tuning(CostTable((1, 8, 9, 64), (3.0, 3.2, 5.0, 60.0)))
    widths = {}
    for count in (1, 8):
        backend = ScriptedBackend(1, vocab_size=1000, skill=0.8)
        texts = [make_text(backend, [index], AUTO, 200, tuning=steep) for index in range(count)]
        assert written(backend, *texts, tuning=steep) == [backend.continuation([i], 200) for i in range(count)]
        widths[count] = sum(backend.widths) / len(backend.widths) / count
    assert widths[8] < 0.6 * widths[1]


def estimates(backend: ScriptedBackend, text: Text) -> dict[str, float]:
    """What a text knows of itself when it ends."""
    written(backend, text, tuning=NARROW)
    return dict(zip(("ease", "faith", "blur", "entropy"), text.core.estimate, strict=False))


def test_copies_that_fall_are_trusted_less() -> None:
    """Three tokens in any order: what ended so before says nothing of what follows."""
    backend = ScriptedBackend(1, vocab_size=3, skill=0.0)
    text = make_text(backend, [1], make_policy("auto", 1), 600, tuning=NARROW)
    begins = text.core.estimate[1]
    assert estimates(backend, text)["faith"] < begins - 0.5
    assert text.stats.copied > 0


def draft_width(temperature: float = 0.0, entropy: float = 1.0) -> int:
    """Rows of a draft behind ten tokens that came one a pass, their rows so undecided."""
    costs = CostTable((1, 8, 64), (3.0, 4.0, 30.0)).core()
    text = Text(1, [60], 0, AUTO, Sampling(temperature), 400, frozenset(), costs)
    for token in range(10):
        text.core.plan(1)
        text.absorb([Output(token, 0.5, entropy)])
    return text.core.plan(64)


def test_sampled_texts_and_undecided_ones_draft_less() -> None:
    assert draft_width() > draft_width(temperature=1.0) >= 1
    assert draft_width(entropy=0.1) > draft_width(entropy=3.0)


# Costs


def learning(known: list[float] = NOTHING[0], counts: list[int] = NOTHING[1]) -> _core.Costs:
    return _core.Costs([], (0.0, 0.0), 0, True, known, counts)


@pytest.mark.parametrize("step", [0.0, 2.0])
def test_costs_are_learned_from_passes(step: float) -> None:
    costs, luck = learning(), random.Random(1)
    truth = {width: 3.0 + 0.5 * width + step * (width > 8) for width in range(1, 65)}
    for _ in range(3000):
        width = luck.choice([1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 30, 33, 50, 64])
        noise = 5.0 if luck.random() < 0.02 else luck.uniform(0.9, 1.1)
        costs.learn(width, 0, truth[width] * noise)
    assert costs.reach == 64
    assert all(costs.cost(width, 0) == pytest.approx(cost, rel=0.12) for width, cost in truth.items())


def test_what_a_position_adds_is_learned_behind_long_histories() -> None:
    """A pass costs 3 + rows / 2, and for each position 1e-4 and 2e-5 a row; nothing is concluded from short texts."""
    costs, luck = learning(), random.Random(1)

    def run(history: int, passes: int) -> None:
        for _ in range(passes):
            width = luck.choice([1, 2, 4, 8, 16])
            cost = 3 + width / 2 + history * (1e-4 + 2e-5 * width)
            costs.learn(width, history, cost * luck.uniform(0.97, 1.03))

    run(200, 300)
    assert costs.per_position == (0.0, 0.0)
    run(3000, 100)
    assert costs.per_position == (0.0, 0.0), "too near to tell it from a machine that slows down"
    run(20_000, 300)
    assert costs.per_position == (pytest.approx(1e-4, rel=0.2), pytest.approx(2e-5, rel=0.2))
    run(100, 300)
    assert costs.cost(8, 20_000) == pytest.approx(7 + 20_000 * 2.6e-4, rel=0.1)
    assert costs.cost(8, 100) == pytest.approx(7, rel=0.1)


def test_windows_come_once_histories_are_known_to_cost() -> None:
    costs, prompt = learning(), [index % 7 for index in range(30_000)]
    for history in (10, 20_000):
        for _ in range(20):
            for width in (1, 2, 4, 8, 16, 17):
                costs.learn(width, history, 3 + width / 8 + history * (1e-3 + 2e-4 * width))
    backend = ScriptedBackend(1, vocab_size=1000, skill=1.0)
    sequence = backend.open()
    backend.history[sequence] = prompt[:-1]
    text = Text(sequence, prompt, len(prompt) - 1, AUTO, Sampling(), len(prompt) + 60, frozenset(), costs)
    assert text.core.wants_windows
    loop = Loop(backend, costs)  # type: ignore[arg-type]
    while text.finish is None:
        loop.run([text])
        text.take()
    assert text.stats.windowed > 0


def test_a_given_table_stays_as_it_is() -> None:
    costs = CHEAP.costs.core()
    before = [costs.cost(width, 100) for width in range(1, 65)]
    for width in range(1, 65):
        costs.learn(width, 0, 1000.0)
    assert [costs.cost(width, 100) for width in range(1, 65)] == before


def test_until_costs_are_known_a_text_decodes_autoregressively_but_for_trials() -> None:
    backend, costs = ScriptedBackend(1, vocab_size=1000), learning()
    text = Text(backend.open(), [1] * 40, 0, AUTO, Sampling(), 240, frozenset(), costs)
    loop = Loop(backend, costs)  # type: ignore[arg-type]
    while text.finish is None:
        loop.run([text])
        text.take()
    assert text.written == backend.continuation([1] * 40, 200)
    assert backend.widths[0] == 40, "the prompt comes first, and nothing before it"
    assert backend.widths[1:4] == [1, 1, 1]
    assert costs.reach >= 16


def test_nothing_is_measured_in_front_of_a_first_token(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitmtp.engine.measure_costs", lambda *_: pytest.fail("measured"))
    engine = Engine(tiny_engine.backend, tiny_engine.tokenizer, tiny_engine.context)
    assert engine.generate(Request("The harbour", 12, seed=1)).num_tokens == 12


def test_costs_outlive_a_process(tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    learned = LearnedCosts.of(tiny_engine.backend)
    assert learned.costs.reach == 0
    for _ in range(9):
        learned.costs.learn(1, 0, 3.0)
        learned.costs.learn(8, 0, 6.0)
    learned.save()
    (file,) = tmp_path.glob("bitmtp/costs/*.json")
    again = LearnedCosts.of(tiny_engine.backend)
    assert (again.costs.reach, again.costs.cost(8, 0)) == (8, pytest.approx(6.0))
    for text in ("", "{", "{}", '{"known": [1], "counts": [1], "far": []}', '{"known": "x", "counts": 3, "far": 1}'):
        file.write_text(text)
        assert LearnedCosts.of(tiny_engine.backend).costs.reach == 0
    again.save()
    assert not list(tmp_path.glob("bitmtp/costs/*.part"))
