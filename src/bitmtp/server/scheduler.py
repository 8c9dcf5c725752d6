"""Continuous batching: one thread owns the backend and runs passes that the texts of all requests share.

A text's rows (a piece of its prompt, a draft, proposals to verify) ride with those of others, as iteration-level
scheduling has it (Orca, OSDI 2022). What a row gives depends on nothing but the row and what it sees, so neither the
company of a text, nor the cut of its prompt, nor how far its drafts shrink under load can change a token of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bitmtp.backends.base import Workload, prefill_by_steps
from bitmtp.core.text import Text
from bitmtp.engine import Engine, Generation
from bitmtp.sampling import GREEDY
from bitmtp.server.errors import ApiError, busy, failed, shutting_down, timed_out
from bitmtp.server.jobs import Job, Piece, Proposal, Update
from bitmtp.server.metrics import Metrics
from bitmtp.server.options import ServerOptions
from bitmtp.server.prefix_cache import Ids, PrefixCache, common_length

WORTH_WAITING = 32  # prompt tokens that another text is about to compute
_TURN = 4.0  # milliseconds of passes between two looks at what came in and what was cancelled
_log = logging.getLogger("bitmtp.server")


@dataclass(eq=False, slots=True)
class _Slot:
    """A text being written."""

    job: Job
    generation: Generation
    sequence: int
    cached: int

    @property
    def text(self) -> Text:
        return self.generation.text

    @property
    def prefilling(self) -> bool:
        return not self.text.begun

    def shared(self, key: Ids) -> tuple[int, int]:
        """Beginning shared with another prompt: how much of it is materialized, how much is still to come."""
        shared = common_length(self.job.key, key)
        return min(shared, self.text.core.materialized), shared if self.prefilling else 0


class Scheduler:
    """Writes the texts of all requests; its methods may be called from any thread.

    A job is told of its progress through :attr:`Job.listen`, and always of an end: a result or an error, unless it was
    cancelled.

    Attributes:
        fault: why it ended though nobody stopped it.
    """

    fault: BaseException | None = None

    def __init__(self, engine: Engine, options: ServerOptions, metrics: Metrics) -> None:
        self._engine = engine
        self._options = options
        self._metrics = metrics
        self._cache = PrefixCache(engine.backend, options.prefix_cache_bytes)
        self._wake = threading.Condition()
        self._queue: deque[Job] = deque()
        self._slots: list[_Slot] = []
        self._final: float | None = None  # when everything has to be over, once the server stops
        self._thread = threading.Thread(target=self._run, name="bitmtp-scheduler", daemon=True)
        metrics.running.set_function(lambda: len(self._slots))
        metrics.waiting.set_function(lambda: len(self._queue))

    def start(self) -> None:
        """Begin to take jobs, whatever their sampling; the backend makes ready before the first of them."""
        self._engine.prepare(Workload(self._options.slots > 1, True, self._options.policy.shaped))
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs of one request, all or none.

        Raises:
            ApiError: 429, the queue is full; 503, the server stops.
        """
        with self._wake:
            if self._final is not None:
                raise shutting_down()
            idle = self._options.slots - len(self._slots)
            if len(self._queue) + len(jobs) > self._options.queue + max(idle, 0):
                raise busy(len(self._queue))
            self._queue.extend(jobs)
            self._wake.notify()

    def cancel(self, job: Job) -> None:
        """Nobody wants this text any more: its slot is free before the next pass. No further update is sent."""
        job.cancelled = True

    def stop(self, grace: float) -> None:
        """Take no more jobs; those there are have ``grace`` seconds to finish, and are told if they did not."""
        with self._wake:
            self._final = time.monotonic() + grace
            self._wake.notify()

    def join(self) -> None:
        """Wait for the end after :meth:`stop`."""
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    # The thread

    def _run(self) -> None:
        try:
            while self._wait():
                self._sweep()
                self._admit()
                self._turn()
            self._cache.clear()
        except Exception as fault:
            self.fault = fault
            _log.critical("no text can be written any more", exc_info=fault)
        finally:  # only a fault leaves anything here; nobody shall wait for ever
            self.stop(0)
            for job in [slot.job for slot in self._slots] + list(self._queue):
                self._tell(job, Update(error=failed()))

    def _wait(self) -> bool:
        """Sleep until there is work; False: there will be none."""
        with self._wake:
            while not self._queue and not self._slots and self._final is None:
                self._wake.wait()
            return bool(self._queue or self._slots)

    def _sweep(self) -> None:
        """Let go of what was cancelled or ran out of time."""
        now = time.monotonic()
        for slot in list(self._slots):
            if error := self._over(slot.job, now):
                self._release(slot, Update(error=error))
        with self._wake:
            waiting = list(self._queue)
            ends = {job: self._over(job, now) for job in waiting}
            self._queue = deque(job for job in waiting if ends[job] is None)
        for job, end in ends.items():
            if end is not None:
                self._tell(job, Update(error=end))

    def _over(self, job: Job, now: float) -> ApiError | None:
        if self._final is not None and now >= self._final:
            return shutting_down()
        return timed_out() if job.cancelled or now >= job.deadline else None

    def _admit(self) -> None:
        """Give free slots to jobs in order; one that begins like a prompt now being run waits for it instead."""
        for job in list(self._queue):
            if len(self._slots) >= self._options.slots:
                return
            source, length = self._reusable(job)
            ahead = max((slot.shared(job.key)[1] for slot in self._slots), default=0)
            if min(ahead, job.reusable) >= length + WORTH_WAITING:
                continue
            with self._wake:
                self._queue.remove(job)
            try:
                self._slots.append(self._open(job, source, length))
            except Exception as error:
                self._fail(job, error)

    def _reusable(self, job: Job) -> tuple[int, int]:
        """The sequence that holds most of the prompt's beginning, and how much of it."""
        best = self._cache.match(job.key)
        for slot in self._slots:
            length = slot.shared(job.key)[0]
            if length > best[1]:
                best = slot.sequence, length
        return best[0], min(best[1], job.reusable)

    def _open(self, job: Job, source: int, length: int) -> _Slot:
        backend = self._engine.backend
        sequence = backend.fork(source, length) if length else backend.open()
        scored = 1 if job.scored else None
        generation = Generation(
            self._engine, sequence, job.request, list(job.ids), length, job.grammar, job.top, scored
        )
        generation.text.core.traced = job.trace
        return _Slot(job, generation, sequence, length)

    def _turn(self) -> None:
        """Passes for all texts, for a few milliseconds, and what they committed. A text that found no room goes first
        in the pass after it."""
        loop, slots = self._engine.loop, {id(slot.text): slot for slot in self._slots}
        if not slots:
            return
        begun = time.perf_counter()
        try:
            texts = loop.run([slot.text for slot in self._slots], _TURN, self._options.prefill_rows)
        except Exception as error:
            self._blame(error)
            return
        self._slots = [slots[id(text)] for text in texts]
        for slot in list(self._slots):
            self._hand_over(slot)
        for width in loop.widths:
            self._metrics.passes.observe(width)
            self._metrics.pass_time.observe((time.perf_counter() - begun) / len(loop.widths))

    def _blame(self, error: Exception) -> None:
        """A pass failed: the texts that cannot even run alone are given up, the others go on.

        Raises:
            Exception: nothing runs any more, not even a token that has nothing to do with them.
        """
        _log.error("a pass failed", exc_info=error)
        for slot in list(self._slots):
            try:
                self._engine.loop.run([slot.text])
            except Exception as own:
                self._drop(slot, own)
        if not self._slots:
            sequence = self._engine.backend.open()
            prefill_by_steps(self._engine.backend, sequence, [0], GREEDY)
            self._engine.backend.close(sequence)

    def _hand_over(self, slot: _Slot) -> None:
        """Tell a job what its text has committed: all at once, or each iteration if it wants a trace."""
        job, generation, first, pieces = slot.job, slot.generation, slot.prefilling, list[Piece]()
        try:
            if job.scored and first and slot.text.core.begun:
                self._tell(job, Update(read=tuple(slot.text.take_scores())))
            while chunks := generation.take():
                pieces += [Piece.of(chunk) for chunk in chunks]
                if job.trace and slot.text.finish is None:
                    self._tell(job, Update(tuple(pieces), checked=_checked(slot)))
                    pieces.clear()
        except Exception as error:
            self._drop(slot, error)
            return
        if first and slot.text.begun:
            self._metrics.ttft.observe(time.monotonic() - job.submitted)
        if slot.text.finish is not None:
            result, stats = generation.result, slot.text.stats
            news = Update(tuple(pieces), checked=_checked(slot), result=result, stats=stats, cached=slot.cached)
            self._release(slot, news)
        elif pieces:
            self._tell(job, Update(tuple(pieces)))

    # Endings

    def _release(self, slot: _Slot, update: Update) -> None:
        """Free the slot, keep its K/V for others, tell the job."""
        text = slot.text
        self._leave(slot)
        if text.materialized:
            self._engine.backend.truncate(slot.sequence, text.materialized)
            self._cache.put(slot.sequence, np.array(text.committed[: text.materialized], np.int32))
        else:
            self._engine.backend.close(slot.sequence)
        self._metrics.cache.set(self._cache.positions)
        self._tell(slot.job, update)

    def _drop(self, slot: _Slot, error: Exception) -> None:
        """Give up a text that cannot go on; nothing of it is reused."""
        self._leave(slot)
        self._engine.backend.close(slot.sequence)
        self._fail(slot.job, error)

    def _leave(self, slot: _Slot) -> None:
        """Free the slot. What was written counts, whether the text came to its end or not."""
        text = slot.text
        self._slots.remove(slot)
        self._engine.loop.leave(text)
        prompt = min(text.materialized, len(slot.job.ids))
        self._metrics.written(slot.generation.result, text.stats, prompt, slot.cached)

    def _fail(self, job: Job, error: Exception) -> None:
        if not isinstance(error, ApiError):
            _log.error("a text failed", exc_info=error)
            error = failed()
        self._tell(job, Update(error=error))

    def _tell(self, job: Job, update: Update) -> None:
        if update.result or update.error:
            self._metrics.ended.labels(_end(job, update)).inc()
        if not job.cancelled:
            job.listen(update)


def _checked(slot: _Slot) -> tuple[Proposal, ...]:
    """What the iteration taken last has checked, if that is to be shown."""
    return tuple(Proposal(token, after) for token, after in slot.text.checked)


def _end(job: Job, update: Update) -> str:
    if job.cancelled:
        return "cancelled"
    if update.error is not None:
        return update.error.code
    assert update.result is not None
    return update.result.finish.value
