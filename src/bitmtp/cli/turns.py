"""What is typed or piped into ``bitmtp chat``, one message at a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.key_binding.key_processor import KeyPressEvent


def piped() -> Iterator[str]:
    """Each line of standard input is a message."""
    for line in sys.stdin:
        yield line.removesuffix("\n")


def typed(commands: Sequence[str]) -> Iterator[str]:
    """Messages from a terminal, until Ctrl-D. Enter sends, Alt-Enter begins a new line, a paste is one message."""
    session = _session(commands)
    while True:
        try:
            yield session.prompt("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            print("(Ctrl-D or /exit ends the chat)")


def _session(commands: Sequence[str]) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter

    return PromptSession(
        multiline=True,
        prompt_continuation="  ",
        key_bindings=_keys(),
        history=_history(),
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
    )


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history() -> History:
    """What was typed in this chat and those before; in this one only, where nothing can be kept."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = state / "bitmtp"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what people type is their own
    except OSError:
        return InMemoryHistory()
    return FileHistory(folder / "chat_history")
