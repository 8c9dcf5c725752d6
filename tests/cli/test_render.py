"""Layout of figures and tables."""

from __future__ import annotations

import io
import sys

import pytest

from bitmtp.cli.render import fill, print_facts, print_table

COLUMNS, ROWS = ["policy", "tok/s", "× AR"], [["autoregressive", "9.5", "1.00"], ["hybrid", "12.0", "1.26"]]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(monkeypatch: pytest.MonkeyPatch, columns: int) -> io.StringIO:
    """Make standard output a terminal of this width."""
    terminal = _Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", terminal)
    return terminal


def test_fill_breaks_between_items() -> None:
    assert fill(["one two", "three", "four five six"], 15) == [["one two", "three"], ["four five six"]]
    assert fill(["longer than the line"], 5) == [["longer than the line"]]


def test_a_piped_table_is_aligned_by_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Title", COLUMNS, ROWS)
    expected = ["Title", "policy          tok/s  × AR", "autoregressive    9.5  1.00", "hybrid           12.0  1.26"]
    assert capsys.readouterr().out.splitlines() == expected


def test_a_table_in_a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = screen(monkeypatch, 60)
    print_table("Title", COLUMNS, ROWS)
    assert [line.split() for line in shown.getvalue().splitlines() if "1." in line] == ROWS


def test_a_table_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = screen(monkeypatch, 24)
    print_table("Title", COLUMNS, ROWS)
    assert shown.getvalue().splitlines()[1:3] == ["autoregressive", "  tok/s 9.5 · × AR 1.00"]


def test_long_facts_continue_under_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = screen(monkeypatch, 28)
    print_facts("Machine", [("CPU", "a processor with a long name")])
    assert shown.getvalue().splitlines() == ["Machine", "  CPU  a processor with a", "       long name"]
