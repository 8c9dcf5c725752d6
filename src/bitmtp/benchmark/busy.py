"""What else a machine did while something was measured on it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

BUSY = 0.15  # of a core taken by others: from here on times of threads mislead
_STAT = Path("/proc/stat")
_IDLE, _WAITING, _STOLEN = 3, 4, 7  # columns of /proc/stat


@dataclass(frozen=True, slots=True)
class Reading:
    """Cores in use by others, on average.

    Attributes:
        cores: that this process may use.
        others: of these, taken by other processes.
        stolen: of these, taken by the host of a virtual machine.
    """

    cores: int
    others: float
    stolen: float

    @property
    def busy(self) -> bool:
        """Whether that is more than an idle machine's background."""
        return self.others + self.stolen >= BUSY

    def __str__(self) -> str:
        takers = {"other processes": self.others, "the host of this virtual machine": self.stolen}
        shares = [f"{who} took {share:.1f}" for who, share in takers.items() if share >= 0.05]
        return f"{' and '.join(shares)} of {self.cores} cores"


@dataclass(frozen=True, slots=True)
class _Ticks:
    """Seconds since some time in the past: by the clock, of work on these cores, stolen from them, and own work."""

    clock: float
    work: float
    stolen: float
    own: float


class Watch:
    """Reads what others do between its creation and :meth:`reading`."""

    def __init__(self) -> None:
        self._begun = _ticks()

    def reading(self) -> Reading | None:
        """What others did since the watch began; None where the system does not say (it is not Linux)."""
        begun, now = self._begun, _ticks()
        if begun is None or now is None:
            return None
        seconds = max(now.clock - begun.clock, 1e-9)
        others = (now.work - begun.work - (now.own - begun.own)) / seconds
        return Reading(len(_cores()), max(others, 0.0), (now.stolen - begun.stolen) / seconds)


def look(seconds: float = 1.0) -> Reading | None:
    """Do nothing for a while, and see what others do."""
    watch = Watch()
    time.sleep(seconds)
    return watch.reading()


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _ticks() -> _Ticks | None:
    if not _STAT.exists():
        return None
    names, hertz = {f"cpu{core}" for core in _cores()}, os.sysconf("SC_CLK_TCK")
    lines = [line.split() for line in _STAT.read_text(encoding="ascii").splitlines()]
    # Guests' time, in the columns behind, is counted in the first ones too.
    columns = [[int(ticks) / hertz for ticks in line[1:9]] for line in lines if line[0] in names]
    stolen = sum(each[_STOLEN] for each in columns)
    work = sum(sum(each) - each[_IDLE] - each[_WAITING] for each in columns) - stolen
    own = os.times()
    return _Ticks(time.monotonic(), work, stolen, own.user + own.system + own.children_user + own.children_system)
