"""Answers as EvalPlus's own runner reads them (``evalplus.evaluate --samples``), one file a task and policy."""

from __future__ import annotations

import json
from pathlib import Path

from bitmtp.core.policy import Policy
from bitmtp.evaluation.code import HUMANEVAL, MBPP, humaneval_solution, mbpp_solution
from bitmtp.evaluation.plan import Results
from bitmtp.evaluation.task import Question, Task

NAMES = {HUMANEVAL: "humaneval", MBPP: "mbpp"}


def sample(task: Task, question: Question, answer: str) -> dict[str, str]:
    """An answer as a line of a sample file: the task's name there, and a whole program."""
    if task is HUMANEVAL:
        return {"task_id": question.id, "solution": humaneval_solution(question, answer)}
    return {"task_id": f"Mbpp/{question.id}", "solution": mbpp_solution(question, answer)}


def write_samples(results: Results, folder: Path) -> list[Path]:
    """Write the answers to the code tasks that there are; the files, the policies numbered in the plan's order."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for task in results.plan.questions:
        for number, policy in enumerate(results.plan.policies if task in NAMES else ()):
            file = folder / f"{NAMES[task]}-{number}-{policy.name}.jsonl"
            lines = [json.dumps(each, ensure_ascii=False) + "\n" for each in _samples(results, task, policy)]
            part = file.with_name(file.name + ".part")
            part.write_text("".join(lines), encoding="utf-8")
            part.replace(file)
            written.append(file)
    return written


def _samples(results: Results, task: Task, policy: Policy) -> list[dict[str, str]]:
    answers = [(question, results.text(task, policy, question)) for question in results.plan.asked(task, policy)]
    return [sample(task, question, text["text"]) for question, text in answers if text is not None]
