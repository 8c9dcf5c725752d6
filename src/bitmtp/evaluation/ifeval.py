"""IFEval: does an answer follow every instruction of its prompt, as it is and with a frame around it forgiven."""

from __future__ import annotations

from collections.abc import Iterator

from bitmtp.evaluation.instructions import CHECKS
from bitmtp.evaluation.task import Question, Record, Task, Verdict


def _question(_: int, record: Record) -> Question:
    unknown = [name for name in record["instruction_id_list"] if name not in CHECKS]
    if unknown or len(record["kwargs"]) != len(record["instruction_id_list"]):
        raise ValueError(f"unknown instruction {unknown[0]}" if unknown else "instructions and kwargs differ in number")
    return Question(str(record["key"]), record["prompt"], record)


def _forms(answer: str) -> Iterator[str]:
    """The answer as it is, and without its first line, last line, both, and asterisks (the paper's loose accuracy)."""
    lines = answer.split("\n")
    for part in (lines, lines[1:], lines[:-1], lines[1:-1]):
        text = answer if part is lines else "\n".join(part).strip()
        yield text
        yield text.replace("*", "")


def _follows(text: str, name: str, options: Record) -> bool:
    return bool(text.strip()) and CHECKS[name](text, options)


def _judge(question: Question, answer: str) -> Verdict:
    record = question.record
    pairs = list(zip(record["instruction_id_list"], record["kwargs"], strict=True))
    broken = [name for name, options in pairs if not _follows(answer, name, options)]
    forgiven = all(any(_follows(form, name, options) for form in _forms(answer)) for name, options in pairs)
    return Verdict(not broken, ", ".join(broken), lenient=forgiven)


IFEVAL = Task("ifeval", "IFEval, every instruction followed", "ifeval/input_data.jsonl", 768, _question, _judge)
