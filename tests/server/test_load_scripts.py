"""``benchmarks/server_load.py`` and ``server_schema.py`` against the tiny model: they pass, and they can fail."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from bitmtp.core.policies import POLICIES

from .conftest import Running

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a script with arguments: its exit code and the JSON object it prints."""

    def run(name: str, *arguments: object) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPTS / name), run_name="__main__")
        return int(ended.value.code or 0), json.loads(capsys.readouterr().out)

    return run


def test_load_is_counted_and_checked(served: Running, report: Any) -> None:
    code, found = report(
        "server_load.py", "--url", served.url, "--clients", 3, "--seconds", 1, "--pool", 6, "--long-words", 40
    )
    assert code == 0
    assert found["wrong"] == 0
    assert set(found["ends"]) <= {"finished", "cancelled"}
    assert found["ends"]["finished"] > 0
    assert found["tokens_per_second"] > 0
    assert found["ttft"]["p50_ms"] <= found["ttft"]["p95_ms"]


def test_load_tells_right_from_wrong() -> None:
    script = runpy.run_path(str(SCRIPTS / "server_load.py"))
    answer, note, tally = script["Answer"], script["_note"], script["Tally"]()
    alone = answer(200, "one two three", tokens=6)
    note(tally, answer(200, "one two three", tokens=6), alone, None, "whole")
    note(tally, answer(200, "one tw", tokens=2), alone, 2, "left early")
    assert (tally.wrong, tally.tokens) == ([], 6 + 3)
    note(tally, answer(200, "one two", tokens=4), alone, None, "cut short")
    note(tally, answer(200, "one ten", tokens=4), alone, 2, "another text")
    assert [line.split(":")[0] for line in tally.wrong] == ["cut short", "another text"]
    note(tally, answer(429), alone, None, "refused")
    note(tally, answer(200, error="failed"), alone, None, "failed")
    assert dict(tally.ends) == {"finished": 2, "cancelled": 2, "429": 1, "error 200 failed": 1}


def test_schemas_are_kept_to_and_a_text_that_is_cut_off_counts(served: Running, report: Any) -> None:
    code, found = report("server_schema.py", "--url", served.url, "--count", 3)
    assert code == 0
    assert found["differ from autoregressive"] == {"speculative": 0, "auto": 0}
    assert {policy: counts["ended"] for policy, counts in found["policies"].items()} == dict.fromkeys(POLICIES, 3)
    code, found = report("server_schema.py", "--url", served.url, "--count", 2, "--max-tokens", 2)
    assert code == 1
    assert all(counts["ended"] == 0 for counts in found["policies"].values())
