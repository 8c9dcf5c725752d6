"""Did `bitmtp tune` choose well? Every lossless setting takes turns, then its choice and the best one, head to head.

    bitmtp tune --model FOLDER --prompts FILE --output profile.json
    python benchmarks/tune_sweep.py --model FOLDER --prompts FILE --profile profile.json --output sweep.jsonl

Lossless settings write the same texts, so seconds can be compared text by text. A run that was ended goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from bitmtp.benchmark.policies import compare
from bitmtp.benchmark.prompts import encode_prompts, read_prompts
from bitmtp.benchmark.records import ResultLog, model_fingerprint
from bitmtp.cli.render import policy_label, print_table
from bitmtp.core.policy import Policy
from bitmtp.engine import Engine
from bitmtp.errors import BitMTPError
from bitmtp.evaluation.intervals import Estimate, bootstrap
from bitmtp.tuning.profile import Profile
from bitmtp.tuning.search import candidates

WITHIN = 0.95  # of the best's speed


@dataclass(frozen=True, slots=True)
class Timing:
    """Measures settings on prompts, and keeps what it measured."""

    engine: Engine
    model: str
    prompts: list[list[int]]
    log: ResultLog
    max_tokens: int

    def rounds(self, name: str, settings: Sequence[Policy], count: int) -> list[list[list[float]]]:
        """Seconds of decoding: [round][prompt][setting]."""
        return [
            [self._text(f"{name} {turn}", number, settings, turn + number) for number in range(len(self.prompts))]
            for turn in range(count)
        ]

    def _text(self, name: str, number: int, settings: Sequence[Policy], turn: int) -> list[float]:
        prompt = self.prompts[number]
        key = f"{self.model} {self.max_tokens} {name} {prompt} {list(map(policy_label, settings))}"
        if key not in self.log:
            place = turn * 7 % len(settings)
            turned = [*settings[place:], *settings[:place]]
            found = compare(self.engine, [prompt], turned, max_tokens=self.max_tokens, rounds=1)
            if any(each.mismatches for each in found):
                sys.exit(f"tune_sweep: the settings' texts of prompt {number + 1} differ")
            seconds = [each.tokens / each.tokens_per_second for each in found]
            self.log.add(key, seconds=[*seconds[len(settings) - place :], *seconds[: len(settings) - place]])
            print(f"\r{name}, prompt {number + 1} of {len(self.prompts)} ", end="", file=sys.stderr, flush=True)
        return list(self.log[key]["seconds"])


def ratios(seconds: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Median over rounds of each setting's speed ÷ the first one's."""
    totals = [[sum(column) for column in zip(*texts, strict=True)] for texts in seconds]
    return [median(total[0] / total[place] for total in totals) for place in range(len(totals[0]))]


def duel(seconds: Sequence[Sequence[Sequence[float]]]) -> Estimate:
    """Speed of the first setting ÷ that of the second: median over texts, those of a round resampled together."""
    pairs = np.array([[second / first for first, second in texts] for texts in seconds])
    return bootstrap(len(pairs), lambda picks: np.median(pairs[picks].reshape(len(picks), -1), axis=1))


def report(settings: Sequence[Policy], found: Sequence[float], profile: Policy) -> None:
    """The best settings, and where the chosen one stands."""
    order = sorted(range(len(settings)), key=lambda place: -found[place])
    own = settings.index(profile)
    shown = list(dict.fromkeys([*order[:5], own, 0]))
    rows = [[policy_label(settings[p]), f"{order.index(p) + 1}", f"{found[p]:.3f}"] for p in shown]
    print_table(f"{len(settings)} settings", ["setting", "place", "× AR"], rows)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--prompts", required=True, help="prompt file, as for bench")
    parser.add_argument("--profile", required=True, help="what `bitmtp tune` wrote")
    parser.add_argument("--output", required=True, help="JSON lines; what is done is skipped")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--limit", type=int, default=8, help="first prompts only")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="of the sweep")
    parser.add_argument("--duels", type=int, default=9, help="rounds of the choice against the best of the sweep")
    return parser.parse_args()


def run(options: argparse.Namespace) -> int:
    """Sweep, duel, report; 1 if the choice is more than 5% slower than the best."""
    profile, model = Profile.read(options.profile), model_fingerprint(options.model)
    profile.check(model)
    engine = Engine.load(options.model, backend=options.backend, threads=profile.threads)
    chosen = profile.make_policy(engine.config.block_size)
    settings = candidates(engine.config.block_size, lossy=False)
    if chosen not in settings:
        raise BitMTPError(f"{policy_label(chosen)} is not among the settings that tune chooses from")
    prompts = encode_prompts(engine, read_prompts(options.prompts)[: options.limit])
    timing = Timing(engine, model, prompts, ResultLog(options.output), options.max_tokens)
    found = ratios(timing.rounds("sweep", settings, options.rounds))
    best = settings[max(range(len(settings)), key=lambda place: found[place])]
    against = duel(timing.rounds("duel", [chosen, best], options.duels)) if best != chosen else Estimate(1, 1, 1)
    print(file=sys.stderr)
    report(settings, found, chosen)
    print(
        f"chosen {policy_label(chosen)}, best {policy_label(best)}, {profile.threads} threads: "
        f"the choice's speed is {against.value:.3f} of the best's (95%: {against.low:.3f} to {against.high:.3f})"
    )
    return 0 if against.value >= WITHIN else 1


if __name__ == "__main__":
    try:
        sys.exit(run(parse()))
    except BitMTPError as error:
        sys.exit(f"tune_sweep: {error}")
