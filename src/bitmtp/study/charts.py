"""Plots as SVG text that takes its colours from the page: readable on light and dark, and without network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from bitmtp.evaluation.intervals import Estimate

WIDTH, HEIGHT = 360, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 18, 30, 38
_DASHES = ("", "6 3", "2 2", "8 3 2 3", "1 3", "10 4")

Points = Sequence[tuple[float, float]]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values that cover ``low`` … ``high``, some ``about`` of them and at least two."""
    span = (high - low) / about or 1.0
    unit = 10.0 ** math.floor(math.log10(span))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= span * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    return [round(step * place, 12) for place in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Axes:
    """Where values lie in a picture of ``height``; both axes are linear."""

    x: tuple[float, float]
    y: tuple[float, float]
    height: float = HEIGHT
    left: float = _LEFT

    def px(self, value: float) -> float:
        """Pixels from the left."""
        low, high = self.x
        return self.left + (value - low) / (high - low) * (WIDTH - self.left - _RIGHT)

    def py(self, value: float) -> float:
        """Pixels from the top."""
        low, high = self.y
        return self.height - _BOTTOM - (value - low) / (high - low) * (self.height - _TOP - _BOTTOM)


def curves(title: str, x_label: str, series: Mapping[str, Points], places: Mapping[str, int]) -> str:
    """Lines over a common x axis, from 0 to 100%.

    Args:
        series: label → points.
        places: label → number of its colour.
    """
    longest = max((x for points in series.values() for x, _ in points), default=1.0)
    marks = ticks(0, longest)
    axes = Axes((0, marks[-1]), (0, 1))
    parts = [
        *_frame(title, axes, x_label),
        *_x_marks(axes, marks),
        *_y_marks(axes, (0, 0.25, 0.5, 0.75, 1), percent=True),
    ]
    for label, points in series.items():
        place = places[label]
        path = " ".join(f"{axes.px(x):.1f},{axes.py(y):.1f}" for x, y in points)
        dash = _DASHES[place % len(_DASHES)]
        parts.append(
            f'<polyline class="line s{place}" stroke-dasharray="{dash}" points="{path}">'
            f"<title>{escape(label)}</title></polyline>"
        )
    return _svg(title, parts, HEIGHT)


def cumulative(values: Sequence[float], last: float) -> list[tuple[float, float]]:
    """Share of values up to each value, as steps; cut at ``last``."""
    points, count = [(0.0, 0.0)], len(values)
    for place, value in enumerate(sorted(values)):
        if value > last:
            break
        points += [(value, place / count), (value, (place + 1) / count)]
    points.append((last, points[-1][1]))
    return points


def bars(title: str, x_label: str, series: Mapping[str, Sequence[float]], places: Mapping[str, int]) -> str:
    """Shares for 1, 2, …, a bar of each label side by side."""
    count = max(map(len, series.values()), default=1)
    highest = ticks(0, max((value for values in series.values() for value in values), default=1.0))
    axes = Axes((0.5, count + 0.5), (0, highest[-1]))
    parts = [
        *_frame(title, axes, x_label),
        *_y_marks(axes, highest, percent=True),
        *_x_marks(axes, range(1, count + 1)),
    ]
    wide = 0.8 / max(len(series), 1)
    for order, (label, values) in enumerate(series.items()):
        for place, value in enumerate(values, start=1):
            left, right = axes.px(place - 0.4 + order * wide), axes.px(place - 0.4 + (order + 1) * wide)
            top = axes.py(value)
            parts.append(
                f'<rect class="bar s{places[label]}" x="{left:.1f}" y="{top:.1f}" width="{right - left - 0.5:.1f}" '
                f'height="{axes.py(0) - top:.1f}"><title>{escape(label)}, {place}: {value:.1%}</title></rect>'
            )
    return _svg(title, parts, HEIGHT)


def intervals(title: str, x_label: str, rows: Mapping[str, Estimate], places: Mapping[str, int]) -> str:
    """A dot and its interval for each label, and a line where the ratio is 1."""
    axes, marks = _row_axes([each for row in rows.values() for each in (row.low, row.high)] + [1.0], len(rows))
    parts = [*_frame(title, axes, x_label), *_x_marks(axes, marks)]
    parts.append(_line("one", axes.px(1), _TOP, axes.px(1), axes.height - _BOTTOM))
    for place, (label, each) in enumerate(rows.items()):
        y = axes.py(len(rows) - 1 - place)
        text = f"<title>{escape(label)}: {each.value:.2f} ({each.low:.2f} to {each.high:.2f})</title>"
        parts.append(_row_label(axes, y, label))
        parts.append(_line(f"line s{places[label]}", axes.px(each.low), y, axes.px(each.high), y))
        parts.append(
            f'<circle class="bar s{places[label]}" cx="{axes.px(each.value):.1f}" cy="{y:.1f}" r="4">{text}</circle>'
        )
    return _svg(title, parts, axes.height)


def stacks(title: str, x_label: str, rows: Mapping[str, Mapping[str, float]], places: Mapping[str, int]) -> str:
    """A bar for each label, of parts that add up.

    Args:
        places: part → number of its colour.
    """
    axes, marks = _row_axes([0.0, *(sum(row.values()) for row in rows.values())], len(rows))
    parts = [*_frame(title, axes, x_label), *_x_marks(axes, marks)]
    for place, (label, row) in enumerate(rows.items()):
        y, start = axes.py(len(rows) - 1 - place), 0.0
        parts.append(_row_label(axes, y, label))
        for name, value in row.items():
            left, right = axes.px(start), axes.px(start + max(value, 0.0))
            start += max(value, 0.0)
            parts.append(
                f'<rect class="bar s{places[name]}" x="{left:.1f}" y="{y - 8:.1f}" width="{right - left:.1f}" '
                f'height="16"><title>{escape(label)}, {escape(name)}: {value:.3g}</title></rect>'
            )
    return _svg(title, parts, axes.height)


def legend(places: Mapping[str, int], *, lines: bool = True) -> str:
    """The names of the colours."""
    entries = []
    for label, place in places.items():
        dash = _DASHES[place % len(_DASHES)] if lines else ""
        entries.append(
            f'<span><svg width="26" height="10" aria-hidden="true"><line class="line s{place} thick" x1="1" y1="5" '
            f'x2="25" y2="5" stroke-dasharray="{dash}"/></svg> {escape(label)}</span>'
        )
    return f'<p class="legend">{"".join(entries)}</p>'


def _row_axes(values: Sequence[float], rows: int) -> tuple[Axes, list[float]]:
    """Axes of a picture with a row for each label, and the marks below it."""
    marks = ticks(min(values), max(values))
    return Axes((marks[0], marks[-1]), (-0.6, rows - 0.4), height=_TOP + _BOTTOM + 26 * rows, left=108), marks


def _svg(title: str, parts: Sequence[str], height: float) -> str:
    body = "\n".join(parts)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">\n{body}\n</svg>'
    )


