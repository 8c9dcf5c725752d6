"""Tokenizers inside GGUF files: the ids are those of the tokenizer that the file was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DATA, TEMPLATE, write_tokenizer

from bitmtp.convert.source import open_model
from bitmtp.errors import CheckpointError, ConfigError
from bitmtp.models import shipped_model
from bitmtp.tokenizer import Tokenizer

from .files import f32, gguf_fields, gguf_name, random_floats, write_gguf
from .test_gguf import SHAPE

TEXT = "In 1987 the café's owner didn't sell 12,345 cups…\n\n  def f(x):\n\treturn x**2  # ½ × 语言 🙂 don't"


def write_file(file: Path, folder: Path, cut: str, vocab: int, **more: Any) -> None:
    """A small model with the tokenizer of ``folder``."""
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    ids = data["model"]["vocab"] | {each["content"]: each["id"] for each in data["added_tokens"]}
    special = {each["content"] for each in data["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]]
    fields = gguf_fields("qwen3", SHAPE) | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": cut,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
    }
    tensors = {gguf_name(name): f32(tensor) for name, tensor in random_floats(SHAPE).items()}
    tensors["token_embd.weight"] = f32(np.zeros((vocab, SHAPE.hidden_size)))
    write_gguf(file, {key: value for key, value in (fields | more).items() if value is not None}, tensors)


@pytest.mark.parametrize("cut", ["gpt-2", "smollm"])
def test_the_ids_are_those_of_the_original(tmp_path: Path, cut: str) -> None:
    folder = shipped_model() if cut == "smollm" else write_tokenizer(tmp_path)
    original = Tokenizer(folder)
    write_file(tmp_path / "m.gguf", folder, cut, original.vocab_size, **{"tokenizer.chat_template": TEMPLATE})
    (tmp_path / "out").mkdir()
    open_model(tmp_path / "m.gguf").write_tokenizer(tmp_path / "out")
    written = Tokenizer(tmp_path / "out", original.vocab_size)
    for text in (TEXT, (DATA / "corpus.txt").read_text(encoding="utf-8")[:5000], "<|im_start|>user\n7 777<|end|>"):
        assert written.encode(text) == original.encode(text)
        assert written.decode(written.encode(text), skip_special=False) == text
    assert "<|start|>" in written.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(("cut", "number"), [("qwen2", ["1", "9", "8", "7"]), ("llama-bpe", ["198", "7"])])
def test_how_words_and_numbers_are_cut(tmp_path: Path, cut: str, number: list[str]) -> None:
    """Without merges every byte is a token, so the cut shows only in the pre-tokenizer."""
    from tokenizers import Tokenizer as Plain

    write_file(tmp_path / "m.gguf", write_tokenizer(tmp_path), cut, 320)
    (tmp_path / "out").mkdir()
    open_model(tmp_path / "m.gguf").write_tokenizer(tmp_path / "out")
    pieces = Plain.from_file(str(tmp_path / "out" / "tokenizer.json")).pre_tokenizer.pre_tokenize_str(
        "It's 1987, ok\n\n x"
    )
    assert [piece for piece, _ in pieces] == ["It", "'s", "Ġ", *number, ",", "Ġok", "ĊĊ", "Ġx"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "'gpt2' with 'deepseek-llm'.*--tokenizer"),
        ({"tokenizer.ggml.model": "llama"}, "its tokenizer is 'llama'.*--tokenizer"),
    ],
)
def test_others_need_a_folder(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    write_file(tmp_path / "m.gguf", write_tokenizer(tmp_path), "gpt-2", 320, **changes)
    with pytest.raises(ConfigError, match=message):
        open_model(tmp_path / "m.gguf").write_tokenizer(tmp_path)


def part(name: str, value: Any, message: str) -> Any:
    return pytest.param({f"tokenizer.ggml.{name}": value}, message, id=f"{name}: {message}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        part("pre", None, "'gpt2' with None"),
        part("model", None, "it holds no tokenizer"),
        part("model", 7, "is '7'; expected str"),
        *(part(name, None, f"{name} is missing") for name in ("tokens", "token_type", "merges")),
        *(part(name, 5, f"{name} is no list") for name in ("tokens", "token_type", "merges")),
        part("tokens", ["a", "b"], "has 2 tokens, the model 320"),
        part("tokens", ["a"] * 320, "a token stands twice"),
        part("token_type", [1] * 319, "320 tokens, and types of 319"),
        part("token_type", ["1"] * 320, "expected int"),
        part("merges", ["qqq zzz"], "its merges do not fit its tokens"),
        part("merges", ["alone"], "its merges do not fit its tokens"),
    ],
)
def test_a_part_that_is_missing_or_wrong_is_loud(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_file(tmp_path / "m.gguf", write_tokenizer(tmp_path), "gpt-2", 320, **changes)
    with pytest.raises((CheckpointError, ConfigError), match=rf"m\.gguf: .*{message}"):
        open_model(tmp_path / "m.gguf").write_tokenizer(tmp_path)
