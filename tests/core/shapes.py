"""Random shapes, and random policies over them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from bitmtp.backends.base import Window
from bitmtp.core.policies import make_policy
from bitmtp.core.policy import Policy, Verify
from bitmtp.core.topology import Kind, Node, Topology, chain, with_block


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


@st.composite
def policies(draw: st.DrawFn, lossless: bool = False, largest: int = 32) -> Policy:
    """Any policy; of the lossless ones also `auto`, trees, windows and passes that verify and draft at once."""
    size, bound = draw(st.integers(1, largest)), draw(st.floats(0, 1))
    kind = draw(st.sampled_from(["plain", "auto", "tree", "window", "fused"])) if lossless else "plain"
    always = Policy("any", size, Verify.ALWAYS, verify_bound=bound)
    if kind == "auto":
        return make_policy("auto", largest, block_size=size)
    if kind == "window":
        return replace(always, window=Window(draw(st.integers(0, 2)), draw(st.integers(1, 4))))
    if kind == "fused":
        depth = draw(st.integers(1, 6))
        return replace(always, verify_bound=0.0, topology=with_block(chain(depth), draw(st.integers(0, depth - 1)), 5))
    if kind == "tree":
        return replace(always, topology=draw(topologies()))
    verify = Verify.ALWAYS if lossless else draw(st.sampled_from(list(Verify)))
    return Policy("any", size, verify, draw(st.floats(0, 1)), draw(st.integers(1, size)), bound)
