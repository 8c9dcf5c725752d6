"""Acceptance by depth and rank, the calibration that follows, what it makes of tau, and the trees worth verifying.

    python benchmarks/depths.py --data FOLDER --limit 9 --output tuning.json

Drafts are compared with the text at every token of greedy texts (or sampled ones, with --temperature). The calibration
is fitted on every other text and tried on the rest. The output file holds a tuning: this machine's cost table and the
calibration.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from shapes import SETS

from bitmtp.benchmark.prompts import encode_prompts, read_prompts
from bitmtp.benchmark.topologies import Occasion, acceptance, best_trees, fit_calibration, likelihood, observe
from bitmtp.core.costs import Calibration, CostTable, Tuning, sigmoid
from bitmtp.engine import Engine
from bitmtp.errors import BitMTPError
from bitmtp.sampling import Sampling

RANKS = 4
TAUS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def observe_set(engine: Engine, name: str, options: argparse.Namespace) -> tuple[list[Occasion], list[Occasion]]:
    """The occasions of one prompt set, of every other text; prints its table."""
    file, template = SETS[name]
    read = read_prompts(Path(options.data) / file)
    prompts = encode_prompts(engine, read[:: max(len(read) // options.limit, 1)][: options.limit], template)
    halves = [
        observe(
            engine, own, max_tokens=options.max_tokens, block_size=engine.config.block_size, ranks=RANKS,
            sampling=Sampling(temperature=options.temperature),
        )
        for own in (prompts[::2], prompts[1::2])
    ]  # fmt: skip
    found = [each for half in halves for each in half]
    print(f"{name}: of {len(found)} occasions, the token that came had rank 0, 1, … (by depth, all before it right)")
    for depth, row in enumerate(acceptance(found, RANKS)[:8], start=1):
        print(f"  depth {depth}: " + "  ".join(f"{share:.2f}" for share in row), flush=True)
    return halves[0], halves[1]


def report_calibration(fitting: list[Occasion], testing: list[Occasion]) -> Calibration:
    """Print what calibration is worth on texts that it was not fitted on, in nats a proposal and in what tau means."""
    fitted = fit_calibration(fitting)
    plain, default = Calibration((1.0,), (0.0,)), Calibration()
    print("temperatures", [round(each, 2) for each in fitted.temperatures])
    print("offsets     ", [round(each, 2) for each in fitted.offsets])
    for name, each in (("raw", plain), ("default", default), ("fitted", fitted)):
        print(f"  {name:8} {likelihood(testing, each):.3f} nats a proposal")
    print(
        "tau   proposals that reach it, and of those autoregressive decoding's, raw / calibrated; of those that just do"
    )
    for tau in TAUS:
        cells = [_reaching(testing, each, tau) for each in (plain, fitted)]
        print(f"{tau:4}  " + "  /  ".join(f"{share:.2f} {right:.3f} {edge:.3f}" for share, right, edge in cells))
    return fitted


def _reaching(occasions: list[Occasion], calibration: Calibration, tau: float) -> tuple[float, float, float]:
    """Share of proposals that reach tau, share of those that stand, and of those that reach it by less than 0.05."""
    chances = [sigmoid(calibration.logit(each.depth, each.probability)) for each in occasions]
    reach = [each.rank == 0 for each, p in zip(occasions, chances, strict=True) if p >= tau]
    edge = [each.rank == 0 for each, p in zip(occasions, chances, strict=True) if tau <= p < tau + 0.05]
    return len(reach) / len(occasions), sum(reach) / max(len(reach), 1), sum(edge) / max(len(edge), 1)


def report_trees(found: list[Occasion], costs: CostTable) -> None:
    """Print the trees that no other beats, and how many tokens a millisecond they bring."""
    print("width  depth  tokens  ms (draft and verify)  tokens/ms")
    for each in best_trees(acceptance(found, RANKS), costs, costs.history)[:32]:
        shape, rate = each.topology, each.tokens / each.milliseconds
        print(f"{shape.width:5}  {shape.depth:5}  {each.tokens:6.2f}  {each.milliseconds:21.1f}  {rate:9.3f}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the four prompt sets")
    parser.add_argument("--output", help="write the tuning here, as JSON")
    parser.add_argument("--model", help="checkpoint folder; default: the shipped model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, default=9, help="prompts of each set, spread over it")
    return parser.parse_args()


def run(options: argparse.Namespace) -> None:
    """Observe, report, write."""
    engine = Engine.load(options.model, backend=options.backend, threads=options.threads)
    costs = engine.tuning.costs
    halves = [observe_set(engine, name, options) for name in SETS]
    fitting, testing = ([each for half in halves for each in half[place]] for place in (0, 1))
    if not fitting or not testing:
        raise BitMTPError("a text must be longer than a block; raise --limit (to 2 or more) or --max-tokens")
    report_calibration(fitting, testing)
    report_trees(fitting + testing, costs)
    if options.output:
        fitted = fit_calibration(fitting + testing)
        unfinished = Path(f"{options.output}.part")
        unfinished.write_text(Tuning(costs, fitted).to_json() + "\n", encoding="utf-8")
        os.replace(unfinished, options.output)


if __name__ == "__main__":
    try:
        run(parse())
    except BitMTPError as error:
        sys.exit(f"depths: {error}")
