"""Random shapes."""

from __future__ import annotations

from hypothesis import strategies as st

from bitmtp.core.topology import Kind, Node, Topology


@st.composite
def topologies(draw: st.DrawFn, most: int = 12) -> Topology:
    """Any proposals, each behind an earlier one or the text."""
    nodes: list[Node] = []
    for _ in range(draw(st.integers(0, most))):
        parent = draw(st.none() | st.integers(0, len(nodes) - 1)) if nodes else None
        depth = 1 if parent is None else nodes[parent].depth + 1
        rank = sum(node.parent == parent for node in nodes)
        nodes.append(Node(Kind.PROPOSAL, depth, rank, parent))
    return Topology("any", tuple(nodes))
