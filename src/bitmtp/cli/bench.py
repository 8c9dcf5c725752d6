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
from bitmtp.cli.render import policy_label, print_facts
from bitmtp.errors import RequestError

if TYPE_CHECKING:
    from bitmtp.backends.base import Backend
    from bitmtp.benchmark.policies import PolicyFigures, Settings
    from bitmtp.benchmark.profile import Profile
    from bitmtp.benchmark.widths import PassCosts
    from bitmtp.core.policy import Policy
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
    profile: Annotated[
        bool, Option("--profile", help="Where time goes: kernels of a pass, parts of the time to the first token.")
    ] = False
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


@dataclass(slots=True)
class _Measured:
    """What there is to report."""

    name: str
    backend: Backend
    costs: PassCosts | None = None
    figures: list[PolicyFigures] | None = None
    profile: Profile | None = None


@with_options
def bench(*, model: ModelOptions, options: BenchOptions) -> None:
    """Compare policies and pass widths.

    Without --prompts, --widths, --profile or --shape: built-in prompts and widths, on the model. The exit
    code is 1 if a lossless policy changed a text.
    """
    options.check(model)
    measured = _measure_shape(model, options) if options.shape else _measure_model(model, options)
    _report(measured, options)
    _check_lossless(measured.figures or [])


def _measure_shape(model: ModelOptions, options: BenchOptions) -> _Measured:
    backend = _random_backend(model, options)
    measured = _Measured(options.shape or "", backend)
    if options.profile:
        measured.profile = _profile(backend, _shape_context(options), options)
    if options.widths or not options.profile:
        measured.costs = _measure_widths(backend, options)
    return measured


def _measure_model(model: ModelOptions, options: BenchOptions) -> _Measured:
    engine = model.load()
    measured = _Measured(Path(model.model or "shipped model").name, engine.backend)
    chosen = options.widths or options.profile
    comparison = _comparison(engine, options) if options.prompts is not None or not chosen else None
    if options.profile:
        _check_context(engine.context, options)
        measured.profile = _profile(engine.backend, engine.context, options)
    if options.widths or (options.prompts is None and not chosen):
        _check_context(engine.context, options)
        measured.costs = _measure_widths(engine.backend, options)
    if comparison is not None:
        measured.figures = _compare_policies(engine, *comparison, options)
    return measured


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

    checkpoint = random_model(options.shape or "")
    context = model.context or checkpoint.config.max_position
    _check_context(context, options)
    context = _shape_context(options)
    return load_backend(model.backend, checkpoint, threads=model.threads, context=context, draft_head=model.draft_head)


def _shape_context(options: BenchOptions) -> int:
    """Positions that a shape's measurements use; a profile's prompts are as long as they may be."""
    from bitmtp.benchmark.profile import PROMPTS
    from bitmtp.benchmark.widths import needed_context

    needed = needed_context(options.history, options.max_tokens)
    return max(needed, PROMPTS[-1] + 1) if options.profile else needed


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
    policies = options.settings().policies(engine.config.block_size)
    return _prompts(engine, options), policies


def _prompts(engine: Engine, options: BenchOptions) -> list[list[int]]:
    from bitmtp.benchmark.prompts import BUILT_IN, encode_prompts, read_prompts

    prompts = read_prompts(options.prompts) if options.prompts else list(BUILT_IN)
    template = options.template.replace("\\n", "\n") if options.template else None  # shells pass \\n as two characters
    return encode_prompts(engine, prompts[: options.limit], template)


def _compare_policies(
    engine: Engine, ids: list[list[int]], policies: list[Policy], options: BenchOptions
) -> list[PolicyFigures]:
    from bitmtp.benchmark.policies import compare

    with progress("policies", options.rounds * len(ids) * len(policies)) as tick:
        return compare(engine, ids, policies, max_tokens=options.max_tokens, rounds=options.rounds, tick=tick)


def _profile(backend: Backend, context: int, options: BenchOptions) -> Profile:
    from bitmtp.benchmark.profile import PROMPTS, measure_profile

    with progress("profile", len(PROMPTS)) as tick:
        return measure_profile(backend, context=context, history=options.history, rounds=options.rounds, tick=tick)


def _report(measured: _Measured, options: BenchOptions) -> None:
    from bitmtp.benchmark.environment import environment, peak_memory_mb

    where, backend = environment(), measured.backend
    runs = {"backend": backend.name, **backend.describe()}
    print_facts(measured.name, [("CPU", f"{where.cpu}, {where.cores} cores ({where.isa})"), *runs.items()])
    _print_tables(measured, options)
    if options.json is not None:
        record: dict[str, Any] = {
            "model": measured.name,
            "environment": asdict(where) | runs | {"peak_memory_mb": round(peak_memory_mb(), 1)},
            "options": asdict(options),
            "passes": None if measured.costs is None else asdict(measured.costs),
            "policies": None if measured.figures is None else _policy_records(measured.figures),
            "profile": None if measured.profile is None else asdict(measured.profile),
        }
        Path(options.json).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _policy_records(figures: list[PolicyFigures]) -> list[dict[str, Any]]:
    return [asdict(each) | {"lossless": each.policy.lossless} for each in figures]


def _print_tables(measured: _Measured, options: BenchOptions) -> None:
    from bitmtp.cli.bench_tables import print_costs, print_policies, print_profile

    texts = f"greedy, up to {options.max_tokens} tokens, medians of {options.rounds} rounds"
    if measured.costs is not None:
        print_costs(measured.costs)
    if measured.profile is not None:
        print_profile(measured.profile)
    if measured.figures is not None:
        print_policies(measured.figures, f"Policies ({texts})")


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
