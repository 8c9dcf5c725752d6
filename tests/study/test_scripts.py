"""The scripts in ``benchmarks/`` that the study's page of the documentation names, on the tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bitmtp.benchmark.records import model_fingerprint
from bitmtp.tuning import search
from bitmtp.tuning.profile import Profile

Script = Callable[..., int]


def profile(model: Path, block_size: int) -> Profile:
    return Profile(model_fingerprint(model), "x", "reference", 1, "speculative", 1.0, 1.0, block_size, verify_bound=0.1)


def test_the_sweep_places_the_choice_and_goes_on(
    script: Script,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(search, "BLOCK_SIZES", (2, 4))
    monkeypatch.setattr(search, "BOUNDS", (0.1,))
    (tmp_path / "prompts.txt").write_text("One\nTwo\n", encoding="utf-8")
    profile(tiny_model, 4).write(tmp_path / "profile.json")
    given = ["--model", tiny_model, "--backend", "reference", "--prompts", tmp_path / "prompts.txt"]
    given += ["--profile", tmp_path / "profile.json", "--output", tmp_path / "sweep.jsonl", "--max-tokens", "8"]
    given += ["--rounds", "2", "--duels", "2"]
    assert script("tune_sweep.py", *given) in (0, 1)
    shown = capsys.readouterr().out
    assert "4 settings" in shown
    assert "chosen speculative D=4 bound=0.1, best" in shown
    done = (tmp_path / "sweep.jsonl").read_text(encoding="utf-8")
    assert len(done.splitlines()) in (4, 8)  # two rounds of two prompts, and of duels unless the choice is the best
    script("tune_sweep.py", *given)
    assert (tmp_path / "sweep.jsonl").read_text(encoding="utf-8") == done
    assert capsys.readouterr().out == shown
    records = [json.loads(line) for line in done.splitlines()]
    for record in records:  # the choice, third of the settings and first of the duels, was twice as slow as the best
        if "duel" in record["key"]:
            record["seconds"] = [2.0, 1.0]
        else:
            record["seconds"] = [1.0, 0.5, 2.0, 3.0]
    (tmp_path / "sweep.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    assert script("tune_sweep.py", *given) in (0, 1)
    assert "speculative D=2 bound=0.1      1" in capsys.readouterr().out


def test_baselines_write_the_same_text(
    script: Script, tiny_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--data", data, "--model", tiny_model, "--backend", "reference", "--context", "512", "--limit", "1"]
    given += ["--workloads", "plain,reasoning", "--output", tmp_path / "out.jsonl", "--max-tokens", "12"]
    assert script("baselines.py", *given) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("prompt lookup" in line for line in lines) == 2
    assert all(line.endswith("2 of 2") for line in lines if line.startswith("bitmtp"))
