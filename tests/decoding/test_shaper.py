"""What a policy that never changes its mind answers."""

from __future__ import annotations

from bitmtp.backends.base import Window
from bitmtp.decoding.policies import make_policy
from bitmtp.decoding.policy import Policy, Verify
from bitmtp.decoding.shaper import Draft, FixedShaper
from bitmtp.decoding.topology import Topology, chain, spine
from bitmtp.decoding.tree import Guess

GUESSES = [Guess((1,), (0.2,)), Guess((2, 3), (0.5, 0.4)), Guess((4, 5), (0.5, 0.1))]


def test_a_chain_down_to_the_bound() -> None:
    shaper = FixedShaper(make_policy("speculative", 8, verify_bound=0.3))
    assert shaper.draft([1], 50, 100) == Draft(8)
    assert shaper.judge(GUESSES, True, 50, 100) == chain(2)
    assert shaper.judge(GUESSES, True, 1, 100) == 1
    assert shaper.judge(GUESSES[:1], True, 50, 100) == 1
    assert shaper.ranks == 1


def test_an_unknown_first_proposal_counts_as_well() -> None:
    shaper = FixedShaper(make_policy("speculative", 8, verify_bound=0.1))
    assert shaper.judge(GUESSES, False, 50, 100) == chain(2)
    assert shaper.judge(GUESSES, False, 2, 100) == chain(1)
    assert shaper.judge(GUESSES, False, 1, 100) == chain(0)


def test_confident_prefixes() -> None:
    assert FixedShaper(make_policy("confidence", 8, tau=0.5)).judge(GUESSES, True, 50, 100) == 3
    assert FixedShaper(make_policy("hybrid", 8, tau=0.5)).judge(GUESSES, True, 2, 100) == chain(1)


def test_a_tree_down_to_the_bound() -> None:
    policy = Policy("tree", 8, Verify.ALWAYS, verify_bound=0.2, topology=spine(4, (0, 1, 1)))
    shaper = FixedShaper(policy)
    shape = shaper.judge(GUESSES, True, 50, 100)
    assert isinstance(shape, Topology)
    assert [(node.depth, node.rank) for node in shape.nodes] == [(1, 0), (2, 0), (3, 0), (2, 1)]
    assert shaper.ranks == 2


def test_a_window_once_it_hides_something() -> None:
    shaper = FixedShaper(Policy("window", 8, Verify.ALWAYS, window=Window(4, 16)))
    assert shaper.draft([1], 50, 20) == Draft(8)
    assert shaper.draft([1], 50, 21) == Draft(8, Window(4, 16))
