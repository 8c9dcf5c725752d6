"""Every shape that a pass can have, for exactness.py: alone, and switched at random in the middle of a text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

from bitmtp.backends.base import Output, Window
from bitmtp.decoding.chooser import AdaptiveShaper
from bitmtp.decoding.costs import CostTable, Tuning
from bitmtp.decoding.decoder import Decoder, advance
from bitmtp.decoding.policies import make_policy
from bitmtp.decoding.policy import Policy, Verify
from bitmtp.decoding.shaper import Draft, FixedShaper, Shaper, Verified
from bitmtp.decoding.state import State
from bitmtp.decoding.topology import Topology, spine, tree
from bitmtp.decoding.tree import Guess
from bitmtp.engine import Engine
from bitmtp.sampling import Sampling

NARROW = Window(4, 48)  # hides most of a text that is not long
CHEAP = Tuning(CostTable((1, 64), (3.0, 3.5)))  # rows that cost next to nothing: alternatives and fused passes pay


class Switched:
    """Asks another shaper for every draft, drawn by a seed."""

    ranks = 3

    def __init__(self, shapers: Sequence[Shaper], seed: int) -> None:
        self._shapers, self._luck = shapers, random.Random(seed)
        self._now = shapers[0]

    def draft(self, text: Sequence[int], room: int, history: int) -> Draft:
        """What the one drawn says."""
        self._now = self._luck.choice(self._shapers)
        return self._now.draft(text, room, history)

    def judge(self, guesses: Sequence[Guess], known: bool, room: int, history: int) -> int | Topology:
        """What the one that drafted says."""
        return self._now.judge(guesses, known, room, history)

    def learn(self, chosen: Sequence[Output], verified: Sequence[Verified], widths: Sequence[int]) -> None:
        """Only the one that drafted knows what it learns from."""
        self._now.learn(chosen, verified, widths)


def policies_of(size: int) -> dict[str, Policy]:
    """Fixed shapes of a model that drafts ``size`` deep."""
    deep = min(size, 9)
    shapes = {
        "spine": spine(min(size, 6), (0, 2, 2, 1)[: min(size, 4)]),
        "tree": tree("bush", [(0,) * deep, (0, 1, 0, 0)[:deep], (0, 0, 1)[:deep], (0, 2)[:deep]]),
    }
    made = {name: Policy(name, size, Verify.ALWAYS, topology=shape) for name, shape in shapes.items()}
    made["window"] = Policy("window", min(size, 8), Verify.ALWAYS, window=NARROW)
    made["window and tree"] = Policy("both", min(size, 8), Verify.ALWAYS, window=NARROW, topology=shapes["spine"])
    return made


def shapers_of(engine: Engine, temperature: float, seed: int) -> dict[str, Callable[[], Shaper]]:
    """Makers of a shaper for each way to write."""
    size = engine.config.block_size
    auto, fixed = make_policy("auto", size), policies_of(size)
    made: dict[str, Callable[[], Shaper]] = {name: partial(FixedShaper, own) for name, own in fixed.items()}
    made["auto"] = lambda: AdaptiveShaper(auto, engine.tuning, temperature)
    made["auto, cheap rows"] = lambda: AdaptiveShaper(auto, CHEAP, temperature)
    makers = list(made.values())
    made["switched"] = lambda: Switched([make() for make in makers], seed)
    return made


def write(
    engine: Engine, prompt: Sequence[int], sampling: Sampling, shapers: dict[str, Shaper | None], max_tokens: int
) -> dict[str, Decoder]:
    """Texts of one prompt, a shaper each (None: autoregressive), which share its K/V and their passes."""
    backend, size = engine.backend, engine.config.block_size
    first = backend.open()
    if len(prompt) > 1:
        backend.prefill(first, prompt[:-1])
    decoders: dict[str, Decoder] = {}
    for name, shaper in shapers.items():
        sequence = backend.fork(first, len(prompt) - 1)
        state = State(sequence, sampling, list(prompt), len(prompt), materialized=len(prompt) - 1)
        policy = make_policy("autoregressive" if shaper is None else "auto", size)
        limit = min(len(prompt) + max_tokens, engine.context)
        decoders[name] = Decoder(state, policy, limit, frozenset(engine.config.eos_token_ids), shaper=shaper)
        decoders[name].start(backend)
    while any(decoder.finish is None for decoder in decoders.values()):
        advance(backend, list(decoders.values()))
    for decoder in decoders.values():
        backend.close(decoder.state.sequence)
    backend.close(first)
    return decoders
