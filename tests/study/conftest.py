"""Requests of our own, and a small study of the tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitmtp.study.measure import Measurement

DATA = Path(__file__).parent / "data"


def text(**changes: object) -> Measurement:
    """A measurement of ten tokens in five passes; any field can be changed."""
    values: dict[str, object] = {
        "ttft": 10.0,
        "tpot": 4.0,
        "latency": 50.0,
        "tokens": 10,
        "passes": 5,
        "replays": None,
        "lengths": (1, 2, 0, 1),
        "proposed": 8,
        "accepted": 4,
        "stages": {},
        "ids": "same",
    }
    return Measurement(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def data() -> Path:
    """Folder of the question files."""
    return DATA
