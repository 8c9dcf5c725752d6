"""Killed at any step, a command leaves nothing half-written in its place, and goes on or begins again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from convert.files import write_hf
from convert.test_bitnet import BITNET, packed, quantised, ternary_tensors
from evaluation.conftest import GSM8K, write_lines

from bitmtp import checkpoint
from bitmtp.tuning.profile import Profile

from .killed import kill_everywhere


@pytest.fixture
def source(tmp_path: Path) -> Path:
    data = BITNET | quantised("autobitlinear")
    return write_hf(tmp_path / "source", data, packed(ternary_tensors(data, sub_norm=True, inverse=False)))


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir() if not each.name.startswith(".")}


def test_convert_is_whole_or_nothing(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    words = ["convert", str(source), str(out / "model"), "--unchecked"]

    def look(_: int) -> None:
        if (out / "model").exists():
            checkpoint.read(out / "model")
            shutil.rmtree(out / "model")
        assert names(out) == set()

    assert kill_everywhere(words, out, look) > 5
    checkpoint.read(out / "model")


def test_convert_in_place_of_another_keeps_one_of_them(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    words = ["convert", str(source), str(out / "model"), "--unchecked", "--force"]
    (out / "model").mkdir()
    (out / "model" / "mine.txt").write_text("kept")

    def look(_: int) -> None:
        if not (out / "model" / "mine.txt").exists() and not list(out.glob(".model.*/old/mine.txt")):
            checkpoint.read(out / "model")

    assert kill_everywhere(words, out, look) > 5
    assert names(out) == {"model"}
    checkpoint.read(out / "model")


def test_tune_writes_its_profile_whole_or_not_at_all(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "prompts.txt").write_text("One\n", encoding="utf-8")
    file = out / "profile.json"
    words = [
        "tune", "--model", str(tiny_model), "--backend", "reference", "--threads", "1", "--limit", "1",
        "--prompts", str(tmp_path / "prompts.txt"), "--max-tokens", "8", "--output", str(file),
    ]  # fmt: skip

    def look(_: int) -> None:
        assert not file.exists()

    kill_everywhere(words, out, look)
    Profile.read(file)


def test_eval_goes_on_where_it_was(tiny_model: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "data/gsm8k/test.jsonl", GSM8K)
    out = tmp_path / "out"
    out.mkdir()
    log = out / "log.jsonl"
    words = [
        "eval", "--model", str(tiny_model), "--backend", "reference", "--data", str(tmp_path / "data"),
        "--tasks", "gsm8k", "--max-tokens", "4", "--timed", "0", "--output", str(log),
    ]  # fmt: skip
    before: list[str] = []

    def look(number: int) -> None:
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        assert lines[: len(before)] == before, "what was done stays"
        before[:] = lines
        if number % 2:  # and a kill in the middle of a line
            with log.open("a", encoding="utf-8") as file:
                file.write('{"key": "ha')

    kill_everywhere(words, out, look)
    keys = [json.loads(line)["key"] for line in log.read_text(encoding="utf-8").splitlines()]
    assert len(keys) == len(set(keys)) > 3


RECIPE = """
source = "{folder}/source"
tokenizer = "{folder}/source"
output = "{folder}/out/run"
steps = 3
batch_size = 2
seq_len = 24
block_size = 3
short_blocks = 2
short_masks = 1
long_blocks = 1
chain_rank = 4
head_chunk = 50
calibration_rows = 2
snapshot_seconds = 0.0
log_seconds = 0.0
[data]
"{folder}/text.jsonl" = 1
"""


def test_train_goes_on_where_it_was(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="pip install 'bitmtp[train]'")
    from training.conftest import write_source, write_text
    from training.conftest import write_tokenizer as write_bytes

    out, source = tmp_path / "out", tmp_path / "source"
    out.mkdir()
    source.mkdir()
    write_source(source)
    write_bytes(source)
    write_text(tmp_path / "text.jsonl")
    (tmp_path / "recipe.toml").write_text(RECIPE.format(folder=tmp_path), encoding="utf-8")

    def look(_: int) -> None:
        for folder in (out / "run" / "model", out / "run" / "snapshot"):
            if folder.exists():
                checkpoint.read(folder)

    assert kill_everywhere(["train", str(tmp_path / "recipe.toml")], out, look, every=5) > 10
    lines = (out / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert max(record["step"] for record in map(json.loads, lines)) == 3
    checkpoint.read(out / "run" / "model")
