"""Tool calls: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` in the text, as Hermes and Qwen have it.

A call names an offered function, and its arguments are a JSON object; the grammar of :mod:`bitmtp.server.grammar` is
made of the same pieces.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from bitmtp.server.json_body import parse

OPEN, CLOSE = "<tool_call>", "</tool_call>"
END = f"\n{CLOSE}"  # no string of a call can hold it, because JSON spells line breaks
# Tags within strings are text of the call. A quote that runs into a line break begins no string. Another opening tag
# means that the first one opened nothing.
_STRING = r'"(?:[^"\\\x00-\x1f]|\\.)*+'
_BODY = rf'(?:[^"<]|<(?!/?tool_call>)|{_STRING}"|"(?={_STRING[1:]}[\x00-\x1f]))*+'
_CALL = re.compile(f"{OPEN}({_BODY})(?:{CLOSE}|(?={OPEN}))")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the text makes; ``arguments`` is JSON text, as the API has it."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class _Written(BaseModel):
    """A call as models write it; some were taught to say ``parameters``."""

    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: dict[str, Any] = Field({}, validation_alias=AliasChoices("arguments", "parameters"))


def arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the arguments of a call must match: an object, and an empty one if the function has no parameters."""
    if not parameters or parameters == {"type": "object", "properties": {}}:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**parameters, "type": "object"}


@dataclass(slots=True)
class ToolParser:
    """Splits a growing text into content and calls. What is no sound call stays content; nothing is lost.

    Attributes:
        names: the functions that were offered.
        single: the answer ends with its first call.
    """

    names: Collection[str]
    single: bool = False
    calls: int = 0
    _held: str = ""
    _behind_call: bool = False  # nothing but white space has followed the last call

    def push(self, text: str) -> list[str | ToolCall]:
        """The content and calls that this text completes, in order."""
        self._held += text
        found: list[str | ToolCall] = []
        while call := self._whole():
            found += [self._held[: call.start()], self._parse(call[1]) or call[0]]
            self._held = self._held[call.end() :]
        start = self._held.find(OPEN)
        keep = len(self._held) - start if start >= 0 else _ending_that_opens(self._held)
        found.append(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return self._settled(found)

    def finish(self) -> list[str | ToolCall]:
        """What was held back at the end of the text; a call that lacks only its closing tag counts."""
        held, self._held = self._held, ""
        return self._settled([self._parse(held.removeprefix(OPEN)) or held if held.startswith(OPEN) else held])

    def _whole(self) -> re.Match[str] | None:
        """The first tag and what belongs to it, once that is all there."""
        start = self._held.find(OPEN)
        rest = start + len(OPEN)
        if start < 0 or (self._held.find(CLOSE, rest) < 0 and self._held.find(OPEN, rest) < 0):
            return None
        return _CALL.match(self._held, start)

    def _parse(self, body: str) -> ToolCall | None:
        try:
            call = _Written.model_validate(parse(body))
            arguments = json.dumps(call.arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, ValidationError):
            return None
        return ToolCall(call.name, arguments) if call.name in self.names else None

    def _settled(self, found: Sequence[str | ToolCall]) -> list[str | ToolCall]:
        """Without empty content, without the white space behind calls, and without what follows a single call."""
        kept: list[str | ToolCall] = []
        for part in found:
            if self.single and self.calls:
                break
            if isinstance(part, ToolCall):
                self.calls += 1
                self._behind_call = True
            else:
                part = part.lstrip() if self._behind_call else part
                if not part:
                    continue
                self._behind_call = False
            kept.append(part)
        return kept


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
