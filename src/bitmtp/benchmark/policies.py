"""Policies against autoregressive decoding: same prompts, one run, taking turns."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bitmtp.core.policies import POLICIES, make_policy
from bitmtp.core.policy import Policy
from bitmtp.core.stats import Stats
from bitmtp.engine import Engine, Request

WARM_UP_TOKENS = 8
WORTH = 1.02  # × autoregressive decoding: with less than that, drafting is not worth its trouble


@dataclass(frozen=True, slots=True)
class Settings:
    """What to compare: every policy named, with each block size; without one, with its own."""

    names: tuple[str, ...] = tuple(POLICIES)
    block_sizes: tuple[int, ...] = ()

    def policies(self, model_block_size: int) -> list[Policy]:
        """The policies, autoregressive decoding first.

        Raises:
            RequestError: a policy is unknown, or a block size is out of range.
        """
        others = [name for name in self.names if name != "autoregressive"]
        sizes = self.block_sizes or (None,)
        drafting = [make_policy(name, model_block_size, block_size=size) for name in others for size in sizes]
        return [make_policy("autoregressive", model_block_size), *drafting]


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """What one policy did.

    Attributes:
        tokens_per_second: decoded tokens ÷ decoding time, first tokens and prefill left out; the time of each text is
            the median of its rounds.
        ratio: its tokens a second ÷ autoregressive decoding's of the same prompts, which took turns with it.
        tokens_per_iteration: committed tokens ÷ iterations.
        mismatches: prompts (by number, from 0) whose token ids differ from autoregressive decoding's.
        digest: of the token ids of all texts: equal where all of them are.
        graph_replays: graphs that the host launched, prefill left out; 0 where there are none.
    """

    policy: Policy
    tokens_per_second: float
    ratio: float
    tokens_per_iteration: float
    tokens_per_pass: float
    draft_acceptance_rate: float
    tokens: int
    mismatches: tuple[int, ...]
    digest: str
    graph_replays: int

    @property
    def broken(self) -> bool:
        """A lossless policy wrote another text than autoregressive decoding."""
        return self.policy.lossless and bool(self.mismatches)


@dataclass(slots=True)
class _Tally:
    """Running sums of one policy over prompts and rounds."""

    policy: Policy
    stats: Stats = field(default_factory=Stats)
    mismatches: set[int] = field(default_factory=set)
    digest: Any = field(default_factory=hashlib.sha256)
    tokens: dict[int, int] = field(default_factory=dict)  # by prompt
    seconds: defaultdict[int, list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )  # by prompt: of each round

    def add(self, number: int, stats: Stats, seconds: float) -> None:
        self.tokens[number] = stats.tokens
        self.seconds[number].append(seconds)
        total = self.stats
        total.passes += stats.passes
        total.graph_replays += stats.graph_replays
        total.iterations += stats.iterations
        total.proposed += stats.proposed
        total.accepted += stats.accepted
        total.lengths.update(stats.lengths)

    @property
    def rate(self) -> float:
        """Tokens a second; a text of one token takes no time."""
        seconds = sum(median(times) for times in self.seconds.values())
        return sum(self.tokens.values()) / seconds if seconds else 0.0


def compare(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    policies: Sequence[Policy],
    *,
    max_tokens: int,
    rounds: int,
    tick: Callable[[], None] = lambda: None,
) -> list[PolicyFigures]:
    """Greedy texts of every prompt under every policy; the first policy is the baseline.

    Args:
        prompts: token ids.
        tick: called after each text.
    """
    tallies = [_Tally(policy) for policy in policies]
    for policy in policies:
        engine.generate(Request(prompts[0], min(WARM_UP_TOKENS, max_tokens), policy))
    for turn in range(rounds):
        for number, prompt in enumerate(prompts):
            ids: dict[int, list[int]] = {}
            for place in range(len(policies)):
                # The order rotates, so that a machine that slows down slows every policy alike.
                index = (place + turn + number) % len(policies)
                ids[index] = _run(engine, Request(prompt, max_tokens, policies[index]), number, tallies[index])
                tick()
            for index, tally in enumerate(tallies):
                if ids[index] != ids[0]:
                    tally.mismatches.add(number)
    return [_figures(tally, tallies[0]) for tally in tallies]


def _run(engine: Engine, request: Request, number: int, tally: _Tally) -> list[int]:
    """Token ids of one text; its figures go to the tally."""
    with engine.session() as session:
        generation = session.generate(request)
        for _ in generation:
            pass
    result = generation.result
    tally.add(number, generation.text.stats, result.tpot_ms * (result.num_tokens - 1) / 1e3)
    tally.digest.update(repr(result.token_ids).encode())
    return result.token_ids


def _figures(tally: _Tally, baseline: _Tally) -> PolicyFigures:
    return PolicyFigures(
        policy=tally.policy,
        tokens_per_second=tally.rate,
        ratio=tally.rate / baseline.rate if baseline.rate else 0.0,
        tokens_per_iteration=tally.stats.mean_acceptance_length,
        tokens_per_pass=tally.stats.tokens_per_pass,
        draft_acceptance_rate=tally.stats.draft_acceptance_rate,
        tokens=tally.stats.tokens,
        mismatches=tuple(sorted(tally.mismatches)),
        digest=tally.digest.hexdigest()[:16],
        graph_replays=tally.stats.graph_replays,
    )
