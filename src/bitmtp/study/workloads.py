"""Three workloads built from local files by a fixed rule: plain text, reasoning, tool calling.

The rule: of each source, the prompts of at most ``LONGEST`` characters are shuffled by a generator seeded with the
file's name, and the first ones taken, so that every source gives an equal share; then the workload is shuffled alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from bitmtp.errors import RequestError
from bitmtp.server.tools import explain
from bitmtp.study.toolset import CALCULATOR, EXTRAS, SEARCH, TRANSLATOR, Tool
from bitmtp.tokenizer import Message

REQUESTS = 120  # of a workload
LONGEST = 2000  # characters of a source's prompt
STEPS = "\nThink step by step, then give the answer."

Prompt = Callable[[str, Random], list[Message]]


@dataclass(frozen=True, slots=True)
class StudyRequest:
    """One request: a conversation that waits for an answer."""

    workload: str
    number: int
    messages: list[Message]


@dataclass(frozen=True, slots=True)
class Source:
    """A file of questions and how a request is made of one.

    Attributes:
        file: JSON lines, below the data folder.
        field: that holds the question; of a list, its first entry.
        categories: only records of these; empty: all.
        prompt: a question to messages.
    """

    file: str
    field: str
    prompt: Prompt
    categories: tuple[str, ...] = ()

    def questions(self, data: Path) -> list[str]:
        """The questions in the order of the file.

        Raises:
            RequestError: the file is missing, or a line of it is no record of this source.
        """
        file, found = data / self.file, []
        if not file.exists():
            raise RequestError(f"{file}: missing; the study reads its requests from there (see docs/study.md)")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                record: dict[str, Any] = json.loads(line)
                value = record[self.field]
                question = str(value[0] if isinstance(value, list) else value)
            except (ValueError, KeyError, TypeError, IndexError):
                raise RequestError(f"{file}:{number}: expected an object with {self.field}") from None
            if not self.categories or record.get("category") in self.categories:
                found.append(question)
        return found


def _plain(question: str, _: Random) -> list[Message]:
    return [{"role": "user", "content": question}]


def _reasoning(question: str, _: Random) -> list[Message]:
    return [{"role": "user", "content": question + STEPS}]


def _calling(tool: Tool) -> Prompt:
    """A system message that offers the tool and one other in random order, an exchange that uses it, the question."""

    def prompt(question: str, random: Random) -> list[Message]:
        offered = [tool, random.choice(EXTRAS)]
        random.shuffle(offered)
        messages = [*tool.exchange, {"role": "user", "content": question}]
        return list(explain(messages, [each.definition for each in offered]))

    return prompt


_SPEC_BENCH, _GSM8K = "spec_bench/question.jsonl", "gsm8k/test.jsonl"
_TALK = ("generic", "knowledge", "roleplay", "common-sense", "fermi", "counterfactual", "writing")

WORKLOADS: dict[str, tuple[Source, ...]] = {
    "plain": (
        Source("oasst_prompts/prompt_lottery_en_250.jsonl", "prompt", _plain),
        Source("vicuna_bench/question.jsonl", "turns", _plain, _TALK),
    ),
    "reasoning": (
        Source(_GSM8K, "question", _reasoning),
        Source("math500/test.jsonl", "problem", _reasoning),
    ),
    "tools": (
        Source(_SPEC_BENCH, "turns", _calling(CALCULATOR), ("math_reasoning",)),
        Source(_SPEC_BENCH, "turns", _calling(TRANSLATOR), ("translation",)),
        Source(_SPEC_BENCH, "turns", _calling(SEARCH), ("qa",)),
    ),
}


def build(name: str, data: str | Path, limit: int = REQUESTS) -> list[StudyRequest]:
    """The first ``limit`` requests of a workload; fewer than 120 in all if the files hold fewer.

    Raises:
        RequestError: no such workload, or its files are missing or unsound.
    """
    if name not in WORKLOADS:
        raise RequestError(f"unknown workload {name!r}; choose of {', '.join(WORKLOADS)}")
    sources, asked = WORKLOADS[name], list[list[Message]]()
    for source in sources:
        random = Random(f"{source.file} {source.categories}")
        questions = [each for each in source.questions(Path(data)) if len(each) <= LONGEST]
        random.shuffle(questions)
        asked += [source.prompt(each, random) for each in questions[: REQUESTS // len(sources)]]
    Random(name).shuffle(asked)
    return [StudyRequest(name, number, messages) for number, messages in enumerate(asked[:limit])]
