"""Text to ids and back, the chat template, and files that are not right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import END
from hypothesis import given
from hypothesis import strategies as st

from bitmtp.errors import CheckpointError, RequestError
from bitmtp.tokenizer import Tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(tokenizer_folder)


@given(text=TEXT)
def test_round_trip(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@given(texts=st.lists(TEXT, max_size=5))
def test_a_batch_is_its_texts(texts: list[str], tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|end|>b")
    assert ids.count(END) == 1
    assert tokenizer.token_id("<|end|>") == END
    assert tokenizer.token_id("<|nothing|>") is None
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special=False) == "a<|end|>b"


def test_nothing_is_added(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == []
    assert not set(tokenizer.encode("The harbour")) & {0, 1, 2}


def test_an_incomplete_character_shows(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\U0001f6a2")
    assert len(ids) == 4
    assert tokenizer.decode(ids[:2]).endswith("\ufffd")


def test_chat(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    want = "<|start|>system\nBe brief.<|end|>\n<|start|>user\nHello<|end|>\n"
    assert tokenizer.chat(messages, add_generation_prompt=False) == want
    assert tokenizer.chat(messages) == want + "<|start|>assistant\n"


def with_settings(folder: Path, tmp_path: Path, settings: Any) -> Path:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return copy


def test_without_a_template(tokenizer_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(with_settings(tokenizer_folder, tmp_path, {}))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.chat(HELLO)


FAILING = ("{% for %}", "{{ messages.nothing.more }}", "{{ ''.__class__.__mro__[1].x }}", "{{ 1 // 0 }}")


@pytest.mark.parametrize("template", FAILING)
def test_a_template_that_fails(template: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(with_settings(tokenizer_folder, tmp_path, {"chat_template": template}))
    with pytest.raises(RequestError, match="chat template rejects"):
        tokenizer.chat(HELLO)


@pytest.mark.parametrize("content", [None, 3, [{"type": "text", "text": "Hello"}]], ids=str)
def test_content_that_is_not_text(content: Any, tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError):
        tokenizer.chat([{"role": "user", "content": content}])


def test_a_message_without_content(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError):
        tokenizer.chat([{"role": "user"}])


def test_a_tokenizer_larger_than_the_model(tokenizer_folder: Path) -> None:
    size = Tokenizer(tokenizer_folder).vocab_size
    assert Tokenizer(tokenizer_folder, size + 5).vocab_size == size
    with pytest.raises(CheckpointError, match="not the tokenizer of this model"):
        Tokenizer(tokenizer_folder, size - 1)


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer_config.json", None),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"\xff"),
    ],
)
def test_damaged_files(file: str, data: bytes | None, tokenizer_folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tokenizer_folder, tmp_path / "copy"))
    (copy / file).unlink()
    if data is not None:
        (copy / file).write_bytes(data)
    with pytest.raises(CheckpointError, match=file) as caught:
        Tokenizer(copy)
    assert "\n" not in str(caught.value)


def test_what_makes_the_library_panic_is_one_line(tokenizer_folder: Path, tmp_path: Path) -> None:
    data = json.loads((tokenizer_folder / "tokenizer.json").read_text(encoding="utf-8"))
    data["model"]["continuing_subword_prefix"] = "a" * 5000
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        Tokenizer(tmp_path)
