"""One request under every policy, one after the other: what its user waits for, and what the runtime did."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bitmtp.core.policy import Policy
from bitmtp.engine import Engine, Request
from bitmtp.evaluation.plan import digest
from bitmtp.study.workloads import StudyRequest

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Measurement:
    """A text written alone, on a sequence of its own. Times in milliseconds.

    Attributes:
        ttft: from the encoded prompt to the first token.
        tpot: of each later token; 0 if there is none.
        latency: from the request's messages to the end of the text, rendering and encoding included.
        passes: forward runs after prefill.
        replays: graphs launched, prefill included; None if the backend has no graphs or does not count them.
        lengths: how often an iteration committed 1, 2, … tokens.
        proposed, accepted: mask proposals.
        stages: time by kind of pass (``loop.STAGES``); empty where passes run on a device.
        ids: digest of the token ids.
    """

    ttft: float
    tpot: float
    latency: float
    tokens: int
    passes: int
    replays: int | None
    lengths: tuple[int, ...]
    proposed: int
    accepted: int
    stages: dict[str, float]
    ids: str


class Measurer:
    """Measures requests on an engine.

    Args:
        policies: the baseline first.
    """

    def __init__(self, engine: Engine, policies: Sequence[Policy], max_tokens: int) -> None:
        self._engine, self._policies, self._max_tokens = engine, policies, max_tokens

    def warm_up(self, request: StudyRequest) -> None:
        """Write a few tokens under each policy: buffers grow, graphs are captured, `auto` learns costs."""
        for policy in self._policies:
            self._engine.generate(Request(request.messages, min(WARM_UP_TOKENS, self._max_tokens), policy))

    def measure(self, request: StudyRequest, turn: int, tick: Callable[[], None]) -> list[Measurement]:
        """The request under every policy, in their order; ``turn`` says which one goes first.

        Args:
            tick: called after each text.
        """
        found: dict[int, Measurement] = {}
        for place in range(len(self._policies)):
            index = (place + turn) % len(self._policies)
            found[index] = self._measure(request, self._policies[index])
            tick()
        return [found[index] for index in range(len(self._policies))]

    def _measure(self, request: StudyRequest, policy: Policy) -> Measurement:
        replays = self._replays()
        before = dict(self._engine.loop.milliseconds)
        begun = time.perf_counter()
        with self._engine.session() as session:
            generation = session.generate(Request(request.messages, self._max_tokens, policy))
            for _ in generation:
                pass
            latency = (time.perf_counter() - begun) * 1e3
        result, stats, after = generation.result, generation.text.stats, self._replays()
        return Measurement(
            ttft=result.ttft_ms,
            tpot=result.tpot_ms,
            latency=latency,
            tokens=result.num_tokens,
            passes=result.passes,
            replays=None if replays is None or after is None else after - replays,
            lengths=tuple(result.acceptance_histogram),
            proposed=stats.proposed,
            accepted=stats.accepted,
            stages=self._stages(before),
            ids=digest(repr(result.token_ids)),
        )

    def _stages(self, before: Mapping[str, float]) -> dict[str, float]:
        spent = {stage: now - before[stage] for stage, now in self._engine.loop.milliseconds.items()}
        return spent if any(spent.values()) else {}

    def _replays(self) -> int | None:
        count = getattr(self._engine.backend, "graph_replays", None)
        return count if isinstance(count, int) else None
