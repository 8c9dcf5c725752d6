"""Prompt files."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitmtp.benchmark.prompts import encode_prompts, read_prompts
from bitmtp.engine import Engine, Request
from bitmtp.errors import RequestError


@pytest.fixture
def engine(tiny_model: Path) -> Engine:
    return Engine.load(tiny_model, backend="reference")


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_every_kind_of_record(tmp_path: Path) -> None:
    messages = '{"messages": [{"role": "user", "content": "d"}]}'
    lines = ['{"prompt": "a", "question": "z"}', "", '{"question": "b"}', '{"turns": ["c", "x"]}', messages]
    found = read_prompts(write(tmp_path, "prompts.jsonl", "\n".join(lines)))
    assert found == ["a", "b", "c", [{"role": "user", "content": "d"}]]


def test_text_files_hold_a_prompt_a_line(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path, "prompts.txt", "one\n\n{two}\n")) == ["one", "{two}"]


@pytest.mark.parametrize("line", ['{"prompt": ', '{"answer": "a"}', "[]", '{"prompt": ""}', '{"turns": []}'])
def test_bad_lines_are_named(tmp_path: Path, line: str) -> None:
    file = write(tmp_path, "prompts.jsonl", '{"prompt": "a"}\n' + line)
    with pytest.raises(RequestError, match=r"prompts\.jsonl:2"):
        read_prompts(file)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"nowhere\.txt"):
        read_prompts(tmp_path / "nowhere.txt")
    with pytest.raises(RequestError, match="no prompts"):
        read_prompts(write(tmp_path, "empty.txt", "\n"))


def test_template_and_chat_template(engine: Engine) -> None:
    [ids] = encode_prompts(engine, ["f{x}()"], "Complete:\n{prompt}.")
    assert ids == engine.encode(Request([{"role": "user", "content": "Complete:\nf{x}()."}]))


def test_templates_that_cannot_be_filled(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"\{prompt\}"):
        encode_prompts(engine, ["a"], "Complete this")
    with pytest.raises(RequestError, match="messages"):
        encode_prompts(engine, [[{"role": "user", "content": "a"}]], "{prompt}")
