"""A disk that is full: one line, exit code 2, and nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import make_backend, random_checkpoint, tiny_config
from convert.files import write_hf
from convert.test_bitnet import BITNET, packed, quantised, ternary_tensors

from bitmtp.core.learned import LearnedCosts

ROOT = Path(__file__).parents[2]


def run_with_room(words: list[str], room: int) -> subprocess.CompletedProcess[str]:
    """A command whose files may not grow beyond ``room`` bytes, as on a full disk."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "bitmtp", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, preexec_fn=limit)


@pytest.mark.parametrize("room", [100, 30_000])
def test_convert(tmp_path: Path, room: int) -> None:
    data = BITNET | quantised("autobitlinear")
    source = write_hf(tmp_path / "source", data, packed(ternary_tensors(data, sub_norm=True, inverse=False)))
    (tmp_path / "out").mkdir()
    ran = run_with_room(["convert", str(source), str(tmp_path / "out" / "model"), "--unchecked"], room)
    assert (ran.returncode, list((tmp_path / "out").iterdir())) == (2, []), ran.stderr
    assert "Traceback" not in ran.stderr
    assert "too large" in ran.stderr.splitlines()[-1]


def test_eval(tiny_model: Path, tmp_path: Path) -> None:
    from evaluation.conftest import GSM8K, write_lines

    write_lines(tmp_path / "data/gsm8k/test.jsonl", GSM8K)
    words = [
        "eval", "--model", str(tiny_model), "--backend", "reference", "--data", str(tmp_path / "data"), "--tasks",
        "gsm8k", "--max-tokens", "4", "--timed", "0", "--output", str(tmp_path / "log.jsonl"),
    ]  # fmt: skip
    ran = run_with_room(words, 300)
    assert ran.returncode == 2, ran.stderr
    assert "Traceback" not in ran.stderr
    ran = run_with_room(words, 1 << 20)
    assert ran.returncode == 0, ran.stderr
    lines = (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert len({json.loads(line)["key"] for line in lines}) == len(lines) > 3


def test_learned_costs_are_lost_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    learned = LearnedCosts.of(make_backend("reference", random_checkpoint(tiny_config())))
    learned.costs.learn(1, 10, 1.0)
    monkeypatch.setattr(Path, "write_text", full)
    learned.save()
