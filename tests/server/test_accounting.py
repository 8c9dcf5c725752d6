"""What was written counts, whether its text came to an end or was given up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from bitmtp.backends.base import Row
from bitmtp.core.policies import make_policy
from bitmtp.core.text import Source
from bitmtp.engine import Engine, Request
from bitmtp.server.jobs import Update
from bitmtp.server.scheduler import Scheduler

from .conftest import wait_for
from .test_scheduler import Text, prompt, scheduling


def figures(scheduler: Scheduler) -> dict[str, float]:
    """The lines of ``/metrics``."""
    lines = scheduler._metrics.render().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def cancel(scheduler: Scheduler, text: Text) -> None:
    scheduler.cancel(text.job)


def run_late(_: Scheduler, text: Text) -> None:
    text.job.deadline = 0.0


def go_on(_: Scheduler, text: Text) -> None:
    pass


@pytest.mark.parametrize(("end", "how"), [(cancel, "cancelled"), (run_late, "timeout"), (go_on, "length")])
def test_what_clients_heard_is_what_metrics_say(
    engine: Engine, end: Callable[[Scheduler, Text], None], how: str
) -> None:
    request = Request(prompt(1, 40), 60, make_policy("confidence", 16, tau=0.0))
    heard: list[Source] = []
    with scheduling(engine, slots=1, prefix_cache_bytes=0) as (scheduler, _):
        text = Text(engine, request)

        def listen(update: Update) -> None:
            heard.extend(piece.source for piece in update.pieces)
            if len(heard) > 20:
                end(scheduler, text)

        text.on_update = listen
        scheduler.submit([text.job])
        wait_for(lambda: figures(scheduler).get(f'bitmtp_texts_total{{end="{how}"}}') == 1)
        found = figures(scheduler)
    assert found["bitmtp_generated_tokens_total"] == len(heard) > 20
    assert found["bitmtp_accepted_tokens_total"] == sum(source is not Source.EXACT for source in heard) > 0
    assert found["bitmtp_proposed_tokens_total"] >= found["bitmtp_accepted_tokens_total"]
    assert found['bitmtp_policy_texts_total{policy="confidence"}'] == 1
    assert found['bitmtp_prompt_tokens_total{how="computed"}'] == 40


def test_a_prompt_counts_as_far_as_it_was_read(engine: Engine) -> None:
    with scheduling(engine, slots=1, prefix_cache_bytes=0) as (scheduler, recording):
        text = Text(engine, Request(prompt(1, 500), 4))
        rows: list[Row] = []

        def before(more: Sequence[Row]) -> None:
            rows.extend(more)
            if len(rows) >= 100:
                scheduler.cancel(text.job)

        recording.before = before
        scheduler.submit([text.job])
        wait_for(lambda: 'bitmtp_texts_total{end="cancelled"}' in figures(scheduler))
        found = figures(scheduler)
    assert found['bitmtp_prompt_tokens_total{how="computed"}'] == len(rows) < 500
    assert found["bitmtp_generated_tokens_total"] == 0


def test_a_text_that_fails_counts_as_far_as_it_came(engine: Engine) -> None:
    with scheduling(engine, slots=1) as (scheduler, recording):
        text, updates = Text(engine, Request(prompt(1, 5), 400)), list[Update]()
        text.on_update = updates.append

        def before(rows: Sequence[Row]) -> None:
            if len(updates) >= 3 and rows[0].position > 0:
                raise MemoryError

        recording.before = before
        scheduler.submit([text.job])
        tokens, update = text.end()
        assert update.error is not None
        assert figures(scheduler)["bitmtp_generated_tokens_total"] == len(tokens) > 0
        assert scheduler.alive


def test_a_text_that_never_ran_was_written_by_no_policy(engine: Engine) -> None:
    with scheduling(engine, slots=1) as (scheduler, _):
        late = Text(engine, Request(prompt(1, 5), 4), seconds=0)
        scheduler.submit([late.job])
        late.end()
        found = figures(scheduler)
    assert found['bitmtp_texts_total{end="timeout"}'] == 1
    assert not any(name.startswith("bitmtp_policy_texts_total") for name in found)
