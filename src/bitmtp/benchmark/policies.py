"""Policies against autoregressive decoding: same prompts, one run, taking turns."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bitmtp.core.policies import POLICIES, make_policy
from bitmtp.core.policy import Policy
from bitmtp.core.stats import Stats
from bitmtp.engine import Engine, Request
from bitmtp.errors import RequestError

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """What to compare: every policy named, with each block size; options that are None take the policy's default."""

    names: tuple[str, ...] = tuple(POLICIES)
    block_sizes: tuple[int, ...] = ()
    tau: float | None = None
    min_prefix: int | None = None
    verify_bound: float | None = None

    def policies(self, model_block_size: int) -> list[Policy]:
        """The policies, autoregressive decoding first.

        Raises:
            RequestError: a value is out of range, or no policy named has a meaning for it.
        """
        made = [make_policy("autoregressive", model_block_size)]
        options = {"tau": self.tau, "min_prefix": self.min_prefix, "verify_bound": self.verify_bound}
        used: set[str] = set()
        for name in self.names:
            if name == "autoregressive":
                continue
            known = inspect.signature(POLICIES[name]).parameters if name in POLICIES else {}
            used |= set(known)
            own = {option: value for option, value in options.items() if option in known}
            sizes = self.block_sizes or (None,)
            made += [make_policy(name, model_block_size, block_size=size, **own) for size in sizes]
        for option, value in options.items():
            if value is not None and option not in used:
                raise RequestError(f"{option} has no meaning under {', '.join(self.names)}; leave it out")
        return made


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """What one policy did.

    Attributes:
        tokens_per_second: median over rounds of decoded tokens ÷ decoding time, first tokens and prefill left out.
        ratio: median over rounds of its tokens a second ÷ autoregressive decoding's in the same round.
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
    rates: list[float] = field(default_factory=list)  # of complete rounds
    stats: Stats = field(default_factory=Stats)
    mismatches: set[int] = field(default_factory=set)
    digest: Any = field(default_factory=hashlib.sha256)
    tokens: int = 0  # of the current round
    seconds: float = 0.0

    def add(self, stats: Stats, seconds: float) -> None:
        self.tokens += stats.tokens
        self.seconds += seconds
        total = self.stats
        total.passes += stats.passes
        total.graph_replays += stats.graph_replays
        total.iterations += stats.iterations
        total.proposed += stats.proposed
        total.accepted += stats.accepted
        total.lengths.update(stats.lengths)

    def end_round(self) -> None:
        self.rates.append(self.tokens / self.seconds if self.seconds else 0.0)
        self.tokens, self.seconds = 0, 0.0


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
                ids[index] = _run(engine, Request(prompt, max_tokens, policies[index]), tallies[index])
                tick()
            for index, tally in enumerate(tallies):
                if ids[index] != ids[0]:
                    tally.mismatches.add(number)
        for tally in tallies:
            tally.end_round()
    return [_figures(tally, tallies[0]) for tally in tallies]


def _run(engine: Engine, request: Request, tally: _Tally) -> list[int]:
    """Token ids of one text; its figures go to the tally."""
    with engine.session() as session:
        generation = session.generate(request)
        for _ in generation:
            pass
    result = generation.result
    tally.add(generation.text.stats, result.tpot_ms * (result.num_tokens - 1) / 1e3)
    tally.digest.update(repr(result.token_ids).encode())
    return result.token_ids


def _figures(tally: _Tally, baseline: _Tally) -> PolicyFigures:
    ratios = [rate / base for rate, base in zip(tally.rates, baseline.rates, strict=True) if base]
    return PolicyFigures(
        policy=tally.policy,
        tokens_per_second=median(tally.rates),
        ratio=median(ratios) if ratios else 0.0,
        tokens_per_iteration=tally.stats.mean_acceptance_length,
        tokens_per_pass=tally.stats.tokens_per_pass,
        draft_acceptance_rate=tally.stats.draft_acceptance_rate,
        tokens=tally.stats.tokens,
        mismatches=tuple(sorted(tally.mismatches)),
        digest=tally.digest.hexdigest()[:16],
        graph_replays=tally.stats.graph_replays,
    )
