"""``bitmtp bench`` and ``bitmtp info``."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bitmtp import __version__
from bitmtp.benchmark import shapes
from bitmtp.benchmark.busy import Reading, Watch
from bitmtp.benchmark.expect import EXPECTED, Expectation
from bitmtp.benchmark.policies import PolicyFigures
from bitmtp.cli.bench_tables import takeaway
from bitmtp.core.policies import make_policy
from bitmtp.engine import Result

from .conftest import Command

QUICK = ["--max-tokens", "12"]


@pytest.fixture(autouse=True)
def _few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitmtp.benchmark.widths.PASSES_PER_ROUND", 1)
    monkeypatch.setattr("bitmtp.cli.bench.ROUNDS", 1)
    monkeypatch.setattr("bitmtp.cli.bench.HISTORY", 16)
    monkeypatch.setattr(Watch, "reading", lambda _: Reading(2, 0.0, 0.0))


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
    base = found["policies"][0]["tokens_per_second"]
    for each in found["policies"]:
        assert each["ratio"] == pytest.approx(each["tokens_per_second"] / base), "no ratio that the rates contradict"
    assert ran.out.splitlines()[-1].startswith("On this machine: `")


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
    assert "tokens a second without drafts" in ran.out.splitlines()[-1]


def test_others_at_work_are_named(bitmtp: Command, model_flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "reading", lambda _: Reading(2, 0.9, 0.0))
    ran = bitmtp("bench", *model_flags, *QUICK, "--widths")
    assert ran.code == 0
    assert "other processes took 0.9 of 2 cores meanwhile" in ran.err


def _figures(name: str, rate: float, ratio: float, block_size: int | None = None) -> PolicyFigures:
    return PolicyFigures(make_policy(name, 16, block_size=block_size), rate, ratio, 1.0, 1.0, 0.5, 9, (), "", 0)


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        (
            [("speculative", 450.0, 1.5), ("auto", 480.0, 1.6), ("confidence", 900.0, 3.0)],
            "`auto`, 1.60 × autoregressive decoding (480 against 300 tokens a second), the same texts",
        ),
        ([("auto", 480.0, 1.6, 4), ("auto", 450.0, 1.5, 8)], "`auto` with blocks of 4, 1.60 ×"),
        ([("auto", 303.0, 1.01)], "`autoregressive`, 300 tokens a second; drafting gains nothing"),
        ([("confidence", 900.0, 3.0)], "`autoregressive`, 300 tokens a second; drafting gains nothing"),
    ],
)
def test_the_last_line_says_what_to_take_from_it(figures: list[Any], line: str) -> None:
    others = [_figures(*each) for each in figures]
    assert takeaway(None, [_figures("autoregressive", 300.0, 1.0), *others]).startswith(f"On this machine: {line}")


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
    assert "tokens a second without drafts" in ran.out
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


def test_info_of_a_named_folder_as_json(bitmtp: Command, tiny_model: Path) -> None:
    ran = bitmtp("info", tiny_model, "--backend", "reference", "--json")
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    assert found["model"]["folder"] == str(tiny_model)
    assert set(found) == {"model", "machine", "backends"}
    assert "twice" in bitmtp("info", tiny_model, "--model", tiny_model).err


@pytest.fixture
def one_expected(monkeypatch: pytest.MonkeyPatch) -> Expectation:
    made = Expectation("bonsai-4b", 1_000_000_000, 600_000_000, 20.0, 80.0, 2.5, 25e9)
    monkeypatch.setattr("bitmtp.benchmark.expect.expect", lambda name, *_: replace(made, name=name))
    return made


def test_what_to_expect(bitmtp: Command, one_expected: Expectation) -> None:
    ran = bitmtp("info", "--expect")
    assert (ran.code, ran.err) == (0, "")
    for words in (*EXPECTED, "1.00", "20.0", "at 25.0 GB/s"):
        assert words in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80
    assert json.loads(bitmtp("info", "bonsai-4b", "--expect", "--json").out) == [asdict(one_expected)]


def test_what_to_expect_of_something_else(bitmtp: Command, tiny_model: Path) -> None:
    for given in ([tiny_model], ["--model", tiny_model], ["cube"]):
        ran = bitmtp("info", "--expect", *given)
        assert (ran.code, ran.out) == (2, "")
        assert "bonsai-1.7b" in ran.err


def test_version(bitmtp: Command) -> None:
    assert bitmtp("--version").out == f"bitmtp {__version__}\n"


def test_no_command_shows_help(bitmtp: Command) -> None:
    ran = bitmtp()
    assert ran.code == 0
    for command in ("generate", "chat", "info", "bench", "train"):
        assert command in ran.out
