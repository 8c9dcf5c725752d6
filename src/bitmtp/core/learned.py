"""Pass costs that texts teach, kept on disk for the next process of the same model, backend and machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from bitmtp.backends.base import Backend
from bitmtp.core import _core

_REMEMBERED = 8  # passes that a cost read from disk counts for: a machine that has changed is soon believed
_TELLING = ("kernels", "threads", "device", "weight bytes")  # of what a backend says of itself


def place_of(backend: Backend) -> Path:
    """The file of a model's costs on a machine."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    facts = backend.describe()
    parts = (repr(backend.config), backend.name, platform.node(), *(facts.get(name, "") for name in _TELLING))
    return cache / "bitmtp" / "costs" / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.json"


@dataclass(slots=True)
class LearnedCosts:
    """Costs that go on learning.

    Attributes:
        costs: shared by all texts of an engine.
    """

    costs: _core.Costs
    _file: Path
    _saved: list[int]  # how many passes stood behind what was written last

    @classmethod
    def of(cls, backend: Backend) -> LearnedCosts:
        """As they were left by the last process; nothing is known where there was none."""
        file = place_of(backend)
        known, counts, far = _read(file)
        costs = _core.Costs([], (0.0, 0.0), 0, True, known, counts, far)
        return cls(costs, file, _counts(costs))

    def save(self) -> None:
        """Write what was learned, if it is news; a disk that refuses costs nothing but the knowledge."""
        costs, counts = self.costs, _counts(self.costs)
        if counts == self._saved:
            return
        self._saved = counts
        part = self._file.with_suffix(f".{os.getpid()}.part")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(
                json.dumps({"known": costs.known, "counts": costs.counts, "far": costs.far}), encoding="utf-8"
            )
            os.replace(part, self._file)
        except OSError:
            part.unlink(missing_ok=True)


def _counts(costs: _core.Costs) -> list[int]:
    return [min(count, _REMEMBERED) for count in (*costs.counts, *(far[-1] for far in costs.far))]


def _read(file: Path) -> tuple[list[float], list[int], list[tuple[float, float, float, int]]]:
    knots = len(_core.KNOTS)
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        known, counts = [float(each) for each in data["known"]], [int(each) for each in data["counts"]]
        far = [(float(ms), float(history), float(width), int(count)) for ms, history, width, count in data["far"]]
    except (OSError, ValueError, KeyError, TypeError):
        known, counts, far = [], [], []
    numbers = [*known, *counts, *(number for each in far for number in each)]
    if len(known) != knots or len(counts) != knots or len(far) != 2 or min(numbers) < 0:
        return [0.0] * knots, [0] * knots, []
    return (
        known,
        [min(count, _REMEMBERED) for count in counts],
        [(ms, history, width, min(count, _REMEMBERED)) for ms, history, width, count in far],
    )
