"""The two tokenizer files of a checkpoint, from a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from bitmtp.convert.safetensors_file import read_json
from bitmtp.errors import CheckpointError

_SETTINGS = ("chat_template", "bos_token", "eos_token", "pad_token")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy ``tokenizer.json`` and ``tokenizer_config.json``; a template in a file of its own joins the latter.

    Raises:
        CheckpointError: there is no ``tokenizer.json``, or the settings are not what they should be.
    """
    if not (source / "tokenizer.json").exists():
        raise CheckpointError(f"{source / 'tokenizer.json'}: missing; name a folder that holds it with --tokenizer")
    shutil.copyfile(source / "tokenizer.json", target / "tokenizer.json")
    file = source / "tokenizer_config.json"
    found = read_json(file) if file.exists() else {}
    settings = {key: value for key, value in found.items() if key in _SETTINGS}
    for key, value in settings.items():
        if isinstance(value, dict):  # an added token with its properties
            settings[key] = value.get("content")
    template = source / "chat_template.jinja"
    if template.exists():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    if isinstance(settings.get("chat_template"), list):  # several by name
        named = [each for each in settings["chat_template"] if isinstance(each, dict)]
        settings["chat_template"] = next(
            (each.get("template") for each in named if each.get("name") == "default"), None
        )
    for key, value in settings.items():
        if not isinstance(value, str | None):
            raise CheckpointError(f"{file}: {key} is {str(value)[:40]}; expected a text")
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
