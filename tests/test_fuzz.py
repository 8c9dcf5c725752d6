"""``benchmarks/fuzz.py``: a small run finds nothing, and it can find something."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import SCRIPTS

for module in ("fastapi", "gguf"):
    pytest.importorskip(module, reason=f"the {module} package is not installed")

FAULT = f"""
import json, runpy
fuzz = runpy.run_path({str(SCRIPTS / "fuzz.py")!r})
def target(_):
    raise KeyError("missing")
found = fuzz["Found"]()
fuzz["fuzz"](target, 3, 0, 20, found)
print(json.dumps([found.inputs.total(), found.tracebacks.total(), *found.tracebacks]))
"""


def run(*words: str) -> str:
    """What a process of its own prints: the script takes the tests' helpers, of which each folder here has its own."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_input_brings_a_traceback() -> None:
    report = json.loads(run(str(SCRIPTS / "fuzz.py"), "--inputs", "500", "--seed", "7"))
    assert report["tracebacks"] == 0
    assert len(report["inputs"]) == 5
    assert min(report["inputs"].values()) >= 100


def test_a_traceback_is_found() -> None:
    inputs, tracebacks, first, *_ = json.loads(run("-c", FAULT))
    assert inputs == tracebacks > 0
    assert "KeyError: 'missing'" in first
