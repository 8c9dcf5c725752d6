"""Lines break between words, however the text is cut into pieces."""

from __future__ import annotations

import textwrap

import pytest

from bitmtp.cli.wrap import LONGEST, Wrap

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps for the rest of the afternoon."


def laid_out(pieces: list[str], width: int) -> str:
    wrap = Wrap(width)
    shown = [part for piece in pieces for part in wrap.push(piece, "")]
    return "".join(text for text, _ in [*shown, *wrap.flush()])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 200])
@pytest.mark.parametrize("width", [12, 30, 31, 80, 200])
def test_it_wraps_as_a_whole_text_would(size: int, width: int) -> None:
    pieces = [TEXT[start : start + size] for start in range(0, len(TEXT), size)]
    assert laid_out(pieces, width) == textwrap.fill(TEXT, width)


def test_what_fits_is_left_as_it_is() -> None:
    code = "def f(x):\n    return  x\n\n\ty = 1\n"
    assert laid_out(list(code), 40) == code


def test_wide_characters_take_two_columns_and_need_no_spaces() -> None:
    lines = laid_out(list("字" * 60), 40).splitlines()
    assert "".join(lines) == "字" * 60
    assert 20 / 2 < max(map(len, lines)) <= 20


def test_a_word_keeps_the_styles_of_its_pieces() -> None:
    wrap = Wrap(10)
    assert list(wrap.push("one tw", "a")) == [("one", "a")]
    assert list(wrap.push("o three ", "b")) == [(" ", "a"), ("tw", "a"), ("o", "b"), ("\n", ""), ("three", "b")]


def test_a_word_longer_than_a_line_is_shown_in_pieces() -> None:
    assert laid_out(["x" * 100], 20) == "x" * 100
    assert laid_out(list("x" * 100), 20).replace("\n", "") == "x" * 100
    assert LONGEST < 100
