"""What the measurements of a study sum up to, with intervals; requests are the cases, and stay paired.

Requests are in the order in which they were measured, and intervals resample stretches of a tenth of them, because a
machine that others use too is slower for minutes at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitmtp.evaluation.intervals import Estimate, bootstrap
from bitmtp.study.measure import Measurement
from bitmtp.study.record import Record, interleave

PERCENTILES = (50, 90, 95, 99)
STRETCHES = 10  # that a study is cut into for its intervals
ALL = "all"  # the workloads together
RELATIVE = ("TPOT, × baseline", "latency, × baseline", "acceptance length", "passes per token")  # of `estimates`

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spread:
    """How a time is spread over requests: its median with an interval, and percentiles (:data:`PERCENTILES`)."""

    median: Estimate
    percentiles: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """One policy on one workload. Times in milliseconds.

    Attributes:
        tpot: over the requests that have more than one token.
        throughput: tokens ÷ time, everything included, of requests one after another.
        speedup: median over requests of baseline TPOT ÷ own TPOT; ``latency_ratio`` likewise of latencies.
        histogram: how often an iteration committed 1, 2, … tokens.
        reached: share of iterations that committed at least 1, 2, … tokens.
        replays_per_token: None if the backend does not count graphs.
        stages: milliseconds a token by kind of pass, and in the host (``host``); empty where it is not known.
        same: texts with the baseline's token ids.
    """

    label: str
    lossless: bool
    requests: int
    tokens: int
    ttft: Spread
    tpot: Spread
    latency: Spread
    throughput: Estimate
    speedup: Estimate
    latency_ratio: Estimate
    acceptance_length: Estimate
    draft_acceptance_rate: float
    histogram: tuple[int, ...]
    reached: tuple[float, ...]
    passes_per_token: Estimate
    replays_per_token: float | None
    stages: dict[str, float]
    same: int

    @property
    def broken(self) -> bool:
        """A lossless policy wrote another text than the baseline."""
        return self.lossless and self.same < self.requests


def summarise(record: Record) -> dict[str, list[Figures]]:
    """Figures by workload, and of all together; the policies in the record's order."""
    texts = dict(record.texts)
    if len(texts) > 1:
        texts[ALL] = list(interleave(list(record.texts.values())))
    return {workload: _workload(record, rows) for workload, rows in texts.items() if rows}


def _workload(record: Record, rows: Sequence[Sequence[Measurement]]) -> list[Figures]:
    baseline = [row[0] for row in rows]
    return [
        _figures(subject.label, subject.lossless, [row[place] for row in rows], baseline)
        for place, subject in enumerate(record.subjects)
    ]


def _figures(label: str, lossless: bool, own: Sequence[Measurement], baseline: Sequence[Measurement]) -> Figures:
    later = [(a, b) for a, b in zip(own, baseline, strict=True) if a.tpot and b.tpot]
    histogram = _histogram(own)
    proposed = sum(each.proposed for each in own)
    return Figures(
        label=label,
        lossless=lossless,
        requests=len(own),
        tokens=sum(each.tokens for each in own),
        ttft=_spread([each.ttft for each in own]),
        tpot=_spread([a.tpot for a, _ in later]),
        latency=_spread([each.latency for each in own]),
        throughput=_ratio([each.tokens for each in own], [each.latency / 1e3 for each in own]),
        speedup=_median([b.tpot / a.tpot for a, b in later]),
        latency_ratio=_median([b.latency / a.latency for a, b in zip(own, baseline, strict=True)]),
        acceptance_length=_ratio([_committed(each) for each in own], [sum(each.lengths) for each in own]),
        draft_acceptance_rate=sum(each.accepted for each in own) / proposed if proposed else 0.0,
        histogram=histogram,
        reached=_reached(histogram),
        passes_per_token=_ratio([each.passes for each in own], [_committed(each) for each in own]),
        replays_per_token=_replays(own),
        stages=_stages(own),
        same=sum(a.ids == b.ids for a, b in zip(own, baseline, strict=True)),
    )


def _median(values: Sequence[float]) -> Estimate:
    if not values:
        return Estimate(0.0, 0.0, 0.0)
    cases = np.array(values, np.float64)
    return bootstrap(len(cases), lambda picks: np.median(cases[picks], axis=1), _stretch(len(cases)))


def _ratio(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Sum ÷ sum, resampled by request; 0 where there is nothing to divide by."""
    a, b = np.array(above, np.float64), np.array(below, np.float64)

    def statistic(picks: NDArray[np.intp]) -> Values:
        total, quotient = b[picks].sum(1), np.zeros(len(picks))
        np.divide(a[picks].sum(1), total, out=quotient, where=total > 0)
        return quotient

    return bootstrap(len(a), statistic, _stretch(len(a)))


def _stretch(count: int) -> int:
    """Requests that are resampled together."""
    return -(-count // STRETCHES)


def _spread(values: Sequence[float]) -> Spread:
    found = np.percentile(values, PERCENTILES) if values else np.zeros(len(PERCENTILES))
    return Spread(_median(values), tuple(float(each) for each in found))


def _committed(text: Measurement) -> int:
    """Tokens behind the first one, which prefill gives."""
    return sum(length * times for length, times in enumerate(text.lengths, start=1))


def _histogram(texts: Sequence[Measurement]) -> tuple[int, ...]:
    longest = max(len(each.lengths) for each in texts)
    counts = [sum(each.lengths[place] for each in texts if place < len(each.lengths)) for place in range(longest)]
    while counts and not counts[-1]:
        counts.pop()
    return tuple(counts)


def _reached(histogram: Sequence[int]) -> tuple[float, ...]:
    total = sum(histogram)
    return tuple(sum(histogram[place:]) / total for place in range(len(histogram))) if total else ()


def _replays(texts: Sequence[Measurement]) -> float | None:
    counts = [each.replays for each in texts if each.replays is not None]
    return sum(counts) / sum(each.tokens for each in texts) if len(counts) == len(texts) else None


def _stages(texts: Sequence[Measurement]) -> dict[str, float]:
    """Milliseconds a token; what is left of the latencies was spent in the host."""
    if not all(each.stages for each in texts):
        return {}
    tokens = sum(each.tokens for each in texts)
    totals = {name: sum(each.stages[name] for each in texts) for name in texts[0].stages}
    totals["host"] = sum(each.latency for each in texts) - sum(totals.values())
    return {name: total / tokens for name, total in totals.items()}


def estimates(figures: Figures) -> dict[str, Estimate]:
    """The figures that have an interval, by name: what two runs of a study are compared by."""
    return {
        "TTFT p50, ms": figures.ttft.median,
        "TPOT p50, ms": figures.tpot.median,
        "latency p50, ms": figures.latency.median,
        "throughput, tok/s": figures.throughput,
        "TPOT, × baseline": figures.speedup,
        "latency, × baseline": figures.latency_ratio,
        "acceptance length": figures.acceptance_length,
        "passes per token": figures.passes_per_token,
    }
