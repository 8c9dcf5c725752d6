"""Real processes: pipes, signals, and a terminal."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable

from .conftest import NEVER_END, Terminal, environment, start

Begin = Callable[..., Terminal]
LONG = ["--max-tokens", "400", *NEVER_END]
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from bitmtp.cli.app import run; run(['--help']); run(['generate', '--help']);"
        "print(sorted({'numpy', 'torch', 'rich', 'tokenizers', 'jinja2'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert "Usage:" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "[]"


def test_sigint_to_a_process(model_flags: list[str]) -> None:
    process = start("generate", "Hello", *model_flags, *LONG)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert first
    assert out.endswith("\n")
    assert err == ""


def test_a_reader_that_goes_away_is_no_error(model_flags: list[str]) -> None:
    process = start("generate", "Hello", *model_flags, *LONG)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=30) == -signal.SIGPIPE


def test_terminal_has_colours_legend_and_figures(model_flags: list[str], terminal: Begin) -> None:
    flags = [*model_flags, "--max-tokens", "40", *NEVER_END, "--temperature", "1", "--seed", "3"]
    run = terminal("generate", "Hello", *flags, "--policy", "hybrid", "--tau", "0.5", COLUMNS="200")
    assert run.finish() == 0
    first, *_, last = COLOUR.sub("", run.output).splitlines()
    assert first == "exact: the model's own · accepted: draft, verified · confident: draft, not verified"
    for words in ("40 tokens", "tok/s", "passes", "first token", "hybrid D=8 τ=0.5 m=3", "lossy", "seed 3"):
        assert words in last
    assert "\x1b[39m" in run.output
    assert "\x1b[32m" in run.output or "\x1b[35m" in run.output


def test_no_color_is_respected(model_flags: list[str], terminal: Begin) -> None:
    run = terminal("generate", "Hello", *model_flags, "--max-tokens", "12", NO_COLOR="1")
    assert run.finish() == 0
    assert not re.search(r"\x1b\[3", run.output)
    assert "not verified" not in run.output
    assert "12 tokens" in run.output or "tokens" in run.output


def test_escape_sequences_of_the_model_are_not_obeyed(model_flags: list[str], terminal: Begin) -> None:
    flags = [*model_flags, "--max-tokens", "6", "--logit-bias", f"{escape_token(model_flags)}=100000"]
    run = terminal("generate", "Hello", *flags, NO_COLOR="1")
    assert run.finish() == 0
    assert "\x1b\x1b" not in run.output
    assert "6 tokens" in run.output


def escape_token(model_flags: list[str]) -> int:
    """The tiny tokenizer's token of the escape character."""
    from bitmtp.tokenizer import Tokenizer

    [token] = Tokenizer(model_flags[1]).encode("\x1b")
    return token


def test_chat_in_a_terminal(model_flags: list[str], terminal: Begin) -> None:
    run = terminal("chat", *model_flags, "--max-tokens", "200", *NEVER_END, COLUMNS="200")
    run.expect("> ")
    run.press_until("\x03", "/exit ends the chat")
    run.expect("> ")
    run.type("Hello\n")
    run.expect("draft, verified")
    run.expect(r"\x1b\[39m")  # its first token
    run.type("\x03")
    run.expect(r"(\d+) tokens? ·")
    run.expect("> ")
    run.type("/exit\n")
    assert run.finish() == 0
    assert "Traceback" not in run.output
