"""``bitmtp chat``: several turns over one sequence, whose K/V are reused from turn to turn."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bitmtp.cli.answer import was_interrupted, write_answer
from bitmtp.cli.commands import COMMANDS, EXIT, is_command, run_command
from bitmtp.cli.conversation import Conversation
from bitmtp.cli.options import ModelOptions, PolicyOptions, TextOptions, with_options
from bitmtp.cli.render import SEPARATOR, Writer, count, make_writer
from bitmtp.cli.turns import piped, typed
from bitmtp.errors import RequestError

if TYPE_CHECKING:
    from bitmtp.engine import Session


@with_options
def chat(*, model: ModelOptions, decoding: PolicyOptions, text: TextOptions) -> None:
    """Talk with the model, turn by turn.

    /help lists what the chat itself can do; /exit or Ctrl-D ends it, Ctrl-C stops an answer. Enter sends, Alt-Enter
    begins a new line. Without a terminal, each line of standard input is a turn.
    """
    if text.no_chat_template:
        raise RequestError(
            "a chat needs the chat template; use `bitmtp generate --no-chat-template` to continue a text"
        )
    profile = decoding.find_profile(model)
    conversation = Conversation(model.load(profile), profile, decoding, text)
    interactive = sys.stdin.isatty() and sys.stdout.isatty() and not text.as_json
    if interactive:
        print(_banner(conversation, model))
    with conversation.engine.session() as session:
        _talk(conversation, session, make_writer(text.as_json), interactive)


def _banner(conversation: Conversation, model: ModelOptions) -> str:
    from bitmtp.models import shipped_model

    engine = conversation.engine
    name = Path(model.model or shipped_model()).resolve().name
    facts = [
        name,
        f"{conversation.policy.name} decoding",
        engine.backend.name,
        f"context {count(engine.context, 'token')}",
    ]
    return f"{SEPARATOR.join(facts)}\n/help lists the commands, Alt-Enter begins a new line, Ctrl-D leaves"


def _talk(conversation: Conversation, session: Session, writer: Writer, interactive: bool) -> None:
    for line in typed([*COMMANDS, EXIT]) if interactive else piped():
        if line.strip() == EXIT:
            return
        try:
            interrupted = _take(conversation, session, writer, line)
        except (RequestError, OSError) as error:
            if not interactive:
                raise
            print(f"bitmtp: {error}", file=sys.stderr)
            continue
        if interrupted and not interactive:
            raise typer.Exit(130)


def _take(conversation: Conversation, session: Session, writer: Writer, line: str) -> bool:
    """Carry out a command, or have a message answered; whether Ctrl-C ended the answer."""
    if is_command(line):
        print(run_command(conversation, line), file=sys.stderr)
        return False
    return bool(line.strip()) and _answer(conversation, session, writer, line)


def _answer(conversation: Conversation, session: Session, writer: Writer, line: str) -> bool:
    asked = conversation.ask(line)
    generation = session.generate(conversation.request(asked))
    if dropped := (len(conversation.turns) + 1 - len(asked)) // 2:
        full = f"the context of {conversation.engine.context} tokens is full"
        print(f"bitmtp: note: {full}; the oldest {count(dropped, 'turn')} left it", file=sys.stderr)
    result = write_answer(generation, writer)
    conversation.answered(asked, result)
    return was_interrupted(result)
