"""Random shapes, and a shaper that takes another one for every pass."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from bitmtp.backends.base import Output, Window
from bitmtp.decoding.shaper import Draft, Verified
from bitmtp.decoding.topology import Kind, Node, Topology, with_block
from bitmtp.decoding.tree import Guess


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


class RandomShaper:
    """Trees, provisional drafts, and next drafts in the pass that verifies, switched at random.

    Attributes:
        block_size: the longest draft.
        used: which of the rarer kinds of pass there were.
        heard: for each iteration, tokens committed, proposals verified, rows run.
    """

    ranks = 3

    def __init__(self, seed: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self.used: set[str] = set()
        self.heard: list[tuple[int, int, int]] = []
        self._luck = random.Random(seed)

    def draft(self, text: Sequence[int], room: int, history: int) -> Draft:  # noqa: ARG002
        """Any block, seeing all or little; or any copy."""
        luck = self._luck
        if room > 1 and luck.random() < 0.2:
            self.used.add("copied")
            start, most = luck.randrange(len(text)), luck.randint(1, room - 1)
            return Draft(1, copied=tuple(Guess((token,), (0.5,)) for token in text[start:][:most]))
        window = Window(luck.randint(0, 2), luck.randint(1, 4)) if luck.random() < 0.3 else None
        return Draft(luck.randint(1, self.block_size), window)

    def judge(self, guesses: Sequence[Guess], known: bool, room: int, history: int) -> int | Topology:  # noqa: ARG002
        """Any tree, perhaps with the next draft's masks."""
        luck = self._luck
        if known and (room == 1 or luck.random() < 0.2):
            return 1
        nodes = [Node(Kind.PROPOSAL, 1)] if room > 1 else []
        for _ in range(luck.randint(0, 20)):
            parent = luck.choice([None, *range(len(nodes))])
            depth = 1 if parent is None else nodes[parent].depth + 1
            rank = sum(node.parent == parent for node in nodes)
            if depth < room and depth <= len(guesses) and rank < self.ranks:
                nodes.append(Node(Kind.PROPOSAL, depth, rank, parent))
        shape = Topology("any", tuple(nodes))
        self.used.add("known" if known else "unknown")
        longest = min(self.block_size, room - max((node.depth for node in nodes), default=0))
        if len(guesses) < 2 or not nodes or longest < 2 or luck.random() < 0.5:
            return shape
        self.used.add("fused")
        return with_block(shape, luck.choice(range(len(nodes))), luck.randint(2, longest))

    def learn(self, chosen: Sequence[Output], verified: Sequence[Verified], widths: Sequence[int]) -> None:
        """Check what it is told."""
        assert 1 <= len(widths) <= 2
        assert all(each.stood for each in verified[:-1])
        self.heard.append((len(chosen), len(verified), sum(widths)))
