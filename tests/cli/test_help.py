"""Help, examples and completion."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer.main

from bitmtp.benchmark.shapes import SHAPES
from bitmtp.cli.app import app
from bitmtp.cli.examples import EXAMPLES, START
from bitmtp.core.policies import POLICIES

from .conftest import Command, environment

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_h_shows_the_whole_help_with_examples(bitmtp: Command, name: str) -> None:
    short, long = bitmtp(name, "-h"), bitmtp(name, "--help")
    assert short == long
    assert short.out.startswith(f"Usage: bitmtp {name}")
    for example in EXAMPLES[name]:
        assert f"\n    {example}\n" in short.out


@pytest.mark.parametrize("example", [*START[:-1], *(one for lines in EXAMPLES.values() for one in lines)])
def test_examples_are_commands(example: str) -> None:
    program, name, *arguments = shlex.split(example.rpartition("| ")[2])
    assert program == "bitmtp"
    COMMANDS[name].make_context(name, arguments)


def test_summaries_are_whole_sentences(bitmtp: Command) -> None:
    lines = bitmtp("-h").out.partition("Commands:")[2].partition("Examples:")[0].strip().splitlines()
    assert len(lines) == len(COMMANDS)
    assert [line for line in lines if line.endswith("...")] == []


@pytest.mark.parametrize(
    ("command", "option", "choices"),
    [
        ("generate", "policy", set(POLICIES)),
        ("generate", "backend", {"auto", "cpu", "cuda", "reference"}),
        ("bench", "shape", set(SHAPES)),
        ("convert", "embedding-bits", {"16", "8", "4"}),
        ("train", "method", {"joint", "autoregressive", "masks", "medusa"}),
    ],
)
def test_choices_are_shown(bitmtp: Command, command: str, option: str, choices: set[str]) -> None:
    [shown] = re.findall(rf"--{option} <(.*)>", bitmtp(command, "-h").out)
    assert set(shown.split("|")) == choices


@pytest.mark.parametrize("command", ["bench", "eval", "study"])
def test_policies_of_a_list_are_named(bitmtp: Command, command: str) -> None:
    [shown] = re.findall(r"--policy <str>(.*?)\n  --", bitmtp(command, "-h").out, re.DOTALL)
    assert all(name in shown for name in POLICIES if name != "autoregressive")


@pytest.mark.parametrize(
    ("line", "expected"), [("bitmtp generate --policy a", "auto\nautoregressive\n"), ("bitmtp ch", "chat\n")]
)
def test_completion(line: str, expected: str) -> None:
    words = {"_BITMTP_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    ran = subprocess.run([sys.executable, "-m", "bitmtp"], capture_output=True, text=True, env=environment(**words))
    assert ran.stdout == expected
