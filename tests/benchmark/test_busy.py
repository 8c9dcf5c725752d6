"""What others do meanwhile, from the system's counters."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bitmtp.benchmark import busy
from bitmtp.benchmark.busy import Reading, Watch, look

HERTZ = os.sysconf("SC_CLK_TCK")


def _stat(user: float, stolen: float, elsewhere: float) -> str:
    """Counters of two cores of which this process may use the first, in seconds."""
    first = f"cpu0 {int(user * HERTZ)} 0 0 900 50 0 0 {int(stolen * HERTZ)} 0 0"
    return f"cpu  1 2 3 4 5 6 7 8 9 10\n{first}\ncpu1 {int(elsewhere * HERTZ)} 0 0 0 0 0 0 0 0 0\nintr 5\n"


@pytest.fixture
def stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of counters; this process does nothing, and a second passes between two looks."""
    clock = iter(range(100))
    monkeypatch.setattr(busy, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(busy, "_cores", lambda: {0})
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    monkeypatch.setattr("os.times", lambda: os.times_result((0.0, 0.0, 0.0, 0.0, 0.0)))
    return tmp_path / "stat"


@pytest.mark.parametrize(
    ("others", "stolen", "words"),
    [
        (0.0, 0.0, None),
        (0.1, 0.0, None),
        (0.5, 0.0, "other processes took 0.5 of 1 cores"),
        (0.0, 0.25, "the host of this virtual machine took 0.2 of 1 cores"),
    ],
)
def test_a_reading_counts_what_others_took_of_our_cores(
    stat: Path, others: float, stolen: float, words: str | None
) -> None:
    stat.write_text(_stat(10, 3, elsewhere=0), encoding="ascii")
    watch = Watch()
    stat.write_text(_stat(10 + others, 3 + stolen, elsewhere=50), encoding="ascii")
    found = watch.reading()
    assert found is not None
    assert (found.others, found.stolen) == (pytest.approx(others), pytest.approx(stolen))
    assert found.busy == (words is not None)
    if words is not None:
        assert str(found) == words


def test_own_work_is_not_others(stat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat.write_text(_stat(10, 3, elsewhere=0), encoding="ascii")
    watch = Watch()
    stat.write_text(_stat(11, 3, elsewhere=0), encoding="ascii")
    monkeypatch.setattr("os.times", lambda: os.times_result((0.7, 0.3, 0.0, 0.0, 0.0)))
    assert watch.reading() == Reading(1, 0.0, 0.0)


def test_a_system_without_counters_says_nothing(stat: Path) -> None:
    assert not stat.exists()
    assert look(0) is None
