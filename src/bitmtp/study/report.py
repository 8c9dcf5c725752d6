"""The study as one HTML page: text, tables and plots, nothing to be fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

import numpy as np

from bitmtp.evaluation.intervals import Estimate
from bitmtp.study import charts
from bitmtp.study.record import Record
from bitmtp.study.summary import ALL, Figures, summarise

_POSITIONS = 17  # that are drawn: what a block of 16 commits at most
_TITLES = {
    "plain": "Plain text",
    "reasoning": "Reasoning",
    "tools": "Tool calling",
    ALL: "All requests",
}
_STAGES = {
    "prefill": "prefill",
    "draft": "draft passes",
    "exact": "exact passes (verification, or one token a pass)",
    "host": "host: decisions, text, encoding",
}


def page(record: Record) -> str:
    """The whole page."""
    summary = summarise(record)
    sections = [_section(record, workload, summary[workload]) for workload in sorted(summary, key=_order)]
    body = "\n".join([_lead(record, summary), *sections, _breakdown(record), _environment(record)])
    style = files("bitmtp.study").joinpath("report.css").read_text(encoding="utf-8")
    title = f"{record.name}: deployment study"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>\n{style}</style></head><body>\n'
        f"<h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def _order(workload: str) -> int:
    known = [ALL, *(name for name in _TITLES if name != ALL)]
    return known.index(workload) if workload in known else len(known)


def _lead(record: Record, summary: Mapping[str, Sequence[Figures]]) -> str:
    whole = summary[ALL] if ALL in summary else next(iter(summary.values()))
    best = max((each for each in whole[1:] if each.lossless), key=lambda each: each.speedup.value, default=None)
    env = record.environment
    device = env.get("device") or f"{env['cpu']}, {env.get('threads', env['cores'])} threads"
    lines = [
        f"{whole[0].requests} requests, each under every policy in turn, greedy, up to {record.max_tokens} tokens; "
        f"{escape(str(env['backend']))} backend on {escape(str(device))}; {escape(str(env['date']))}."
    ]
    if best is not None:
        verdict = "" if best.speedup.low > 1 else "Drafting does not pay here beyond doubt. "
        lines.append(
            f"{verdict}The fastest lossless policy that drafts is <b>{escape(best.label)}</b>: "
            f"{best.speedup.value:.2f} × as fast as autoregressive decoding (time per later token; median, 95% "
            f"{best.speedup.low:.2f} to {best.speedup.high:.2f}), with {best.acceptance_length.value:.2f} tokens "
            "committed an iteration."
        )
    lines += [_broken(each) for each in whole if each.broken]
    note = "Every text is written alone. Intervals: 95%, bootstrap over requests, which stay paired."
    return "".join(f"<p>{line}</p>" for line in lines) + f'<p class="soft">{note}</p>'


def _broken(figures: Figures) -> str:
    return (
        f"<b>MISMATCH</b>: {escape(figures.label)} is lossless, but {figures.requests - figures.same} of its texts "
        "differ from autoregressive decoding's."
    )


def _section(record: Record, workload: str, figures: Sequence[Figures]) -> str:
    named = _named(figures)
    places = {name: place for place, name in enumerate(named)}
    speed = {name: each.speedup for name, each in named.items()}
    latency = {name: each.latency_ratio for name, each in named.items()}
    plots = [
        charts.intervals("Decoding against autoregressive", "× as fast (TPOT, paired)", speed, places),
        charts.intervals("Latency against autoregressive", "× as fast (end to end, paired)", latency, places),
        *_times(record, workload, places),
        *_acceptance(named, places),
    ]
    return (
        f"<h2>{escape(_TITLES.get(workload, workload))}</h2>\n{charts.legend(places)}\n"
        f'<div class="plots">{"".join(plots)}</div>\n{_stage_plot(named)}{_table(figures)}{_percentiles(figures)}'
    )


def _named(figures: Sequence[Figures]) -> dict[str, Figures]:
    """By the policy's name where that is enough, for there is little room in a plot."""
    names = [each.label.split()[0] for each in figures]
    return {name if names.count(name) == 1 else each.label: each for name, each in zip(names, figures, strict=True)}


def _times(record: Record, workload: str, places: Mapping[str, int]) -> list[str]:
    """Cumulative shares of TTFT, TPOT and latency."""
    rows = [row for name, own in record.texts.items() if workload in (name, ALL) for row in own]
    plots = []
    for field, title in (("ttft", "Time to first token"), ("tpot", "Time per later token"), ("latency", "Latency")):
        values = {
            label: [value for row in rows if (value := getattr(row[place], field))] for label, place in places.items()
        }
        last = float(np.percentile([each for own in values.values() for each in own] or [1.0], 99))
        series = {label: charts.cumulative(own, last) for label, own in values.items() if own}
        plots.append(charts.curves(f"{title}: share of requests", "ms", series, places))
    return plots


