"""``bitmtp bench``: policies against autoregressive decoding, and the cost of a pass by width."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from bitmtp.cli.options import ModelOptions, with_options
from bitmtp.cli.progress import progress
from bitmtp.cli.render import policy_label, print_facts, print_table
from bitmtp.errors import RequestError

if TYPE_CHECKING:
    from bitmtp.backends.base import Backend
    from bitmtp.benchmark.policies import PolicyFigures, Settings
    from bitmtp.benchmark.widths import PassCosts
    from bitmtp.decoding.policy import Policy
    from bitmtp.engine import Engine


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure."""

    prompts: Annotated[
        str | None, Option(metavar="FILE", help="Prompts: .jsonl (prompt, question, turns or messages) or one a line.")
    ] = None
    template: Annotated[
        str | None, Option(help="Text around each prompt, with {prompt} where it goes; \\n is a new line.")
    ] = None
    limit: Annotated[int | None, Option(min=1, help="Use the first N prompts.")] = None
    max_tokens: Annotated[int, Option(min=2, help="Most tokens of a text.")] = 256
    rounds: Annotated[int, Option(min=1, help="Rounds that medians are taken over.")] = 3
    policy: Annotated[str | None, Option(help="Policies to compare, such as speculative,hybrid; default: all.")] = None
    block_size: Annotated[str | None, Option(help="Block sizes to compare, such as 4,8.")] = None
    tau: Annotated[float | None, Option(help="τ of confidence and hybrid.")] = None
    min_prefix: Annotated[int | None, Option(help="Shortest confident prefix of hybrid.")] = None
    verify_bound: Annotated[float | None, Option(help="Joint probability from which proposals are verified.")] = None
    widths: Annotated[bool, Option("--widths", help="Measure the cost of a pass by width.")] = False
    history: Annotated[int, Option(min=1, help="Positions before the pass, with --widths.")] = 256
    shape: Annotated[str | None, Option(help="Random weights: bonsai-1.7b, bonsai-4b, bitnet-2b or smollm2-135m.")] = (
        None
    )
    json: Annotated[str | None, Option(metavar="FILE", help="Write the figures and the environment to a file.")] = None

    def check(self, model: ModelOptions) -> None:
        """Refuse what contradicts itself before anything slow begins."""
        if self.shape is not None and (self.prompts is not None or model.model is not None):
            raise RequestError("a shape has random weights: leave out --prompts and --model")
        if self.prompts is None and (self.template is not None or self.limit is not None):
            raise RequestError("--template and --limit need --prompts")
        if self.json is not None and not Path(self.json).absolute().parent.is_dir():
            raise RequestError(f"{self.json}: its folder does not exist")

    def settings(self) -> Settings:
        """The policies asked for."""
        from bitmtp.benchmark.policies import Settings

        names = {"names": tuple(_split(self.policy))} if self.policy else {}
        sizes = tuple(_whole(size) for size in _split(self.block_size or ""))
        return Settings(
            block_sizes=sizes, tau=self.tau, min_prefix=self.min_prefix, verify_bound=self.verify_bound, **names
        )


@with_options
def bench(*, model: ModelOptions, options: BenchOptions) -> None:
    """Compare policies and pass widths.

    Without --prompts, --widths or --shape: built-in prompts and widths, on the model. The exit code is 1 if a lossless
    policy changed a text.
    """
    options.check(model)
    costs, figures = None, None
    if options.shape is not None:
        backend = _random_backend(model, options)
        costs = _measure_widths(backend, options)
    else:
        engine = model.load()
        backend = engine.backend
        comparison = _comparison(engine, options) if options.prompts is not None or not options.widths else None
        if options.widths or options.prompts is None:
            _check_context(engine.context, options)
            costs = _measure_widths(backend, options)
        if comparison is not None:
            figures = _compare_policies(engine, *comparison, options)
    name = options.shape or Path(model.model or "shipped model").name
    _report(name, backend, costs, figures, options)
    if figures is not None:
        _check_lossless(figures)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise RequestError(f"block size {text!r} is not a whole number") from None


def _random_backend(model: ModelOptions, options: BenchOptions) -> Backend:
    from bitmtp.backends import load_backend
    from bitmtp.benchmark.shapes import random_model
    from bitmtp.benchmark.widths import needed_context

    checkpoint = random_model(options.shape or "")
    context = model.context or checkpoint.config.max_position
    _check_context(context, options)
    context = needed_context(options.history, options.max_tokens)
    return load_backend(model.backend, checkpoint, threads=model.threads, context=context)


