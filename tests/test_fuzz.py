"""``benchmarks/fuzz.py``: a small run finds nothing, and it can find something."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from random import Random

import pytest
from conftest import SCRIPTS

for module in ("fastapi", "gguf"):
    pytest.importorskip(module, reason=f"the {module} package is not installed")

FAULT = f"""
import json, runpy, signal
fuzz = runpy.run_path({str(SCRIPTS / "fuzz.py")!r})
signal.signal(signal.SIGPROF, fuzz["_too_long"])
def target(random):
    if random.random() < 2:
        {{}}
found = fuzz["fuzz"](target, 5, 3, 0.2)
print(json.dumps([found.inputs, found.faults]))
"""


def run(*words: str) -> str:
    """What a process of its own prints: the script takes the tests' helpers, of which each folder here has its own."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_input_brings_a_traceback() -> None:
    report = json.loads(run(str(SCRIPTS / "fuzz.py"), "--inputs", "1000", "--first", "123456789"))
    assert report.pop("faults") == 0
    assert [found["inputs"] for found in report.values()] == [150, 100, 100, 50, 200, 150, 250]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("raise KeyError('missing')", "KeyError: 'missing'"),
        ("raise BaseException('panic')", "BaseException: panic"),
        ("while True: pass", "an input took too long"),
    ],
)
def test_a_fault_is_found(line: str, what: str) -> None:
    inputs, faults = json.loads(run("-c", FAULT.format(line)))
    assert inputs == 3
    assert ["5", "6", "7"] in [numbers for text, numbers in faults.items() if text.startswith(what)]


def test_an_input_is_decided_by_its_number() -> None:
    inputs = runpy.run_path(str(SCRIPTS / "fuzz_inputs.py"))
    for make in (inputs["value"], inputs["schema"], inputs["pieces"], lambda rng: inputs["damaged"](rng, b"abc", 3)):
        assert make(Random("read 5")) == make(Random("read 5"))
