"""``benchmarks/fuzz.py``: a small run finds nothing, and it can find something."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from typing import Any

import pytest
from conftest import SCRIPTS

for module in ("fastapi", "gguf"):
    pytest.importorskip(module, reason=f"the {module} package is not installed")


def test_no_input_brings_a_traceback(script: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert script("fuzz.py", "--inputs", 500, "--seed", 7) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tracebacks"] == 0
    assert len(report["inputs"]) == 5
    assert min(report["inputs"].values()) >= 100


def test_a_traceback_is_found() -> None:
    fuzz = runpy.run_path(str(SCRIPTS / "fuzz.py"))
    found = fuzz["Found"]()

    def target(_: Any) -> None:
        raise KeyError("missing")

    fuzz["fuzz"](target, 3, 0, 20, found)
    assert found.inputs.total() == found.tracebacks.total() > 0
    assert "KeyError: 'missing'" in next(iter(found.tracebacks))
