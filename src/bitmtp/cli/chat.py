"""``bitmtp chat``: several turns over one sequence, whose K/V are reused from turn to turn."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress

import typer

from bitmtp.cli.answer import was_interrupted, write_answer
from bitmtp.cli.options import ModelOptions, PolicyOptions, TextOptions, with_options
from bitmtp.cli.render import make_writer
from bitmtp.errors import RequestError


@with_options
def chat(*, model: ModelOptions, decoding: PolicyOptions, text: TextOptions) -> None:
    """Talk with the model, turn by turn.

    /exit or Ctrl-D ends the chat, Ctrl-C stops an answer. Without a terminal, each line of standard input is a turn.
    """
    if text.no_chat_template:
        raise RequestError(
            "a chat needs the chat template; use `bitmtp generate --no-chat-template` to continue a text"
        )
    profile = decoding.find_profile(model)
    engine = model.load(profile)
    policy = decoding.make(engine.config.block_size, profile)
    interactive = sys.stdin.isatty() and sys.stdout.isatty() and not text.as_json
    messages, writer = text.messages(), make_writer(text.as_json)
    with engine.session() as session:
        for line in _turns(interactive):
            asked = [*messages, {"role": "user", "content": line}]
            try:
                result = write_answer(session.generate(text.request(asked, policy)), writer)
            except RequestError as error:
                if not interactive:
                    raise
                print(f"bitmtp: {error}", file=sys.stderr)
                continue
            if was_interrupted(result) and not interactive:
                raise typer.Exit(130)
            messages = [*asked, {"role": "assistant", "content": result.text}]


def _turns(interactive: bool) -> Iterator[str]:
    if interactive:
        with suppress(ImportError):  # line editing and history, where Python has it
            import readline  # noqa: F401
    while True:
        try:
            line = input("> " if interactive else "")
        except EOFError:
            print(end="\n" if interactive else "")
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\n(Ctrl-D or /exit ends the chat)")
            continue
        if line.strip() == "/exit":
            return
        if line.strip():
            yield line
