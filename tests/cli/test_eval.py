"""``bitmtp eval``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evaluation.conftest import GSM8K, HUMANEVAL, write_lines

from bitmtp.engine import Generation, Request, Result

from .conftest import Command

TASKS = ["--tasks", "gsm8k,humaneval+", "--max-tokens", "8"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_lines(tmp_path / "data/gsm8k/test.jsonl", GSM8K)
    write_lines(tmp_path / "data/humaneval_plus/HumanEvalPlus-OriginFmt.jsonl.gz", HUMANEVAL)
    return tmp_path / "data"


@pytest.fixture
def flags(model_flags: list[str], data: Path, tmp_path: Path) -> list[str]:
    return [*model_flags, "--data", str(data), *TASKS, "--output", str(tmp_path / "log.jsonl")]


def test_table_and_record(bitmtp: Command, flags: list[str], tmp_path: Path) -> None:
    ran = bitmtp(
        "eval", *flags, "--policy", "speculative:8,hybrid:4", "--tau", "0.5", "--lossy-limit", "2", "--timed", "1",
        "--json", tmp_path / "record.json",
    )  # fmt: skip
    assert ran.code == 0
    assert "GSM8K, exact match (greedy" in ran.out
    assert "gsm8k, judging" in ran.err
    figures = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))["figures"]
    rows = [(each["task"], each["policy"]["name"], each["policy"]["block_size"], each["asked"]) for each in figures]
    for task, whole, part in (("gsm8k", 3, 2), ("humaneval+", 1, 1)):
        assert [row[1:] for row in rows if row[0] == task] == [
            ("autoregressive", 1, whole), ("speculative", 8, whole), ("hybrid", 4, part),
        ]  # fmt: skip
    for each in figures:
        assert each["speed"]["tokens_per_second"] > 0
        assert each["interval"][0] <= each["right"] / each["asked"] <= each["interval"][1]
        assert each["same"] == each["asked"] or not each["lossless"]
    assert figures[0]["tokens_per_iteration"] == figures[0]["speed"]["ratio"] == 1


def test_resuming_writes_nothing_twice(bitmtp: Command, flags: list[str], requests: list[Request]) -> None:
    first = bitmtp("eval", *flags, "--timed", "1")
    assert len(requests) == 2 * (3 + 1) + 2 * 2 * 2  # texts; of each task one alone by each policy, and a warm-up
    del requests[:]
    again = bitmtp("eval", *flags, "--timed", "1")
    assert requests == []
    assert (again.out, again.err) == (first.out, "")


def test_answers_for_evalplus(bitmtp: Command, flags: list[str], tmp_path: Path) -> None:
    ran = bitmtp("eval", *flags, "--timed", "0", "--evalplus", tmp_path / "samples")
    assert ran.code == 0
    files = sorted((tmp_path / "samples").iterdir())
    assert [file.name for file in files] == ["humaneval-0-autoregressive.jsonl", "humaneval-1-speculative.jsonl"]
    assert str(files[1]) in ran.out
    (line,) = map(json.loads, files[0].read_text(encoding="utf-8").splitlines())
    assert line["task_id"] == "HumanEval/0"
    assert line["solution"].startswith(HUMANEVAL[0]["prompt"])


def test_shards_join(bitmtp: Command, flags: list[str], tmp_path: Path, requests: list[Request]) -> None:
    whole = bitmtp("eval", *flags, "--timed", "0").out
    parts = []
    for number in (1, 2):
        parts.append(tmp_path / f"part{number}.jsonl")
        ran = bitmtp("eval", *flags[:-1], parts[-1], "--shard", f"{number}/2")
        assert (ran.code, ran.out) == (0, "")
    joined = tmp_path / "joined.jsonl"
    joined.write_text("".join(part.read_text(encoding="utf-8") for part in parts), encoding="utf-8")
    del requests[:]
    assert bitmtp("eval", *flags[:-1], joined, "--timed", "0").out == whole
    assert requests == []


def test_a_lossless_policy_that_changes_the_text_is_an_error(
    bitmtp: Command, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Generation.result.fget  # type: ignore[attr-defined]

    def lying(self: Generation) -> Result:
        from dataclasses import replace

        result: Result = honest(self)
        return replace(result, token_ids=[0]) if result.policy.name == "speculative" else result

    monkeypatch.setattr(Generation, "result", property(lying))
    ran = bitmtp("eval", *flags, "--timed", "0")
    assert ran.code == 1
    assert "MISMATCH: speculative D=8 bound=0.1 is lossless, but 3 of 3 texts of gsm8k differ" in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "gsm8k"], "name the folder of the questions with --data"),
        (["--tasks", "gsm8k", "--data", "/nowhere"], "missing; gsm8k is read from there"),
        (["--tasks", "", "--shard", "3/2"], "shard '3/2' is not I/N"),
        (["--tasks", "hellaswag", "--shard", "1/2"], "have no shards"),
        (["--tasks", "", "--policy", "hybrid:x"], "is not NAME or NAME:BLOCKSIZE"),
        (["--tasks", "", "--policy", "speculative", "--tau", "0.5"], "tau has no meaning under speculative"),
        (["--tasks", "", "--policy", "magic"], "unknown policy 'magic'"),
    ],
)
def test_errors(bitmtp: Command, model_flags: list[str], tmp_path: Path, arguments: list[str], message: str) -> None:
    ran = bitmtp("eval", *model_flags, "--output", tmp_path / "log.jsonl", *arguments)
    assert ran.code == 2
    assert message in ran.err
    assert ran.err.count("\n") == 1
