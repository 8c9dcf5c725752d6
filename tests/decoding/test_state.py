"""The rows that a text asks for, and what penalties count."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bitmtp.backends.base import Head, Row, Window
from bitmtp.decoding.state import State
from bitmtp.decoding.topology import chain, tree, with_block
from bitmtp.decoding.tree import Tree, masks
from bitmtp.sampling import Choice, Sampling

PENALISED = Sampling(presence_penalty=1.0)


def counts(choice: Choice) -> dict[int, int]:
    return dict(zip(choice.seen.tolist(), choice.counts.tolist(), strict=True))


def verify_rows(state: State, proposals: list[int]) -> list[Row]:
    return state.rows(Tree(chain(len(proposals)), tuple(proposals)))


def test_rows_of_a_draft_pass() -> None:
    state = State(7, Sampling(), [5, 6, 8, 9, 3], 2, materialized=3)
    rows = state.rows(masks(4))
    assert [row.token for row in rows] == [9, 3, -1, -2, -3]
    assert [row.position for row in rows] == [3, 4, 5, 6, 7]
    assert [row.visible for row in rows] == [0b1, 0b11, 0b111, 0b1111, 0b11111]
    assert [row.head for row in rows] == [Head.NONE, *[Head.EXACT] * 4]
    assert {row.sequence for row in rows} == {7}
    assert all(row.window is None for row in rows)


def test_rows_of_a_block_of_one() -> None:
    (row,) = State(1, Sampling(), [5, 6], 1, materialized=1).rows(masks(1))
    assert (row.token, row.position, row.head) == (6, 1, Head.EXACT)


def test_rows_of_a_verify_pass() -> None:
    rows = verify_rows(State(1, Sampling(), [5, 6], 1, materialized=2), [4, 2, 4])
    assert [row.token for row in rows] == [4, 2, 4]
    assert [row.position for row in rows] == [2, 3, 4]
    assert [row.visible for row in rows] == [0b1, 0b11, 0b111]
    assert {row.head for row in rows} == {Head.EXACT}


def test_rows_of_a_tree_behind_pending_tokens() -> None:
    shape = with_block(tree("t", [(0, 0), (0, 1)]), 2, 3)
    rows = State(1, Sampling(), [5, 6], 1, materialized=1).rows(Tree(shape, (7, 8, 9, -1, -2)))
    assert [row.token for row in rows] == [6, 7, 8, 9, -1, -2]
    assert [row.position for row in rows] == [1, 2, 3, 3, 4, 5]
    assert [row.visible for row in rows] == [0b1, 0b11, 0b111, 0b1011, 0b11011, 0b111011]
    assert [row.head for row in rows] == [Head.EXACT] * 6


def test_rows_of_a_provisional_draft() -> None:
    window = Window(2, 3)
    rows = State(1, Sampling(), [5, 6, 7], 1, materialized=1).rows(masks(2), window)
    assert [row.head for row in rows] == [Head.NONE, Head.DRAFT, Head.DRAFT]
    assert all(row.window == window for row in rows)


def test_penalties_count_along_each_row_s_own_path() -> None:
    state = State(1, PENALISED, [5, 6, 5], 2, materialized=3)
    rows = verify_rows(state, [6, 4, 4])
    assert [counts(row.choice) for row in rows] == [
        {5: 1, 6: 1},
        {4: 1, 5: 1, 6: 1},
        {4: 2, 5: 1, 6: 1},
    ]
    assert counts(state.choice()) == {5: 1, 6: 0}


def test_penalties_count_along_the_branches_of_a_tree() -> None:
    state = State(1, PENALISED, [5, 6, 5], 2, materialized=3)
    rows = state.rows(Tree(tree("t", [(0, 0), (0, 1)]), (6, 4, 9)))
    assert [counts(row.choice) for row in rows] == [{5: 1, 6: 1}, {4: 1, 5: 1, 6: 1}, {5: 1, 6: 1, 9: 1}]


def test_penalties_follow_the_text() -> None:
    state = State(1, PENALISED, [5, 5, 6], 3, materialized=2)
    assert counts(state.choice()) == {5: 0, 6: 0}
    state.commit([6, 7], 1)
    assert counts(state.choice()) == {5: 0, 6: 1, 7: 1}
    assert counts(state.choice([7, 8])) == {5: 0, 6: 1, 7: 2, 8: 1}
    assert counts(state.choice()) == {5: 0, 6: 1, 7: 1}


def test_pending_and_generated() -> None:
    state = State(1, Sampling(), [5, 5, 6], 3)
    assert state.pending == [5, 5, 6]
    state.commit([9], 3)
    assert (state.pending, state.generated, state.materialized) == ([9], 1, 3)


def test_without_penalties_nothing_is_counted() -> None:
    assert counts(State(1, Sampling(temperature=1.0), [5, 6], 1).choice([7])) == {}


class Alternating:
    """A grammar: even ids behind an odd number of tokens, odd ids behind an even one."""

    def __init__(self) -> None:
        self.text: list[int] = []

    def allowed(self, path: Sequence[int]) -> NDArray[np.uint32] | None:
        text = [*self.text, *path]
        if any(token % 2 == index % 2 for index, token in enumerate(text)):
            return None
        return np.full(10, 0x55555555 if len(text) % 2 else 0xAAAAAAAA, np.uint32)

    def commit(self, tokens: Sequence[int]) -> None:
        self.text += tokens


def words(choice: Choice) -> int | None:
    return None if choice.allowed is None else int(choice.allowed[0])


def test_a_grammar_restricts_exact_rows_along_their_path() -> None:
    grammar = Alternating()
    state = State(1, Sampling(), [5, 6], 2, materialized=1, grammar=grammar)
    assert [words(row.choice) for row in state.rows(masks(3))] == [0xAAAAAAAA, None, None]
    state.commit([7], 1)
    assert grammar.text == [7]
    assert [words(row.choice) for row in state.rows(masks(2))] == [0x55555555, None]
    state.materialized = 3
    assert [words(row.choice) for row in verify_rows(state, [8, 9, 9, 8])] == [0xAAAAAAAA, 0x55555555, None, None]


def test_pieces_of_a_long_prompt() -> None:
    rows = State(1, Sampling(), [5, 6, 7, 8], 4, materialized=1).piece_rows(2)
    assert [(row.token, row.position, row.visible, row.head) for row in rows] == [
        (6, 1, 0b1, Head.NONE),
        (7, 2, 0b11, Head.NONE),
    ]
