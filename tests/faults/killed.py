"""Commands that are killed at every step they take on a disk."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bitmtp.cli.app import run

LONGEST = 300  # steps of a command
PRELOADED = ["bitmtp.cli.app", "bitmtp.convert.convert", "bitmtp.engine", "bitmtp.training.train", "conftest"]


def _count_writes(folder: Path, act: Callable[[], None]) -> None:
    """Call ``act`` before each step that changes what lies in a folder."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod")
        if event == "open":
            mode = str(arguments[1] or "")
            changes = any(letter in mode for letter in "wax+") or bool((arguments[2] or 0) & os.O_CREAT)
        if changes and str(folder) in os.fspath(str(arguments[0])):
            act()

    sys.addaudithook(hook)


def _run_killed(words: list[str], folder: Path, number: int) -> None:
    steps = 0

    def act() -> None:
        nonlocal steps
        steps += 1
        if steps == number:
            os.kill(os.getpid(), signal.SIGKILL)

    _count_writes(folder, act)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    os._exit(run(words))


def kill_everywhere(words: list[str], folder: Path, look: Callable[[int], object], every: int = 1) -> int:
    """Run a command line again and again, killed at its first, second … step, until it gets to its end.

    ``folder`` is where its steps count; ``look`` is told the number of the step that a run was killed at. Returns the
    last of them. ``every``: kill at each so-manieth step only.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # what is not there is left out
    for number in range(1, LONGEST, every):
        process = context.Process(target=_run_killed, args=(words, folder, number))
        process.start()
        process.join()
        if process.exitcode == 0:
            return number - every
        assert process.exitcode == -signal.SIGKILL, f"step {number}: exit code {process.exitcode}"
        look(number)
    raise AssertionError("it does not come to an end")
