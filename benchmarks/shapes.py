"""Adaptive shapes against fixed ones: the same prompts of four kinds, one run, policies taking turns.

    python benchmarks/shapes.py --data FOLDER --limit 10

Prints tokens a second as a ratio to autoregressive decoding, with an interval over texts (bootstrap, 95%), and checks
that every lossless text has the autoregressive ids. Exit code 1 if one differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bitmtp.benchmark.prompts import encode_prompts, read_prompts
from bitmtp.core.policies import make_policy
from bitmtp.core.policy import Policy
from bitmtp.engine import Engine, Request
from bitmtp.errors import BitMTPError
from bitmtp.sampling import Sampling

CODE = "Complete this Python function:\n```python\n{prompt}```"
SETS = {
    "HumanEval": ("humaneval/HumanEval.jsonl", CODE),
    "GSM8K": ("gsm8k/test.jsonl", None),
    "OASST": ("oasst_prompts/prompt_lottery_en_250.jsonl", None),
    "creative": ("creative_writing_v3/prompts.jsonl", None),
}


@dataclass
class Times:
    """Seconds, tokens and iterations of each text under one policy."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    iterations: int = 0
    passes: int = 0

    def rate(self, texts: Sequence[int]) -> float:
        """Tokens a second over these texts."""
        return sum(self.tokens[text] for text in texts) / sum(self.seconds[text] for text in texts)


def policies_of(engine: Engine, options: argparse.Namespace) -> dict[str, Policy]:
    """Autoregressive decoding first, then fixed blocks, then the adaptive policy."""
    size = engine.config.block_size
    made = {"autoregressive": make_policy("autoregressive", size)}
    for each in options.block_size:
        policy = make_policy("speculative", size, block_size=each, verify_bound=options.verify_bound)
        made[f"speculative D={each}"] = policy
    return {**made, "auto": make_policy("auto", size)}


def measure(
    engine: Engine, prompts: list[list[int]], policies: dict[str, Policy], options: argparse.Namespace
) -> dict[str, Times]:
    """Every prompt under every policy, in an order that rotates."""
    times = {name: Times() for name in policies}
    names = list(policies)
    for number, prompt in enumerate(prompts):
        texts: dict[str, list[int]] = {}
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            sampling = Sampling(temperature=options.temperature)
            result = engine.generate(Request(prompt, options.max_tokens, policies[name], sampling, seed=number + 1))
            times[name].seconds.append(result.tpot_ms * (result.num_tokens - 1) / 1e3)
            times[name].tokens.append(result.num_tokens - 1)
            times[name].iterations += sum(result.acceptance_histogram)
            times[name].passes += result.passes
            texts[name] = result.token_ids
        for name, ids in texts.items():
            if ids != texts["autoregressive"]:
                raise SystemExit(f"MISMATCH: {name}, prompt {number}")
    return times


def interval(a: Times, b: Times) -> tuple[float, float, float]:
    """Ratio of the rates, and its 95% bootstrap interval over texts."""
    luck, texts = random.Random(0), range(len(a.tokens))
    draws = sorted(a.rate(pick) / b.rate(pick) for pick in (luck.choices(texts, k=len(texts)) for _ in range(1000)))
    return a.rate(texts) / b.rate(texts), draws[25], draws[974]


def report(results: dict[str, dict[str, Times]]) -> None:
    """One line a policy; the mix is the harmonic mean over the sets."""
    print("× autoregressive   " + "  ".join(f"{name:>24}" for name in [*results, "mix"]))
    for policy in next(iter(results.values())):
        cells, ratios = [], []
        for times in results.values():
            ratio, low, high = interval(times[policy], times["autoregressive"])
            mine = times[policy]
            ratios.append(ratio)
            cells.append(f"{ratio:.2f} [{low:.2f} {high:.2f}] {sum(mine.tokens) / mine.iterations:.2f}/it")
        mix = len(ratios) / sum(1 / ratio for ratio in ratios)
        print(f"{policy:18} " + "  ".join(f"{cell:>24}" for cell in [*cells, f"{mix:.3f}"]))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the four prompt sets")
    parser.add_argument("--model", help="checkpoint folder; default: the shipped model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--block-size", type=int, nargs="+", default=[4, 5, 6, 8])
    parser.add_argument("--verify-bound", type=float, default=0.05)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, default=10, help="prompts of each set, spread over it")
    return parser.parse_args()


def run(options: argparse.Namespace) -> None:
    """Measure and report."""
    engine = Engine.load(options.model, backend=options.backend, threads=options.threads)
    policies = policies_of(engine, options)
    costs = engine.tuning.costs
    print("cost table, ms:", dict(zip(costs.widths, (round(each, 2) for each in costs.milliseconds), strict=True)))
    print("per position:", costs.per_position)
    results = {}
    for name, (file, template) in SETS.items():
        read = read_prompts(Path(options.data) / file)
        prompts = encode_prompts(engine, read[:: max(len(read) // options.limit, 1)][: options.limit], template)
        results[name] = measure(engine, prompts, policies, options)
        print(f"{name} done", file=sys.stderr)
    report(results)


if __name__ == "__main__":
    try:
        run(parse())
    except BitMTPError as error:
        sys.exit(f"shapes: {error}")
