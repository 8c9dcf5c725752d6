"""Continuous batching: exact whatever the company, fair, bounded, and every job is told of its end."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitmtp.backends.base import MAX_WIDTH, Row
from bitmtp.core.policies import make_policy
from bitmtp.engine import Engine, Request
from bitmtp.sampling import Sampling
from bitmtp.server.errors import ApiError
from bitmtp.server.jobs import Job, Update
from bitmtp.server.metrics import Metrics
from bitmtp.server.options import ServerOptions
from bitmtp.server.prefix_cache import PIECE, PrefixCache, common_length, position_bytes
from bitmtp.server.scheduler import Scheduler


class Recording:
    """A backend that writes down its passes, and fails when told to; the host drives them."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.passes: list[list[Row]] = []
        self.before: Callable[[Sequence[Row]], None] = lambda _: None

    def __getattr__(self, name: str) -> Any:
        if name == "run":
            raise AttributeError(name)
        return getattr(self._backend, name)

    def step(self, rows: Sequence[Row], **options: Any) -> Any:
        self.before(rows)
        self.passes.append(list(rows))
        return self._backend.step(rows, **options)


@contextmanager
def scheduling(engine: Engine, recorded: bool = True, **options: Any) -> Iterator[tuple[Scheduler, Recording]]:
    """A scheduler over a recording backend, or over the backend as it is, which may iterate by itself."""
    recording = Recording(engine.backend)
    watched = Engine(recording, engine.tokenizer, engine.context) if recorded else engine
    chosen = ServerOptions(**{"model_name": "m", "policy": engine.default_policy(), **options})
    scheduler = Scheduler(watched, chosen, Metrics())
    scheduler.start()
    try:
        yield scheduler, recording
    finally:
        scheduler.stop(0)
        scheduler.join()


class Text:
    """A job and what was heard of it."""

    def __init__(self, engine: Engine, request: Request, seconds: float = 60) -> None:
        self.news: queue.Queue[Update] = queue.Queue()
        self.on_update: Callable[[Update], None] = lambda _: None
        self.job = Job(request, engine.encode(request), self._listen, time.monotonic() + seconds)

    def _listen(self, update: Update) -> None:
        self.news.put(update)
        self.on_update(update)

    def end(self) -> tuple[list[int], Update]:
        """All tokens, and the last update."""
        tokens: list[int] = []
        while True:
            update = self.news.get(timeout=60)
            tokens += [piece.id for piece in update.pieces]
            if update.result or update.error:
                return tokens, update


def prompt(seed: int, length: int) -> list[int]:
    """Ordinary token ids."""
    ids: list[int] = np.random.default_rng(seed).integers(3, 320, length).tolist()
    return ids


REQUESTS = st.builds(
    lambda seed, length, policy, size, sampling, tokens: Request(
        prompt(seed % 3, length),
        tokens,
        make_policy(policy, 16, **({"block_size": size} if size else {})),
        sampling,
        seed,
    ),
    st.integers(0, 9),
    st.integers(1, 150),
    st.sampled_from(["speculative", "auto", "confidence", "hybrid"]),
    st.sampled_from([None, 4, 16]),
    st.sampled_from(
        [
            Sampling(),
            Sampling(temperature=1),
            Sampling(temperature=0.8, top_p=0.9, presence_penalty=0.5),
            Sampling(repetition_penalty=1.2),
        ]
    ),
    st.integers(1, 40),
)


@settings(max_examples=15)
@given(st.lists(REQUESTS, min_size=1, max_size=12), st.sampled_from([1, 3, 12]), st.booleans())
def test_company_changes_no_token(engine: Engine, requests: list[Request], slots: int, recorded: bool) -> None:
    alone = [engine.generate(request).token_ids for request in requests]
    with scheduling(engine, recorded, slots=slots) as (scheduler, recording):
        texts = [Text(engine, request) for request in requests]
        for text in texts:
            scheduler.submit([text.job])
        ends = [text.end() for text in texts]
    assert [tokens for tokens, _ in ends] == alone
    assert [update.result.token_ids for _, update in ends if update.result] == alone
    assert all(len(rows) <= MAX_WIDTH for rows in recording.passes)


def test_a_long_prompt_does_not_stall_the_others(engine: Engine) -> None:
    short = Text(engine, Request(prompt(1, 4), 30, make_policy("autoregressive", 16)))
    long = Text(engine, Request(prompt(2, 400), 4))
    with scheduling(engine) as (scheduler, recording):
        short.on_update = lambda _: scheduler.submit([long.job]) if short.news.qsize() == 1 else None
        scheduler.submit([short.job])
        short.end()
        long.end()
    mixed = [rows for rows in recording.passes if len({row.sequence for row in rows}) == 2]
    assert len(mixed) >= 400 // 32
    assert all(sum(row.head == 0 for row in rows) <= 32 for rows in mixed), "prompts ride in pieces"


