"""Resumable results."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bitmtp.benchmark.records import ResultLog, model_fingerprint
from bitmtp.errors import RequestError


def test_results_outlive_the_run(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    ResultLog(file).add("a", value=1)
    log = ResultLog(file)
    log.add("b", value=2)
    again = ResultLog(file)
    assert "a" in again
    assert again["b"] == {"key": "b", "value": 2}
    assert "c" not in again


def test_half_a_line_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text('{"key": "a"}\n{"key": "b", "val', encoding="utf-8")
    log = ResultLog(file)
    assert "a" in log
    assert "b" not in log
    log.add("c")
    assert file.read_text(encoding="utf-8") == '{"key": "a"}\n{"key": "c"}\n'


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text('{"key": "a"}\nhello\n', encoding="utf-8")
    with pytest.raises(RequestError, match=r"results\.jsonl:2"):
        ResultLog(file)


def test_fingerprints_tell_models_apart(tiny_model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    assert model_fingerprint(copy) == model_fingerprint(tiny_model)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert model_fingerprint(copy) != model_fingerprint(tiny_model)
