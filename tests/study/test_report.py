"""The page: whole, sound, and from nowhere else."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from bitmtp.evaluation.intervals import Estimate
from bitmtp.study import charts
from bitmtp.study.record import Subject
from bitmtp.study.report import page

from .conftest import text
from .test_summary import study

ESTIMATE = Estimate(1.5, 1.2, 1.9)


class Tags(HTMLParser):
    """Every element that is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_no_network() -> None:
    html = page(study())
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert not re.search(r"https?://|<script|<link|@import|url\(", html)
    assert "prefers-color-scheme: dark" in html
    for drawing in re.findall(r'<svg class="plot".*?</svg>', html, re.DOTALL):
        ElementTree.fromstring(drawing)
        assert "nan" not in drawing
    assert "× as fast as autoregressive" in html


def test_names_cannot_become_markup() -> None:
    made = study()
    subjects = (made.subjects[0], Subject("<b>x</b> D=8", True, "<i>"))
    html = page(replace(made, name="<u>name</u>", environment=made.environment | {"date": "<s>"}, subjects=subjects))
    assert not re.search(r"<u>|<i>|<s>|<b>x", html)


def test_it_says_so_if_drafting_does_not_pay() -> None:
    made = study()
    assert "does not pay" not in page(made)
    slow = replace(made, texts={"plain": [[text(tpot=1.0), text(tpot=1.5)] for _ in range(5)]})
    assert "Drafting does not pay here" in page(slow)
    assert "The fastest lossless" not in page(replace(made, subjects=(made.subjects[0], Subject("lossy", False, ""))))


def test_long_commits_share_the_last_bar() -> None:
    made = study()
    made.texts["plain"][0][1] = text(lengths=(0,) * 39 + (1,))
    html = page(made)
    assert "tokens committed (17: or more)" in html
    assert "speculative, 17: 1.3%" in html  # one of 77 iterations
    assert "speculative, 18" not in html


def test_a_changed_text_is_said() -> None:
    made = study()
    assert "MISMATCH" not in page(made)
    made.texts["plain"][3][1] = text(ids="other")
    assert "MISMATCH" in page(made)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.0031), (0.4, 2.3), (0, 1700), (3, 3)])
def test_marks_cover_the_values_in_equal_steps(low: float, high: float) -> None:
    marks = charts.ticks(low, high)
    assert marks[0] <= low
    assert marks[-1] >= high
    steps = {round(b - a, 9) for a, b in pairwise(marks)}
    assert len(steps) <= 1
    assert 2 <= len(marks) <= 9


def test_a_cumulative_share_ends_with_what_lies_below_the_edge() -> None:
    points = charts.cumulative([3.0, 1.0, 2.0, 9.0], last=4.0)
    assert points == [(0, 0), (1, 0), (1, 0.25), (2, 0.25), (2, 0.5), (3, 0.5), (3, 0.75), (4, 0.75)]


def test_dots_lie_where_their_values_are() -> None:
    drawing = ElementTree.fromstring(
        charts.intervals("t", "x", {"a": ESTIMATE, "b": Estimate(1.0, 1.0, 1.0)}, {"a": 1, "b": 0})
    )
    dots = {dot[0].text: float(dot.get("cx", "nan")) for dot in drawing.findall("circle")}
    one = next(float(line.get("x1", "nan")) for line in drawing.findall("line") if line.get("class") == "one")
    assert dots["b: 1.00 (1.00 to 1.00)"] == one
    assert dots["a: 1.50 (1.20 to 1.90)"] > one
