"""``bitmtp tune``: the fastest settings for a model on this machine, into a profile."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from bitmtp.cli.options import ModelOptions, with_options
from bitmtp.cli.progress import progress
from bitmtp.cli.render import policy_label, print_table
from bitmtp.errors import BitMTPError, RequestError

if TYPE_CHECKING:
    from bitmtp.benchmark.busy import Reading
    from bitmtp.benchmark.policies import PolicyFigures
    from bitmtp.core.costs import Tuning
    from bitmtp.engine import Engine
    from bitmtp.tuning.profile import Profile


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What to tune for."""

    prompts: Annotated[
        str | None, Option(metavar="FILE", help="Sample prompts, as for bench; default: a few built-in ones.")
    ] = None
    limit: Annotated[int, Option(min=1, help="Use the first N prompts.")] = 8
    max_tokens: Annotated[int, Option(min=8, help="Most tokens of a text.")] = 128
    lossy: Annotated[bool, Option("--lossy", help="Consider confidence and hybrid too; they change texts.")] = False
    output: Annotated[
        str | None,
        Option(metavar="FILE", help="The profile to write; default: where commands look for this model's."),
    ] = None


@with_options
def tune(*, model: ModelOptions, options: TuneOptions) -> None:
    """Find the fastest settings for a model on this machine.

    Measures block sizes, bounds and threads on sample prompts and writes the best into a profile; says so if drafting
    does not pay. Only lossless settings are considered, unless --lossy is given. It also fits what a draft's
    probabilities mean. `generate`, `chat` and `serve` then decode as the profile says, if no option says otherwise.
    A machine that others keep busy is refused, unless --threads says how many to use.
    """
    output = _output(model, options)
    from bitmtp.benchmark.policies import WORTH
    from bitmtp.tuning.search import best, candidates, search, texts

    threads, engine, prompts = _choose_threads(model, options)
    tuning = _calibrate(engine, prompts, options)
    policies = candidates(engine.config.block_size, lossy=options.lossy)
    with progress("settings", texts(len(policies), len(prompts))) as tick:
        figures = search(engine, prompts, policies, max_tokens=options.max_tokens, tick=tick)
    chosen = best(figures)
    _print_figures(figures, threads, options.max_tokens)
    if chosen is figures[0]:
        why = (
            f"no setting was {WORTH:g} × as fast as autoregressive decoding"
            if len(figures) > 1
            else "the model has none"
        )
        print(f"drafting does not pay here: {why}")
    _profile(model, engine, threads, chosen, tuning).write(output)
    print(f"wrote {output}: {policy_label(chosen.policy)}, {threads} threads")


def _output(model: ModelOptions, options: TuneOptions) -> Path:
    from bitmtp.models import shipped_model
    from bitmtp.tuning.profile import usual_place

    if options.output is None:
        usual = usual_place(model.model or shipped_model(), model.backend)
        usual.parent.mkdir(parents=True, exist_ok=True)
        return usual
    if not Path(options.output).absolute().parent.is_dir():
        raise RequestError(f"{options.output}: its folder does not exist")
    return Path(options.output)


def _check_idle(reading: Reading | None, threads: int | None) -> None:
    """Where others take the cores, more threads look slower than one, and the profile would say so for good.

    Raises:
        BitMTPError: others do, and the number of threads is to be measured.
    """
    if reading is None or not reading.busy:
        return
    if threads is None:
        raise BitMTPError(
            f"this machine is busy: {reading}, and settings chosen now would be wrong when it is not; "
            "wait until it is idle, or say with --threads how many to use"
        )
    print(f"bitmtp: note: this machine is busy: {reading}; tune again when it is idle", file=sys.stderr)


def _calibrate(engine: Engine, prompts: list[list[int]], options: TuneOptions) -> Tuning | None:
    """What the probabilities of drafts mean, if there are any; from here on the engine knows it too."""
    from bitmtp.tuning.calibration import calibrate

    if engine.config.block_size == 1:
        return None
    with progress("drafts", len(prompts) + len(prompts[::2])) as tick:
        engine.tuning = calibrate(engine, prompts, max_tokens=options.max_tokens, tick=tick)
    return engine.tuning


def _choose_threads(model: ModelOptions, options: TuneOptions) -> tuple[int, Engine, list[list[int]]]:
    from bitmtp.benchmark.busy import Watch, look
    from bitmtp.benchmark.prompts import BUILT_IN, encode_prompts, read_prompts
    from bitmtp.tuning.search import best_threads

    cores = os.cpu_count() or 1
    counts = [model.threads] if model.threads else sorted({cores, max(cores // 2, 1)}, reverse=True)
    read = read_prompts(options.prompts) if options.prompts else list(BUILT_IN)
    first = replace(model, threads=counts[0]).load()
    prompts = encode_prompts(first, read[: options.limit])
    _check_idle(look(), model.threads)
    watch = Watch()
    with progress("threads", 4 * len(counts)) as tick:
        count, engine = best_threads(
            lambda count: first if count == counts[0] else replace(model, threads=count).load(),
            counts,
            prompts[:2],
            max_tokens=options.max_tokens,
            tick=tick,
        )
    if model.threads is None:
        _check_idle(watch.reading(), None)
    return count, engine, prompts


def _print_figures(figures: list[PolicyFigures], threads: int, max_tokens: int) -> None:
    rows = [
        [
            policy_label(each.policy),
            f"{each.tokens_per_second:.1f}",
            f"{each.ratio:.2f}",
            f"{each.tokens_per_iteration:.2f}",
        ]
        for each in figures
    ]
    print_table(
        f"The best settings (greedy, up to {max_tokens} tokens, {threads} threads)",
        ["policy", "tok/s", "× AR", "tok/iter"],
        rows,
    )


def _profile(
    model: ModelOptions, engine: Engine, threads: int, chosen: PolicyFigures, tuning: Tuning | None
) -> Profile:
    import inspect

    from bitmtp.benchmark.environment import environment
    from bitmtp.benchmark.records import model_fingerprint
    from bitmtp.core.policies import POLICIES
    from bitmtp.models import shipped_model
    from bitmtp.tuning.profile import Profile

    policy = chosen.policy
    return Profile(
        model=model_fingerprint(model.model or shipped_model()),
        cpu=environment().cpu,
        backend=engine.backend.name,
        threads=threads,
        policy=policy.name,
        tokens_per_second=round(chosen.tokens_per_second, 2),
        ratio=round(chosen.ratio, 3),
        tuning=tuning,
        **{name: getattr(policy, name) for name in inspect.signature(POLICIES[policy.name]).parameters},
    )
