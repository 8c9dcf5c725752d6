"""``bitmtp eval``: how good the texts of each policy are, and how fast they come."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from bitmtp.cli.options import ModelOptions, with_options
from bitmtp.cli.progress import progress
from bitmtp.cli.render import policy_label, print_table
from bitmtp.errors import RequestError

if TYPE_CHECKING:
    from bitmtp.benchmark.records import ResultLog
    from bitmtp.core.policy import Policy
    from bitmtp.engine import Engine
    from bitmtp.evaluation.figures import Figures
    from bitmtp.evaluation.harness import Score
    from bitmtp.evaluation.plan import Plan, Results
    from bitmtp.evaluation.task import Task


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What to evaluate."""

    tasks: Annotated[
        str, Option(help="ifeval, gsm8k, math500, humaneval+, mbpp+, and names of lm-evaluation-harness's tasks.")
    ] = "ifeval,gsm8k,math500,humaneval+,mbpp+"
    data: Annotated[str | None, Option(metavar="FOLDER", help="Folder of the questions and of task files.")] = None
    policy: Annotated[
        str,
        Option(
            help="Beside autoregressive decoding: of speculative, auto, hybrid and confidence, with a block size or "
            "without (hybrid:4,hybrid:8)."
        ),
    ] = "speculative:8"
    tau: Annotated[float | None, Option(help="Probability from which a proposal is confident (lossy policies).")] = None
    limit: Annotated[int | None, Option(min=1, help="First questions of each task only.")] = None
    lossy_limit: Annotated[int | None, Option(min=1, help="First questions only, for lossy policies.")] = None
    max_tokens: Annotated[int | None, Option(min=2, help="Most tokens of a text; default: the task's.")] = None
    batch: Annotated[int, Option(min=1, help="Texts written at a time.")] = 8
    timed: Annotated[int, Option(min=0, help="Questions of each task to measure speeds on, one text at a time.")] = 10
    output: Annotated[str, Option(metavar="FILE", help="Log of what is done; a run goes on where it ends.")] = (
        "eval.jsonl"
    )
    shard: Annotated[str | None, Option(metavar="I/N", help="Only write every N-th text, from the I-th on.")] = None
    evalplus: Annotated[
        str | None,
        Option(metavar="FOLDER", help="Also write the code tasks' answers there, for EvalPlus's own runner."),
    ] = None
    json: Annotated[str | None, Option(metavar="FILE", help="Write the figures and the environment to a file.")] = None

    def policies(self, model_block_size: int) -> tuple[Policy, ...]:
        """Autoregressive decoding, then what was asked for.

        Raises:
            RequestError: a policy is unknown, or an option has no meaning under any.
        """
        from bitmtp.core.policies import POLICIES, make_policy

        made = [make_policy("autoregressive", model_block_size)]
        for entry in _split(self.policy):
            name, _, size = entry.partition(":")
            if size and not size.isdigit():
                raise RequestError(f"policy {entry!r} is not NAME or NAME:BLOCKSIZE, such as hybrid:4")
            takes_tau = name in POLICIES and "tau" in inspect.signature(POLICIES[name]).parameters
            tau = self.tau if takes_tau else None
            made.append(make_policy(name, model_block_size, block_size=int(size) if size else None, tau=tau))
        if self.tau is not None and all(policy.lossless for policy in made):
            raise RequestError(f"tau has no meaning under {self.policy}; leave it out")
        return tuple(dict.fromkeys(made))

    def share(self) -> tuple[int, int]:
        """The shard as (number from 0, how many)."""
        index, _, count = (self.shard or "1/1").partition("/")
        if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
            raise RequestError(f"shard {self.shard!r} is not I/N, such as 1/4")
        return int(index) - 1, int(count)


@with_options
def eval(*, model: ModelOptions, options: EvalOptions) -> None:
    """Score the texts of each policy on benchmark tasks.

    What is done is kept in the output file: a run goes on where the last one ended, and the files of shards, joined
    with cat, are judged, timed and shown by one run. The exit code is 1 if a lossless policy changed a text.
    """
    from bitmtp.benchmark.records import ResultLog
    from bitmtp.evaluation.plan import Results

    share = options.share()
    questions, others = _questions(options)
    log, engine = ResultLog(options.output), model.load()
    plan = _plan(model, options, engine, questions)
    results = Results(log, plan)
    _write(engine, results, share, options.batch)
    if options.shard is not None:
        return
    _judge(results, model.threads)
    _time(engine, results)
    figures = _figures(results)
    scores = _run_harness(engine, plan, log, others, options) if others else {}
    _report(engine, plan, figures, scores, options)
    if options.evalplus is not None:
        _write_samples(results, Path(options.evalplus))
    _check_lossless(figures)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _questions(options: EvalOptions) -> tuple[dict[Task, list[Any]], list[str]]:
    """The questions of our own tasks, and the names of the others, which are the harness's."""
    from bitmtp.evaluation.tasks import TASKS

    names = _split(options.tasks)
    ours, others = [name for name in names if name in TASKS], [name for name in names if name not in TASKS]
    if ours and options.data is None:
        raise RequestError(f"{', '.join(ours)}: name the folder of the questions with --data (see docs/evaluation.md)")
    if others and options.shard is not None:
        raise RequestError(f"{', '.join(others)}: lm-evaluation-harness's tasks have no shards; leave --shard out")
    return {TASKS[name]: TASKS[name].questions(options.data or "")[: options.limit] for name in ours}, others


