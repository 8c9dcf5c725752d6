"""What a run tells: a progress bar or plain lines, ``metrics.jsonl``, and TensorBoard where it is installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Report:
    """The voice of one run; its files lie in ``folder`` and grow over resumed runs."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._board = _tensorboard(folder / "tensorboard")
        self._bar: Any = None
        if sys.stdout.isatty():
            from rich.progress import Progress

            self._bar = Progress()
            self._bar.start()
            self._task = self._bar.add_task("training", total=1.0)

    def say(self, text: str) -> None:
        """One line."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.console.print(text, highlight=False)

    def advance(self, progress: float) -> None:
        """Move the bar to ``progress`` (0 to 1)."""
        if self._bar is not None:
            self._bar.update(self._task, completed=progress)

    def values(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Record named numbers of a step."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Close the files and the bar."""
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._bar is not None:
            self._bar.stop()


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))
