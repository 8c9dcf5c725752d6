"""What a large model would gain from drafts as good as a recorded trace says: acceptance is IMPOSED, speed is measured.

    python benchmarks/imposed.py record --data eval --output trace.json
    python benchmarks/imposed.py play --trace trace.json --shape bonsai-1.7b --backend cuda

`record` writes texts with the shipped model (speculative, D = 8, every proposal verified) and keeps how many tokens
each iteration committed. `play` runs a shape with random weights, whose own drafts would never stand, in two ways:

- host loop: real draft and verify passes, but the verifier's tokens are replaced so that each iteration commits as many
  as the trace says: its lengths, weighted by exp(a × length) with the a that gives the mean asked for, in random order;
- its own loop: nothing is replaced. Draft and verifier share their sampling noise, so a temperature makes them agree
  as often as one likes: the one that gives the mean asked for is searched for first.

Both are compared with the fastest autoregressive decoding there is, over the same history.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from bitmtp.backends import load_backend
from bitmtp.backends.base import Backend, LoopBackend, Output, Row
from bitmtp.benchmark.prompts import encode_prompts, read_prompts
from bitmtp.benchmark.shapes import SHAPES, random_checkpoint
from bitmtp.benchmark.timed import timed_text
from bitmtp.checkpoint import Checkpoint
from bitmtp.core.policies import make_policy
from bitmtp.core.policy import Policy
from bitmtp.engine import Engine, Request
from bitmtp.errors import BitMTPError
from bitmtp.sampling import Sampling

BLOCK = 8
SPECULATIVE = make_policy("speculative", BLOCK, block_size=BLOCK, verify_bound=0.0)
AUTOREGRESSIVE = make_policy("autoregressive", BLOCK)
PARTS = {
    "ifeval": ("ifeval/input_data.jsonl", None),
    "humaneval": ("humaneval/HumanEval.jsonl", "Complete this Python function:\n{prompt}"),
    "mbpp": ("mbpp/sanitized-mbpp.jsonl", "Write a Python function.\n{prompt}"),
}


def record(options: argparse.Namespace) -> None:
    """Write texts and keep the acceptance lengths of their iterations."""
    engine, trace = Engine.load(options.model, backend=options.backend), {}
    for name, (file, template) in PARTS.items():
        prompts = encode_prompts(engine, read_prompts(options.data / file), template)
        chosen = np.random.default_rng(0).permutation(len(prompts))[: options.prompts]
        lengths: Counter[int] = Counter()
        for prompt in (prompts[index] for index in chosen):
            histogram = engine.generate(Request(prompt, options.max_tokens, SPECULATIVE)).acceptance_histogram
            lengths.update({length: count for length, count in enumerate(histogram, 1) if count})
        trace[name] = dict(sorted(lengths.items()))
        print(f"{name}: {lengths.total()} iterations, {_mean(lengths):.2f} tokens each")
    options.output.write_text(json.dumps({"block_size": BLOCK, "lengths": trace}, indent=1) + "\n")


def _mean(lengths: dict[int, Any]) -> float:
    return float(sum(length * weight for length, weight in lengths.items()) / sum(lengths.values()))


def tilted(lengths: dict[int, int], mean: float) -> dict[int, float]:
    """Probabilities of the lengths: the trace's, times exp(a × length) with the ``a`` that gives this mean."""
    if not min(lengths) < mean < max(lengths):
        raise BitMTPError(f"a mean of {mean} lies outside the trace's lengths, {min(lengths)} to {max(lengths)}")
    low, high = -20.0, 20.0
    for _ in range(60):
        a = (low + high) / 2
        weights = {length: count * math.exp(a * (length - BLOCK)) for length, count in lengths.items()}
        low, high = (a, high) if _mean(weights) < mean else (low, a)
    total = sum(weights.values())
    return {length: weight / total for length, weight in weights.items()}


def drawn(chances: dict[int, float], count: int) -> Iterator[int]:
    """Lengths in random order, each as often as its share of ``count``; and again."""
    shares = (np.arange(count) + 0.5) / count
    lengths = np.array(list(chances))[np.searchsorted(np.cumsum(list(chances.values())), shares)]
    return cycle(np.random.default_rng(0).permutation(lengths).tolist())


class Imposed:
    """A backend whose verify passes say what makes an iteration commit a given number of tokens."""

    def __init__(self, backend: Backend, lengths: Iterator[int]) -> None:
        self.backend, self._lengths = backend, lengths
        self._proposals: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if name == "run":  # it has to see every pass
            raise AttributeError(name)
        return getattr(self.backend, name)

    def step(self, rows: Sequence[Row], **options: Any) -> list[Output | None]:
        """A real pass; of a verify pass, the tokens are replaced."""
        outputs = self.backend.step(rows, **options)
        if any(row.token < 0 for row in rows):
            self._proposals = [output.token for output in outputs if output is not None]
            return outputs
        proposals, self._proposals = self._proposals, []
        matches = next(self._lengths) - 1 if proposals else 0
        for index, following in enumerate(proposals[1 : len(rows) + 1]):
            other = (following + 1) % self.backend.config.vocab_size
            token, output = following if index < matches - 1 else other, outputs[index]
            outputs[index] = replace(output, token=token) if output else None
        return outputs


