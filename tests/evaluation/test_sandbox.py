"""What a generated program can and cannot do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bitmtp.evaluation.sandbox import Limits, run_python


def test_a_program_that_ends_passes() -> None:
    assert run_python("assert 1 + 1 == 2").passed


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 + 1 == 3, 'sum'", "AssertionError: sum"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; os._exit(0)", "exit code 0"),
        ("print('passed'); raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("input()", "EOFError"),
    ],
)
def test_whatever_ends_it_early_fails(program: str, reason: str) -> None:
    outcome = run_python(program)
    assert not outcome.passed
    assert reason in outcome.reason


@pytest.mark.parametrize(
    "program",
    [
        "import socket; socket.socket()",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9/')",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.fork()",
        "import os; os.system('true')",
        "import os; os.kill(os.getppid(), 9)",
        "import ctypes; ctypes.CDLL(None).getpid()",
        "import os; os.remove(__import__('sys').executable)",
    ],
)
def test_refused(program: str) -> None:
    outcome = run_python(program)
    assert not outcome.passed
    assert "refused" in outcome.reason


def test_files_outside_stay_as_they_are(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("before", encoding="utf-8")
    for attempt in (
        "open({!r}, 'w')",
        "open({!r}, 'a')",
        "import os; os.open({!r}, 1)",
        "import os; os.symlink({!r}, 'a')",
    ):
        assert "refused" in run_python(attempt.format(str(kept))).reason
    assert kept.read_text(encoding="utf-8") == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]


def test_small_files_of_its_own() -> None:
    assert run_python("with open('a', 'w') as f: f.write('a')\nassert open('a').read() == 'a'").passed
    assert not run_python("with open('a', 'w') as f: f.write('a' * 3000)", Limits(file=1000)).passed


def test_time_and_memory_end() -> None:
    assert run_python("while True: pass", Limits(seconds=1)).reason == "out of time"
    assert "MemoryError" in run_python("x = bytearray(1 << 33)").reason


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_no_interface_but_loopback() -> None:
    # Behind the hook lies an empty network, where the kernel gives one to this user.
    names = "','.join(line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line)"
    outcome = run_python(f"raise ValueError({names})")
    if outcome.reason != "ValueError: lo":
        pytest.skip(f"no network namespace here: {outcome.reason}")
