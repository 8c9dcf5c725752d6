"""What is evaluated, and the log of what was done: a run goes on where it stopped, and machines can share the work."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bitmtp.benchmark.records import Record, ResultLog
from bitmtp.core.policy import Policy
from bitmtp.engine import Generation
from bitmtp.evaluation.task import Question, Task, Verdict


@dataclass(frozen=True, slots=True)
class Plan:
    """What is evaluated.

    Attributes:
        model, backend: names under which results are kept, so that another model's are never taken for its own.
        questions: of each task, in order.
        policies: autoregressive decoding first.
        lossy_limit: lossy policies answer only so many of the questions; None: all.
        max_tokens: longest text; None: the task's.
        timed: questions of each task that are also written alone, one policy after the other, for the speeds.
    """

    model: str
    backend: str
    questions: dict[Task, list[Question]]
    policies: tuple[Policy, ...]
    lossy_limit: int | None = None
    max_tokens: int | None = None
    timed: int = 0

    def asked(self, task: Task, policy: Policy) -> list[Question]:
        """The questions of a task that a policy answers."""
        return self.questions[task][: None if policy.lossless else self.lossy_limit]

    def length(self, task: Task) -> int:
        """Longest text of a task, in tokens."""
        return self.max_tokens or task.max_tokens

    def place(self, task: Task) -> str:
        """What a text of a task depends on besides policy and question."""
        return f"{self.model} {self.backend} {task.name} {self.length(task)}"


@dataclass(frozen=True, slots=True)
class Speed:
    """Of texts written alone; ``ratio`` is to autoregressive decoding's."""

    tokens_per_second: float
    ratio: float


class Results:
    """The log of a plan: texts by policy and question, verdicts by question and text, speeds by task."""

    def __init__(self, log: ResultLog, plan: Plan) -> None:
        self._log, self.plan = log, plan

    def text(self, task: Task, policy: Policy, question: Question) -> Record | None:
        """The text that a policy wrote, if it did."""
        return self._log.get(self._text_key(task, policy, question))

    def add_text(self, task: Task, policy: Policy, question: Question, generation: Generation) -> None:
        """Keep a finished text and its counts."""
        result, stats = generation.result, generation.text.stats
        self._log.add(
            self._text_key(task, policy, question),
            text=result.text,
            ids=digest(repr(result.token_ids)),
            tokens=result.num_tokens,
            finish=str(result.finish),
            histogram=result.acceptance_histogram,
            proposed=stats.proposed,
            accepted=stats.accepted,
        )

    def verdict(self, task: Task, question: Question, text: str) -> Verdict | None:
        """The verdict on a text, if it was judged."""
        record = self._log.get(_verdict_key(task, question, text))
        return None if record is None else Verdict(record["right"], record["note"], record["lenient"])

    def add_verdict(self, task: Task, question: Question, text: str, verdict: Verdict) -> None:
        """Keep a verdict."""
        self._log.add(_verdict_key(task, question, text), **asdict(verdict))

    def speeds(self, task: Task) -> list[Speed] | None:
        """The speed of each policy, if they were measured."""
        record = self._log.get(self._speed_key(task))
        return None if record is None else [Speed(*pair) for pair in record["speeds"]]

    def add_speeds(self, task: Task, speeds: Sequence[Speed]) -> None:
        """Keep the speed of each policy."""
        self._log.add(self._speed_key(task), speeds=[(each.tokens_per_second, each.ratio) for each in speeds])

    def _text_key(self, task: Task, policy: Policy, question: Question) -> str:
        return f"text {self.plan.place(task)} {policy} {question.id} {digest(question.prompt)}"

    def _speed_key(self, task: Task) -> str:
        return f"speed {self.plan.place(task)} {digest(str(self.plan.policies))} {self.plan.timed}"


def _verdict_key(task: Task, question: Question, text: str) -> str:
    return f"verdict {task.name} {question.id} {digest(text)}"


def digest(text: str) -> str:
    """A short name of a text's content."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