def test_two_long_prompts_take_turns(engine: Engine) -> None:
    with scheduling(engine) as (scheduler, recording):
        first, second = (Text(engine, Request(prompt(seed, 300), 2)) for seed in (3, 4))
        scheduler.submit([first.job, second.job])
        first.end()
        second.end()
    order = [rows[0].sequence for rows in recording.passes[:8]]
    assert order[0::2] == [order[0]] * 4
    assert order[1::2] == [order[1]] * 4 != order[0::2]


def test_drafts_shrink_with_the_load(engine: Engine) -> None:
    with scheduling(engine, slots=12, prefix_cache_bytes=0) as (scheduler, recording):
        policy = make_policy("speculative", 16, block_size=8)
        texts = [Text(engine, Request(prompt(seed, 3), 10 * (seed + 1), policy)) for seed in range(12)]
        scheduler.submit([text.job for text in texts])
        for text in texts:
            text.end()
    drafts = {}
    for rows in recording.passes:
        writing = {row.sequence for row in rows}
        for sequence in writing:
            masks = sum(row.sequence == sequence and row.token < 0 for row in rows)
            drafts[len(writing)] = max(drafts.get(len(writing), 0), masks)
    assert drafts[12] == MAX_WIDTH // 12 - 1
    assert max(drafts.values()) == 7, "with less company, longer drafts"


def test_a_beginning_is_run_once(engine: Engine) -> None:
    begin = prompt(5, 100)
    with scheduling(engine) as (scheduler, recording):
        choices = [
            Text(engine, Request(begin, 6, sampling=Sampling(temperature=1, choice=choice), seed=1))
            for choice in range(4)
        ]
        scheduler.submit([text.job for text in choices])
        cached = [text.end()[1].cached for text in choices]
        follow = Text(engine, Request([*begin, 9, 10], 6))
        scheduler.submit([follow.job])
        tokens, update = follow.end()
        assert update.cached >= 100
        assert tokens == engine.generate(follow.job.request).token_ids
    assert sorted(cached) == [0, 99, 99, 99]
    assert sum(row.position < 99 for rows in recording.passes for row in rows) == 99


def test_the_cache_keeps_to_its_budget(engine: Engine) -> None:
    budget = 3 * PIECE * position_bytes(engine.config)
    cache = PrefixCache(engine.backend, budget)
    for seed in range(6):
        ids = prompt(seed, 40)
        sequence = engine.backend.open()
        engine.backend.prefill(sequence, ids)
        cache.put(sequence, np.array(ids, np.int32))
        assert cache.positions <= 3 * PIECE
    key = np.array(prompt(5, 40), np.int32)
    assert cache.match(key)[1] == 40
    assert cache.match(np.array(prompt(0, 40), np.int32))[1] < 40, "the oldest went first"
    cache.clear()
    assert cache.positions == 0


def test_the_cache_holds_no_text_twice(engine: Engine) -> None:
    cache = PrefixCache(engine.backend, 10 * PIECE * position_bytes(engine.config))
    for length in (20, 30, 10):
        sequence = engine.backend.open()
        engine.backend.prefill(sequence, prompt(1, length))
        cache.put(sequence, np.array(prompt(1, 30)[:length], np.int32))
    assert cache.positions == PIECE
    cache.clear()


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_length(a: list[int], b: list[int]) -> None:
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_length(np.array(a, np.int32), np.array(b, np.int32)) == expected


def test_a_cancelled_text_runs_in_no_further_pass(engine: Engine) -> None:
    with scheduling(engine, slots=1) as (scheduler, recording):
        first = Text(engine, Request(prompt(1, 5), 400))
        second = Text(engine, Request(prompt(2, 5), 3))
        passes: list[int] = []

        def cancel(_: Update) -> None:
            scheduler.cancel(first.job)
            passes.append(len(recording.passes))

        first.on_update = cancel
        scheduler.submit([first.job, second.job])
        _, update = second.end()
        assert update.result is not None
    assert first.news.qsize() == 1, "nothing is sent to who has gone"
    sequence = recording.passes[0][0].sequence
    assert all(row.sequence != sequence for rows in recording.passes[passes[0] :] for row in rows)


def test_a_waiting_text_can_be_cancelled(engine: Engine) -> None:
    with scheduling(engine, slots=1) as (scheduler, _):
        first, second, third = (Text(engine, Request(prompt(seed, 5), 30)) for seed in range(3))
        scheduler.submit([first.job, second.job, third.job])
        scheduler.cancel(second.job)
        first.end()
        third.end()
        assert second.news.empty()


