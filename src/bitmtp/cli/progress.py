"""How far a long command is, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(label: str, total: int, *, lines: bool = False) -> Iterator[Callable[[], None]]:
    """What to call after each of ``total`` steps: a bar in a terminal; elsewhere, if ``lines``, a line each tenth."""
    if not sys.stderr.isatty():
        yield _Lines(label, total) if lines else lambda: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    # Drawn between measurements only: a refreshing thread would take part in them.
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(label, total=total)

        def tick() -> None:
            bar.advance(task)
            bar.refresh()

        yield tick


class _Lines:
    """Progress for logs."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0

    def __call__(self) -> None:
        self._done += 1
        if self._done * 10 // self._total > (self._done - 1) * 10 // self._total:
            print(f"{self._label}: {self._done} of {self._total}", file=sys.stderr, flush=True)
