"""Passes in detail: their cost by width behind any history, the kernels they are made of, and what a first token takes.

    python benchmarks/passes.py --history 512 --rounds 3
    python benchmarks/passes.py --shape bonsai-1.7b --backend cuda --kernels

Kernels are known of the CUDA backend only; of the others, the time of the head is. `bitmtp bench --widths` measures the
same passes behind 256 tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bitmtp.backends import load_backend
from bitmtp.backends.base import Backend
from bitmtp.benchmark.environment import environment
from bitmtp.benchmark.profile import PROMPTS, Profile, measure_profile
from bitmtp.benchmark.shapes import SHAPES, random_model
from bitmtp.benchmark.widths import measure_passes, needed_context
from bitmtp.checkpoint import read
from bitmtp.cli.bench_tables import print_costs, print_machine
from bitmtp.cli.render import print_table
from bitmtp.errors import BitMTPError
from bitmtp.models import shipped_model

if TYPE_CHECKING:
    from bitmtp.backends.cuda.profile import KernelTime


def load(options: argparse.Namespace) -> tuple[Backend, int]:
    """The backend, and as many positions as the measurements use."""
    checkpoint = random_model(options.shape) if options.shape else read(options.model or shipped_model())
    longest, needed = checkpoint.config.max_position, needed_context(options.history, options.max_tokens)
    if needed > longest:
        raise BitMTPError(f"history and text need a context of {needed}; this model allows {longest}")
    context = min(max(needed, PROMPTS[-1] + 1), longest)
    return load_backend(options.backend, checkpoint, threads=options.threads, context=context), context


def print_profile(profile: Profile) -> None:
    """Kernels of passes, where the backend knows them, and the time to the first token."""
    for each in profile.passes:
        print()
        kind = "Draft" if each.masks else "Pass"
        print_table(
            f"{kind} of {each.width} rows, history {each.history}: {each.microseconds:.1f} us as a graph, "
            f"{each.total:.1f} us its kernels class by class",
            ["kernels", "launches", "us each", "us", "share", "MB", "GB/s"],
            [_kernel_row(kernel, each.total) for kernel in each.kernels],
        )
    rows = [
        [
            str(each.prompt),
            f"{each.total:.2f}",
            f"{each.prefill:.2f}",
            f"{each.head:.3f}",
            "in the head" if each.sampling is None else f"{each.sampling:.3f}",
        ]
        for each in profile.first_token
    ]
    print()
    print_table("Time to the first token, ms", ["prompt", "total", "prefill", "head", "sampling"], rows)


def _kernel_row(kernel: KernelTime, total: float) -> list[str]:
    row = [kernel.name, str(kernel.launches), f"{kernel.microseconds / kernel.launches:.2f}"]
    row += [f"{kernel.microseconds:.1f}", f"{kernel.microseconds / total:.1%}"]
    if not kernel.bytes:
        return [*row, "-", "-"]
    return [*row, f"{kernel.bytes / 1e6:.1f}", f"{kernel.bytes / kernel.microseconds / 1e3:.0f}"]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="checkpoint folder; default: the shipped model")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights instead of a model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--history", type=int, default=256, help="positions before the passes")
    parser.add_argument("--max-tokens", type=int, default=256, help="of the text that is decoded beside them")
    parser.add_argument("--rounds", type=int, default=3, help="that medians are taken over")
    parser.add_argument("--kernels", action="store_true", help="also the parts of a pass and of the first token")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    backend, context = load(options)
    print_machine(options.shape or Path(options.model or shipped_model()).name, environment(), backend)
    costs = measure_passes(backend, history=options.history, tokens=options.max_tokens, rounds=options.rounds)
    print_costs(costs)
    print(f"decoding: {costs.decoded_tokens_per_second:.1f} tokens a second")
    record = {"environment": asdict(environment()), "passes": asdict(costs)}
    if options.kernels:
        profile = measure_profile(backend, context=context, history=options.history, rounds=options.rounds)
        print_profile(profile)
        record["profile"] = asdict(profile)
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        run(parse(sys.argv[1:]))
    except BitMTPError as error:
        sys.exit(f"passes: {error}")
