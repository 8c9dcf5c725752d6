"""Reading questions, and verdicts on answers."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from bitmtp.errors import RequestError
from bitmtp.evaluation.arithmetic import last_number
from bitmtp.evaluation.code import extract_code
from bitmtp.evaluation.task import Verdict
from bitmtp.evaluation.tasks import TASKS


def judge(data: Path, task: str, answer: str, number: int = 0) -> Verdict:
    return TASKS[task].judge(TASKS[task].questions(data)[number], answer)


def test_questions(data: Path) -> None:
    prompts = {name: [each.prompt for each in task.questions(data)] for name, task in TASKS.items()}
    assert list(prompts) == ["ifeval", "gsm8k", "math500", "humaneval+", "mbpp+"]
    assert prompts["gsm8k"][0] == "What is 1 and 1?"
    assert "\\boxed{}" in prompts["math500"][0]
    assert "def twice" in prompts["humaneval+"][0]
    assert "assert add_one(1) == 2" in prompts["mbpp+"][0]
    assert [each.id for each in TASKS["ifeval"].questions(data)] == ["7", "9"]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 12.", "12"),
        ("3 + 4 = 7\n#### 1,234\nThat took 3 steps.", "1234"),
        ("so \\boxed{-5} of the 8", "-5"),
        ("It costs $1,200.50.", "1200.50"),
        ("between 2 and .5", ".5"),
    ],
)
def test_last_number(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


def test_gsm8k(data: Path) -> None:
    assert judge(data, "gsm8k", "#### 2.0").right
    assert judge(data, "gsm8k", "That makes 3,000 in all.", 2).right
    assert judge(data, "gsm8k", "It is 3.").note == "3, not 2"
    assert not judge(data, "gsm8k", "I do not know.").right


def test_math500(data: Path) -> None:
    pytest.importorskip("math_verify", reason="pip install 'bitmtp[eval]'")
    assert judge(data, "math500", "It is $\\boxed{\\dfrac12}$.").right
    assert judge(data, "math500", "The answer is \\boxed{0.5}").right
    assert not judge(data, "math500", "It is $\\boxed{\\frac{1}{3}}$.").right
    assert judge(data, "math500", "").note.startswith("no answer")


@pytest.mark.parametrize(
    "answer",
    [
        "Here:\n```python\ndef twice(x: List[int]):\n    return [2 * each for each in x]\n```\nIt doubles.",
        "def twice(x):\n    return [2 * each for each in x]\n\nThis doubles each.",
        "    return [2 * each for each in x]",
        "```\nprint(1)\n```\n```py\ndef helper(y):\n    return y\ndef twice(x):\n    return [helper(2 * y) for y in x]",
    ],
)
def test_humaneval(data: Path, answer: str) -> None:
    assert judge(data, "humaneval+", answer) == Verdict(True)


def test_humaneval_wrong(data: Path) -> None:
    assert not judge(data, "humaneval+", "```python\ndef twice(x):\n    return x\n```").right
    assert not judge(data, "humaneval+", "I cannot do that.").right


def test_mbpp(data: Path) -> None:
    assert judge(data, "mbpp+", "```python\ndef add_one(x):\n    return x + 1\n```").right
    assert "NameError" in judge(data, "mbpp+", "```python\ndef other(x):\n    return x + 1\n```").note


def test_code_ends_where_it_stops_being_python() -> None:
    assert extract_code("def f():\n    return 1\nand that is it, folks", "f") == "def f():\n    return 1"


def test_errors_name_file_and_line(data: Path) -> None:
    file = data / "gsm8k/test.jsonl"
    file.write_text('{"question": "a", "answer": "1"}\n{"answer": "1"}\n', encoding="utf-8")
    with pytest.raises(RequestError, match=r"test\.jsonl:2: not a question of gsm8k \(lacks 'question'\)"):
        TASKS["gsm8k"].questions(data)
    file.unlink()
    with pytest.raises(RequestError, match="missing; gsm8k is read from there"):
        TASKS["gsm8k"].questions(data)
    (data / "ifeval/input_data.jsonl").write_text(
        '{"key": 1, "prompt": "a", "instruction_id_list": ["no:such"], "kwargs": [{}]}\n', encoding="utf-8"
    )
    with pytest.raises(RequestError, match="unknown instruction no:such"):
        TASKS["ifeval"].questions(data)
