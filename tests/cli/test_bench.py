"""``bitmtp bench`` and ``bitmtp info``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bitmtp import __version__
from bitmtp.benchmark import shapes
from bitmtp.core.topology import NAMED
from bitmtp.engine import Result

from .conftest import Command

QUICK = ["--max-tokens", "12", "--rounds", "1", "--history", "16"]


@pytest.fixture(autouse=True)
def _few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitmtp.benchmark.widths.PASSES_PER_ROUND", 1)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Hello"}\n{"question": "Why?"}\n{"turns": ["One", "Two"]}\n', encoding="utf-8")
    return file


def test_policies_and_record(bitmtp: Command, model_flags: list[str], prompts: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    ran = bitmtp(
        "bench", *model_flags, *QUICK, "--prompts", prompts, "--limit", "2", "--block-size", "4,8", "--json", record,
        "--template", "Say:\\n{prompt}",
    )  # fmt: skip
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(record.read_text(encoding="utf-8"))
    names = [(each["policy"]["name"], each["policy"]["block_size"]) for each in found["policies"]]
    drafting = [(name, size) for name in ("speculative", "auto", "confidence", "hybrid") for size in (4, 8)]
    assert names == [("autoregressive", 1), *drafting]
    for each in found["policies"]:
        assert each["tokens_per_second"] > 0
        assert each["lossless"] == (each["policy"]["name"] in ("autoregressive", "speculative", "auto"))
    assert found["policies"][0]["ratio"] == found["policies"][0]["tokens_per_iteration"] == 1
    assert found["environment"]["bitmtp"] == __version__
    assert found["passes"] is None
    assert "speculative D=4" in ran.out


def test_widths(bitmtp: Command, model_flags: list[str], tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    ran = bitmtp("bench", *model_flags, *QUICK, "--widths", "--json", record)
    passes = json.loads(record.read_text(encoding="utf-8"))["passes"]
    assert ran.code == 0
    assert [cost["width"] for cost in passes["costs"]] == [1, 2, 4, 8, 9, 16, 32]
    assert passes["costs"][0]["ratio"] == 1
    assert passes["decoded_tokens_per_second"] > 0
    assert "width" in ran.out
    assert "Policies" not in ran.out


def test_profile(bitmtp: Command, model_flags: list[str], tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    ran = bitmtp("bench", *model_flags, *QUICK, "--profile", "--json", record)
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(record.read_text(encoding="utf-8"))
    assert [each["prompt"] for each in found["profile"]["first_token"]] == [64]
    assert found["policies"] is None
    assert "Time to the first token" in ran.out


def test_a_shape_needs_no_model(bitmtp: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(
        shapes.SHAPES["smollm2-135m"],
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        vocab_size=256,
    )
    monkeypatch.setattr(shapes, "SHAPES", {"smollm2-135m": small})
    ran = bitmtp("bench", "--shape", "smollm2-135m", "--backend", "reference", *QUICK)
    assert (ran.code, ran.err) == (0, "")
    assert "tok/s decoding" in ran.out
    assert "Policies" not in ran.out


def test_a_lossless_policy_that_changes_the_text_is_an_error(
    bitmtp: Command, model_flags: list[str], prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitmtp.engine import Generation

    honest = Generation.result.fget  # type: ignore[attr-defined]

    def lying(self: Generation) -> Result:
        result: Result = honest(self)
        return replace(result, token_ids=[0]) if result.policy.name == "speculative" else result

    monkeypatch.setattr(Generation, "result", property(lying))
    ran = bitmtp("bench", *model_flags, *QUICK, "--prompts", prompts, "--policy", "speculative")
    assert ran.code == 1
    assert "MISMATCH: speculative" in ran.err
    assert "prompts 1, 2, 3" in ran.err


def test_info(bitmtp: Command, model_flags: list[str], tiny_model: Path) -> None:
    ran = bitmtp("info", *model_flags)
    assert (ran.code, ran.err) == (0, "")
    for words in (str(tiny_model), "2 layers", "blocks of up to 16", "runs; kernels: NumPy", __version__):
        assert words in ran.out


def test_topologies_are_drawn(bitmtp: Command) -> None:
    ran = bitmtp("info", "--topologies")
    assert ran.code == 0
    for shape in NAMED:
        assert shape.drawing() in ran.out


def test_version(bitmtp: Command) -> None:
    assert bitmtp("--version").out == f"bitmtp {__version__}\n"


def test_no_command_shows_help(bitmtp: Command) -> None:
    ran = bitmtp()
    assert ran.code == 0
    for command in ("generate", "chat", "info", "bench", "train"):
        assert command in ran.out
