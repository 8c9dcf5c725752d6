"""The text's own past: the latest place that ends alike, against a search through all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bitmtp.decoding.copies import GRAM, LONGEST, Past, continuation


def search(text: list[int]) -> tuple[int, int]:
    """The same by brute force."""
    for end in range(len(text) - 1, GRAM - 1, -1):
        if text[end - GRAM : end] == text[-GRAM:]:
            shared = GRAM
            while shared < min(end, LONGEST) and text[end - shared - 1] == text[len(text) - shared - 1]:
                shared += 1
            return shared, end
    return 0, 0


@given(text=st.lists(st.integers(0, 2), max_size=60), steps=st.lists(st.integers(1, 7), max_size=30))
def test_latest_place_as_the_text_grows(text: list[int], steps: list[int]) -> None:
    past, length = Past(), 0
    for step in steps:
        length = min(length + step, len(text))
        assert past.match(text[:length]) == search(text[:length])


def test_what_followed_and_what_repeats() -> None:
    assert continuation([1, 2, 3, 4, 1, 2, 3], 3, 2) == [4, 1]
    assert continuation([7, 8, 7, 8, 7, 8], 4, 5) == [7, 8, 7, 8, 7]
