"""Figures for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bitmtp.core.stats import Stats
from bitmtp.engine import Result

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


class Metrics:
    """One registry per server, so that several can live in a process."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.requests = counter("bitmtp_requests", "HTTP requests by path and status", ["path", "status"])
        self.running = gauge("bitmtp_running", "Texts being written")
        self.waiting = gauge("bitmtp_waiting", "Texts that wait for a slot")
        self.cache = gauge("bitmtp_prefix_cache_positions", "Positions of K/V kept for reuse")
        self.prompt = counter("bitmtp_prompt_tokens", "Prompt tokens by how they were had", ["how"])
        self.generated = counter("bitmtp_generated_tokens", "Tokens written")
        self.proposed = counter("bitmtp_proposed_tokens", "Mask proposals that could have been committed")
        self.accepted = counter("bitmtp_accepted_tokens", "Mask proposals that were committed")
        self.shapes = counter("bitmtp_shaped_passes", "Passes that were no plain block or chain, by shape", ["shape"])
        self.policies = counter("bitmtp_policy_texts", "Texts by the policy that wrote them", ["policy"])
        self.futile = counter("bitmtp_texts_drafted_in_vain", "Texts of whose drafts next to none were accepted")
        self.ended = counter("bitmtp_texts", "Texts by how they ended", ["end"])
        self.passes = self._histogram("bitmtp_pass_rows", "Rows of a pass", _ROWS)
        self.pass_time = self._histogram("bitmtp_pass_seconds", "Time of a pass", _TOKEN_SECONDS)
        self.ttft = self._histogram("bitmtp_time_to_first_token_seconds", "From arrival, waiting included", _SECONDS)
        self.tpot = self._histogram("bitmtp_time_per_output_token_seconds", "After the first", _TOKEN_SECONDS)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)

    def written(self, result: Result, stats: Stats, prompt_tokens: int, cached: int) -> None:
        """A text ended, in whatever way; of its prompt ``prompt_tokens`` were had, ``cached`` of them from others."""
        self.prompt.labels("computed").inc(max(prompt_tokens - cached, 0))
        self.prompt.labels("reused").inc(cached)
        self.generated.inc(result.num_tokens)
        self.proposed.inc(stats.proposed)
        self.accepted.inc(stats.accepted)
        self.policies.labels(result.policy.name).inc()
        self.futile.inc(result.drafts_rejected)
        for shape in ("windowed", "copied", "ahead", "ahead_used"):
            self.shapes.labels(shape).inc(getattr(stats, shape))
        if result.num_tokens > 1:
            self.tpot.observe(result.tpot_ms / 1e3)

    def render(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)
