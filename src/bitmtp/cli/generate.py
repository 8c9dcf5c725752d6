"""``bitmtp generate``: one text from one prompt."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from bitmtp.cli.answer import was_cut_off, was_interrupted, write_answer
from bitmtp.cli.form import FormOptions
from bitmtp.cli.options import ModelOptions, PolicyOptions, TextOptions, with_options
from bitmtp.cli.render import make_writer
from bitmtp.errors import RequestError

if TYPE_CHECKING:
    from bitmtp.engine import Engine
    from bitmtp.tokenizer import Message


@with_options
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or none reads standard input.")] = None,
    *,
    model: ModelOptions,
    decoding: PolicyOptions,
    text: TextOptions,
    form: FormOptions,
) -> None:
    """Write a text from PROMPT."""
    given = _prompt(prompt)
    profile = decoding.find_profile(model)
    engine = model.load(profile)
    writer = make_writer(text.as_json)
    with engine.session() as session:
        request = text.request(_wrap(engine, text, given), decoding.make(engine.config.block_size, profile))
        grammar = form.make(engine)
        result = write_answer(session.generate(request, grammar), writer)
    if grammar is not None and was_cut_off(result):
        print("bitmtp: warning: the text is not complete; give it more --max-tokens", file=sys.stderr)
    if was_interrupted(result):
        raise typer.Exit(130)


def _prompt(given: str | None) -> str:
    if given is None and sys.stdin.isatty():
        raise RequestError("no prompt; give one, or - to type it (end with Ctrl-D)")
    prompt = sys.stdin.read().removesuffix("\n") if given is None or given == "-" else given
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token of text")
    prompt.encode()  # bytes that are not UTF-8 come as lone surrogates; this refuses them
    return prompt


def _wrap(engine: Engine, text: TextOptions, prompt: str) -> str | list[Message]:
    """The prompt as a user's message if the model has a chat template, as it is otherwise."""
    if not text.no_chat_template and engine.tokenizer.has_chat_template:
        return [*text.messages(), {"role": "user", "content": prompt}]
    if text.system is not None:
        raise RequestError("a system message needs the chat template; leave --system out")
    return prompt
