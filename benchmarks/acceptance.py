"""How well a model drafts: tokens per iteration of greedy speculative decoding on code, arithmetic and conversation.

    python benchmarks/acceptance.py --data eval --output acceptance.jsonl --model A --model B

Reads humaneval/HumanEval.jsonl (all), gsm8k/test.jsonl (the first 200) and mt_bench/question.jsonl (80 first turns)
below the data folder. All proposals are verified. Texts run in batches, which changes no token. Results are appended to
the output file and skipped by the next run; the last lines give each set, their average, and the ratio of the first
model to the others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from bitmtp.benchmark.prompts import encode_prompts, read_prompts
from bitmtp.benchmark.records import ResultLog, model_fingerprint
from bitmtp.core.policies import make_policy
from bitmtp.engine import Engine, Request, Result
from bitmtp.errors import BitMTPError


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one kind."""

    name: str
    file: str
    limit: int | None = None
    template: str | None = None


SETS = (
    PromptSet(
        "HumanEval", "humaneval/HumanEval.jsonl", template="Complete this Python function:\n```python\n{prompt}```"
    ),
    PromptSet("GSM8K", "gsm8k/test.jsonl", limit=200),
    PromptSet("MT-Bench", "mt_bench/question.jsonl", limit=80),
)


@dataclass(frozen=True)
class Figures:
    """What a set gave."""

    tokens: int
    iterations: int

    @property
    def tokens_per_iteration(self) -> float:
        """Committed tokens ÷ iterations, over the whole set."""
        return self.tokens / self.iterations if self.iterations else 0.0


def measure(engine: Engine, model: str, prompts: PromptSet, options: argparse.Namespace, log: ResultLog) -> Figures:
    """Write every text of a set that is not in the log, and sum up the set."""
    limit = min(filter(None, (prompts.limit, options.limit)), default=None)
    read = read_prompts(Path(options.data) / prompts.file)[:limit]
    ids = encode_prompts(engine, read, prompts.template)
    keys = [f"{model} D={options.block_size} {options.max_tokens} {prompts.name} {i}" for i in range(len(ids))]
    missing = [index for index, key in enumerate(keys) if key not in log]
    policy = make_policy("speculative", engine.config.block_size, block_size=options.block_size, verify_bound=0)
    for start in range(0, len(missing), options.batch):
        batch = missing[start : start + options.batch]
        results = engine.generate_batch([Request(ids[index], options.max_tokens, policy) for index in batch])
        for index, result in zip(batch, results, strict=True):
            log.add(keys[index], **counts(result))
        print(f"\r{prompts.name}: {batch[-1] + 1} of {len(ids)} ", end="", file=sys.stderr, flush=True)
    tokens, iterations = (sum(log[key][name] for key in keys) for name in ("tokens", "iterations"))
    return Figures(tokens, iterations)


def counts(result: Result) -> dict[str, int]:
    """Counts of one text; the first token, which prefill gives, belongs to no iteration."""
    histogram = result.acceptance_histogram
    tokens = sum(length * times for length, times in enumerate(histogram, start=1))
    return {"tokens": tokens, "iterations": sum(histogram)}


def report(models: Sequence[str], figures: dict[str, list[Figures]]) -> None:
    """One line per set, the average, and ratios of the first model to the others."""
    names = [*(prompts.name for prompts in SETS), "average"]
    rates = {model: [each.tokens_per_iteration for each in sets] for model, sets in figures.items()}
    rates = {model: [*values, mean(values)] for model, values in rates.items()}
    print("tokens per iteration  " + "  ".join(f"{name:>10}" for name in names))
    for model in models:
        print(f"{Path(model).name[:20]:20}  " + "  ".join(f"{value:10.3f}" for value in rates[model]))
    for other in models[1:]:
        ratios = [a / b for a, b in zip(rates[models[0]], rates[other], strict=True)]
        print(f"{'first / ' + Path(other).name:.20}".ljust(22) + "  ".join(f"{value:10.3f}" for value in ratios))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="folder that holds humaneval, gsm8k and mt_bench")
    parser.add_argument("--output", required=True, help="JSON lines; done prompts are skipped")
    parser.add_argument("--model", required=True, action="append", help="checkpoint folder; may be repeated")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="texts that share passes")
    parser.add_argument("--limit", type=int, help="first prompts of each set only")
    return parser.parse_args()


def run(options: argparse.Namespace) -> None:
    """Measure every model and report."""
    log, figures = ResultLog(options.output), {}
    for model in options.model:
        engine = Engine.load(model, backend=options.backend, threads=options.threads)
        name = model_fingerprint(model)
        figures[model] = [measure(engine, name, prompts, options, log) for prompts in SETS]
    print(file=sys.stderr)
    report(options.model, figures)


if __name__ == "__main__":
    try:
        run(parse())
    except BitMTPError as error:
        sys.exit(f"acceptance: {error}")