def _frame(title: str, axes: Axes, x_label: str) -> Iterator[str]:
    middle = (axes.left + WIDTH - _RIGHT) / 2
    yield f'<text class="head" x="4" y="16">{escape(title)}</text>'
    yield f'<text class="axis" x="{middle:g}" y="{axes.height - 6:g}" text-anchor="middle">{escape(x_label)}</text>'
    yield _line("rule", axes.left, axes.height - _BOTTOM, WIDTH - _RIGHT, axes.height - _BOTTOM)


def _x_marks(axes: Axes, marks: Sequence[float]) -> Iterator[str]:
    every = math.ceil(len(marks) / 9)
    for mark in marks[::every]:
        x, y = axes.px(mark), axes.height - _BOTTOM
        yield _line("grid", x, _TOP, x, y)
        yield f'<text class="axis" x="{x:.1f}" y="{y + 14:g}" text-anchor="middle">{mark:g}</text>'


def _y_marks(axes: Axes, marks: Sequence[float], *, percent: bool) -> Iterator[str]:
    for mark in marks:
        y = axes.py(mark)
        yield _line("grid", axes.left, y, WIDTH - _RIGHT, y)
        label = f"{mark:.0%}" if percent else f"{mark:g}"
        yield f'<text class="axis" x="{axes.left - 5:g}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'


def _row_label(axes: Axes, y: float, label: str) -> str:
    return f'<text class="axis" x="{axes.left - 8:g}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
