"""Figures of made-up measurements, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitmtp.errors import RequestError
from bitmtp.evaluation.intervals import Estimate
from bitmtp.study.breakdown import Breakdown
from bitmtp.study.compare import Agreement, compare
from bitmtp.study.measure import Measurement
from bitmtp.study.record import Record, Subject
from bitmtp.study.summary import summarise

from .conftest import text

PARTS = Breakdown({"1 row": {"attention": 2.0, "product": 3.0}}, {"64": {"prefill": 9.0, "head": 1.0}})
SUBJECTS = (Subject("autoregressive", True, ""), Subject("speculative", True, ""))


def record(**texts: list[list[Measurement]]) -> Record:
    return Record("tiny", "abc", {"cpu": "x", "cores": 2, "backend": "cpu", "date": "now"}, PARTS, 16, SUBJECTS, texts)


def study(slower: float = 1.0) -> Record:
    """Twenty requests; the second policy is 1.5 to 2.45 times as fast."""
    rows = []
    for number in range(20):
        own = text(tpot=slower * 4.0, latency=100.0, lengths=(9,), passes=9)
        other = text(tpot=4.0 / (1.5 + number / 20), latency=50.0 + number)
        rows.append([own, other])
    return record(plain=rows)


def test_figures_are_those_of_the_measurements() -> None:
    rows = [
        [text(tpot=4.0, latency=100.0, lengths=(9,)), text(tpot=2.0, latency=80.0)],
        [text(tpot=4.0, latency=100.0, lengths=(9,)), text(tpot=1.0, latency=20.0, ids="other")],
        [text(tpot=4.0, latency=100.0, lengths=(9,)), text(tpot=4.0, latency=100.0, lengths=(0, 0, 3))],
    ]
    baseline, other = summarise(record(plain=rows))["plain"]
    assert baseline.speedup.value == baseline.speedup.low == 1
    assert baseline.acceptance_length.value == 1
    assert other.speedup.value == 2
    assert other.speedup.low < 2 < other.speedup.high
    assert other.latency_ratio.value == 1.25
    assert other.throughput.value == pytest.approx(30 / 0.2)
    assert other.acceptance_length.value == pytest.approx((9 + 9 + 9) / (4 + 4 + 3))
    assert other.histogram == (2, 4, 3, 2)
    assert other.reached == pytest.approx((1, 9 / 11, 5 / 11, 2 / 11))
    assert other.passes_per_token.value == pytest.approx(15 / 27)
    assert other.draft_acceptance_rate == 0.5
    assert other.ttft.percentiles == (10, 10, 10, 10)
    assert (other.same, other.broken) == (2, True)
    assert not baseline.broken


def test_workloads_are_summed_up_together_too() -> None:
    figures = summarise(record(plain=[[text(), text()]], tools=[[text(), text(tokens=30)]]))
    assert list(figures) == ["plain", "tools", "all"]
    assert [each.tokens for each in figures["all"]] == [20, 40]


def test_what_the_stages_leave_is_the_hosts() -> None:
    stages = {"prefill": 10.0, "draft": 20.0, "exact": 15.0}
    own, other = summarise(record(plain=[[text(), text(stages=stages)]]))["plain"]
    assert own.stages == {}
    assert other.stages == pytest.approx({"prefill": 1.0, "draft": 2.0, "exact": 1.5, "host": 0.5})


def test_texts_of_one_token_have_no_time_per_later_token() -> None:
    short = text(tpot=0.0, tokens=1, lengths=(), passes=0)
    own, other = summarise(record(plain=[[short, short]]))["plain"]
    assert (own.tpot.median.value, other.speedup.value, other.acceptance_length.value) == (0, 0, 0)


def test_a_run_agrees_with_itself_and_not_with_a_slower_one() -> None:
    assert all(each.agrees for each in compare(study(), study()))
    changed = [each for each in compare(study(), study(slower=2.0)) if not each.agrees]
    assert {(each.label, each.figure) for each in changed} == {
        ("autoregressive", "TPOT p50, ms"),
        ("speculative", "TPOT, × baseline"),
    }
    assert {round(each.change, 6) for each in changed} == {1.0}
    assert {each.figure: each.relative for each in changed} == {"TPOT p50, ms": False, "TPOT, × baseline": True}


@pytest.mark.parametrize(
    ("second", "agrees"),
    [
        (Estimate(14.9, 11.9, 18.0), True),  # 4.9 apart; 4 and 3 make 5
        (Estimate(15.1, 12.1, 18.0), False),
        (Estimate(7.5, 6.0, 9.0), True),  # 2.5 apart; 2 and 1.5 make 2.5
        (Estimate(7.4, 6.0, 8.9), False),
    ],
)
def test_runs_agree_within_the_error_of_a_difference(second: Estimate, agrees: bool) -> None:
    first = Estimate(10.0, 8.0, 14.0)
    assert Agreement("plain", "x", "TPOT p50, ms", first, second).agrees == agrees
    assert Agreement("plain", "x", "TPOT p50, ms", second, first).agrees == agrees


def test_other_studies_are_not_compared() -> None:
    with pytest.raises(RequestError, match="differ in max_tokens"):
        compare(study(), Record("tiny", "abc", {}, PARTS, 17, SUBJECTS, study().texts))
    with pytest.raises(RequestError, match="different requests"):
        compare(study(), record(plain=study().texts["plain"][:5]))


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    study().write(tmp_path / "study.json")
    assert Record.read(tmp_path / "study.json") == study()
    for bad in ("{}", "[]", '{"format": "bitmtp study 1"}', "x"):
        (tmp_path / "bad.json").write_text(bad, encoding="utf-8")
        with pytest.raises(RequestError, match="not a study"):
            Record.read(tmp_path / "bad.json")
    with pytest.raises(RequestError, match="cannot be read"):
        Record.read(tmp_path / "none.json")
