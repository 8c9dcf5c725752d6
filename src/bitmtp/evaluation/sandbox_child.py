"""The process in which a generated program runs; started by :mod:`bitmtp.evaluation.sandbox`, never imported."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from types import ModuleType
from typing import Any

import numpy  # noqa: F401  (tests compare with it; once the hook is set, its libraries could not be loaded)

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # linux/sched.h
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REFUSED = (
    "socket.", "subprocess.", "ctypes.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill",
    "os.putenv", "os.chmod", "os.chown", "os.link", "os.symlink", "os.remove", "os.rename", "os.rmdir", "os.mkdir",
    "os.truncate", "os.utime", "os.chdir", "os.setxattr", "os.startfile", "os.forkpty", "pty.", "shutil.", "signal.",
    "resource.", "sys.addaudithook", "syslog.", "fcntl.", "mmap.", "sqlite3.", "webbrowser.", "ftplib.",
)  # fmt: skip


def _limit(limits: dict[str, int]) -> None:
    for name, value in (
        (resource.RLIMIT_CPU, limits["seconds"]),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["file"]),
        (resource.RLIMIT_NOFILE, limits["files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (value, value))


def _leave_network() -> None:
    """Move into an empty network namespace; where the kernel refuses, the audit hook alone keeps sockets shut."""
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if library.unshare(_NEW_NETWORK):
            library.unshare(_NEW_USER | _NEW_NETWORK)


def _watch(folder: str) -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(_REFUSED):
            raise PermissionError(f"{event} is refused here")
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING:
            path = os.path.realpath(os.fsdecode(arguments[0])) if isinstance(arguments[0], str | bytes) else ""
            if not path.startswith(folder + os.sep) and path != os.devnull:
                raise PermissionError("writing outside the working folder is refused here")

    sys.addaudithook(hook)


def _run(program: str) -> str:
    """What went wrong, in a few words; empty if nothing did."""
    module = ModuleType("program")
    sys.modules["program"] = module  # dataclasses look their module up
    try:
        exec(compile(program, "program", "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:  # the program's own SystemExit is a failure too
        return f"{type(error).__name__}: {error}"[:200].replace("\n", " ")
    return ""


def main() -> None:
    """Take an order from standard input, run it, and report on what was standard output."""
    order = json.loads(sys.stdin.read())
    report = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    sys.setrecursionlimit(10_000)
    _leave_network()
    _limit(order["limits"])
    _watch(os.path.realpath(os.getcwd()))
    reason = _run(order["program"])
    os.write(report, f"{order['word']} {reason}".encode(errors="replace"))
    os._exit(0)  # threads and exit handlers of the program get no say


main()