def _acceptance(named: Mapping[str, Figures], places: Mapping[str, int]) -> list[str]:
    drafting = {name: each for name, each in named.items() if len(each.histogram) > 1}
    if not drafting:
        return []
    shares = {name: _shares(each.histogram) for name, each in drafting.items()}
    reached = {name: list(enumerate(each.reached[:_POSITIONS], start=1)) for name, each in drafting.items()}
    most = max(len(each.histogram) for each in drafting.values())
    label = "tokens committed" + (f" ({_POSITIONS}: or more)" if most > _POSITIONS else "")
    return [
        charts.bars("Tokens an iteration: share of iterations", label, shares, places),
        charts.curves("Iterations that reach a position", "position in the iteration", reached, places),
    ]


def _shares(histogram: Sequence[int]) -> list[float]:
    """Of iterations, by tokens committed; the last place stands for all beyond it."""
    kept = [*histogram[: _POSITIONS - 1], sum(histogram[_POSITIONS - 1 :])]
    return [count / sum(histogram) for count in kept[: len(histogram)]]


def _stage_plot(named: Mapping[str, Figures]) -> str:
    rows = {
        name: {_STAGES[stage]: value for stage, value in each.stages.items()}
        for name, each in named.items()
        if each.stages
    }
    if not rows:
        return '<p class="soft">Whole iterations run without the host here: time by kind of pass is not known.</p>'
    places = {name: place for place, name in enumerate(_STAGES.values(), start=1)}
    plot = charts.stacks("Where a token's time goes", "ms a token", rows, places)
    return f'{charts.legend(places, lines=False)}<div class="plots">{plot}</div>'


def _table(figures: Sequence[Figures]) -> str:
    head = ["policy", "same texts", "× TPOT", "× latency", "tok/s", "tokens an iteration", "passes a token"]
    replays = any(each.replays_per_token is not None for each in figures)
    head += ["drafts accepted"] + ["graph replays a token"] * replays
    rows = []
    for each in figures:
        cells = [
            escape(each.label) + ("" if each.lossless else " (lossy)"),
            f"{each.same} of {each.requests}",
            *(_estimate(value, digits) for value, digits in (
                (each.speedup, 2), (each.latency_ratio, 2), (each.throughput, 1),
                (each.acceptance_length, 2), (each.passes_per_token, 3),
            )),
            f"{each.draft_acceptance_rate:.0%}" if each.draft_acceptance_rate else "",
        ]  # fmt: skip
        cells += [f"{each.replays_per_token or 0:.3f}"] * replays
        rows.append(cells)
    return _html_table(head, rows)


def _percentiles(figures: Sequence[Figures]) -> str:
    head = ["milliseconds: p50 / p90 / p95 / p99", "TTFT", "TPOT", "latency"]
    rows = [
        [
            escape(each.label),
            *(" / ".join(map(_milliseconds, spread.percentiles)) for spread in (each.ttft, each.tpot, each.latency)),
        ]
        for each in figures
    ]
    return _html_table(head, rows)


def _milliseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _estimate(estimate: Estimate, digits: int) -> str:
    low, high = f"{estimate.low:.{digits}f}", f"{estimate.high:.{digits}f}"
    return f'{estimate.value:.{digits}f} <span class="interval">{low}–{high}</span>'


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>\n'


def _breakdown(record: Record) -> str:
    """What passes and first tokens are made of."""
    known, plots = record.breakdown, []
    if known.passes:
        plots.append(_parts("Kernels of a pass, each class replayed alone", "µs", known.passes))
    if known.first_token:
        prompts = {f"{length} tokens": parts for length, parts in known.first_token.items()}
        plots.append(_parts("Time to the first token of a prompt", "ms", prompts))
    note = "" if known.passes else '<p class="soft">This backend does not tell the kernels of a pass apart.</p>'
    return f'<h2>What the times are made of</h2>{note}<div class="plots">{"".join(plots)}</div>' if plots else ""


def _parts(title: str, unit: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """A plot with its legend and table; the eleven classes of a pass share the six colours, largest first."""
    totals = {name: sum(row.get(name, 0.0) for row in rows.values()) for row in rows.values() for name in row}
    names = sorted(totals, key=lambda name: -totals[name])
    shown = {name: place for place, name in enumerate(names[:5], start=1)}
    grouped = {
        label: {name: row.get(name, 0.0) for name in shown}
        | ({"other": sum(value for name, value in row.items() if name not in shown)} if len(names) > 5 else {})
        for label, row in rows.items()
    }
    places = shown | ({"other": 0} if len(names) > 5 else {})
    table = _html_table(
        [unit, *rows], [[escape(name), *(f"{row.get(name, 0.0):.3g}" for row in rows.values())] for name in names]
    )
    return f"<div>{charts.stacks(title, unit, grouped, places)}{charts.legend(places, lines=False)}{table}</div>"


def _environment(record: Record) -> str:
    facts = {"model": f"{record.name} ({record.model})", **record.environment}
    facts |= {each.label: each.options for each in record.subjects}
    entries = "".join(f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    return f"<h2>Where and how</h2><dl>{entries}</dl>"
