"""The texts of one HTTP request: submitted together, followed together, given up when the client goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import fields

from starlette.types import Receive

from bitmtp.core.stats import Stats
from bitmtp.engine import Result
from bitmtp.server.errors import ApiError
from bitmtp.server.intake import Plan
from bitmtp.server.jobs import Job, Update
from bitmtp.server.scheduler import Scheduler


class ClientGoneError(Exception):
    """The client closed the connection; nobody is left to answer."""


class Run:
    """The jobs of a plan.

    Attributes:
        results: of the choices that ended, by index.
        stats: counts over all choices.
        completion_tokens: written so far, over all choices.
        first: seconds from arrival to the first token; None before it.
    """

    def __init__(self, scheduler: Scheduler, plan: Plan, receive: Receive) -> None:
        self.plan = plan
        self.results: dict[int, Result] = {}
        self.stats = Stats()
        self.completion_tokens = 0
        self.first: float | None = None
        self.error: ApiError | None = None
        self._cached = [0 for _ in plan.prompts]
        self._scheduler = scheduler
        self._receive = receive
        self._begun = time.monotonic()
        self._news: asyncio.Queue[tuple[int, Update] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        deadline = self._begun + plan.timeout
        self._jobs = [
            Job(
                request,
                ids,
                self._listener(loop, index),
                deadline,
                plan.top,
                plan.scored,
                plan.grammar and plan.grammar.copy(),
                plan.trace,
            )
            for index, (request, ids) in enumerate(zip(plan.requests, plan.prompts, strict=True))
        ]

    def _listener(self, loop: asyncio.AbstractEventLoop, index: int) -> Callable[[Update], None]:
        def listen(update: Update) -> None:
            with suppress(RuntimeError):  # the loop is closed: the server has gone
                loop.call_soon_threadsafe(self._news.put_nowait, (index, update))

        return listen

    def submit(self) -> None:
        """Queue the jobs.

        Raises:
            ApiError: the queue is full, or the server stops.
        """
        self._scheduler.submit(self._jobs)

    async def updates(self) -> AsyncGenerator[tuple[int, Update], None]:
        """What happens to each choice (its index, the news), until all have ended.

        Raises:
            ApiError: a choice failed; the others are given up.
            ClientGoneError: so has the client.
        """
        watcher = asyncio.create_task(self._watch())
        try:
            while not self.ended:
                news = await self._news.get()
                if news is None:
                    raise ClientGoneError
                self._note(*news)
                yield news
        except ApiError as error:
            self.error = error
            raise
        finally:
            watcher.cancel()
            self.give_up()

    def give_up(self) -> None:
        """Cancel what still runs."""
        for job in self._jobs:
            self._scheduler.cancel(job)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.give_up()
        self._news.put_nowait(None)

    def _note(self, index: int, update: Update) -> None:
        if update.error is not None:
            raise update.error
        self.completion_tokens += len(update.pieces)
        if self.first is None and update.pieces:
            self.first = time.monotonic() - self._begun
        if update.result is not None:
            self.results[index] = update.result
            self._cached[index] = update.cached
            self.stats = _sum(self.stats, update.stats)

    @property
    def ended(self) -> bool:
        """Whether every choice has its result."""
        return len(self.results) == len(self._jobs)

    @property
    def warning(self) -> str | None:
        """What whoever asked should know of the drafts, once the texts have ended."""
        rates = [result.draft_acceptance_rate for result in self.results.values() if result.drafts_rejected]
        if not rates:
            return None
        return f"only {max(rates):.2%} of the drafts were accepted; drafting costs time here and saves none"

    @property
    def seconds(self) -> float:
        """Since the request arrived."""
        return time.monotonic() - self._begun

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(ids) for ids in self.plan.prompts[:: self.plan.n])

    @property
    def cached_tokens(self) -> int:
        """Of those, the ones that did not have to be run."""
        n = self.plan.n
        return sum(min(self._cached[start : start + n]) for start in range(0, len(self._cached), n))


def _sum(a: Stats, b: Stats) -> Stats:
    return Stats(**{field.name: getattr(a, field.name) + getattr(b, field.name) for field in fields(Stats)})
