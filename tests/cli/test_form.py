"""``bitmtp generate --schema`` and ``--grammar``: the text has the form asked for, under every policy."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from .conftest import Command

pytest.importorskip("llguidance", reason="the extra `serve` is not installed")

SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "colour": {"enum": ["red", "green"]}},
    "required": ["on", "colour"],
    "additionalProperties": False,
}


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    """A file with a schema."""
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA), encoding="utf-8")
    return file


@pytest.mark.parametrize("policy", ["speculative", "auto", "autoregressive", "hybrid"])
def test_text_by_a_schema(bitmtp: Command, model_flags: list[str], schema: Path, policy: str) -> None:
    ran = bitmtp("generate", "Hello", *model_flags, "--schema", schema, "--policy", policy)
    assert (ran.code, ran.err) == (0, "")
    jsonschema.validate(json.loads(ran.out), SCHEMA)


def test_text_by_a_grammar(bitmtp: Command, model_flags: list[str], tmp_path: Path) -> None:
    file = tmp_path / "grammar.lark"
    file.write_text('start: ("yes" | "no") "!"\n', encoding="utf-8")
    assert bitmtp("generate", "Hello", *model_flags, "--grammar", file).out in ("yes!\n", "no!\n")


def test_a_text_that_is_cut_off_says_so(bitmtp: Command, model_flags: list[str], schema: Path) -> None:
    ran = bitmtp("generate", "Hello", *model_flags, "--schema", schema, "--max-tokens", "3")
    assert ran.code == 0
    assert "not complete" in ran.err


@pytest.mark.parametrize(
    ("flag", "content", "word"),
    [
        ("--schema", "{", "JSON"),
        ("--schema", "[]", "object"),
        ("--schema", '{"type": "no such type"}', "schema"),
        ("--grammar", "start: nothing_named_so", "grammar"),
    ],
)
def test_what_is_no_form_is_refused(
    bitmtp: Command, model_flags: list[str], tmp_path: Path, flag: str, content: str, word: str
) -> None:
    file = tmp_path / "form"
    file.write_text(content, encoding="utf-8")
    ran = bitmtp("generate", "Hello", *model_flags, flag, file)
    assert (ran.code, ran.out) == (2, "")
    assert word in ran.err


def test_one_form_at_a_time(bitmtp: Command, model_flags: list[str], schema: Path) -> None:
    assert bitmtp("generate", "Hello", *model_flags, "--schema", schema, "--grammar", schema).code == 2
    assert "nowhere" in bitmtp("generate", "Hello", *model_flags, "--schema", "nowhere").err
