"""What a backend's own loop brings: the same greedy texts with the host between passes and without, in turns.

    python benchmarks/resident.py --backend cpu --threads 2 --prompts HumanEval.jsonl --limit 24

Both run the same core. The host's texts see a backend without ``run``, so that ``Loop`` drives every pass from Python.
Exit code 1 if the two ever differ, in their tokens or in what they count.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bitmtp.benchmark.prompts import encode_prompts, read_prompts
from bitmtp.core.costs import Tuning
from bitmtp.core.policies import make_policy
from bitmtp.core.policy import Policy
from bitmtp.engine import Engine, Request, Result
from bitmtp.errors import BitMTPError

OWN_LOOP = ("can_run", "run", "settle")


class HostDriven:
    """A backend whose own loop nobody sees."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        if name in OWN_LOOP:
            raise AttributeError(name)
        return getattr(self._backend, name)


@dataclass(frozen=True)
class Pair:
    """A text by either loop."""

    host: Result
    resident: Result

    @property
    def same(self) -> bool:
        """Tokens and what was counted of passes."""
        names = ("token_ids", "passes", "acceptance_histogram", "draft_acceptance_rate", "finish")
        return all(getattr(self.host, name) == getattr(self.resident, name) for name in names)

    @property
    def gain(self) -> float:
        """How many times faster a token is without the host."""
        return self.host.tpot_ms / self.resident.tpot_ms


def write_pair(host: Engine, own: Engine, request: Request, host_first: bool) -> Pair:
    """Both texts, of two tokens or more."""
    if host_first:
        return Pair(host.generate(request), own.generate(request))
    resident = own.generate(request)
    return Pair(host.generate(request), resident)


def report(name: str, pairs: list[Pair]) -> None:
    """A line: the ratio (median and quartiles), and milliseconds a token."""
    low, middle, high = quantiles([pair.gain for pair in pairs], n=4)
    host, resident = median(pair.host.tpot_ms for pair in pairs), median(pair.resident.tpot_ms for pair in pairs)
    print(f"{name}: {middle:.3f} x ({low:.3f} to {high:.3f}); {host:.2f} and {resident:.2f} ms a token")


def run(options: argparse.Namespace) -> int:
    """Print the gain of each policy."""
    fixed = Tuning.usual()  # costs change nothing under these policies: none are learned, and none kept
    engine = Engine.load(options.model, backend=options.backend, threads=options.threads, tuning=fixed)
    host = Engine(HostDriven(engine.backend), engine.tokenizer, engine.context, fixed)
    size = min(options.block_size, engine.config.block_size)
    policies: dict[str, Policy] = {
        "autoregressive": make_policy("autoregressive", size),
        f"speculative D={size}": make_policy("speculative", size, block_size=size, verify_bound=options.verify_bound),
    }
    prompts = encode_prompts(engine, read_prompts(options.prompts)[: options.limit])
    pairs: dict[str, list[Pair]] = {name: [] for name in policies}
    for each in (host, engine):
        each.generate(Request(prompts[0], 16))
    for index, prompt in enumerate(prompts):
        for name, policy in policies.items():
            request = Request(prompt, options.max_tokens, policy, seed=1)
            pairs[name].append(write_pair(host, engine, request, index % 2 == 0))
    for name, found in pairs.items():
        report(name, found)
    return 0 if all(pair.same for found in pairs.values() for pair in found) else 1


def main() -> int:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: the model that ships")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=6)
    parser.add_argument("--verify-bound", type=float, default=0.02)
    try:
        return run(parser.parse_args())
    except BitMTPError as error:
        print(f"resident.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
