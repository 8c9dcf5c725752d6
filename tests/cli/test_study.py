"""``bitmtp study``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bitmtp.study.record import Record

from .conftest import Command

DATA = Path(__file__).parents[1] / "study" / "data"


@pytest.fixture
def studied(bitmtp: Command, model_flags: list[str], tmp_path: Path) -> Path:
    """The folder of a study of four requests."""
    flags = ["--data", str(DATA), "--workloads", "plain,reasoning", "--limit", "2", "--max-tokens", "8"]
    ran = bitmtp("study", *model_flags, *flags, "--policy", "speculative,hybrid", "--output", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "speculative D=8" in ran.out
    assert "texts: 12 of 12" in ran.err
    return tmp_path / "out"


def test_writes_record_and_page(studied: Path) -> None:
    record = Record.read(studied / "study.json")
    assert [each.label.split()[0] for each in record.subjects] == ["autoregressive", "speculative", "hybrid"]
    assert {name: len(rows) for name, rows in record.texts.items()} == {"plain": 2, "reasoning": 2}
    assert record.environment["backend"] == "reference"
    assert "<svg" in (studied / "report.html").read_text(encoding="utf-8")
    assert sorted(file.name for file in studied.iterdir()) == ["log.jsonl", "report.html", "study.json"]


def test_two_runs_are_compared(bitmtp: Command, studied: Path, tmp_path: Path) -> None:
    ran = bitmtp("study", "--compare", studied / "study.json", studied / "study.json")
    assert ran.code == 0
    for kind in ("ratios and counts", "times and speeds"):  # three policies, two workloads and both together, four each
        assert f"{kind}: 36 of 36 agree" in ran.out
    slower = json.loads((studied / "study.json").read_text(encoding="utf-8"))
    for rows in slower["texts"].values():
        for row in rows:
            row[0]["tpot"] *= 100
    (tmp_path / "slower.json").write_text(json.dumps(slower), encoding="utf-8")
    ran = bitmtp("study", "--compare", studied / "study.json", tmp_path / "slower.json")
    assert ran.code == 1
    assert "+9900.0%" in ran.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--data is missing"),
        (["--data", str(DATA), "--workloads", "chat"], "unknown workload 'chat'"),
        (["--data", str(DATA), "--workloads", ","], "nothing to study"),
        (["--data", "/nowhere"], "missing; the study reads"),
        (["--data", str(DATA), "--policy", "magic", "--limit", "1"], "unknown policy 'magic'"),
        (["--compare", "/nowhere", "/nowhere"], "cannot be read"),
    ],
)
def test_errors_are_one_line(bitmtp: Command, model_flags: list[str], flags: list[str], message: str) -> None:
    ran = bitmtp("study", *model_flags, *flags)
    assert ran.code == 2
    assert message in ran.err
    assert ran.err.count("\n") == 1
