"""A conversation: what was said, and how the next answer is written."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bitmtp.cli.options import PolicyOptions, TextOptions
from bitmtp.errors import RequestError

if TYPE_CHECKING:
    from bitmtp.core.policy import Policy
    from bitmtp.engine import Engine, Request, Result
    from bitmtp.tokenizer import Message
    from bitmtp.tuning.profile import Profile


@dataclass(slots=True)
class Conversation:
    """What was said, and how the next answer is written.

    Attributes:
        text: its system message stands before all turns.
        turns: messages of user and assistant by turns, oldest first.
        answers: the figures of every answer of this sitting.
    """

    engine: Engine
    profile: Profile | None
    decoding: PolicyOptions
    text: TextOptions
    turns: list[Message] = field(default_factory=list)
    answers: list[Result] = field(default_factory=list)

    @property
    def policy(self) -> Policy:
        """How answers are decoded."""
        return self.decoding.make(self.engine.config.block_size, self.profile)

    @property
    def messages(self) -> list[Message]:
        """All of it, the system message first."""
        return [*self.text.messages(), *self.turns]

    def ask(self, line: str) -> list[Message]:
        """The turns with a new one. The oldest are left out if the context has no room for them and an answer."""
        asked: list[Message] = [*self.turns, {"role": "user", "content": line}]
        while len(asked) > 1 and not self._fits(asked):
            asked = asked[2:]
        return asked

    def request(self, turns: list[Message]) -> Request:
        """The request for the answer to these turns.

        Raises:
            RequestError: a setting is out of range, or has no meaning together with another.
        """
        return self.text.request([*self.text.messages(), *turns], self.policy)

    def answered(self, turns: list[Message], result: Result) -> None:
        """These turns have been answered."""
        self.turns = [*turns, {"role": "assistant", "content": result.text}]
        self.answers.append(result)

    def change(self, decoding: PolicyOptions, text: TextOptions) -> None:
        """Write the next answers in another way.

        Raises:
            RequestError: as :meth:`request`; nothing has changed then.
        """
        self.engine.encode(replace(self, decoding=decoding, text=text).request([{"role": "user", "content": "?"}]))
        self.decoding, self.text = decoding, text

    def length(self, turns: list[Message]) -> int:
        """Tokens of the prompt that these turns make."""
        tokenizer = self.engine.tokenizer
        return len(tokenizer.encode(tokenizer.chat([*self.text.messages(), *turns])))

    def _fits(self, turns: list[Message]) -> bool:
        room = min(self.text.max_tokens, self.engine.context // 4)
        return self.length(turns) + room <= self.engine.context


def write_messages(file: Path, messages: list[Message]) -> None:
    """Write a conversation as OpenAI's API has it; only a conversation is ever replaced.

    Raises:
        RequestError: the file is there and holds something else.
    """
    if file.exists():
        read_messages(file)
    file.write_text(json.dumps({"messages": messages}, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def read_messages(file: Path) -> list[Message]:
    """Read what :func:`write_messages` wrote.

    Raises:
        RequestError: it is no conversation.
    """
    try:
        messages = json.loads(file.read_text(encoding="utf-8"))["messages"]
        roles = [message["role"] for message in messages]
        whole = all(isinstance(message["content"], str) for message in messages)
    except (ValueError, KeyError, TypeError):
        raise RequestError(f"{file}: not a conversation that /save wrote") from None
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not whole or turns != ["user", "assistant"] * (len(turns) // 2):
        raise RequestError(f"{file}: the messages are not those of a user and an assistant by turns")
    return list(messages)
