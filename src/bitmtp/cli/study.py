"""``bitmtp study``: what a deployment would see under each policy, as a record and a page."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from bitmtp.cli.options import ModelOptions, with_options
from bitmtp.cli.progress import progress
from bitmtp.cli.render import policy_label, print_table
from bitmtp.errors import RequestError

if TYPE_CHECKING:
    from bitmtp.engine import Engine
    from bitmtp.evaluation.intervals import Estimate
    from bitmtp.study.record import Plan
    from bitmtp.study.summary import Figures
    from bitmtp.study.workloads import StudyRequest


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """What to study."""

    data: Annotated[str | None, Option(metavar="FOLDER", help="Folder of the question files (docs/study.md).")] = None
    workloads: Annotated[str, Option(help="Of plain, reasoning and tools.")] = "plain,reasoning,tools"
    limit: Annotated[int, Option(min=1, max=120, help="First requests of each workload only.")] = 120
    max_tokens: Annotated[int, Option(min=2, help="Most tokens of a text.")] = 96
    policy: Annotated[
        str, Option(help="Beside autoregressive decoding: of speculative, auto, hybrid and confidence.")
    ] = "speculative,auto,hybrid,confidence"
    output: Annotated[str, Option(metavar="FOLDER", help="For log, record and page; a run goes on there.")] = "study"
    compare: Annotated[
        tuple[str, str] | None, Option(metavar="FILE FILE", help="Only compare the records of two runs.")
    ] = None


@with_options
def study(*, model: ModelOptions, options: StudyOptions) -> None:
    """Measure three workloads under every policy. Write study.json and report.html.

    The exit code is 1 if a lossless policy changed a text, or if fewer than 95% of the figures of two runs agree.
    """
    if options.compare is not None:
        _compare(*options.compare)
        return
    if options.data is None:
        raise RequestError("--data is missing: the folder that holds the question files (see docs/study.md)")
    from bitmtp.benchmark.records import ResultLog
    from bitmtp.study.record import run
    from bitmtp.study.report import page
    from bitmtp.study.summary import summarise

    requests = _requests(options)
    engine = model.load()
    plan = _plan(engine, model, options, requests)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    with progress("texts", len(plan.requests) * len(plan.policies), lines=True) as tick:
        record = run(engine, plan, ResultLog(folder / "log.jsonl"), tick)
    record.write(folder / "study.json")
    _write(folder / "report.html", page(record))
    summary = summarise(record)
    for workload, figures in summary.items():
        _print_figures(workload, figures)
    print(f"\nwrote {folder / 'study.json'} and {folder / 'report.html'}")
    _check_lossless(summary)


def _requests(options: StudyOptions) -> tuple[StudyRequest, ...]:
    from bitmtp.study.record import interleave
    from bitmtp.study.workloads import build

    names = dict.fromkeys(part.strip() for part in options.workloads.split(",") if part.strip())
    requests = tuple(interleave([build(name, options.data or "", options.limit) for name in names]))
    if not requests:
        raise RequestError("there is nothing to study: name a workload whose files hold questions")
    return requests


def _plan(engine: Engine, model: ModelOptions, options: StudyOptions, requests: tuple[StudyRequest, ...]) -> Plan:
    from bitmtp.benchmark.policies import Settings
    from bitmtp.benchmark.records import model_fingerprint
    from bitmtp.models import shipped_model
    from bitmtp.study.record import Plan

    names = tuple(part.strip() for part in options.policy.split(",") if part.strip())
    policies = Settings(names=names).policies(engine.config.block_size)
    folder = Path(model.model or shipped_model())
    return Plan(
        name=folder.name,
        model=model_fingerprint(folder),
        policies={policy_label(each): each for each in policies},
        requests=requests,
        max_tokens=options.max_tokens,
    )


def _write(file: Path, text: str) -> None:
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def _print_figures(workload: str, figures: list[Figures]) -> None:
    rows = [
        [
            each.label,
            _interval(each.speedup, 2),
            _interval(each.throughput, 1),
            *_times(each),
            _interval(each.acceptance_length, 2),
            f"{each.passes_per_token.value:.3f}",
            f"{each.same} of {each.requests}" + ("" if each.lossless else ", lossy"),
        ]
        for each in figures
    ]
    names = ["policy", "× AR", "tok/s", "TTFT", "TPOT", "latency", "tok/iter", "pass/tok", "same texts"]
    print()
    print_table(f"{workload}: {figures[0].requests} requests; times p50 / p95 in ms, [95%]", names, rows)


def _times(figures: Figures) -> list[str]:
    """p50 / p95 of TTFT, TPOT and latency."""
    pairs = [(each.percentiles[0], each.percentiles[2]) for each in (figures.ttft, figures.tpot, figures.latency)]
    return [f"{p50:.1f} / {p95:.1f}" for p50, p95 in pairs]


def _interval(estimate: Estimate, digits: int) -> str:
    return f"{estimate.value:.{digits}f} [{estimate.low:.{digits}f} {estimate.high:.{digits}f}]"


def _check_lossless(summary: dict[str, list[Figures]]) -> None:
    broken = {each.label: each for figures in summary.values() for each in figures if each.broken}
    for each in broken.values():
        print(
            f"bitmtp: MISMATCH: {each.label} is lossless, but {each.requests - each.same} of {each.requests} texts "
            "differ from autoregressive decoding's",
            file=sys.stderr,
        )
    if broken:
        raise typer.Exit(1)


def _compare(first: str, second: str) -> None:
    from bitmtp.study.compare import EXPECTED, compare
    from bitmtp.study.record import Record

    found = compare(Record.read(first), Record.read(second))
    rows = [
        [
            f"{each.workload}, {each.label}, {each.figure}",
            _interval(each.first, 3),
            _interval(each.second, 3),
            f"{each.change:+.1%}",
            "yes" if each.agrees else "NO",
        ]
        for each in found
    ]
    print_table("Two runs: figures, [95%], and whether they differ by no more than chance", _COMPARED, rows)
    kinds = {
        "ratios and counts": [each.agrees for each in found if each.relative],
        "times and speeds": [each.agrees for each in found if not each.relative],
    }
    for kind, agreeing in kinds.items():
        print(f"{kind}: {sum(agreeing)} of {len(agreeing)} agree")
    if any(sum(agreeing) < EXPECTED * len(agreeing) for agreeing in kinds.values()):
        raise typer.Exit(1)


_COMPARED = ["figure", "first", "second", "change", "agree"]
