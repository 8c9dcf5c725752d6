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
        CheckpointError: there is no ``tokenizer.json``.
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
        settings["chat_template"] = next(
            (each["template"] for each in settings["chat_template"] if each.get("name") == "default"), None
        )
    text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
    (target / "tokenizer_config.json").write_text(text, encoding="utf-8")
