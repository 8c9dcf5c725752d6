"""Text that grows token by token: never broken, never taken back, cut at a stop string wherever tokens end."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import END
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers

from bitmtp.text import TextStream
from bitmtp.tokenizer import Tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
SMALL = st.text("ab ", max_size=30)
STOP = st.text("ab ", min_size=1, max_size=5)
TOKENS = st.lists(st.integers(0, 319), max_size=40)


def write_byte_fallback(folder: Path) -> Path:
    """A tokenizer as Llama 2 has it: what it does not know becomes a token a byte, and the first space is dropped."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581", "a", "b", "\u2581a", "<unk>"]
    merges = [("\u2581", "a")]
    words = Library(
        models.BPE({name: id for id, name in enumerate(names)}, merges, byte_fallback=True, unk_token="<unk>")
    )
    words.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    words.decoder = decoders.Sequence(steps)
    words.add_special_tokens(["<s>", "<pad>", "</s>"])
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(tokenizer_folder)


@pytest.fixture(scope="module", params=["byte level", "byte fallback"])
def either(request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of the two ways in which tokenizers write what they do not know."""
    return tokenizer if request.param == "byte level" else Tokenizer(write_byte_fallback(tmp_path_factory.mktemp("f")))


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
def test_pieces_make_the_text(text: str, either: Tokenizer) -> None:
    stream = TextStream(either)
    pieces = run(stream, either.encode(text.replace("\u2581", "")))
    assert "".join(pieces) == stream.text == text.replace("\u2581", "")


@given(text=TEXT, cut=st.integers(0, 160))
def test_a_text_cut_anywhere_ends_with_a_whole_character(text: str, cut: int, either: Tokenizer) -> None:
    """Also behind a U+FFFD that was written."""
    text = text.replace("\u2581", "")
    tokens = either.encode(text)[:cut]
    stream = TextStream(either)
    run(stream, tokens)
    assert text.startswith(stream.text)
    lossy = either.decode(tokens)
    assert stream.text == lossy or (lossy.endswith("\ufffd") and len(stream.text) < len(lossy))


@given(tokens=TOKENS)
def test_any_tokens_make_their_decoded_text(tokens: list[int], tokenizer: Tokenizer) -> None:
    """Also broken characters, special tokens in the middle of one, and whatever else a model may write."""
    stream = TextStream(tokenizer)
    assert "".join(run(stream, tokens)) == tokenizer.decode_whole(tokens)


@given(text=TEXT)
def test_no_piece_is_broken(text: str, either: Tokenizer) -> None:
    pieces = run(TextStream(either), either.encode(text.replace("\ufffd", "")))
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_of_four_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    assert run(TextStream(tokenizer), tokenizer.encode("\U0001f6a2!")) == ["", "", "", "\U0001f6a2", "!", ""]


def test_a_character_that_was_cut_never_shows(tokenizer: Tokenizer) -> None:
    ship = tokenizer.encode("\U0001f6a2")
    assert len(ship) == 4
    for cut in range(1, 4):
        assert run(TextStream(tokenizer), [*ship, *ship[:cut]])[4:] == [""] * (cut + 1)
    assert tokenizer.decode_whole([*ship, *ship[:2], END]) == "\U0001f6a2"
    assert tokenizer.decode_whole(ship[1:3]) == tokenizer.decode(ship[1:3]), "not the beginning of any character"


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
