"""Real processes: pipes, signals, and a terminal."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .conftest import NEVER_END, Terminal, environment, start

Begin = Callable[..., Terminal]
LONG = ["--max-tokens", "400", *NEVER_END]
PROMPT = r">[^>]*\x1b\[\?25h"  # drawn, and the cursor shown: it takes keys now
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
    run.expect(r"tiny · .* · reference · context 512 tokens")
    run.expect("/help lists the commands")
    run.expect(PROMPT)
    run.type("\x03")
    run.expect("/exit ends the chat")
    run.expect(PROMPT)
    run.type("Hello\n")
    run.expect("draft, verified")
    run.expect(r"\x1b\[39m")  # its first token
    run.type("\x03")
    run.expect(r"(\d+) tokens? ·")
    run.expect(PROMPT)
    run.type("/exit\n")
    assert run.finish() == 0
    assert "Traceback" not in run.output


def test_a_paste_is_one_message_and_so_are_lines_typed_with_alt_enter(model_flags: list[str], terminal: Begin) -> None:
    run = terminal("chat", *model_flags, "--max-tokens", "4", *NEVER_END, COLUMNS="200")
    run.expect(PROMPT)
    run.type("\x1b[200~one\r\n/two\r\nthree\x1b[201~\r")
    run.expect("4 tokens")
    run.expect(PROMPT)
    run.type("one\x1b\rtwo\r")
    run.expect("4 tokens")
    run.expect(PROMPT)
    run.type("/stats\r")
    run.expect("2 answers")
    run.expect(PROMPT)
    run.type("/nonsense\r")
    run.expect("no command /nonsense")
    run.expect(PROMPT)
    run.type("\x04")
    assert run.finish() == 0


def test_what_was_typed_is_remembered_in_the_next_chat(model_flags: list[str], terminal: Begin, tmp_path: Path) -> None:
    for keys in ("/set seed 7\r", "\x1b[A\r"):
        run = terminal("chat", *model_flags)
        run.expect(PROMPT)
        run.type(keys)
        run.expect("(?s)seed 7.*repetition_penalty")
        run.expect(PROMPT)
        run.type("\x04")
        assert run.finish() == 0
    assert (tmp_path / "state" / "bitmtp").stat().st_mode & 0o077 == 0


def test_words_wrap_at_words(model_flags: list[str], terminal: Begin) -> None:
    flags = [*model_flags, "--max-tokens", "120", *NEVER_END]
    run = terminal("generate", "Hello", *flags, COLUMNS="50")
    assert run.finish() == 0
    written = run.output.split("verified")[1].split("120 tokens")[0]
    lines = COLOUR.sub("", written).splitlines()
    text = subprocess.run(
        [sys.executable, "-m", "bitmtp", "generate", "Hello", *flags],
        capture_output=True,
        env=environment(),
        check=True,
    ).stdout.decode()
    words = set(re.split(r"\s+", text))
    assert len(lines) > 3
    assert {word for line in lines for word in line.split() if len(word) < 20} <= words


INTERRUPTED_IMPORT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from bitmtp.__main__ import main
main()
"""


def test_ctrl_c_while_the_program_loads_ends_it_without_a_word() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=default_sigint,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (-signal.SIGINT, "", "")


def default_sigint() -> None:
    """As in a terminal; background jobs begin with the signal ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
