"""The study's log, which a run goes on from, and the record that comes of it: one JSON file with everything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from bitmtp.benchmark.environment import environment
from bitmtp.benchmark.records import ResultLog
from bitmtp.core.policy import Policy
from bitmtp.engine import Engine
from bitmtp.errors import RequestError
from bitmtp.evaluation.plan import digest
from bitmtp.study.breakdown import Breakdown, break_down
from bitmtp.study.measure import Measurement, Measurer
from bitmtp.study.workloads import StudyRequest

FORMAT = "bitmtp study 1"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Subject:
    """A policy as the record has it; ``options`` are all its fields, as text."""

    label: str
    lossless: bool
    options: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What is studied.

    Attributes:
        name, model: of the checkpoint: what people call it, and the name of its content.
        policies: by label, autoregressive decoding first.
        requests: in the order in which they are measured.
    """

    name: str
    model: str
    policies: dict[str, Policy]
    requests: tuple[StudyRequest, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Record:
    """A study: where it was made, and for each workload the measurements of every request, one of each policy.

    Attributes:
        environment: machine, versions, backend; for people to read.
        breakdown: parts of typical passes and prompts.
        texts: workload → requests → policies, in the order of ``subjects``.
    """

    name: str
    model: str
    environment: dict[str, Any]
    breakdown: Breakdown
    max_tokens: int
    subjects: tuple[Subject, ...]
    texts: dict[str, list[list[Measurement]]]

    def write(self, path: Path) -> None:
        """Write the file whole or not at all."""
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps({"format": FORMAT, **asdict(self)}, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(part, path)

    @classmethod
    def read(cls, path: str | Path) -> Record:
        """Read a file.

        Raises:
            RequestError: it is missing or no study.
        """
        try:
            values: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
            if values.pop("format") != FORMAT:
                raise ValueError
            values["breakdown"] = Breakdown(**values["breakdown"])
            values["subjects"] = tuple(Subject(**each) for each in values["subjects"])
            values["texts"] = {
                name: [[_measurement(each) for each in row] for row in rows] for name, rows in values["texts"].items()
            }
            return cls(**values)
        except OSError as error:
            raise RequestError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RequestError(f"{path}: not a study; `bitmtp study` writes one as study.json") from None


def _measurement(values: dict[str, Any]) -> Measurement:
    return Measurement(**(values | {"lengths": tuple(values["lengths"])}))


def run(engine: Engine, plan: Plan, log: ResultLog, tick: Callable[[], None]) -> Record:
    """Measure what the log does not hold, and put the record together.

    Args:
        tick: called for every text, those of the log included.

    Raises:
        RequestError: the log was made on another machine or backend.
    """
    where, parts = _check_place(engine, plan, log), _break_down(engine, plan, log)
    measurer = Measurer(engine, list(plan.policies.values()), plan.max_tokens)
    warm, texts = False, dict[str, list[list[Measurement]]]()
    for turn, request in enumerate(plan.requests):
        key = _key(plan, request)
        if (known := log.get(key)) is not None:
            found = [_measurement(each) for each in known["texts"]]
            for _ in found:
                tick()
        else:
            if not warm:
                measurer.warm_up(request)
                warm = True
            found = measurer.measure(request, turn, tick)
            log.add(key, texts=[asdict(each) for each in found])
        texts.setdefault(request.workload, []).append(found)
    subjects = tuple(Subject(label, each.lossless, str(each)) for label, each in plan.policies.items())
    return Record(plan.name, plan.model, where, parts, plan.max_tokens, subjects, texts)


def interleave(workloads: Sequence[Sequence[T]]) -> Iterator[T]:
    """One request of each workload in turn, so that a machine that slows down slows all alike."""
    for place in range(max(map(len, workloads), default=0)):
        yield from (requests[place] for requests in workloads if place < len(requests))


def _key(plan: Plan, request: StudyRequest) -> str:
    what = f"{plan.model} {plan.max_tokens} {list(plan.policies.values())} {request.messages}"
    return f"{request.workload} {request.number} {digest(what)}"


def _versions() -> dict[str, str]:
    """Of the packages that a text goes through."""
    found = {}
    for name in ("tokenizers", "safetensors", "jinja2", "cuda-core", "cuda-bindings"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _break_down(engine: Engine, plan: Plan, log: ResultLog) -> Breakdown:
    key = f"breakdown {plan.model}"
    if key not in log:
        log.add(key, **asdict(break_down(engine.backend, engine.context)))
    known = log[key]
    return Breakdown(known["passes"], known["first_token"])


def _check_place(engine: Engine, plan: Plan, log: ResultLog) -> dict[str, Any]:
    """The environment, kept in the log: a study of two machines would say nothing of either."""
    now = asdict(environment()) | _versions() | {"backend": engine.backend.name, **engine.backend.describe()}
    key = f"environment {plan.model}"
    before = log.get(key)
    if before is None:
        log.add(key, environment=now)
        return now
    for name in ("cpu", "cores", "isa", "bitmtp", "backend", "kernels", "device", "threads"):
        if before["environment"].get(name) != now.get(name):
            was, found = before["environment"].get(name), now.get(name)
            raise RequestError(f"this study was begun with {name} {was!r}, not {found!r}; choose another --output")
    return dict(before["environment"])
