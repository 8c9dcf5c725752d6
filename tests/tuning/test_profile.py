"""The profile file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bitmtp.core.costs import Calibration, CostTable, Tuning
from bitmtp.errors import ConfigError
from bitmtp.tuning.profile import Profile

PROFILE = Profile("abc", "a CPU", "cpu", 2, "speculative", 300.0, 1.5, block_size=6, verify_bound=0.2)


def test_round_trip(tmp_path: Path) -> None:
    PROFILE.write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == PROFILE
    assert [each.name for each in tmp_path.iterdir()] == ["profile.json"]


def test_policy() -> None:
    policy = PROFILE.make_policy(16)
    assert (policy.name, policy.block_size, policy.verify_bound) == ("speculative", 6, 0.2)
    plain = replace(PROFILE, policy="autoregressive", block_size=None, verify_bound=None)
    assert plain.make_policy(16).block_size == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads": "two"}, "threads of a profile is 'two'; expected int"),
        ({"colour": "red"}, "not a profile"),
        ({"block_size": 2.5}, "block_size"),
    ],
)
def test_damaged(tmp_path: Path, change: dict[str, object], message: str) -> None:
    file = tmp_path / "profile.json"
    PROFILE.write(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        Profile.read(file)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`bitmtp tune` writes one"):
        Profile.read(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"model": "a"', encoding="utf-8")
    with pytest.raises(ConfigError, match="not a profile"):
        Profile.read(tmp_path / "half.json")
    (tmp_path / "less.json").write_text('{"model": "a"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="not a profile"):
        Profile.read(tmp_path / "less.json")


def test_lossy_policies_are_calibrated(tmp_path: Path) -> None:
    tuning = Tuning(CostTable((1, 8), (1.0, 2.0)), Calibration((0.5,), (1.0,)))
    profile = replace(PROFILE, policy="confidence", verify_bound=None, tau=0.9, tuning=tuning)
    profile.write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == profile
    assert profile.make_policy(16).calibration == tuning.calibration
    assert replace(PROFILE, tuning=tuning).make_policy(16).calibration is None
    (tmp_path / "bad.json").write_text(json.dumps({"tuning": {"costs": {}}}), encoding="utf-8")
    with pytest.raises(ConfigError, match="not a tuning"):
        Profile.read(tmp_path / "bad.json")


def test_another_model_is_refused() -> None:
    PROFILE.check("abc")
    with pytest.raises(ConfigError, match="made for model abc, not abd"):
        PROFILE.check("abd")
