"""What a task is: a file of questions, the prompt of each, and how an answer is judged."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitmtp.errors import RequestError

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an answer is worth.

    Attributes:
        right: whether it counts.
        note: why it does not, in a few words.
        lenient: whether it would count under the task's milder rule, if it has one.
    """

    right: bool
    note: str = ""
    lenient: bool | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """One record of a task with the prompt made of it."""

    id: str
    prompt: str
    record: Record


@dataclass(frozen=True, slots=True)
class Task:
    """Questions and how their answers are judged.

    Attributes:
        title: what is counted, for the head of a table.
        file: of the questions, below the data folder; JSON lines, gzip if its name says so.
        max_tokens: longest answer.
        question: a record, with its number in the file, to a question.
        judge: the verdict on an answer.
        isolated: ``judge`` runs in a process of its own, so that several answers can be judged at once.
    """

    name: str
    title: str
    file: str
    max_tokens: int
    question: Callable[[int, Record], Question]
    judge: Callable[[Question, str], Verdict]
    isolated: bool = False

    def questions(self, data: str | Path) -> list[Question]:
        """Every question, in the order of the file.

        Raises:
            RequestError: the file is missing, or a line of it is not a record of this task.
        """
        file = Path(data) / self.file
        questions = []
        for number, line in enumerate(_lines(file, self.name)):
            try:
                questions.append(self.question(number, json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
                raise RequestError(f"{file}:{number + 1}: not a question of {self.name} ({what})") from None
        return questions


def _lines(file: Path, name: str) -> Iterator[str]:
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except FileNotFoundError:
        raise RequestError(f"{file}: missing; {name} is read from there (see docs/evaluation.md)") from None
    except (OSError, EOFError) as error:
        raise RequestError(f"{file}: cannot be read ({error})") from None
    return (line for line in data.decode().splitlines() if line.strip())
