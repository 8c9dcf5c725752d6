"""Small files of questions in the layout of the real ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

GSM8K = [{"question": f"What is {n} and {n}?", "answer": f"It is {n}+{n}={2 * n}.\n#### {2 * n}"} for n in (1, 2, 1500)]
IFEVAL = [
    {"key": 7, "prompt": "Use no commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    {
        "key": 9,
        "prompt": "Write 3 words or more in quotation marks.",
        "instruction_id_list": ["length_constraints:number_words", "startend:quotation"],
        "kwargs": [{"num_words": 3, "relation": "at least"}, {}],
    },
]
MATH = [{"problem": "What is half of $1$?", "answer": "\\frac{1}{2}", "unique_id": "test/algebra/1.json"}]
HUMANEVAL = [
    {
        "task_id": "HumanEval/0",
        "prompt": 'from typing import List\n\n\ndef twice(x: List[int]) -> List[int]:\n    """ Double each. """\n',
        "entry_point": "twice",
        "test": "def check(candidate):\n    assert candidate([1, 2]) == [2, 4]\n",
    }
]
MBPP = [
    {
        "task_id": 2,
        "prompt": "Write a function to add one.",
        "code": "def helper(x):\n    return x\ndef add_one(x):\n    return helper(x) + 1",
        "test_imports": ["import math"],
        "test_list": ["assert add_one(1) == 2"],
        "test": "assert math.isclose(add_one(2), 3)\n",
    }
]
FILES = {
    "gsm8k/test.jsonl": GSM8K,
    "ifeval/input_data.jsonl": IFEVAL,
    "math500/test.jsonl": MATH,
    "humaneval_plus/HumanEvalPlus-OriginFmt.jsonl.gz": HUMANEVAL,
    "mbpp_plus/MbppPlus-OriginFmt.jsonl.gz": MBPP,
}


def write_lines(file: Path, records: Sequence[dict[str, Any]]) -> None:
    """JSON lines, gzip if the name says so."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder."""
    for name, records in FILES.items():
        write_lines(tmp_path / "data" / name, records)
    return tmp_path / "data"
