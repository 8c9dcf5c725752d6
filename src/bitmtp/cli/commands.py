"""What can be said to ``bitmtp chat`` itself: lines that begin with a slash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import cast

from bitmtp.cli.conversation import Conversation, read_messages, write_messages
from bitmtp.cli.options import PolicyName, PolicyOptions
from bitmtp.cli.render import SEPARATOR, count, figures, fill
from bitmtp.errors import RequestError

EXIT = "/exit"
POLICY_SETTINGS: dict[str, type] = {
    "policy": str,
    "block_size": int,
    "tau": float,
}
TEXT_SETTINGS: dict[str, type] = {
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
}


@dataclass(frozen=True, slots=True)
class Command:
    """A command: ``act`` takes what stands behind its name and returns what to tell the user."""

    usage: str
    help: str
    act: Callable[[Conversation, str], str]


def is_command(line: str) -> bool:
    """Whether a line is meant for the chat and not for the model: several lines never are."""
    return line.startswith("/") and "\n" not in line


def run_command(conversation: Conversation, line: str) -> str:
    """Carry out a command; what to tell the user.

    Raises:
        RequestError: there is no such command, or it cannot be done.
    """
    name, _, argument = line.partition(" ")
    if name not in COMMANDS:
        raise RequestError(f"there is no command {name}; /help lists what there is")
    return COMMANDS[name].act(conversation, argument.strip())


def _help(_: Conversation, __: str) -> str:
    lines = [(command.usage, command.help) for command in COMMANDS.values()]
    lines.append((EXIT, "leave; Ctrl-D does the same"))
    width = max(len(usage) for usage, _ in lines)
    listed = "\n".join(f"  {usage:<{width}}  {text}" for usage, text in lines)
    return f"{listed}\nA space before the slash sends a line to the model."


def _reset(conversation: Conversation, _: str) -> str:
    conversation.turns = []
    return "the conversation begins anew"


def _system(conversation: Conversation, argument: str) -> str:
    if argument:
        conversation.change(conversation.decoding, replace(conversation.text, system=argument))
    return f"system message: {conversation.text.system or 'none'}"


def _save(conversation: Conversation, argument: str) -> str:
    file = _file(argument)
    write_messages(file, conversation.messages)
    return f"{count(len(conversation.turns), 'message')} saved in {file}"


def _load(conversation: Conversation, argument: str) -> str:
    file = _file(argument)
    messages = read_messages(file)
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
    conversation.text = replace(conversation.text, system=system)
    conversation.turns = messages
    return f"{count(len(messages), 'message')} loaded from {file}"


def _file(argument: str) -> Path:
    if not argument:
        raise RequestError("name a file")
    return Path(argument).expanduser()


def _set(conversation: Conversation, argument: str) -> str:
    name, _, value = argument.partition(" ")
    if argument:
        _change(conversation, name.replace("-", "_"), value.strip())
    return "\n".join(f"  {name} {value}" for name, value in _settings(conversation).items())


def _change(conversation: Conversation, name: str, value: str) -> None:
    decoding, text = conversation.decoding, conversation.text
    known = POLICY_SETTINGS | TEXT_SETTINGS
    if name not in known:
        raise RequestError(f"there is no setting {name!r}; there are {', '.join(known)}")
    try:
        changed = {name: known[name](value)}
    except ValueError:
        raise RequestError(f"{name} is {value!r}; it must be a number") from None
    if name == "policy":
        # The settings of one policy mean nothing to another. Whether there is such a policy, `change` will tell.
        decoding = PolicyOptions(policy=cast(PolicyName, value))
    elif name in POLICY_SETTINGS:
        decoding = replace(decoding, **changed)
    else:
        text = replace(text, **changed)
    conversation.change(decoding, text)


def _settings(conversation: Conversation) -> dict[str, object]:
    from bitmtp.core.policies import POLICIES

    policy, text = conversation.policy, conversation.text
    options = [name for name in signature(POLICIES[policy.name]).parameters if name in POLICY_SETTINGS]
    values = {name: getattr(policy, name) for name in options} | {name: getattr(text, name) for name in TEXT_SETTINGS}
    return {"policy": policy.name} | values | {"seed": "random" if text.seed is None else text.seed}


def _stats(conversation: Conversation, _: str) -> str:
    if not conversation.answers:
        return "no answer yet"
    answers, engine = conversation.answers, conversation.engine
    tokens = sum(answer.num_tokens for answer in answers)
    seconds = sum(answer.tpot_ms * (answer.num_tokens - 1) for answer in answers) / 1e3
    speed = [f"{(tokens - len(answers)) / seconds:.1f} tok/s"] if seconds else []
    used = f"context {conversation.length(conversation.turns)} of {engine.context} tokens"
    whole = [count(len(answers), "answer"), count(tokens, "token"), *speed, used]
    last = figures(answers[-1], sampled=conversation.text.temperature > 0)
    return f"last answer\n{_listed(last)}\nthis chat\n{_listed(whole)}"


def _listed(items: list[str]) -> str:
    return "\n".join("  " + SEPARATOR.join(line) for line in fill(items, 76))


COMMANDS = {
    "/help": Command("/help", "this list", _help),
    "/reset": Command("/reset", "forget what was said; the system message stays", _reset),
    "/system": Command("/system [TEXT]", "tell the model how to behave, or show what it was told", _system),
    "/set": Command("/set [NAME VALUE]", "change a setting (`/set policy auto`), or show all", _set),
    "/save": Command("/save FILE", "write the conversation as JSON", _save),
    "/load": Command("/load FILE", "go on with a conversation that was saved", _load),
    "/stats": Command("/stats", "speed, and how full the context is", _stats),
}
