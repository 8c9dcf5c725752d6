"""HumanEval+ and MBPP+ (EvalPlus, arXiv:2305.01210): does the generated function pass every test.

Read from EvalPlus's files in the format of the original sets, whose records bring runnable tests; those run in
:mod:`bitmtp.evaluation.sandbox` rather than in the evalplus package's own runner, which leaves the network open. For
that runner the answers can be written as its samples.
"""

from __future__ import annotations

import ast
import re

from bitmtp.evaluation.sandbox import run_python
from bitmtp.evaluation.task import Question, Record, Task, Verdict

_FENCE = re.compile(r"```(?:[Pp]ython|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
# The release tests HumanEval/32 by the polynomial of the solution instead of the solution in the polynomial.
_FAULT, _MENDED = "_poly(*candidate(*inp), inp) <=", "abs(_poly(*inp, candidate(*inp))) <="


def extract_code(text: str, function: str) -> str:
    """The program in an answer: the first fenced block that defines ``function`` (else the first, else the whole
    text), up to where it stops being Python."""
    blocks = _FENCE.findall(text) or [text]
    chosen = next((block for block in blocks if re.search(rf"\bdef {re.escape(function)}\b", block)), blocks[0])
    return _parsing_prefix(chosen)


def _parsing_prefix(code: str) -> str:
    """The longest run of first lines that parses; the code itself if none does."""
    lines = code.rstrip().split("\n")
    for end in range(len(lines), 0, -1):
        candidate = "\n".join(lines[:end])
        try:
            if ast.parse(candidate).body:
                return candidate
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return code


def _humaneval_question(_: int, record: Record) -> Question:
    prompt = f"Complete this Python function:\n```python\n{record['prompt'].rstrip()}\n```"
    return Question(record["task_id"], prompt, record)


def humaneval_solution(question: Question, answer: str) -> str:
    """The whole program that an answer makes of the prompt."""
    record, name = question.record, question.record["entry_point"]
    code = extract_code(answer, name)
    # The prompt comes first in either case: for its imports and helpers, or because the answer only continues it.
    start = record["prompt"] + ("    pass\n\n" if f"def {name}" in code else "")
    return f"{start}{code}\n"


def _judge_humaneval(question: Question, answer: str) -> Verdict:
    tests = question.record["test"].replace(_FAULT, _MENDED)
    return _run(f"{humaneval_solution(question, answer)}\n{tests}\ncheck({question.record['entry_point']})\n")


def _mbpp_question(_: int, record: Record) -> Question:
    prompt = f"{record['prompt'].strip()} Your code should satisfy this test:\n```python\n{record['test_list'][0]}\n```"
    return Question(str(record["task_id"]), prompt, record | {"entry_point": _last_function(record["code"])})


def _last_function(code: str) -> str:
    """The name that the tests call: helpers precede it."""
    return [node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)][-1]


def mbpp_solution(question: Question, answer: str) -> str:
    """The whole program of an answer, without its tests."""
    code = extract_code(answer, question.record["entry_point"])
    return "\n".join([*question.record["test_imports"], code]) + "\n"


def _judge_mbpp(question: Question, answer: str) -> Verdict:
    return _run(f"{mbpp_solution(question, answer)}{question.record['test']}\n")


def _run(program: str) -> Verdict:
    outcome = run_python(program)
    return Verdict(outcome.passed, outcome.reason)


HUMANEVAL = Task(
    "humaneval+",
    "HumanEval+, all tests pass",
    "humaneval_plus/HumanEvalPlus-OriginFmt.jsonl.gz",
    512,
    _humaneval_question,
    _judge_humaneval,
    isolated=True,
)
MBPP = Task(
    "mbpp+",
    "MBPP+, all tests pass",
    "mbpp_plus/MbppPlus-OriginFmt.jsonl.gz",
    384,
    _mbpp_question,
    _judge_mbpp,
    isolated=True,
)
