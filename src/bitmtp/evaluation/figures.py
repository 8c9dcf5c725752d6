"""What the texts and verdicts of a policy on a task sum up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitmtp.benchmark.records import Record
from bitmtp.core.policy import Policy
from bitmtp.evaluation.intervals import paired, wilson
from bitmtp.evaluation.plan import Results, Speed
from bitmtp.evaluation.task import Task, Verdict


@dataclass(frozen=True, slots=True)
class Figures:
    """What a policy did on a task.

    Attributes:
        right: how many of ``asked`` answers were right; ``interval`` is that of the rate, 95%.
        lenient: how many would be by the task's milder rule; None if it has none.
        difference: rate less autoregressive decoding's on the same questions, and half the width of its interval.
        same: how many texts have autoregressive decoding's token ids.
        truncated: how many texts were cut at the longest length.
        tokens_per_iteration: acceptance length, over all texts.
        acceptance_histogram: how often an iteration committed 1, 2, … tokens.
        speed: None if it was not measured.
    """

    task: str
    policy: Policy
    asked: int
    right: int
    interval: tuple[float, float]
    lenient: int | None
    difference: tuple[float, float]
    same: int
    tokens: int
    truncated: int
    tokens_per_iteration: float
    draft_acceptance_rate: float
    acceptance_histogram: tuple[int, ...]
    speed: Speed | None

    @property
    def broken(self) -> bool:
        """A lossless policy wrote another text than autoregressive decoding."""
        return self.policy.lossless and self.same < self.asked


def figures_of(results: Results, task: Task) -> list[Figures]:
    """The figures of every policy on a task whose texts are all written and judged."""
    plan = results.plan
    baseline = _answers(results, task, plan.policies[0])
    speeds: Sequence[Speed | None] = results.speeds(task) or [None] * len(plan.policies)
    found = []
    for policy, speed in zip(plan.policies, speeds, strict=True):
        answers = _answers(results, task, policy)
        found.append(_sum_up(task, policy, answers, baseline[: len(answers)], speed))
    return found


def _answers(results: Results, task: Task, policy: Policy) -> list[tuple[Record, Verdict]]:
    answers = []
    for question in results.plan.asked(task, policy):
        text = results.text(task, policy, question)
        verdict = None if text is None else results.verdict(task, question, text["text"])
        if text is None or verdict is None:
            raise ValueError(f"{task.name}: question {question.id} is not answered and judged under {policy.name}")
        answers.append((text, verdict))
    return answers


def _sum_up(
    task: Task,
    policy: Policy,
    answers: Sequence[tuple[Record, Verdict]],
    baseline: Sequence[tuple[Record, Verdict]],
    speed: Speed | None,
) -> Figures:
    rights = [verdict.right for _, verdict in answers]
    lenient = [verdict.lenient for _, verdict in answers]
    return Figures(
        task=task.name,
        policy=policy,
        asked=len(answers),
        right=sum(rights),
        interval=wilson(sum(rights), len(rights)),
        lenient=None if None in lenient else sum(map(bool, lenient)),
        difference=paired(rights, [verdict.right for _, verdict in baseline]),
        same=sum(text["ids"] == base["ids"] for (text, _), (base, _) in zip(answers, baseline, strict=True)),
        truncated=sum(text["finish"] == "length" for text, _ in answers),
        **_counts([text for text, _ in answers]),
        speed=speed,
    )


def _counts(texts: Sequence[Record]) -> dict[str, Any]:
    """Sums over texts; the first token of each, which prefill gives, belongs to no iteration."""
    lengths: Counter[int] = Counter()
    for text in texts:
        lengths.update(dict(enumerate(text["histogram"], start=1)))
    iterations, proposed = lengths.total(), sum(text["proposed"] for text in texts)
    committed = sum(length * times for length, times in lengths.items())
    return {
        "tokens": sum(text["tokens"] for text in texts),
        "tokens_per_iteration": committed / iterations if iterations else 0.0,
        "draft_acceptance_rate": sum(text["accepted"] for text in texts) / proposed if proposed else 0.0,
        "acceptance_histogram": tuple(lengths[length] for length in range(1, max(lengths, default=0) + 1)),
    }
