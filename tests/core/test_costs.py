"""The cost table and the calibration: reading between entries, refusals, JSON."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitmtp.core.costs import Calibration, CostTable, Tuning, logit, sigmoid
from bitmtp.errors import ConfigError

TABLE = CostTable((1, 2, 8), (3.0, 4.0, 10.0), history=100, per_position=(0.01, 0.001))


def test_costs_between_and_beyond_the_widths_measured() -> None:
    assert [TABLE.cost(width, 100) for width in (1, 2, 5, 8, 10)] == [3, 4, 7, 10, 12]
    assert TABLE.cost(5, 1100) == pytest.approx(7 + 1000 * 0.015)
    assert CostTable((1,), (2.0,)).cost(9, 16) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"widths": (2, 3), "milliseconds": (1.0, 2.0)}, "ascending from 1"),
        ({"widths": (1, 1), "milliseconds": (1.0, 2.0)}, "ascending from 1"),
        ({"widths": (1, 2), "milliseconds": (1.0,)}, "a cost for each"),
        ({"widths": (), "milliseconds": ()}, "ascending from 1"),
        ({"widths": (1,), "milliseconds": (0.0,)}, "not positive"),
        ({"widths": (1,), "milliseconds": (1.0,), "per_position": (0.0, -1.0)}, "not positive"),
    ],
)
def test_tables_that_are_none(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CostTable(**fields)


def test_calibration_by_depth() -> None:
    calibration = Calibration((0.5, 2.0), (1.0, 0.0))
    assert calibration.logit(1, 0.5) == 1
    assert calibration.logit(1, 0.9) == pytest.approx(2 * math.log(9) + 1)
    assert calibration.logit(2, 0.9) == calibration.logit(7, 0.9) == pytest.approx(math.log(9) / 2)
    assert math.isfinite(calibration.logit(1, 0.0) + calibration.logit(1, 1.0))
    assert sigmoid(logit(0.3)) == pytest.approx(0.3)


@pytest.mark.parametrize(("temperatures", "offsets"), [((), ()), ((1.0,), (0.0, 0.0)), ((0.0,), (0.0,))])
def test_calibrations_that_are_none(temperatures: tuple[float, ...], offsets: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="calibration needs"):
        Calibration(temperatures, offsets)


def test_json_round_trip() -> None:
    tuning = Tuning(TABLE, Calibration((0.5, 2.0), (1.0, 0.0)), Calibration((3.0,), (0.1,)))
    assert Tuning.from_json(tuning.to_json()) == tuning
    assert tuning.calibration_at(0.0) is tuning.calibration
    assert tuning.calibration_at(1.0) is tuning.sampled


@given(depth=st.integers(1, 4), chance=st.floats(0.001, 0.999), probability=st.floats(0.001, 0.999))
def test_a_bar_is_where_a_proposal_stands_with_that_chance(depth: int, chance: float, probability: float) -> None:
    calibration = Calibration((0.5, 2.0, 1.0), (1.0, 0.0, -1.0))
    bar = calibration.bar(depth, chance)
    stands = sigmoid(calibration.logit(depth, probability))
    assert (probability >= bar) == (stands >= chance) or math.isclose(stands, chance)
    assert calibration.bar(depth, 0.0) == 0
    assert calibration.bar(depth, 1.0) > 1  # nothing is certain


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"costs": {}, "calibration": {}}', '{"costs": 1, "calibration": 2}'])
def test_what_is_no_tuning(text: str) -> None:
    with pytest.raises(ConfigError):
        Tuning.from_json(text)
