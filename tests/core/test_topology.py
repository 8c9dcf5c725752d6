"""Shapes of passes: what is refused, what each node sees, and that a shape survives JSON."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import topologies

from bitmtp.backends.base import MAX_WIDTH
from bitmtp.core.topology import NAMED, Kind, Node, Topology, block, chain, spine, tree, with_block
from bitmtp.errors import ConfigError

PROPOSAL, MASK = Kind.PROPOSAL, Kind.MASK


@given(topologies())
def test_a_node_sees_its_ancestors_and_itself(shape: Topology) -> None:
    for index, node in enumerate(shape.nodes):
        ancestors = {index}
        while node.parent is not None:
            ancestors.add(node.parent)
            node = shape.nodes[node.parent]
        assert shape.visible[index] == sum(1 << each for each in ancestors)
        assert shape.path(index) == sorted(ancestors)
        assert len(ancestors) == shape.nodes[index].depth
        assert index in shape.children(shape.nodes[index].parent)


@given(topologies(), st.lists(st.booleans(), min_size=12, max_size=12))
def test_what_is_kept_is_a_shape(shape: Topology, wanted: list[bool]) -> None:
    kept = shape.keep(wanted[: shape.width])
    alive = [index for index in range(shape.width) if all(wanted[each] for each in shape.path(index))]
    assert [(node.depth, node.rank) for node in kept.nodes] == [
        (shape.nodes[index].depth, shape.nodes[index].rank) for index in alive
    ]
    assert [kept.path(index) for index in range(kept.width)] == [
        [alive.index(each) for each in shape.path(index)] for index in alive
    ]


@given(topologies() | st.sampled_from(NAMED))
def test_json_round_trip(shape: Topology) -> None:
    assert Topology.from_json(shape.to_json()) == shape


def test_the_plain_block() -> None:
    shape = block(4)
    assert [node.depth for node in shape.nodes] == [1, 2, 3]
    assert shape.visible == (0b1, 0b11, 0b111)
    assert (shape.width, shape.depth) == (3, 0)
    assert block(1).width == 0


def test_a_spine() -> None:
    shape = spine(3, (0, 2, 1))
    places = [(node.depth, node.rank, node.parent) for node in shape.nodes]
    assert places == [(1, 0, None), (2, 0, 0), (3, 0, 1), (2, 1, 0), (2, 2, 0), (3, 1, 1)]
    assert (shape.depth, shape.ranks) == (3, 3)


def test_shared_beginnings_are_one_node() -> None:
    assert tree("t", [(0, 0), (0, 1), (0, 1, 0)]).width == 4
    assert tree("t", [(0,) * 5]).nodes == chain(5).nodes


def test_the_next_draft_hangs_from_a_proposal() -> None:
    shape = with_block(chain(3), 1, 3)
    assert [(node.kind, node.depth, node.parent) for node in shape.nodes[3:]] == [(MASK, 1, 1), (MASK, 2, 3)]
    assert shape.visible[3:] == (0b01011, 0b11011)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([Node(PROPOSAL, 1, 0, 0)], "its parent must come before it"),
        ([Node(PROPOSAL, 1, 0, -1)], "its parent must come before it"),
        ([Node(PROPOSAL, 2)], "one place behind its parent"),
        ([Node(PROPOSAL, 1), Node(PROPOSAL, 1, 1, 0)], "one place behind its parent"),
        ([Node(PROPOSAL, 1), Node(PROPOSAL, 1)], "has such a child already"),
        ([Node(PROPOSAL, 1, -1)], "a rank is not negative"),
        ([Node(MASK, 2)], "masks count 1, 2"),
        ([Node(PROPOSAL, 1), Node(MASK, 2, 0, 0)], "masks count 1, 2"),
        ([Node(MASK, 1), Node(PROPOSAL, 2, 0, 0)], "cannot stand behind a mask"),
        ([Node(PROPOSAL, 1, rank) for rank in range(MAX_WIDTH + 1)], "at most 64 rows"),
    ],
)
def test_refusals(nodes: list[Node], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology("wrong", tuple(nodes))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"name": "a", "nodes": [[1]]}', '{"name": "a", "nodes": [["x", 1, 0, 0]]}']
)
def test_what_is_not_a_topology(text: str) -> None:
    with pytest.raises(ConfigError, match="not a topology"):
        Topology.from_json(text)