def _plan(model: ModelOptions, options: EvalOptions, engine: Engine, questions: dict[Task, list[Any]]) -> Plan:
    from bitmtp.benchmark.records import model_fingerprint
    from bitmtp.evaluation.plan import Plan
    from bitmtp.models import shipped_model

    return Plan(
        model=model_fingerprint(model.model or shipped_model()),
        backend=engine.backend.name,
        questions=questions,
        policies=options.policies(engine.config.block_size),
        lossy_limit=options.lossy_limit,
        max_tokens=options.max_tokens,
        timed=options.timed,
    )


def _write(engine: Engine, results: Results, share: tuple[int, int], batch: int) -> None:
    from bitmtp.evaluation.run import unwritten, write

    for task, policy, left in unwritten(results, share):
        with progress(f"{task.name}, {policy_label(policy)}", len(left), lines=True) as tick:
            write(engine, results, task, policy, left, batch, tick)


def _judge(results: Results, threads: int | None) -> None:
    from bitmtp.evaluation.run import judge, unjudged

    for task, answers in unjudged(results):
        with progress(f"{task.name}, judging", len(answers), lines=True) as tick:
            judge(results, task, answers, threads or os.cpu_count() or 1, tick)


def _time(engine: Engine, results: Results) -> None:
    from bitmtp.evaluation.run import measure, untimed

    plan = results.plan
    for task in untimed(results):
        texts = min(plan.timed, len(plan.questions[task])) * len(plan.policies)
        with progress(f"{task.name}, speeds", texts, lines=True) as tick:
            measure(engine, results, task, tick)


def _write_samples(results: Results, folder: Path) -> None:
    from bitmtp.evaluation.evalplus import write_samples

    for file in write_samples(results, folder):
        print(f"wrote {file}")


def _figures(results: Results) -> list[Figures]:
    from bitmtp.evaluation.figures import figures_of

    return [figures for task in results.plan.questions for figures in figures_of(results, task)]


def _run_harness(
    engine: Engine, plan: Plan, log: ResultLog, names: Sequence[str], options: EvalOptions
) -> dict[Policy, list[Score]]:
    from bitmtp.evaluation.harness import HarnessModel, run_tasks

    scores = {}
    for policy in plan.policies:
        model = HarnessModel(engine, policy, log=log, name=plan.model, batch=options.batch)
        scores[policy] = run_tasks(model, names, folder=options.data, limit=options.limit)
    return scores


def _report(
    engine: Engine,
    plan: Plan,
    figures: Sequence[Figures],
    scores: dict[Policy, list[Score]],
    options: EvalOptions,
) -> None:
    from bitmtp.benchmark.environment import environment

    for task in plan.questions:
        _print_task(task, [each for each in figures if each.task == task.name])
    if scores:
        _print_scores(scores)
    if options.json is not None:
        record = {
            "model": plan.model,
            "environment": asdict(environment()) | {"backend": engine.backend.name, **engine.backend.describe()},
            "options": asdict(options),
            "figures": [asdict(each) | {"lossless": each.policy.lossless} for each in figures],
            "harness": [asdict(each) | {"policy": asdict(policy)} for policy, own in scores.items() for each in own],
        }
        Path(options.json).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _print_task(task: Task, figures: Sequence[Figures]) -> None:
    rows = [
        [
            policy_label(each.policy),
            str(each.asked),
            f"{each.right / each.asked:.1%}",
            f"{each.interval[0]:.1%} to {each.interval[1]:.1%}",
            _difference(each) if place else "",
            f"{each.same} of {each.asked}" if place else "",
            f"{each.tokens_per_iteration:.2f}",
            f"{each.draft_acceptance_rate:.0%}" if each.policy.block_size > 1 else "-",
            f"{each.speed.tokens_per_second:.1f}" if each.speed else "",
            f"{each.speed.ratio:.2f}" if each.speed else "",
        ]
        for place, each in enumerate(figures)
    ]
    names = ["policy", "n", "right", "95%", "− AR", "same ids", "tok/iter", "accepted", "tok/s", "× AR"]
    print()
    print_table(f"{task.title} (greedy, {_lenient(figures[0])}{_truncated(figures[0])})", names, rows)


def _difference(figures: Figures) -> str:
    """Points more than autoregressive decoding; there is nothing to estimate where the texts are the same."""
    if figures.same == figures.asked:
        return "0"
    return f"{100 * figures.difference[0]:+.1f} ± {100 * figures.difference[1]:.1f}"


def _lenient(baseline: Figures) -> str:
    return "" if baseline.lenient is None else f"loosely {baseline.lenient / baseline.asked:.1%}, "


def _truncated(baseline: Figures) -> str:
    return f"{baseline.truncated / baseline.asked:.0%} of the texts cut at the longest length"


def _print_scores(scores: dict[Policy, list[Score]]) -> None:
    rows = [
        [
            f"{each.task} {each.metric.removesuffix(',none')}, {policy_label(policy)}",
            str(each.questions),
            f"{each.value:.4f}",
            "-" if each.error is None else f"± {1.96 * each.error:.4f}",
        ]
        for policy, own in scores.items()
        for each in own
    ]
    print()
    print_table("lm-evaluation-harness", ["task, metric, policy", "n", "value", "95%"], rows)


def _check_lossless(figures: Sequence[Figures]) -> None:
    broken = [each for each in figures if each.broken]
    for each in broken:
        print(
            f"bitmtp: MISMATCH: {policy_label(each.policy)} is lossless, but {each.asked - each.same} of {each.asked} "
            f"texts of {each.task} differ from autoregressive decoding's",
            file=sys.stderr,
        )
    if broken:
        raise typer.Exit(1)
