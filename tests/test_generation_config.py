"""What a checkpoint says of sampling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import random_checkpoint, tiny_config, write_model, write_tokenizer

from bitmtp.engine import Engine
from bitmtp.errors import CheckpointError
from bitmtp.generation_config import FILE, GenerationConfig


def read(folder: Path, text: str) -> GenerationConfig:
    """From a folder with such a file."""
    (folder / FILE).write_text(text, encoding="utf-8")
    return GenerationConfig.read(folder)


def test_fields_that_are_known(tmp_path: Path) -> None:
    assert GenerationConfig.read(tmp_path) == GenerationConfig()
    assert read(tmp_path, '{"eos_token_id": [2], "top_p": 0.9, "top_k": null}') == GenerationConfig(top_p=0.9)
    assert read(tmp_path, '{"do_sample": false, "temperature": 0.6}').temperature == 0
    assert read(tmp_path, '{"do_sample": true, "temperature": 0.6}').temperature == 0.6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ('{"temperature": "warm"}', "temperature is 'warm'"),
        ('{"temperature": true}', "temperature is True"),
        ('{"top_k": 2.5}', "top_k is 2.5"),
        ('{"top_p": 2}', "top_p is 2"),
    ],
)
def test_damage_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"{FILE}: {message}") as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_written_with_a_checkpoint_and_read_with_it(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.mkdir()
    write_tokenizer(words)
    (words / FILE).write_text(json.dumps({"temperature": 0.5, "max_length": 9}))
    folder = write_model(tmp_path / "model", random_checkpoint(tiny_config()), words)
    assert json.loads((folder / FILE).read_text()) == {"temperature": 0.5}
    assert Engine.load(folder, backend="reference").defaults == GenerationConfig(temperature=0.5)
