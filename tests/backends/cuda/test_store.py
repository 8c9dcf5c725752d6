"""The K/V store: copies across the borders of mappings."""

from __future__ import annotations

from itertools import pairwise

import pytest
from conftest import make_backend, random_checkpoint, random_tokens, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng

from bitmtp.backends.base import Head, causal_rows
from bitmtp.backends.cuda.layout import PIECE
from bitmtp.backends.cuda.store import block_bytes, spans
from bitmtp.sampling import GREEDY

ends = st.lists(st.integers(1, 60), max_size=6)


@given(st.integers(0, 50), ends, ends)
def test_spans_cover_all_bytes_once_and_cross_no_end(size: int, source: list[int], copy: list[int]) -> None:
    found = spans(size, source, copy)
    assert [byte for start, end in found for byte in range(start, end)] == list(range(size))
    assert all(start < end for start, end in found)
    assert not [end for end in (*source, *copy) for start, stop in found if start < end < stop]


def test_no_more_spans_than_ends_ask_for() -> None:
    assert spans(10) == [(0, 10)]
    assert spans(10, [4], [4, 6]) == [(0, 4), (4, 6), (6, 10)]
    assert spans(10, [4, 10], [20]) == [(0, 4), (4, 10)]
    assert spans(0, [4]) == []


# K/V as large as those of a real model, so that pages, blocks of positions and mappings end at different places.
LARGE = {"num_layers": 28, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "max_position": 1024}
LENGTH = 900


@pytest.fixture(scope="module")
def backend(gpu):  # noqa: ARG001  (`gpu` skips where there is none)
    return make_backend("cuda", random_checkpoint(tiny_config(**LARGE)))


def outputs_of(backend, sequence, tokens):
    """Read tokens behind what is there; the logits behind each, which tell every bit of K/V that it saw."""
    found = []
    for start in range(0, len(tokens), 64):
        piece = tokens[start : start + 64]
        rows = causal_rows(sequence, piece, backend.length(sequence), [Head.EXACT] * len(piece), GREEDY)
        found += [output.logits.tobytes() for output in backend.step(rows, logits=True)]
        backend.materialize(sequence, range(len(piece)))
    return found


def borders(backend, sequence):
    """Positions in whose K/V a mapping of the sequence ends, or that are the last or first of their block there."""
    block = block_bytes(backend.config)
    at = {end // block * PIECE for end in backend.sequence(sequence).store.ends}
    return sorted({place + further for place in at for further in (-1, 0, 1, PIECE - 1, PIECE, PIECE + 1)})


def test_forks_around_every_border_of_a_mapping(backend):
    tokens = random_tokens(default_rng(1), LENGTH, backend.config)
    source = backend.open()
    whole = outputs_of(backend, source, tokens)
    assert len(backend.sequence(source).store.ends) > 2
    assert all(a < b for a, b in pairwise(backend.sequence(source).store.ends))
    lengths = [length for length in borders(backend, source) if 0 < length < LENGTH - 2]
    assert len(lengths) > 12
    for length in lengths:
        fork = backend.fork(source, length)
        assert outputs_of(backend, fork, tokens[length : length + 2]) == whole[length : length + 2], length
        backend.close(fork)
    backend.close(source)


def test_forks_of_forks_that_have_grown(backend):
    """A copy has other borders than what it was copied from, and grows at others again."""
    tokens = random_tokens(default_rng(2), LENGTH, backend.config)
    source = backend.open()
    whole = outputs_of(backend, source, tokens)
    for length in (1, PIECE, 3 * PIECE + 1, 5 * PIECE - 1):
        first = backend.fork(source, length)
        assert outputs_of(backend, first, tokens[length:]) == whole[length:], length
        for shorter in borders(backend, first):
            if 0 < shorter < LENGTH - 2:
                second = backend.fork(first, shorter)
                assert outputs_of(backend, second, tokens[shorter : shorter + 2]) == whole[shorter : shorter + 2]
                backend.close(second)
        backend.close(first)
    backend.close(source)
