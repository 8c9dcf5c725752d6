"""The driver of every text: a plan for each, one pass, the outputs to each; for one text or many, on every backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from bitmtp.backends.base import MAX_WIDTH, Backend, LoopBackend, Ran, TimedBackend
from bitmtp.core import _core
from bitmtp.core.text import Text

STAGES = ("prefill", "draft", "exact")  # exact: passes without masks, that is verification or one token a pass
_PROMPT, _DRAFT = 1, 2  # of the core's ``Running``


class Loop:
    """Runs passes that texts share.

    Attributes:
        widths: of the passes of the last :meth:`run`.
        milliseconds: within passes of each of :data:`STAGES`, so far, where the backend tells.
    """

    def __init__(self, backend: Backend, costs: _core.Costs) -> None:
        self._backend = backend
        self._batch = _core.Batch(costs)
        self._masks = ThreadPoolExecutor(1, "bitmtp-grammar")
        self._preparing: dict[Text, Future[None]] = {}
        self.widths: Sequence[int] = ()
        self.milliseconds = dict.fromkeys(STAGES, 0.0)

    def run(self, texts: Sequence[Text], milliseconds: float = 0.0, prompt_rows: int = MAX_WIDTH) -> list[Text]:
        """At least one pass for those texts that go on; where the backend iterates by itself, more, for about so long.

        A text with a grammar takes part when its plan and masks are ready; passes of others do not wait for it. What a
        pass commits waits in :meth:`Text.take`, and so does the fault of a text whose grammar fails.

        Args:
            prompt_rows: of a pass, for prompts, while others write.

        Returns:
            the texts, those first that found no room in the pass.
        """
        self._prepare([text for text in texts if text.goes_on])
        going = [text for text in texts if text.goes_on]
        ran = self._run(going, milliseconds, prompt_rows) if going else Ran((), ())
        self.widths = ran.widths
        for stage, spent in zip(STAGES, ran.milliseconds, strict=True):
            self.milliseconds[stage] += spent
        for text in going:
            if text.core.waiting:
                self._keep(text, text.absorb_waiting)
        return [going[place] for place in ran.order] + [text for text in texts if text not in going]

    def _keep(self, text: Text, absorb: Callable[[], list[int]]) -> None:
        try:
            self._backend.materialize(text.sequence, absorb())
        except Exception as fault:
            text.fault = fault

    def _run(self, texts: Sequence[Text], milliseconds: float, prompt_rows: int) -> Ran:
        backend, cores = self._backend, [text.core for text in texts]
        replays = getattr(backend, "graph_replays", 0)
        try:
            if isinstance(backend, LoopBackend) and backend.can_run(cores):
                return backend.run(self._batch, cores, prompt_rows, milliseconds)
            return self._step(texts, cores, prompt_rows)
        finally:
            for text in texts:
                text.stats.graph_replays += getattr(backend, "graph_replays", 0) - replays

    def leave(self, text: Text) -> None:
        """Nobody goes on with a text: what it committed and nobody took is forgotten."""
        if text in self._preparing:
            self._preparing.pop(text).exception()  # what its grammar says no longer matters, but it has to be done
        text.leave()
        if isinstance(self._backend, LoopBackend):
            self._backend.settle()

    # Grammars

    def _prepare(self, texts: Sequence[Text]) -> None:
        """Have masks made for guarded texts, beside the passes of others; where there are none, wait for them."""
        for text in texts:
            if text.grammar is not None and not text.core.ready and text not in self._preparing:
                self._preparing[text] = self._masks.submit(text.prepare)
        free = any(text.grammar is None or text.core.ready for text in texts)
        for text, future in list(self._preparing.items()):
            if text in texts and (future.done() or not free):
                del self._preparing[text]
                text.fault = future.exception()
                free = True

    # Passes that the host drives

    def _step(self, texts: Sequence[Text], cores: Sequence[_core.Text], prompt_rows: int) -> Ran:
        places = self._batch.plan(cores, MAX_WIDTH, prompt_rows)
        if not places:
            return Ran((), range(len(texts)))
        running = [texts[place] for place in places]
        planned = [text.rows() for text in running]
        rows = [row for own in planned for row in own]
        shown = [text.top for text in running if text.top is not None]
        top = max([text.core.ranks for text in running] + shown)
        kind = _kind(running)
        begun = time.perf_counter()
        outputs = self._backend.step(rows, top=top, logits=bool(shown))
        elapsed = (time.perf_counter() - begun) * 1e3
        committed, start = 0, 0
        for text, own in zip(running, planned, strict=True):
            before = text.core.committed
            self._keep(text, partial(text.absorb, outputs[start : start + len(own)]))
            committed += text.core.committed - before
            start += len(own)
        if kind and not isinstance(self._backend, TimedBackend):  # whose own clock leaves the host out
            history = max(text.core.materialized for text in running)
            self._batch.spend(committed, len(rows), len(running), history, elapsed)
        late = [place for place in range(len(texts)) if place not in places]
        return Ran((len(rows),), (*late, *places), _at(kind, elapsed))


def _kind(texts: Iterable[Text]) -> int:
    running = {text.core.running for text in texts}
    return 0 if _PROMPT in running else 1 if _DRAFT in running and any(text.core.width > 1 for text in texts) else 2


def _at(kind: int, elapsed: float) -> tuple[float, float, float]:
    return elapsed if kind == 0 else 0.0, elapsed if kind == 1 else 0.0, elapsed if kind == 2 else 0.0
