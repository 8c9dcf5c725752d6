"""What a decoder asks of its policy: how to draft next, and what of a draft to verify.

Here the answers of a policy that never changes its mind; ``chooser.py`` has those that follow the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bitmtp.backends.base import Output, Window
from bitmtp.decoding.policy import Policy, decide, worth_verifying
from bitmtp.decoding.topology import Topology, chain
from bitmtp.decoding.tree import Guess, Tree, joint_probabilities


@dataclass(frozen=True, slots=True)
class Draft:
    """The next draft.

    Attributes:
        size: how many proposals.
        window: if it is provisional, seeing this much of the history only.
        copied: proposals that need no draft, being copied from the text; they are verified at once.
    """

    size: int
    window: Window | None = None
    copied: tuple[Guess, ...] = ()


@dataclass(frozen=True, slots=True)
class Verified:
    """What a verify pass showed of one proposal.

    Attributes:
        depth: how many of the draft's guesses it depends on, its own included.
        probability: what the draft said of it.
        stood: whether the text took it.
    """

    depth: int
    probability: float
    stood: bool


@dataclass(frozen=True, slots=True)
class Drafted:
    """A draft to verify: what is proposed, what the draft said of it, and the first token if the exact head gave it."""

    tree: Tree
    guesses: tuple[Guess, ...]
    known: Output | None = None
    copied: bool = False

    def verified(self, tree: Tree, path: Sequence[int]) -> list[Verified]:
        """What the draft said of its own choices along the path that the text follows, up to the first that fell.

        Args:
            tree: as much of :attr:`tree` as was run.
            path: its nodes that stood.
        """
        found: list[Verified] = []
        for depth, guess in enumerate(self.guesses):
            parent = path[depth - 1] if depth else None
            own = [index for index in tree.shape.children(parent) if tree.tokens[index] == guess.tokens[0]]
            if not own:
                break
            stood = depth < len(path) and path[depth] == own[0]
            guessed = depth + (self.known is None)
            if guessed:
                found.append(Verified(guessed, guess.probabilities[0], stood))
            if not stood:
                break
        return found


class Shaper(Protocol):
    """Decides the shape of each pass of one text. Of a lossless text it can change the speed, never a token."""

    @property
    def ranks(self) -> int:
        """How many candidates of a depth it can use."""
        ...

    def draft(self, text: Sequence[int], room: int, history: int) -> Draft:
        """How to draft behind this text, of which ``history`` tokens are in the store, if ``room`` more may come."""
        ...

    def judge(self, guesses: Sequence[Guess], known: bool, room: int, history: int) -> int | Topology:
        """What to do with a draft: commit so many proposals as they are (at least 1), or verify this shape.

        Args:
            guesses: for each depth from 1 on.
            known: whether the first proposal is the exact head's; if not, nothing can be committed as it is.
        """
        ...

    def learn(self, chosen: Sequence[Output], verified: Sequence[Verified], widths: Sequence[int]) -> None:
        """An iteration is over: the exact outputs that it committed, its verified proposals along the text, and the
        widths of its passes."""
        ...


@dataclass(frozen=True, slots=True)
class FixedShaper:
    """The same block and the same bound all along."""

    policy: Policy

    @property
    def ranks(self) -> int:
        """As many as the policy's topology has."""
        return self.policy.topology.ranks if self.policy.topology else 1

    def draft(self, text: Sequence[int], room: int, history: int) -> Draft:  # noqa: ARG002
        """The policy's block; provisional where its window hides something."""
        window = self.policy.window
        hides = window is not None and history > window.sinks + window.recent
        return Draft(self.policy.block_size, window if hides else None)

    def judge(self, guesses: Sequence[Guess], known: bool, room: int, history: int) -> int | Topology:  # noqa: ARG002
        """What ``policy.decide`` says; of a topology, the nodes that reach the bound."""
        policy, probabilities = self.policy, [guess.probabilities[0] for guess in guesses]
        if known:
            decision = decide(policy, probabilities, room)
            if decision.commit or policy.topology is None:
                return decision.commit or chain(decision.verify)
        if policy.topology is None:
            return chain(min(worth_verifying([1.0, *probabilities], policy.verify_bound), room) - 1)
        joint = joint_probabilities(policy.topology, guesses, known)
        return policy.topology.keep(
            [
                p >= policy.verify_bound and node.depth < room
                for p, node in zip(joint, policy.topology.nodes, strict=True)
            ]
        )

    def learn(self, chosen: Sequence[Output], verified: Sequence[Verified], widths: Sequence[int]) -> None:
        """Nothing changes its mind."""