@dataclass(frozen=True, slots=True)
class Played:
    """Decoding of one text: tokens a second behind the first, and tokens an iteration."""

    tokens_per_second: float
    mean: float


@dataclass(frozen=True, slots=True)
class Player:
    """Decodes a text of random tokens."""

    backend: Backend
    prompt: tuple[int, ...]
    tokens: int

    def play(self, policy: Policy, temperature: float = 0.0, lengths: Iterator[int] | None = None) -> Played:
        """One text: in the backend's own loop if it has one, unless lengths are imposed."""
        backend: Any = self.backend if lengths is None else Imposed(self.backend, lengths)
        sampling = Sampling(temperature=temperature, seed=1)
        seconds, stats = timed_text(backend, policy, self.prompt, self.tokens, sampling)
        return Played((self.tokens - 1) / seconds, stats.mean_acceptance_length)

    def temperature_for(self, mean: float) -> float:
        """The temperature at which draft and verifier agree just so often."""
        low, high, nearest = -5.0, 12.0, (math.inf, 0.0)
        for _ in range(18):
            middle = (low + high) / 2
            found = self.play(SPECULATIVE, math.exp(middle)).mean
            nearest = min(nearest, (abs(found - mean), math.exp(middle)))
            low, high = (middle, high) if found < mean else (low, middle)
        return nearest[1]


def drafting(name: str) -> Checkpoint:
    """A shape with random weights and random mask embeddings."""
    made = random_checkpoint(SHAPES[name], name)
    masks = np.random.default_rng(1).standard_normal((BLOCK - 1, made.config.hidden_size)).astype(np.float32)
    config = replace(made.config, block_size=BLOCK)
    return replace(made, config=config, tensors={**made.tensors, "mask_embedding.weight": masks})


def best_of(player: Player, rounds: int, policy: Policy, **options: Any) -> Played:
    """The median of a few texts."""
    played = sorted((player.play(policy, **options) for _ in range(rounds)), key=lambda each: each.tokens_per_second)
    return played[rounds // 2]


def play(options: argparse.Namespace) -> None:
    """Print tokens a second under imposed acceptance."""
    counts: Counter[int] = Counter()
    for part in json.loads(options.trace.read_text())["lengths"].values():
        counts.update({int(length): count for length, count in part.items()})
    model = drafting(options.shape)
    context = options.history + options.tokens + 64
    backend = load_backend(options.backend, model, threads=options.threads, context=context)
    random = np.random.default_rng(0)
    prompt = tuple(random.integers(0, model.config.vocab_size, options.history).tolist())
    player = Player(backend, prompt, options.tokens)
    player.play(AUTOREGRESSIVE)
    base = best_of(player, options.rounds, AUTOREGRESSIVE)
    print(
        f"{options.shape}, {backend.name}, history {options.history} to {options.history + options.tokens}, D = {BLOCK}"
    )
    print(f"trace: {counts.total()} iterations, {_mean(counts):.2f} tokens each")
    print(f"autoregressive, greedy: {base.tokens_per_second:.0f} tok/s")
    for mean in options.means:
        lengths = drawn(tilted(counts, mean), round(options.tokens / mean))
        played = best_of(player, options.rounds, SPECULATIVE, lengths=lengths)
        print(_line(f"acceptance imposed: {mean} by the trace, host loop", played, base))
        if isinstance(backend, LoopBackend):
            temperature = player.temperature_for(mean)
            own = best_of(player, options.rounds, AUTOREGRESSIVE, temperature=temperature)
            played = best_of(player, options.rounds, SPECULATIVE, temperature=temperature)
            print(_line(f"acceptance imposed: {mean} by temperature {temperature:.3g}, its own loop", played, own))


def _line(label: str, played: Played, base: Played) -> str:
    ratio = played.tokens_per_second / base.tokens_per_second
    return (
        f"  {label}: {played.mean:.2f} tokens an iteration, {played.tokens_per_second:.0f} tok/s, "
        f"{ratio:.2f} x autoregressive ({base.tokens_per_second:.0f})"
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--data", type=Path, required=True, help="folder with ifeval, humaneval and mbpp")
    recording.add_argument("--output", type=Path, required=True)
    recording.add_argument("--model", type=Path)
    recording.add_argument("--prompts", type=int, default=40, help="of each part")
    recording.add_argument("--max-tokens", type=int, default=128)
    playing = commands.add_parser("play")
    playing.add_argument("--trace", type=Path, required=True)
    playing.add_argument("--shape", default="bonsai-1.7b", choices=list(SHAPES))
    playing.add_argument("--means", type=float, nargs="+", default=[4.6, 6.7, 7.1])
    playing.add_argument("--history", type=int, default=256)
    playing.add_argument("--tokens", type=int, default=768)
    playing.add_argument("--rounds", type=int, default=3)
    playing.add_argument("--threads", type=int)
    for each in (recording, playing):
        each.add_argument("--backend", default="auto")
    return parser.parse_args()


def main() -> int:
    """0, or 2 with a line that says what was wrong."""
    options = parse()
    try:
        (record if options.command == "record" else play)(options)
    except BitMTPError as error:
        print(f"imposed: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