def _check_context(context: int, options: BenchOptions) -> None:
    from bitmtp.benchmark.widths import needed_context

    if (needed := needed_context(options.history, options.max_tokens)) > context:
        raise RequestError(f"history and text need a context of {needed}, it is {context}; lower --history")


def _measure_widths(backend: Backend, options: BenchOptions) -> PassCosts:
    from bitmtp.benchmark.widths import measure_passes

    with progress("widths", options.rounds) as tick:
        return measure_passes(
            backend, history=options.history, tokens=options.max_tokens, rounds=options.rounds, tick=tick
        )


def _comparison(engine: Engine, options: BenchOptions) -> tuple[list[list[int]], list[Policy]]:
    """Prompts and policies to compare, checked before anything is measured."""
    from bitmtp.benchmark.prompts import BUILT_IN, encode_prompts, read_prompts

    policies = options.settings().policies(engine.config.block_size)
    prompts = read_prompts(options.prompts) if options.prompts else list(BUILT_IN)
    template = options.template.replace("\\n", "\n") if options.template else None  # shells pass \\n as two characters
    return encode_prompts(engine, prompts[: options.limit], template), policies


def _compare_policies(
    engine: Engine, ids: list[list[int]], policies: list[Policy], options: BenchOptions
) -> list[PolicyFigures]:
    from bitmtp.benchmark.policies import compare

    with progress("policies", options.rounds * len(ids) * len(policies)) as tick:
        return compare(engine, ids, policies, max_tokens=options.max_tokens, rounds=options.rounds, tick=tick)


def _report(
    name: str, backend: Backend, costs: PassCosts | None, figures: list[PolicyFigures] | None, options: BenchOptions
) -> None:
    from bitmtp.benchmark.environment import environment, peak_memory_mb

    where, runs = environment(), {"backend": backend.name, **backend.describe()}
    print_facts(name, [("CPU", f"{where.cpu}, {where.cores} cores ({where.isa})"), *runs.items()])
    if costs is not None:
        _print_costs(costs)
    if figures is not None:
        _print_figures(figures, options)
    if options.json is not None:
        record: dict[str, Any] = {
            "model": name,
            "environment": asdict(where) | runs | {"peak_memory_mb": round(peak_memory_mb(), 1)},
            "options": asdict(options),
            "passes": None if costs is None else asdict(costs),
            "policies": None
            if figures is None
            else [asdict(each) | {"lossless": each.policy.lossless} for each in figures],
        }
        Path(options.json).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _print_costs(costs: PassCosts) -> None:
    rows = [[str(cost.width), f"{cost.milliseconds:.2f}", f"{cost.ratio:.2f}"] for cost in costs.costs]
    print()
    print_table(
        f"One pass by width (history {costs.history}, exact head on every row)", ["width", "ms", "× width 1"], rows
    )
    print(
        f"autoregressive: {costs.implied_tokens_per_second:.1f} tok/s implied by width 1, "
        f"{costs.decoded_tokens_per_second:.1f} tok/s decoding"
    )


def _print_figures(figures: list[PolicyFigures], options: BenchOptions) -> None:
    rows = [
        [
            policy_label(each.policy),
            f"{each.tokens_per_second:.1f}",
            f"{each.ratio:.2f}",
            f"{each.tokens_per_iteration:.2f}",
            f"{each.tokens_per_pass:.2f}",
            f"{each.draft_acceptance_rate:.0%}" if each.policy.block_size > 1 else "-",
            "yes" if each.policy.lossless else f"no ({len(each.mismatches)} texts differ)",
        ]
        for each in figures
    ]
    print()
    print_table(
        f"Policies (greedy, up to {options.max_tokens} tokens, medians of {options.rounds} rounds)",
        ["policy", "tok/s", "× AR", "tok/iter", "tok/pass", "accepted", "lossless"],
        rows,
    )


def _check_lossless(figures: list[PolicyFigures]) -> None:
    broken = [each for each in figures if each.broken]
    for each in broken:
        numbers = ", ".join(str(number + 1) for number in each.mismatches)
        print(
            f"bitmtp: MISMATCH: {policy_label(each.policy)} is lossless, but its token ids differ from autoregressive "
            f"decoding's for prompts {numbers}",
            file=sys.stderr,
        )
    if broken:
        raise typer.Exit(1)
