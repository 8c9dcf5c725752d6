"""Trees with their tokens: candidates, growth, likelihood and the path that a text follows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import topologies

from bitmtp.backends.base import Output
from bitmtp.decoding.topology import Topology, block, chain, spine, tree, with_block
from bitmtp.decoding.tree import Guess, Tree, grow, joint_probabilities, longest_path, masks
from bitmtp.sampling import Choice, Sampling, choose

GREEDY = Sampling()


def guess(*tokens: int) -> Guess:
    return Guess(tokens, tuple(0.5**place for place in range(1, len(tokens) + 1)))


def test_candidates_of_a_greedy_row() -> None:
    output = Output(4, 0.6, 1.0, ((4, 2.0), (9, 2.0 - np.log(2)), (1, 0.0), (2, -9.0)))
    found = Guess.of(output, 7, GREEDY)
    assert found.tokens == (4, 9, 1), "the last one is too unlikely"
    assert found.probabilities == pytest.approx((0.6, 0.3, 0.6 * np.exp(-2)))


def test_a_row_without_alternatives_has_one_candidate() -> None:
    assert Guess.of(Output(4, 0.6, 1.0), 7, GREEDY) == Guess((4,), (0.6,))
    assert Guess.of(Output(4, 0.6, 1.0, ((5, 1.0),)), 7, GREEDY) == Guess((4,), (0.6,)), "its logit is not known"


@given(seed=st.integers(0, 1000), position=st.integers(0, 50))
def test_alternatives_are_ranked_as_the_sample_is_drawn(seed: int, position: int) -> None:
    sampling = Sampling(temperature=1.5, seed=seed)
    raw = np.linspace(1, 0, 6).astype(np.float32)
    ids = np.arange(6, dtype=np.int32)
    drawn: list[int] = []
    while len(drawn) < 6:  # what would be drawn if those before were forbidden
        left = np.array([token for token in ids if token not in drawn], np.int32)
        drawn.append(int(left[choose(left, raw[left], Choice(sampling), position)]))
    output = Output(drawn[0], 0.5, 1.0, tuple((int(token), float(raw[token])) for token in ids))
    assert list(Guess.of(output, position, sampling).tokens) == drawn


def test_growing() -> None:
    shape = with_block(spine(3, (0, 1, 2)), 2, 3)
    grown = grow(shape, [guess(1), guess(2, 3), guess(4, 5)], lambda _: True)
    assert grown.tokens == (1, 2, 4, 3, 5, -1, -2), "there is no third candidate for depth 3"
    assert [grown.path(index) for index in range(5)] == [[1], [1, 2], [1, 2, 4], [1, 3], [1, 2, 5]]
    assert grow(chain(4), [guess(1), guess(2)], lambda _: True).tokens == (1, 2)


def test_what_may_not_stand_does_not_grow() -> None:
    shape = tree("t", [(0, 0, 0), (0, 1, 0)])
    grown = grow(shape, [guess(1), guess(2, 3), guess(4)], lambda path: path[:2] != [1, 2])
    assert [grown.path(index) for index in range(grown.shape.width)] == [[1], [1, 3], [1, 3, 4]]


def test_likelihood() -> None:
    shape = tree("t", [(0, 0), (0, 1, 0), (1,)])
    guesses = [Guess((1, 2), (0.4, 0.3)), Guess((3, 4), (0.5, 0.2)), Guess((5,), (0.5,))]
    assert joint_probabilities(shape, guesses, known=True) == pytest.approx([1, 0.5, 0.2, 0.1, 0])
    assert joint_probabilities(shape, guesses, known=False) == pytest.approx([0.4, 0.2, 0.08, 0.04, 0.3])
    assert joint_probabilities(chain(3), guesses[:1], known=True) == [1, 0, 0]
    assert joint_probabilities(block(3), guesses, known=True) == [0, 0]


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Any proposals, siblings with different tokens."""
    shape = draw(topologies())
    return Tree(shape, tuple(node.rank for node in shape.nodes))


@given(trees(), st.integers(0, 2), st.lists(st.integers(0, 2), min_size=12, max_size=12))
def test_longest_path(grown: Tree, first: int, chosen: list[int]) -> None:
    def follows(index: int) -> bool:
        path = grown.shape.path(index)
        wanted = [first, *(chosen[each] for each in path[:-1])]
        return grown.path(index) == wanted

    fits = [index for index in range(grown.shape.width) if follows(index)]
    path = longest_path(grown, first, chosen)
    assert path == (grown.shape.path(max(fits, key=lambda index: grown.shape.nodes[index].depth)) if fits else [])


@given(trees(), st.integers(-1, 14))
def test_its_first_nodes(grown: Tree, width: int) -> None:
    cut = grown.first(width)
    assert cut.tokens == grown.tokens[: max(width, 0)]
    assert cut.shape.nodes == grown.shape.nodes[: max(width, 0)]


def test_the_block_of_an_anchor() -> None:
    grown = Tree(with_block(chain(3), 1, 4), (1, 2, 3, -1, -2, -3))
    assert [grown.block(index) for index in range(3)] == [[], [3, 4, 5], []]
    assert masks(4).tokens == (-1, -2, -3)
    assert masks(1) == Tree(Topology("block-1", ()), ())
