"""What the defaults are worth: `bitmtp generate` with nothing named, against one token a pass and against fixed drafts.

    python benchmarks/defaults.py --data FOLDER --limit 6

Every text is a process of its own, as a user starts it. The three ways to decode take turns on the same prompt with the
same seed, greedy and at temperature 1. What passes cost is learned in a folder of this run's own: nothing is known at
first, and later processes find what earlier ones left, as they do for a user (``--cache`` names another folder). A
profile of ``bitmtp tune`` is not read. Prints, for each prompt set, tokens a second ÷ autoregressive decoding's (median
over the prompts, and quartiles) and the time to the first token. Exit code 1 if any text differs from the
autoregressive one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from shapes import SETS

from bitmtp.benchmark.prompts import Prompt, read_prompts
from bitmtp.cli.render import print_table
from bitmtp.errors import BitMTPError

Answer = dict[str, Any]  # what `bitmtp generate --json` prints
BASE = "autoregressive"
WAYS: dict[str, tuple[str, ...]] = {
    "default": (),
    BASE: ("--policy", "autoregressive"),
    "speculative": ("--policy", "speculative"),
}
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}


@dataclass(frozen=True, slots=True)
class Command:
    """``bitmtp generate`` with the options that all texts share, in an environment of its own."""

    options: tuple[str, ...]
    environment: Mapping[str, str]

    @classmethod
    def of(cls, options: argparse.Namespace, cache: str, settings: str) -> Command:
        """From the command line; ``cache`` holds what is learned, ``settings`` no profile."""
        shared = ["--backend", options.backend, "--max-tokens", str(options.max_tokens)]
        for name in ("model", "threads"):
            value = getattr(options, name)
            shared += [] if value is None else [f"--{name}", str(value)]
        return cls(tuple(shared), {**os.environ, "XDG_CACHE_HOME": cache, "XDG_CONFIG_HOME": settings})

    def write(self, prompt: str, *own: str) -> Answer:
        """A text, by a process of its own.

        Raises:
            BitMTPError: the process failed; its last line says why.
        """
        words = [sys.executable, "-m", "bitmtp", "generate", "-", "--json", *self.options, *own]
        done = subprocess.run(words, input=prompt + "\n", env=self.environment, capture_output=True, text=True)
        if done.returncode:
            raise BitMTPError((done.stderr.strip().splitlines() or ["generate failed"])[-1])
        answer: Answer = json.loads(done.stdout)
        return answer


def prompts_of(name: str, options: argparse.Namespace) -> list[str]:
    """Prompts of a set, spread over it, as a user would type them."""
    file, template = SETS[name]
    read = read_prompts(Path(options.data) / file)
    chosen = read[:: max(len(read) // options.limit, 1)][: options.limit]
    return [_filled(prompt, template) for prompt in chosen]


def _filled(prompt: Prompt, template: str | None) -> str:
    if not isinstance(prompt, str):
        raise BitMTPError("a prompt is a conversation; these sets hold plain texts")
    return prompt if template is None else template.replace("{prompt}", prompt)


def write_round(command: Command, prompt: str, temperature: float, seed: int) -> dict[str, Answer]:
    """A prompt in every way, in an order that rotates with the seed."""
    given, names = ("--temperature", str(temperature), "--seed", str(seed)), list(WAYS)
    turned = [names[(seed + place) % len(names)] for place in range(len(names))]
    written = {name: command.write(prompt, *WAYS[name], *given) for name in turned}
    return {name: written[name] for name in names}


def differing(answers: Mapping[str, Answer]) -> list[str]:
    """The ways whose text is not the autoregressive one."""
    return [name for name, answer in answers.items() if answer["token_ids"] != answers[BASE]["token_ids"]]


def ratios(rounds: Sequence[Mapping[str, Answer]], name: str) -> list[float]:
    """Speed ÷ the autoregressive one, of every prompt whose text is long enough to have a speed."""
    pairs = [(each[name]["tokens_per_second"], each[BASE]["tokens_per_second"]) for each in rounds]
    return [mine / base for mine, base in pairs if mine and base]


def line(name: str, rounds: Sequence[Mapping[str, Answer]]) -> list[str]:
    """Cells of a way: ratio with its quartiles, tokens an iteration, milliseconds to the first token."""
    found = ratios(rounds, name)
    low, middle, high = np.quantile(found, (0.25, 0.5, 0.75)) if found else (float("nan"),) * 3
    lengths, first = ([each[name][key] for each in rounds] for key in ("mean_acceptance_length", "ttft_ms"))
    spread = f"{middle:.2f} ({low:.2f}–{high:.2f})"
    return [name, spread, f"{np.median(lengths):.2f}", f"{np.median(first):.0f}", str(len(found))]


def report(title: str, rounds: Sequence[Mapping[str, Answer]]) -> None:
    """The table of a set."""
    columns = ["decoding", "× autoregressive (quartiles)", "tokens an iteration", "first token, ms", "texts"]
    print_table(title, columns, [line(name, rounds) for name in WAYS])


def measure(command: Command, options: argparse.Namespace) -> int:
    """Write and report every set; how many texts differ."""
    wrong = 0
    for name in options.sets:
        prompts = prompts_of(name, options)
        for label, temperature in TEMPERATURES.items():
            rounds = []
            for number, prompt in enumerate(prompts, start=1):
                rounds.append(write_round(command, prompt, temperature, number))
                for way in differing(rounds[-1]):
                    wrong += 1
                    print(f"MISMATCH {name}, {label}, prompt {number}: {way}")
                print(f"\r{name}, {label}: prompt {number} of {len(prompts)} ", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
            report(f"{name}, {label}", rounds)
    return wrong


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the four prompt sets")
    parser.add_argument(
        "--sets", nargs="+", choices=list(SETS), default=list(SETS), metavar="SET", help=", ".join(SETS)
    )
    parser.add_argument("--model", help="checkpoint folder; default: the shipped model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--limit", type=int, default=6, help="prompts of each set, spread over it")
    parser.add_argument("--cache", help="folder of learned costs; default: a fresh one")
    return parser.parse_args()


def run(options: argparse.Namespace) -> int:
    """Measure in folders that are gone afterwards; the number of mismatches."""
    with tempfile.TemporaryDirectory(prefix="bitmtp-defaults-") as folder:
        cache = options.cache or str(Path(folder) / "cache")
        return measure(Command.of(options, cache, str(Path(folder) / "settings")), options)


if __name__ == "__main__":
    try:
        sys.exit(1 if run(parse()) else 0)
    except BitMTPError as error:
        sys.exit(f"defaults: {error}")
