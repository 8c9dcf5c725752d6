"""A shape with its tokens: what a pass runs behind the text, and which of it the text turns out to follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from bitmtp.backends.base import Output, mask
from bitmtp.decoding.topology import Kind, Node, Topology, block
from bitmtp.numerics import gumbel
from bitmtp.sampling import Sampling

UNLIKELY = 0.02  # alternatives below this are not worth a row anywhere


@dataclass(frozen=True, slots=True)
class Tree:
    """A topology and the token of each of its nodes."""

    shape: Topology
    tokens: tuple[int, ...]

    def first(self, width: int) -> Tree:
        """Its first ``width`` nodes; a node never comes before what it hangs from."""
        if width >= self.shape.width:
            return self
        width = max(width, 0)
        return Tree(self.shape.keep([index < width for index in range(self.shape.width)]), self.tokens[:width])

    def block(self, node: int) -> list[int]:
        """The masks that hang from a node, if it is the anchor of a block."""
        found: list[int] = []
        at: int | None = node
        while at is not None:
            below = (index for index in self.shape.children(at) if self.shape.nodes[index].kind is Kind.MASK)
            if (at := next(below, None)) is not None:
                found.append(at)
        return found

    def path(self, index: int) -> list[int]:
        """Tokens from the text to this node, its own included."""
        return [self.tokens[each] for each in self.shape.path(index)]


@cache
def masks(size: int) -> Tree:
    """The draft of ``size`` proposals behind an anchor."""
    return Tree(block(size), tuple(mask(depth) for depth in range(1, size)))


@dataclass(frozen=True, slots=True)
class Guess:
    """What a draft says of one depth, the likeliest first: tokens, and their probabilities behind its own choices."""

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]

    @classmethod
    def of(cls, output: Output, position: int, sampling: Sampling) -> Guess:
        """The chosen token first, then the alternatives of a draft's row that are not too unlikely.

        Under sampling they are ranked as the sample is drawn: by logit with the noise of the place where the token
        will stand (``position``), which the verifier's row will add as well.
        """
        logits = dict(output.top)
        if len(logits) < 2 or output.token not in logits:
            return cls((output.token,), (output.probability,))
        best = logits.pop(output.token)
        others = {
            token: p for token, logit in logits.items() if (p := _beside(output.probability, logit - best)) >= UNLIKELY
        }
        if sampling.temperature and len(others) > 1:
            ids = np.array(list(others), np.int32)
            noise = gumbel(sampling.seed, sampling.choice, position, ids).tolist()
            score = {
                token: logits[token] / sampling.temperature + more for token, more in zip(others, noise, strict=True)
            }
            others = {token: others[token] for token in sorted(others, key=score.__getitem__, reverse=True)}
        return cls((output.token, *others), (output.probability, *others.values()))


def _beside(probability: float, gap: float) -> float:
    """Probability of an alternative whose logit is ``gap`` above that of a token of this probability."""
    return min(probability * math.exp(min(gap, 50.0)), 1.0)


def grow(shape: Topology, guesses: Sequence[Guess], accepts: Callable[[Sequence[int]], bool] | None = None) -> Tree:
    """Give each proposal the token of its depth and rank, each mask its own.

    Args:
        guesses: of each depth, from 1 on.
        accepts: whether a path of tokens may stand (None: any may); a node that may not, or that no guess covers, is
            left out with all that hangs from it.
    """
    tokens = [_token(node, guesses) for node in shape.nodes]
    if accepts is None and None not in tokens:
        return Tree(shape, tuple(token for token in tokens if token is not None))
    wanted: list[bool] = []
    for index, node in enumerate(shape.nodes):
        known = tokens[index] is not None and (node.parent is None or wanted[node.parent])
        if known and accepts is not None and node.kind is Kind.PROPOSAL:
            known = accepts([tokens[each] or 0 for each in shape.path(index)])
        wanted.append(known)
    kept = [token for token, want in zip(tokens, wanted, strict=True) if want and token is not None]
    return Tree(shape.keep(wanted), tuple(kept))


def joint_probabilities(shape: Topology, guesses: Sequence[Guess], known: bool) -> list[float]:
    """How likely the draft thinks that the text follows each node; 0 for masks and where no guess reaches.

    Args:
        known: whether the first proposal is certain, being the exact head's.
    """
    joint: list[float] = []
    for node in shape.nodes:
        own = guesses[node.depth - 1].probabilities if node.kind is Kind.PROPOSAL and node.depth <= len(guesses) else ()
        probability = own[node.rank] if node.rank < len(own) else 0.0
        if node.parent is not None:
            probability *= joint[node.parent]
        elif known and node.kind is Kind.PROPOSAL:
            probability = float(node.rank == 0)
        joint.append(probability)
    return joint


def _token(node: Node, guesses: Sequence[Guess]) -> int | None:
    if node.kind is Kind.MASK:
        return mask(node.depth)
    known = guesses[node.depth - 1].tokens if node.depth <= len(guesses) else ()
    return known[node.rank] if node.rank < len(known) else None


def longest_path(tree: Tree, first: int, chosen: Sequence[int | None]) -> list[int]:
    """The proposals that stand, from the text on.

    Args:
        first: the token that stands behind the text.
        chosen: what the row of each node says comes next.
    """
    path: list[int] = []
    wanted: int | None = first
    while True:
        parent = path[-1] if path else None
        found = next((index for index in tree.shape.children(parent) if tree.tokens[index] == wanted), None)
        if found is None:
            return path
        path.append(found)
        wanted = chosen[found]
