"""The steps of an evaluation: write, judge, time. Each skips what the log holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import starmap

from bitmtp.benchmark.policies import compare
from bitmtp.core.policy import Policy
from bitmtp.engine import Engine, Request
from bitmtp.evaluation.plan import Results, Speed
from bitmtp.evaluation.task import Question, Task
from bitmtp.evaluation.writer import write_texts

Tick = Callable[[], None]


def unwritten(results: Results, shard: tuple[int, int] = (0, 1)) -> Iterator[tuple[Task, Policy, list[Question]]]:
    """The questions that are not answered yet; of a shard (i, n), every n-th question from the i-th on."""
    for task in results.plan.questions:
        for policy in results.plan.policies:
            share = results.plan.asked(task, policy)[shard[0] :: shard[1]]
            if left := [question for question in share if results.text(task, policy, question) is None]:
                yield task, policy, left


def write(
    engine: Engine,
    results: Results,
    task: Task,
    policy: Policy,
    questions: Sequence[Question],
    batch: int,
    tick: Tick,
) -> None:
    """Answer questions, greedily, ``batch`` at a time."""
    requests = [_request(engine, results, task, policy, question) for question in questions]
    for index, generation in write_texts(engine, requests, batch):
        results.add_text(task, policy, questions[index], generation)
        tick()


def unjudged(results: Results) -> Iterator[tuple[Task, list[tuple[Question, str]]]]:
    """The answers without a verdict; policies that wrote the same text share one."""
    plan = results.plan
    for task in plan.questions:
        found: dict[tuple[str, str], Question] = {}
        for policy in plan.policies:
            for question in plan.asked(task, policy):
                text = results.text(task, policy, question)
                if text is not None and results.verdict(task, question, text["text"]) is None:
                    found[question.id, text["text"]] = question
        if found:
            yield task, [(question, text) for (_, text), question in found.items()]


def judge(results: Results, task: Task, answers: Sequence[tuple[Question, str]], workers: int, tick: Tick) -> None:
    """Judge answers; generated programs run ``workers`` at a time."""
    pool = ThreadPoolExecutor(workers)
    try:
        # Only what runs in a process of its own: math-verify limits its time by a signal, which needs this thread.
        verdicts = pool.map(task.judge, *zip(*answers, strict=True)) if task.isolated else starmap(task.judge, answers)
        for (question, text), verdict in zip(answers, verdicts, strict=True):
            results.add_verdict(task, question, text, verdict)
            tick()
    finally:
        pool.shutdown(cancel_futures=True)


def untimed(results: Results) -> list[Task]:
    """The tasks whose speeds are to be measured yet."""
    return [task for task in results.plan.questions if results.plan.timed and results.speeds(task) is None]


def measure(engine: Engine, results: Results, task: Task, tick: Tick) -> None:
    """Measure the speeds on a task's first questions: texts written alone, the policies taking turns text by text."""
    plan = results.plan
    asked = plan.questions[task][: plan.timed]
    prompts = [engine.encode(_request(engine, results, task, plan.policies[0], question)) for question in asked]
    found = compare(engine, prompts, plan.policies, max_tokens=plan.length(task), rounds=1, tick=tick)
    results.add_speeds(task, [Speed(each.tokens_per_second, each.ratio) for each in found])


def _request(engine: Engine, results: Results, task: Task, policy: Policy, question: Question) -> Request:
    chat = engine.tokenizer.has_chat_template
    prompt = [{"role": "user", "content": question.prompt}] if chat else question.prompt
    return Request(prompt, results.plan.length(task), policy)
