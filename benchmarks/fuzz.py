"""Damaged files, odd requests and odd texts: whatever comes in, what comes out is an answer or one line.

    python benchmarks/fuzz.py --inputs 1000000
    python benchmarks/fuzz.py --target read_gguf --first 4711 --inputs 1      # one input again

An input is decided by its target and its number. Prints one JSON object (inputs, seconds and growth of memory of each
target, faults) and exits with 1 if anything but an error of this project came out of an input, or it took longer than
``--limit`` seconds of a core.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_targets import TARGETS, Targets

from bitmtp.errors import BitMTPError

STUCK = 120  # seconds after which code that gives no other sign of life is ended, and says where it was
WARM = 1000  # inputs before memory counts


class TooLong(BaseException):
    """The input's time is over."""


@dataclass
class Found:
    """What came out of the inputs of a target."""

    inputs: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    growth_mib: float = 0.0
    faults: dict[str, list[str]] = field(default_factory=dict)  # traceback → the inputs that brought it

    def fault(self, what: str, number: int) -> None:
        """Note what an input brought."""
        self.faults.setdefault(what, []).append(str(number))


def put(target: Callable[[Random], None], number: int, limit: float, found: Found) -> None:
    """Put one input to a target."""
    found.inputs += 1
    late = False
    begun = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        target(Random(f"{target.__name__} {number}"))
    except BitMTPError:
        found.refused += 1
    except TooLong:
        late = True
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        found.fault(_where(error), number)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    took = time.process_time() - begun
    found.slowest = max(found.slowest, took)
    if late or took > limit:  # the exception may have been caught on its way
        found.fault("an input took too long", number)


def _where(error: BaseException) -> str:
    """The error and the last lines of its way: what faults of one kind share."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    way = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    return f"{type(error).__name__}: {str(error)[:300]} at {way}"


def fuzz(target: Callable[[Random], None], first: int, count: int, limit: float) -> Found:
    """Run a target with the inputs from ``first`` on."""
    found, begun, memory = Found(), time.monotonic(), 0
    for number in range(first, first + count):
        if found.inputs % 100 == 0:
            faulthandler.dump_traceback_later(STUCK, exit=True)
        put(target, number, limit, found)
        if found.inputs == min(WARM, count // 2):
            memory = _pages()
    faulthandler.cancel_dump_traceback_later()
    found.seconds = time.monotonic() - begun
    found.growth_mib = (_pages() - memory) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return found


def _pages() -> int:
    """Resident memory."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) if statm.exists() else 0


def _too_long(*_: object) -> None:
    raise TooLong


def main(arguments: argparse.Namespace) -> int:
    """Run, print, judge."""
    faulthandler.enable()
    os.environ["RUST_BACKTRACE"] = "0"
    signal.signal(signal.SIGPROF, _too_long)
    names = arguments.target or list(TARGETS)
    unit = arguments.inputs / sum(TARGETS[name] for name in names)
    counts = {name: math.ceil(TARGETS[name] * unit) for name in names}
    shared = Path("/dev/shm")  # a million files on a disk cost more than all that reads them
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as scratch:
        targets = Targets(Path(scratch))
        found = {name: fuzz(getattr(targets, name), arguments.first, counts[name], arguments.limit) for name in names}
    report = {
        name: {key: round(number, 2) for key, number in asdict(one).items() if key != "faults"}
        for name, one in found.items()
    }
    print(
        json.dumps(report | {"faults": sum(map(len, (each for one in found.values() for each in one.faults.values())))})
    )
    for name, one in found.items():
        for what, numbers in sorted(one.faults.items(), key=lambda pair: -len(pair[1])):
            print(f"{name} {', '.join(numbers[:5])} ({len(numbers)} in all): {what}", file=sys.stderr)
    return 1 if any(one.faults for one in found.values()) else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000, help="over all targets")
    parser.add_argument("--first", type=int, default=0, help="number of each target's first input")
    parser.add_argument("--target", action="append", choices=TARGETS, help="leave the others out; repeat")
    parser.add_argument("--limit", type=float, default=2.0, help="seconds of a core that an input may take")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(parse_arguments()))
