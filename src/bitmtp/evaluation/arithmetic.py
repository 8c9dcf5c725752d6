"""GSM8K (arXiv:2110.14168) and MATH-500 (arXiv:2305.20050): exact match of the answer that a text ends with."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from bitmtp.errors import RequestError
from bitmtp.evaluation.task import Question, Record, Task, Verdict

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_BOXED = re.compile(rf"\\boxed\{{\s*({_NUMBER})")


def last_number(text: str) -> Decimal | None:
    """The number that a text gives as its answer: behind ``####`` or in a box if there is one, else the last one."""
    marked = _MARKED.findall(text) or _BOXED.findall(text) or re.findall(_NUMBER, text)
    if not marked:
        return None
    try:
        return Decimal(marked[-1].replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


def _gsm8k_question(number: int, record: Record) -> Question:
    return Question(str(number), record["question"], record)


def _judge_gsm8k(question: Question, answer: str) -> Verdict:
    found, wanted = last_number(answer), last_number(question.record["answer"])
    return Verdict(found is not None and found == wanted, "" if found == wanted else f"{found}, not {wanted}")


def _math_question(_: int, record: Record) -> Question:
    prompt = f"{record['problem']}\n\nReason step by step, and put the final answer within \\boxed{{}}."
    return Question(record["unique_id"], prompt, record)


def _judge_math(question: Question, answer: str) -> Verdict:
    """Equality of the expressions, by the math-verify package; it limits its own time, by a signal."""
    try:
        from math_verify import parse, verify
    except ImportError:
        raise RequestError("judging MATH-500 needs math-verify; pip install 'bitmtp[eval]'") from None
    wanted = parse(f"\\boxed{{{question.record['answer']}}}")
    found = parse(answer)
    right = bool(found) and bool(verify(wanted, found))
    return Verdict(right, "" if right else f"{found[-1] if found else 'no answer'}, not {question.record['answer']}")


GSM8K = Task("gsm8k", "GSM8K, exact match", "gsm8k/test.jsonl", 320, _gsm8k_question, _judge_gsm8k)
MATH500 = Task("math500", "MATH-500, equal expressions", "math500/test.jsonl", 640, _math_question, _judge_math)
