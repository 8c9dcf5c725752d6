"""Samples are programs that run as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitmtp.evaluation.evalplus import sample
from bitmtp.evaluation.tasks import TASKS


def defined(data: Path, task: str, answer: str) -> tuple[str, dict[str, Any]]:
    """EvalPlus's name of the first question, and what its sample defines."""
    line = sample(TASKS[task], TASKS[task].questions(data)[0], answer)
    names: dict[str, Any] = {}
    exec(line["solution"], names)
    return line["task_id"], names


def test_humaneval(data: Path) -> None:
    whole = "```python\ndef twice(x: List[int]):\n    return [2 * each for each in x]\n```"
    for answer in (whole, "    return [2 * each for each in x]"):
        name, names = defined(data, "humaneval+", answer)
        assert name == "HumanEval/0"
        assert names["twice"]([1, 2]) == [2, 4]


def test_mbpp(data: Path) -> None:
    name, names = defined(data, "mbpp+", "Sure:\n```python\ndef add_one(x):\n    return math.floor(x) + 1\n```\nDone.")
    assert name == "Mbpp/2"
    assert names["add_one"](1) == 2
