"""The scripts in ``benchmarks/``, on the tiny model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bitmtp.benchmark import shapes
from bitmtp.core.policies import POLICIES
from bitmtp.core.policies.confidence import confidence

Script = Callable[..., int]


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


def test_exactness_of_other_shapes(
    script: Script, questions: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--data", questions, "--output", tmp_path / "shapes.jsonl", "--model", tiny_model]
    given += ["--backend", "reference", "--max-tokens", "8", "--threads", "1"]
    assert script("exactness.py", *given, "--shapes") == 0
    assert "2 questions × thread counts, 36 texts, 0 mismatches" in capsys.readouterr().out


def test_exactness_sees_another_text(
    script: Script, questions: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "speculative", lambda block_size=8: confidence(block_size, tau=0.0))
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


def test_agreement_is_measured_on_the_same_text(
    script: Script, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("zstandard")
    for file, record in (
        ("gsm8k/test.jsonl", {"question": "One?", "answer": "Two."}),
        ("humaneval/HumanEval.jsonl", {"prompt": "def f():\n", "canonical_solution": "    return 1\n"}),
        ("math500/test.jsonl", {"problem": "Three?", "solution": "Four."}),
    ):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text((json.dumps(record) + "\n") * 40, encoding="utf-8")
    given = ["record", "--model", tiny_model, "--backend", "reference"]
    base, other = tmp_path / "base.npz", tmp_path / "other.npz"
    assert script("agreement.py", *given, "--rows", "1", "--data", tmp_path, "--output", base) == 0
    assert script("agreement.py", *given, "--like", base, "--output", other) == 0
    assert script("agreement.py", "compare", base, other) == 0
    assert "agrees 100.00%" in capsys.readouterr().out

    arrays = dict(np.load(other))
    arrays["tokens"] = arrays["tokens"] + 1
    np.savez(other, **arrays)
    assert script("agreement.py", "compare", base, other) == 1
    assert "agrees 0.00%" in capsys.readouterr().out
    assert script("agreement.py", "compare", base, other, "--bound", other) == 0
    assert script("agreement.py", "compare", base, other, "--bound", base) == 1


def test_imposed_acceptance_is_what_the_trace_says(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    config = replace(shapes.SHAPES["smollm2-135m"], vocab_size=96, **small)  # type: ignore[arg-type]
    monkeypatch.setattr(shapes, "SHAPES", {"bonsai-1.7b": config})
    trace = tmp_path / "trace.json"
    trace.write_text('{"lengths": {"a": {"2": 30, "9": 10}, "b": {"5": 20}}}', encoding="utf-8")
    given = ["play", "--trace", trace, "--backend", "reference", "--history", "8", "--tokens", "140", "--rounds", "1"]
    assert script("imposed.py", *given, "--means", "7") == 0
    told = capsys.readouterr().out
    assert "60 iterations, 4.17 tokens each" in told
    [played] = re.findall(r"acceptance imposed: 7.0 .*: ([\d.]+) tokens an iteration", told)
    assert float(played) == pytest.approx(7, abs=0.3)
    assert script("imposed.py", *given, "--means", "9.5") == 2


def test_a_trace_is_recorded(script: Script, tiny_model: Path, tmp_path: Path) -> None:
    for file in ("ifeval/input_data.jsonl", "humaneval/HumanEval.jsonl", "mbpp/sanitized-mbpp.jsonl"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text('{"prompt": "Hello"}\n{"prompt": "Why?"}\n', encoding="utf-8")
    trace = tmp_path / "trace.json"
    given = ["record", "--data", tmp_path, "--output", trace, "--model", tiny_model, "--backend", "reference"]
    assert script("imposed.py", *given, "--prompts", "1", "--max-tokens", "12") == 0
    lengths = json.loads(trace.read_text(encoding="utf-8"))["lengths"]
    assert set(lengths) == {"ifeval", "humaneval", "mbpp"}
    assert all(sum(int(length) * count for length, count in part.items()) <= 11 for part in lengths.values())


def test_the_resident_loop_is_compared_with_the_host_s(
    script: Script, questions: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", tiny_model, "--backend", "reference", "--prompts", questions, "--max-tokens", "12"]
    assert script("resident.py", *given) == 0
    told = capsys.readouterr().out
    assert re.findall(r"(.*): [\d.]+ x", told) == ["autoregressive", "speculative D=6"]
    assert script("resident.py", *given[:-4], "--prompts", "nowhere") == 2


def test_passes_in_detail(
    script: Script,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("bitmtp.benchmark.widths.PASSES_PER_ROUND", 1)
    record = tmp_path / "passes.json"
    given = ["--model", tiny_model, "--backend", "reference", "--history", "16", "--max-tokens", "4", "--rounds", "1"]
    assert script("passes.py", *given, "--kernels", "--json", record) == 0
    found = json.loads(record.read_text(encoding="utf-8"))
    assert [cost["width"] for cost in found["passes"]["costs"]] == [1, 2, 4, 8, 9, 16, 32]
    assert [each["prompt"] for each in found["profile"]["first_token"]] == [64]
    assert "Time to the first token" in capsys.readouterr().out
    assert script("passes.py", *given[:4], "--history", "500") == 2
