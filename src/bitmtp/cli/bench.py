"""``bitmtp bench``: policies against autoregressive decoding, and the cost of a pass by width."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from bitmtp.cli.options import ModelOptions, with_options
from bitmtp.cli.progress import progress
from bitmtp.cli.render import policy_label
from bitmtp.errors import RequestError

if TYPE_CHECKING:
    from bitmtp.backends.base import Backend
    from bitmtp.benchmark.busy import Reading
    from bitmtp.benchmark.policies import PolicyFigures, Settings
    from bitmtp.benchmark.widths import PassCosts
    from bitmtp.core.policy import Policy
    from bitmtp.engine import Engine

Shape = Literal["smollm2-135m", "bonsai-1.7b", "bonsai-4b", "bonsai-8b", "bitnet-2b"]
HISTORY = 256  # positions before the passes that are timed
ROUNDS, MANY_PROMPTS = 3, 16  # many prompts make up for fewer rounds


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
    policy: Annotated[
        str | None, Option(help="Of speculative, auto, confidence and hybrid, such as auto,hybrid; default: all.")
    ] = None
    block_size: Annotated[str | None, Option(help="Block sizes to compare, such as 4,8.")] = None
    widths: Annotated[bool, Option("--widths", help="Measure the cost of a pass by width only.")] = False
    shape: Annotated[Shape | None, Option(help="Passes of a well-known model's size, with random weights.")] = None
    json: Annotated[str | None, Option(metavar="FILE", help="Write the figures and the environment to a file.")] = None

    def check(self, model: ModelOptions) -> None:
        """Refuse what contradicts itself before anything slow begins."""
        if self.shape is not None and (self.prompts is not None or model.model is not None):
            raise RequestError("a shape has random weights: leave out --prompts and --model")
        if self.widths and self.prompts is not None:
            raise RequestError("--widths times passes, not texts: leave out --prompts")
        if self.prompts is None and (self.template is not None or self.limit is not None):
            raise RequestError("--template and --limit need --prompts")
        if self.json is not None and not Path(self.json).absolute().parent.is_dir():
            raise RequestError(f"{self.json}: its folder does not exist")

    def settings(self) -> Settings:
        """The policies asked for."""
        from bitmtp.benchmark.policies import Settings

        names = {"names": tuple(_split(self.policy))} if self.policy else {}
        return Settings(block_sizes=tuple(_whole(size) for size in _split(self.block_size or "")), **names)


@dataclass(slots=True)
class _Measured:
    """What there is to report."""

    name: str
    backend: Backend
    costs: PassCosts | None = None
    figures: list[PolicyFigures] | None = None
    rounds: int = ROUNDS


@with_options
def bench(*, model: ModelOptions, options: BenchOptions) -> None:
    """Compare policies and pass widths.

    Without --prompts, --widths or --shape: built-in prompts and widths, on the model. The exit code is 1 if a
    lossless policy changed a text.
    """
    from bitmtp.benchmark.busy import Watch

    options.check(model)
    watch = Watch()
    measured = _measure_shape(model, options) if options.shape else _measure_model(model, options)
    _report(measured, options, watch.reading())
    _check_lossless(measured.figures or [])


def _measure_shape(model: ModelOptions, options: BenchOptions) -> _Measured:
    backend = _random_backend(model, options)
    return _Measured(options.shape or "", backend, costs=_measure_widths(backend, HISTORY, options))


def _measure_model(model: ModelOptions, options: BenchOptions) -> _Measured:
    engine = model.load()
    measured = _Measured(Path(model.model or "shipped model").name, engine.backend)
    comparison = None if options.widths else _comparison(engine, options)
    if options.prompts is None:
        measured.costs = _measure_widths(engine.backend, _history(engine.context, options), options)
    if comparison is not None:
        prompts, policies = comparison
        measured.rounds = 1 if len(prompts) >= MANY_PROMPTS else ROUNDS
        measured.figures = _compare_policies(engine, prompts, policies, measured.rounds, options.max_tokens)
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
    from bitmtp.benchmark.widths import needed_context

    checkpoint, context = random_model(options.shape or ""), needed_context(HISTORY, options.max_tokens)
    if context > (model.context or checkpoint.config.max_position):
        raise RequestError(f"passes and texts need a context of {context}; raise --context or lower --max-tokens")
    return load_backend(model.backend, checkpoint, threads=model.threads, context=context)


def _history(context: int, options: BenchOptions) -> int:
    """As many positions before a pass as the context has room for."""
    from bitmtp.benchmark.widths import needed_context

    if (room := context - needed_context(0, options.max_tokens)) < 1:
        raise RequestError(f"a context of {context} has no room for {options.max_tokens} tokens; lower --max-tokens")
    return min(HISTORY, room)


def _measure_widths(backend: Backend, history: int, options: BenchOptions) -> PassCosts:
    from bitmtp.benchmark.widths import measure_passes

    with progress("widths", ROUNDS) as tick:
        return measure_passes(backend, history=history, tokens=options.max_tokens, rounds=ROUNDS, tick=tick)


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
    engine: Engine, ids: list[list[int]], policies: list[Policy], rounds: int, max_tokens: int
) -> list[PolicyFigures]:
    from bitmtp.benchmark.policies import compare

    with progress("policies", rounds * len(ids) * len(policies)) as tick:
        return compare(engine, ids, policies, max_tokens=max_tokens, rounds=rounds, tick=tick)


def _report(measured: _Measured, options: BenchOptions, meanwhile: Reading | None) -> None:
    from bitmtp.benchmark.environment import environment, peak_memory_mb
    from bitmtp.cli.bench_tables import print_costs, print_machine, print_policies, takeaway

    where, backend = environment(), measured.backend
    print_machine(measured.name, where, backend)
    if measured.costs is not None:
        print_costs(measured.costs)
    if measured.figures is not None:
        print_policies(measured.figures, _kind(measured, options.max_tokens))
    print(f"\n{takeaway(measured.costs, measured.figures)}")
    if meanwhile is not None and meanwhile.busy:
        print(f"bitmtp: note: {meanwhile} meanwhile; an idle machine is faster", file=sys.stderr)
    if options.json is not None:
        record: dict[str, Any] = {
            "model": measured.name,
            "environment": asdict(where)
            | {"backend": backend.name, **backend.describe(), "peak_memory_mb": round(peak_memory_mb(), 1)},
            "options": asdict(options),
            "meanwhile": None if meanwhile is None else asdict(meanwhile),
            "passes": None if measured.costs is None else asdict(measured.costs),
            "policies": None if measured.figures is None else _policy_records(measured.figures),
        }
        Path(options.json).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _kind(measured: _Measured, max_tokens: int) -> str:
    rounds = f", medians of {measured.rounds} rounds" if measured.rounds > 1 else ""
    return f"greedy, the same prompts in turns, up to {max_tokens} tokens{rounds}"


def _policy_records(figures: list[PolicyFigures]) -> list[dict[str, Any]]:
    return [asdict(each) | {"lossless": each.policy.lossless} for each in figures]


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
