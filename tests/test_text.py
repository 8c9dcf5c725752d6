"""Text that grows token by token: never broken, never taken back, cut at a stop string wherever tokens end."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import END
from hypothesis import given
from hypothesis import strategies as st

from bitmtp.text import TextStream
from bitmtp.tokenizer import Tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
SMALL = st.text("ab ", max_size=30)
STOP = st.text("ab ", min_size=1, max_size=5)
TOKENS = st.lists(st.integers(0, 319), max_size=40)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(tokenizer_folder)


def run(stream: TextStream, tokens: list[int]) -> list[str]:
    """The pieces of a text whose generation ends with its tokens or a stop string, as the engine does it."""
    pieces = []
    for token in tokens:
        pieces.append(stream.push(token))
        assert stream.text == "".join(pieces)
        if stream.stopped:
            break
    return [*pieces, stream.finish()]


@given(text=TEXT)
def test_pieces_make_the_text(text: str, tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    pieces = run(stream, tokenizer.encode(text))
    whole = tokenizer.decode(tokenizer.encode(text))
    assert "".join(pieces) == stream.text == whole


@given(tokens=TOKENS)
def test_any_tokens_make_their_decoded_text(tokens: list[int], tokenizer: Tokenizer) -> None:
    """Also broken characters, special tokens in the middle of one, and whatever else a model may write."""
    stream = TextStream(tokenizer)
    assert "".join(run(stream, tokens)) == tokenizer.decode(tokens)


@given(text=TEXT)
def test_no_piece_is_broken(text: str, tokenizer: Tokenizer) -> None:
    pieces = run(TextStream(tokenizer), tokenizer.encode(text.replace("\ufffd", "")))
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_of_four_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    assert run(TextStream(tokenizer), tokenizer.encode("\U0001f6a2!")) == ["", "", "", "\U0001f6a2", "!", ""]


def test_a_broken_character_shows_at_the_end(tokenizer: Tokenizer) -> None:
    assert run(TextStream(tokenizer), tokenizer.encode("\U0001f6a2")[:2]) == ["", "", "\ufffd"]


@given(text=SMALL, stop=STOP)
def test_one_stop_string(text: str, stop: str, tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, (stop,))
    run(stream, tokenizer.encode(text))
    assert stream.text == text.split(stop)[0]
    assert stream.stopped == (stop in text)


@given(text=SMALL, stops=st.lists(STOP, min_size=1, max_size=4))
def test_several_stop_strings(text: str, stops: list[str], tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, tuple(stops))
    run(stream, tokenizer.encode(text))
    assert not any(stop in stream.text for stop in stops)
    if stream.stopped:
        assert any(text.startswith(stream.text + stop) for stop in stops)
    else:
        assert stream.text == text


@given(text=TEXT, place=st.integers(0, 39), length=st.integers(1, 6))
def test_stop_strings_of_any_characters(text: str, place: int, length: int, tokenizer: Tokenizer) -> None:
    stop = text[place : place + length]
    if not stop or "\ufffd" in text:
        return
    stream = TextStream(tokenizer, (stop,))
    run(stream, tokenizer.encode(text))
    assert stream.text == text[: text.index(stop)]


def test_a_stop_string_across_tokens_is_never_shown(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ("x-y-z",))
    tokens = tokenizer.encode("q x-y-z tail")
    pieces = run(stream, tokens)
    assert stream.stopped
    assert "".join(pieces) == "q "
    assert not any(piece.startswith("x") for piece in pieces)


def test_what_looked_like_a_stop_string_is_released(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ("x-y-z",))
    assert "".join(run(stream, tokenizer.encode("x-y-q x-y"))) == "x-y-q x-y"
    assert not stream.stopped


def test_special_tokens_are_silent(tokenizer: Tokenizer) -> None:
    assert run(TextStream(tokenizer), [*tokenizer.encode("ab"), END])[-2:] == ["", ""]
