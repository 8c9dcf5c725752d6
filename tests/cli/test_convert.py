"""``bitmtp convert`` from the outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from convert.files import write_hf
from convert.test_bitnet import BITNET, packed, quantised, ternary_tensors

from .conftest import Command, Terminal
from .test_errors import check


@pytest.fixture
def source(tmp_path: Path) -> Path:
    data = BITNET | quantised("autobitlinear")
    return write_hf(tmp_path / "source", data, packed(ternary_tensors(data, sub_norm=True, inverse=False)))


def test_convert_and_generate(bitmtp: Command, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    ran = bitmtp("convert", source, target, "--unchecked", "--embedding-bits", "8")
    assert (ran.code, ran.out) == (0, f"wrote {target}\n")
    assert "autobitlinear" in ran.err
    assert "kept in 8 bits; relative rounding error" in ran.err
    assert "100% of" in ran.err
    ran = bitmtp("generate", "Hello", "--model", target, "--backend", "reference", "--max-tokens", "4")
    assert ran.code == 0, ran
    ran = bitmtp("info", "--model", target, "--backend", "reference")
    assert "none (never taught to draft)" in ran.out
    for flags in (
        ["--policy", "speculative"],
        ["--policy", "hybrid"],
        ["--policy", "speculative", "--block-size", "4"],
    ):
        check(bitmtp("generate", "Hello", "--model", target, *flags), "never taught to draft", "bitmtp train")


def test_a_bar_in_a_terminal(source: Path, tmp_path: Path, terminal: Callable[..., Terminal]) -> None:
    shown = terminal("convert", str(source), str(tmp_path / "model"), "--unchecked")
    assert shown.finish() == 0
    assert "100%" in shown.output
    assert "━" in shown.output
    assert "wrote" in shown.output


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--embedding-bits", "5"], "--embedding-bits"),
        (["--tokenizer", "nowhere"], "nowhere"),
    ],
)
def test_bad_flags(bitmtp: Command, source: Path, tmp_path: Path, flags: list[str], word: str) -> None:
    ran = bitmtp("convert", source, tmp_path / "model", *flags)
    assert ran.code == 2
    assert ran.err.splitlines()[-1].startswith("bitmtp: ")
    assert word in ran.err.splitlines()[-1]


def test_sources_that_are_none(bitmtp: Command, source: Path, tmp_path: Path) -> None:
    check(bitmtp("convert", tmp_path / "nowhere", tmp_path / "model"), "nowhere", "Hugging Face folder or a .gguf file")
    check(bitmtp("convert", tmp_path / "no.gguf", tmp_path / "model"), "no.gguf", "no such file")
    check(bitmtp("convert", source, source, "--unchecked"), "exists already", "--force")


def test_random_weights_are_refused_unless_unchecked(bitmtp: Command, source: Path, tmp_path: Path) -> None:
    ran = bitmtp("convert", source, tmp_path / "model")
    assert ran.code == 2
    assert "hardly reads plain English" in ran.err.splitlines()[-1]
    assert not (tmp_path / "model").exists()
