"""Tool calls: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` in the text, as Hermes and Qwen have it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the text makes; ``arguments`` is JSON text, as the API has it."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(slots=True)
class ToolParser:
    """Splits a growing text into content and calls. What is no sound call stays content; nothing is lost."""

    calls: int = 0
    _held: str = ""

    def push(self, text: str) -> list[str | ToolCall]:
        """The content and calls that this text completes, in order."""
        self._held += text
        found: list[str | ToolCall] = []
        while (start := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, start)
            found.append(self._held[:start])
            if end < 0:
                self._held = self._held[start:]
                return self._settled(found)
            end += len(CLOSE)
            found.append(_parse(self._held[start:end]))
            self._held = self._held[end:]
        keep = _ending_that_opens(self._held)
        found.append(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return self._settled(found)

    def finish(self) -> list[str | ToolCall]:
        """What was held back at the end of the text; a call that lacks only its closing tag counts."""
        held, self._held = self._held, ""
        call = _parse(held + CLOSE) if held.startswith(OPEN) else held
        return self._settled([call if isinstance(call, ToolCall) else held])

    def _settled(self, found: Sequence[str | ToolCall]) -> list[str | ToolCall]:
        """Without empty content, and without the white space around calls."""
        kept: list[str | ToolCall] = []
        for part in found:
            if isinstance(part, ToolCall):
                self.calls += 1
            elif not part or (self.calls and not part.strip()):
                continue
            kept.append(part)
        return kept


def _parse(text: str) -> str | ToolCall:
    try:
        call = json.loads(text[len(OPEN) : -len(CLOSE)])
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return text
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return text
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _ending_that_opens(text: str) -> int:
    """Length of the longest ending of ``text`` with which a call may begin."""
    return next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if OPEN.startswith(text[-n:])), 0)


def explain(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation for a template that knows no tools: definitions, calls and results become text."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        f"You can call these functions, one JSON object a line:\n{listed}\n"
        f'To call one, answer with {OPEN}\n{{"name": "its name", "arguments": {{its arguments}}}}\n{CLOSE}'
    )
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
    parts = [content] * bool(content) + [f"{OPEN}\n{call}\n{CLOSE}" for call in calls]
    return {"role": message["role"], "content": "\n".join(parts)}
