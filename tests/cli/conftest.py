"""Running the command line: in this process, in another one, and in a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bitmtp.cli.app import run
from bitmtp.core.text import Grammar
from bitmtp.engine import Generation, Request, Session

ROOT = Path(__file__).parents[2]
NEVER_END = ("--logit-bias", "2=-10000")  # the tiny model's end-of-turn token


@dataclass(frozen=True)
class Ran:
    """What one command line did."""

    code: int
    out: str
    err: str


Command = Callable[..., Ran]


@pytest.fixture
def bitmtp(capfd: pytest.CaptureFixture[str]) -> Command:
    """Run a command line in this process."""

    def command(*arguments: str | Path) -> Ran:
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Ran(code, captured.out, captured.err)

    return command


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folders of settings and state: no profile of the machine's user decides what a test does, and no history
    of theirs grows by it."""
    folder = tmp_path / "settings"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    return folder


@pytest.fixture
def model_flags(tiny_model: Path) -> list[str]:
    """Flags that choose the tiny model on the reference backend."""
    return ["--model", str(tiny_model), "--backend", "reference"]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Every request that reaches the engine."""
    seen: list[Request] = []
    generate = Session.generate

    def recording(session: Session, request: Request, grammar: Grammar | None = None) -> Generation:
        seen.append(request)
        return generate(session, request, grammar)

    monkeypatch.setattr(Session, "generate", recording)
    return seen


def environment(**changes: str) -> dict[str, str]:
    """Environment of a child process, without what would change its colours."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Nothing here answers when a program asks the terminal where its cursor is.
    return kept | {"PYTHONPATH": path, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"} | changes


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start a process with its streams piped."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "bitmtp", *arguments]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment())


class Terminal:
    """A process in a pseudo-terminal."""

    def __init__(self, arguments: list[str], **changes: str) -> None:
        self.output = ""
        self._seen = 0
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bitmtp", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(**changes),
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(slave)

    def type(self, text: str) -> None:
        """Send keys."""
        os.write(self._master, text.encode())

    def expect(self, pattern: str, seconds: float = 30) -> None:
        """Read until new output matches."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.output[self._seen :])):
            assert self._read(deadline), f"no {pattern!r} in {self.output[self._seen :]!r}"
        self._seen += match.end()

    def finish(self, seconds: float = 30) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + seconds
        while self._read(deadline):
            pass
        return self.process.wait(timeout=10)

    def close(self) -> None:
        """End the process if a test left it running."""
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self, deadline: float) -> bool:
        if not select.select([self._master], [], [], max(deadline - time.monotonic(), 0))[0]:
            return False
        try:
            piece = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            return False
        self.output += piece.decode(errors="replace")
        return bool(piece)


def _own_terminal() -> None:
    """Make standard input the controlling terminal, so that typing Ctrl-C sends SIGINT.

    A shell's background jobs start with SIGINT ignored, and so would a test of them.
    """
    import fcntl
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Start a command in a pseudo-terminal."""
    started: list[Terminal] = []

    def begin(*arguments: str, **changes: str) -> Terminal:
        started.append(Terminal(list(arguments), **changes))
        return started[-1]

    yield begin
    for each in started:
        each.close()
