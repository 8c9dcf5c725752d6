"""Prompt files, and the built-in prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitmtp.engine import Engine, Request
from bitmtp.errors import RequestError
from bitmtp.tokenizer import Message

Prompt = str | list[Message]

BUILT_IN: tuple[str, ...] = (
    "Write a Python function that checks whether a string is a palindrome, with a docstring and an example.",
    "A train leaves at 9:40 and arrives at 12:15. How long is the journey? Explain step by step.",
    "List the planets of the solar system in order and say one thing about each.",
    "Write a short letter to a neighbour who looked after your cat.",
)


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a prompt file.

    ``.jsonl``: an object a line with ``prompt``, ``question``, ``writing_prompt``, ``messages`` or ``turns`` (the first
    one); anything else: a prompt a line, empty lines skipped.

    Raises:
        RequestError: names file and line, and what was expected.
    """
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RequestError(f"{file}: cannot be read ({error.strerror})") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise RequestError(f"{file}: holds no prompts")
    if file.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_prompt(f"{file}:{number}", line) for number, line in numbered]


def _prompt(place: str, line: str) -> Prompt:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{place}: not valid JSON ({error})") from None
    if isinstance(record, dict):
        for name in ("prompt", "question", "writing_prompt"):
            if isinstance(record.get(name), str) and record[name]:
                return str(record[name])
        if isinstance(turns := record.get("turns"), list) and turns and isinstance(turns[0], str):
            return turns[0]
        if isinstance(messages := record.get("messages"), list) and all(isinstance(each, dict) for each in messages):
            return list(messages)
    raise RequestError(f"{place}: expected an object with prompt, question, turns or messages")


def encode_prompts(engine: Engine, prompts: Sequence[Prompt], template: str | None = None) -> list[list[int]]:
    """Token ids of prompts, by the chat template if the model has one.

    Args:
        template: text with ``{prompt}`` where each prompt goes.

    Raises:
        RequestError: a prompt does not fit the context, or the template has no place for it.
    """
    if template is not None:
        prompts = [_fill(template, prompt) for prompt in prompts]
    return [engine.encode(Request(_as_messages(engine, prompt))) for prompt in prompts]


def _fill(template: str, prompt: Prompt) -> str:
    if "{prompt}" not in template:
        raise RequestError("the template has no {prompt} in it")
    if not isinstance(prompt, str):
        raise RequestError("a template needs prompts that are text, not messages")
    return template.replace("{prompt}", prompt)


def _as_messages(engine: Engine, prompt: Prompt) -> Prompt:
    if isinstance(prompt, str) and engine.tokenizer.has_chat_template:
        return [{"role": "user", "content": prompt}]
    return prompt
