"""The static shape of a pass behind the text: which proposals and masks there are, and what each one sees.

A shape says nothing about tokens. A proposal is named by its depth (how many places behind the text it stands) and its
rank among the draft's candidates for that place, as in Medusa's trees (arXiv:2401.10774); the plain block is the chain
of masks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, cached_property
from typing import Any

from bitmtp.backends.base import MAX_WIDTH
from bitmtp.errors import ConfigError


class Kind(StrEnum):
    """What a node's row runs."""

    PROPOSAL = "proposal"
    MASK = "mask"


@dataclass(frozen=True, slots=True)
class Node:
    """One row of a shape.

    Attributes:
        depth: of a proposal, its place behind the text, from 1 on; of a mask, its place behind its block's anchor.
        rank: of a proposal, its place among the candidates for its depth; 0 is the draft's own choice.
        parent: index of the node before it, which it sees with all that this one sees; None: the text alone.
    """

    kind: Kind
    depth: int
    rank: int = 0
    parent: int | None = None


@dataclass(frozen=True)
class Topology:
    """A named shape: nodes, each behind its parent.

    Raises:
        ConfigError: the nodes are no such shape.
    """

    name: str
    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        if len(self.nodes) > MAX_WIDTH:
            raise ConfigError(
                f"topology {self.name!r} has {len(self.nodes)} nodes; a pass has at most {MAX_WIDTH} rows"
            )
        taken: set[tuple[int | None, Kind, int]] = set()
        for index, node in enumerate(self.nodes):
            if reason := self._fault(index, node):
                raise ConfigError(f"topology {self.name!r}, node {index}: {reason}")
            place = (node.parent, node.kind, node.rank)
            if place in taken:
                raise ConfigError(f"topology {self.name!r}, node {index}: its parent has such a child already")
            taken.add(place)

    def _fault(self, index: int, node: Node) -> str | None:
        """What is wrong with a node, if anything is."""
        if node.parent is not None and not 0 <= node.parent < index:
            return "its parent must come before it"
        parent = None if node.parent is None else self.nodes[node.parent]
        if node.kind is Kind.MASK:
            before = parent.depth if parent is not None and parent.kind is Kind.MASK else 0
            return None if node.depth == before + 1 and node.rank == 0 else "masks count 1, 2, … and have rank 0"
        if parent is not None and parent.kind is Kind.MASK:
            return "a proposal cannot stand behind a mask"
        if node.depth != (1 if parent is None else parent.depth + 1):
            return "a proposal stands one place behind its parent"
        return None if node.rank >= 0 else "a rank is not negative"

    @property
    def width(self) -> int:
        """How many rows it has."""
        return len(self.nodes)

    @property
    def depth(self) -> int:
        """Depth of its deepest proposal; 0 without proposals."""
        return max((node.depth for node in self.nodes if node.kind is Kind.PROPOSAL), default=0)

    @property
    def drafts(self) -> bool:
        """Whether it has masks."""
        return any(node.kind is Kind.MASK for node in self.nodes)

    @property
    def ranks(self) -> int:
        """How many candidates of a depth it needs."""
        return max((node.rank + 1 for node in self.nodes), default=1)

    @cached_property
    def visible(self) -> tuple[int, ...]:
        """For each node, bits of the nodes that it sees: its ancestors and itself."""
        bits: list[int] = []
        for index, node in enumerate(self.nodes):
            bits.append(1 << index | (0 if node.parent is None else bits[node.parent]))
        return tuple(bits)

    def place(self, index: int) -> int:
        """How many places behind the text a node stands."""
        return self.visible[index].bit_count()

    def path(self, index: int) -> list[int]:
        """The nodes from the text to this one, itself included."""
        return [other for other in range(index + 1) if self.visible[index] >> other & 1]

    def children(self, parent: int | None) -> Sequence[int]:
        """The nodes behind this one."""
        return self._children.get(parent, ())

    @cached_property
    def _children(self) -> dict[int | None, list[int]]:
        found: dict[int | None, list[int]] = {}
        for index, node in enumerate(self.nodes):
            found.setdefault(node.parent, []).append(index)
        return found

    def keep(self, wanted: Sequence[bool]) -> Topology:
        """The nodes that are wanted, less those whose parent is not among them."""
        if all(wanted):
            return self
        places: dict[int | None, int | None] = {None: None}
        nodes: list[Node] = []
        for index, node in enumerate(self.nodes):
            if wanted[index] and node.parent in places:
                places[index] = len(nodes)
                nodes.append(replace(node, parent=places[node.parent]))
        return Topology(self.name, tuple(nodes))

    def to_json(self) -> str:
        """One line of JSON."""
        rows = [[node.kind, node.depth, node.rank, node.parent] for node in self.nodes]
        return json.dumps({"name": self.name, "nodes": rows})

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Read :meth:`to_json`.

        Raises:
            ConfigError: the text is no topology.
        """
        try:
            data: Any = json.loads(text)
            nodes = tuple(Node(Kind(kind), depth, rank, parent) for kind, depth, rank, parent in data["nodes"])
            return cls(str(data["name"]), nodes)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"not a topology ({error})") from None


def block(size: int) -> Topology:
    """The masks of a draft pass behind its anchor: ``size`` proposals, the anchor's own included."""
    nodes = (Node(Kind.MASK, depth, parent=depth - 2 if depth > 1 else None) for depth in range(1, size))
    return Topology(f"block-{size}", tuple(nodes))


@cache
def chain(size: int) -> Topology:
    """The draft's own choices, one behind the other."""
    return tree(f"chain-{size}", [(0,) * size])


def spine(size: int, alternatives: Sequence[int]) -> Topology:
    """A chain, and beside its i-th proposal ``alternatives[i]`` further candidates.

    That is the natural tree of a model with a chain: what it says of a depth holds behind its own choice for the depth
    before.
    """
    paths = [(0,) * depth + (rank,) for depth, more in enumerate(alternatives) for rank in range(1, more + 1)]
    name = f"spine-{size}-" + "".join(map(str, alternatives))
    return tree(name, [(0,) * size, *paths])


def tree(name: str, paths: Iterable[Sequence[int]]) -> Topology:
    """The proposals on these paths; a path names the rank taken at each depth from 1 on."""
    nodes: list[Node] = []
    places: dict[tuple[int, ...], int] = {}
    for path in paths:
        for depth in range(1, len(path) + 1):
            prefix = tuple(path[:depth])
            if prefix not in places:
                places[prefix] = len(nodes)
                nodes.append(Node(Kind.PROPOSAL, depth, prefix[-1], places.get(prefix[:-1])))
    return Topology(name, tuple(nodes))


def with_block(base: Topology, node: int, size: int) -> Topology:
    """``base`` with a block of masks hanging from one of its proposals: the next draft, in the same pass.

    The proposal is the block's anchor, so ``size`` counts it, as in :func:`block`.
    """
    start = base.width
    masks = (Node(Kind.MASK, depth, parent=node if depth == 1 else start + depth - 2) for depth in range(1, size))
    return Topology(f"{base.name}+{size}@{node}", (*base.nodes, *masks))


# A few shapes that say what there is; any other is made by the functions above.
NAMED: tuple[Topology, ...] = (
    block(8),
    chain(8),
    spine(6, (0, 2, 2, 1)),
    tree("wide-12", [(0, 0, 0, 0, 0), (0, 1, 0), (0, 2), (0, 0, 1, 0), (0, 0, 2), (0, 0, 0, 1)]),
    with_block(chain(6), 5, 6),
)