def test_a_full_queue_refuses_all_or_nothing(engine: Engine) -> None:
    with scheduling(engine, slots=1, queue=2) as (scheduler, recording):
        recording.before = lambda _: time.sleep(0.01)
        texts = [Text(engine, Request(prompt(seed, 5), 20)) for seed in range(6)]
        scheduler.submit([text.job for text in texts[:3]])
        with pytest.raises(ApiError) as error:
            scheduler.submit([text.job for text in texts[3:]])
        assert (error.value.status, error.value.code) == (429, "queue_full")
        assert error.value.headers["retry-after"] == "1"
        for text in texts[:3]:
            assert text.end()[1].result is not None
        scheduler.submit([text.job for text in texts[3:]])
        assert texts[5].end()[1].result is not None


@pytest.mark.parametrize("running", [True, False])
def test_a_deadline_ends_a_text(engine: Engine, running: bool) -> None:
    with scheduling(engine, slots=1) as (scheduler, recording):
        late = Text(engine, Request(prompt(1, 5), 400), seconds=60)
        other = Text(engine, Request(prompt(2, 5), 400))
        if running:
            late.on_update = lambda _: setattr(late.job, "deadline", 0.0)
            scheduler.submit([late.job])
        else:
            late.job.deadline = 0.0
            scheduler.submit([other.job, late.job])
        _, update = late.end()
        scheduler.cancel(other.job)
    assert update.error is not None
    assert update.error.code == "timeout"
    assert len(recording.passes) < 100


def test_stopping_lets_texts_finish(engine: Engine) -> None:
    with scheduling(engine, slots=1) as (scheduler, _):
        texts = [Text(engine, Request(prompt(seed, 5), 30)) for seed in range(2)]
        scheduler.submit([text.job for text in texts])
        scheduler.stop(60)
        with pytest.raises(ApiError, match="shutting down"):
            scheduler.submit([Text(engine, Request([5], 1)).job])
        assert all(text.end()[1].result for text in texts)
        scheduler.join()


def test_stopping_reports_what_did_not_finish(engine: Engine) -> None:
    with scheduling(engine, slots=1) as (scheduler, _):
        texts = [Text(engine, Request(prompt(seed, 5), 400)) for seed in range(2)]
        texts[0].on_update = lambda _: scheduler.stop(0)
        scheduler.submit([text.job for text in texts])
        codes = [update.error.code for text in texts if (update := text.end()[1]).error]
    assert codes == ["shutting_down"] * 2


def test_a_failing_pass_takes_nobody_else_along(engine: Engine) -> None:
    with scheduling(engine) as (scheduler, recording):
        bad, good = Text(engine, Request(prompt(1, 5), 9)), Text(engine, Request(prompt(2, 5), 9))

        def fail(rows: Sequence[Row]) -> None:
            if any(row.token == bad.job.ids[0] and row.position == 0 for row in rows):
                raise MemoryError

        recording.before = fail
        scheduler.submit([bad.job, good.job])
        error = bad.end()[1].error
        assert error is not None
        assert error.status == 500
        assert good.end()[0] == engine.generate(good.job.request).token_ids


def test_a_pass_that_fails_once_costs_no_text(engine: Engine) -> None:
    with scheduling(engine) as (scheduler, recording):
        texts = [Text(engine, Request(prompt(seed, 5), 9)) for seed in (1, 2)]

        def fail(_: Sequence[Row]) -> None:
            recording.before = lambda _: None
            raise MemoryError

        recording.before = fail
        scheduler.submit([text.job for text in texts])
        ends = [text.end()[0] for text in texts]
    assert ends == [engine.generate(text.job.request).token_ids for text in texts]


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("where", ["allowed", "accepts", "commit"])
def test_a_fault_of_some_texts_ends_these_only(engine: Engine, where: str, recorded: bool) -> None:
    class Broken:
        def allowed(self, path: Sequence[int]) -> None:  # noqa: ARG002
            self._fail("allowed")

        def accepts(self, path: Sequence[int]) -> int:
            self._fail("accepts")
            return len(path)

        def commit(self, tokens: Sequence[int]) -> None:  # noqa: ARG002
            self._fail("commit")

        def _fail(self, here: str) -> None:
            if here == where:
                raise ValueError("broken grammar")

    with scheduling(engine, recorded) as (scheduler, _):
        texts = [Text(engine, Request(prompt(seed, 5), 9, make_policy("speculative", 16))) for seed in range(4)]
        bad, good = texts[1:3], [texts[0], texts[3]]
        for text in bad:
            text.job.grammar = Broken()
        scheduler.submit([text.job for text in texts])
        assert all(text.end()[1].error is not None for text in bad)
        assert [text.end()[0] for text in good] == [engine.generate(text.job.request).token_ids for text in good]
        assert scheduler.alive


def test_sequences_are_given_back(engine: Engine) -> None:
    before = engine.backend.describe().get("kv bytes")
    with scheduling(engine, slots=2) as (scheduler, _):
        texts = [Text(engine, Request(prompt(seed, 30), 10)) for seed in range(5)]
        scheduler.submit([text.job for text in texts])
        for text in texts:
            text.end()
    assert engine.backend.describe().get("kv bytes") == before
