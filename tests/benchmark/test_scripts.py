"""The scripts in ``benchmarks/``, on the tiny model."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
Script = Callable[..., int]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Run a script with arguments; its exit code."""

    def run(name: str, *arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        try:
            runpy.run_path(str(SCRIPTS / name), run_name="__main__")
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else 2
        return 0

    return run


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "question.jsonl"
    file.write_text('{"turns": ["Hello", "x"]}\n{"turns": ["Why?"]}\n', encoding="utf-8")
    return file


def test_exactness_checks_resumes_and_fails(
    script: Script, questions: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results.jsonl"
    given = ["--data", questions, "--output", output, "--model", tiny_model, "--backend", "reference"]
    given += ["--max-tokens", "8"]
    assert script("exactness.py", *given, "--threads", "1") == 0
    lines = output.read_text(encoding="utf-8").splitlines()
    # two questions, five policies, greedy and sampled; the first one with penalties too, and each text alone
    assert [json.loads(line)["texts"] for line in lines] == [30, 10]
    assert script("exactness.py", *given, "--threads", "1", "2") == 0
    assert output.read_text(encoding="utf-8").splitlines()[:2] == lines
    assert "4 questions × thread counts, 80 texts, 0 mismatches" in capsys.readouterr().out

    broken = json.loads(lines[0])
    broken["differs"] = {"greedy D=4": 3}
    output.write_text("\n".join([json.dumps(broken), *lines[1:]]) + "\n", encoding="utf-8")
    assert script("exactness.py", *given, "--threads", "1") == 1
    assert "greedy D=4 differs from token 3 on" in capsys.readouterr().out


def test_exactness_sees_another_text(
    script: Script, questions: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bitmtp.decoding.decoder.longest_path", lambda tree, *_: list(range(tree.shape.width)))
    given = ["--data", questions, "--output", tmp_path / "out.jsonl", "--model", tiny_model, "--backend", "reference"]
    assert script("exactness.py", *given, "--max-tokens", "12", "--limit", "1", "--threads", "1") == 1


def test_acceptance_resumes_and_compares(
    script: Script, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, line in (
        ("humaneval/HumanEval.jsonl", '{"prompt": "def f():\\n"}'),
        ("gsm8k/test.jsonl", '{"question": "1 + 1?"}'),
        ("mt_bench/question.jsonl", '{"turns": ["Hello"]}'),
    ):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text((line + "\n") * 3, encoding="utf-8")
    output = tmp_path / "results.jsonl"
    given = ["--data", tmp_path, "--output", output, "--backend", "reference", "--max-tokens", "8", "--limit", "2"]
    given += ["--model", tiny_model, "--model", tiny_model]
    assert script("acceptance.py", *given) == 0
    first = output.read_text(encoding="utf-8")
    assert len(first.splitlines()) == 6  # the second model has the same content
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].split()[-4:] == ["1.000"] * 4
    assert script("acceptance.py", *given) == 0
    assert output.read_text(encoding="utf-8") == first
    assert capsys.readouterr().out == shown
