"""What each part of the CUDA runtime is worth: the same texts on every rung of the ladder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bitmtp.backends.cuda.runtime import Runtime
from bitmtp.benchmark.policies import PolicyFigures, compare
from bitmtp.decoding.policy import Policy
from bitmtp.engine import Engine
from bitmtp.errors import RequestError

NAMES, BLOCK_SIZES = ("speculative",), (4, 8)  # what is compared with autoregressive decoding by default


@dataclass(frozen=True, slots=True)
class Rung:
    """One runtime: what each policy did on it, autoregressive decoding first."""

    runtime: Runtime
    figures: list[PolicyFigures]

    @property
    def baseline(self) -> float:
        """Tokens a second of autoregressive decoding."""
        return self.figures[0].tokens_per_second


def ablate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    policies: Sequence[Policy],
    *,
    max_tokens: int,
    rounds: int,
    tick: Callable[[], None] = lambda: None,
) -> list[Rung]:
    """Greedy texts of every prompt under every policy, on every rung from the generic runtime up.

    Raises:
        RequestError: the engine's backend is not ``cuda``.
    """
    backend = engine.backend
    if not hasattr(backend, "runtime"):
        raise RequestError(f"the ablation takes the CUDA runtime apart, this is {backend.name}; use --backend cuda")
    whole, rungs = backend.runtime, []
    try:
        for runtime in Runtime:
            backend.runtime = runtime
            figures = compare(engine, prompts, policies, max_tokens=max_tokens, rounds=rounds, tick=tick)
            rungs.append(Rung(runtime, figures))
    finally:
        backend.runtime = whole
    return rungs


def changed(rungs: Sequence[Rung]) -> list[tuple[Runtime, Policy]]:
    """Where texts differ: lossless ones from the first rung's autoregressive ones, others from the first rung's own."""
    first = rungs[0].figures
    return [
        (rung.runtime, each.policy)
        for rung in rungs
        for each, own in zip(rung.figures, first, strict=True)
        if each.digest != (first[0] if each.policy.lossless else own).digest
    ]
