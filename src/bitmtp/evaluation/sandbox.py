"""Run a generated program where it can do little harm: a process of its own with limits, no network, no files.

The child (``sandbox_child.py``) sets the kernel's limits (time, memory, file sizes, an empty network namespace where it
may) and an audit hook that refuses sockets, processes, foreign memory, and writing outside a temporary folder. That
stops mistakes and ordinary mischief, not an attacker who knows the interpreter: evaluate a model that you do not trust
inside a container.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_CHILD = Path(__file__).with_name("sandbox_child.py")
_START_SECONDS = 10.0  # for Python and NumPy to start on a busy machine


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use: seconds (of processor, and twice that of the clock), bytes of memory, of one file, and
    open files.

    The reference solutions need up to 40 seconds and more than 2 GB.
    """

    seconds: int = 60
    memory: int = 4 << 30
    file: int = 1 << 20
    files: int = 32


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether a program ran to its end, and otherwise why not."""

    passed: bool
    reason: str = ""


def run_python(program: str, limits: Limits | None = None) -> Outcome:
    """Run a program; it passes if it reaches its end without an exception, ``SystemExit`` included."""
    limits = limits or Limits()
    # The word that the child reports with is drawn anew: an exit code or a printed line could be the program's own.
    word = secrets.token_hex(16)
    order = json.dumps({"word": word, "program": program, "limits": asdict(limits)})
    with tempfile.TemporaryDirectory(prefix="bitmtp-") as folder:
        child = subprocess.Popen(
            [sys.executable, "-s", "-B", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=folder,
            env=_environment(folder),
            start_new_session=True,
        )
        try:
            report, _ = child.communicate(order, timeout=2 * limits.seconds + _START_SECONDS)
        except subprocess.TimeoutExpired:
            return Outcome(False, "out of time")
        finally:
            _kill(child)
    return _outcome(report, word, child.returncode)


def _environment(folder: str) -> dict[str, str]:
    # sys.path, so that the child finds the packages that this process found.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {"PYTHONPATH": path, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _kill(child: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()


def _outcome(report: str, word: str, code: int) -> Outcome:
    said, _, reason = report.partition(" ")
    if said == word:
        return Outcome(not reason, reason)
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return Outcome(False, "out of time")
    return Outcome(False, f"the process ended ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})")
