"""Every shape that a pass can have, for exactness.py: alone, and switched at random in the middle of a text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bitmtp.backends.base import Window, prefill_by_steps
from bitmtp.core.costs import CostTable, Tuning
from bitmtp.core.policies import make_policy
from bitmtp.core.policy import Policy, Verify
from bitmtp.core.text import Text
from bitmtp.core.topology import spine, tree
from bitmtp.engine import Engine
from bitmtp.sampling import GREEDY, Sampling

NARROW = Window(4, 48)  # hides most of a text that is not long
CHEAP = Tuning(CostTable((1, 64), (3.0, 3.5)))  # rows that cost next to nothing: alternatives and fused passes pay
PIECE = 12  # tokens, at most, before a switch


@dataclass(frozen=True, slots=True)
class Way:
    """A way to write; where there is no tuning, the costs are the engine's, which go on learning."""

    policy: Policy
    tuning: Tuning | None = None

    def text(self, engine: Engine, sequence: int, ids: Sequence[int], sampling: Sampling, limit: int) -> Text:
        """One that goes on behind ``ids``, of which all but the last are in the sequence."""
        costs = engine.costs if self.tuning is None else self.tuning.costs.core()
        tuning, eos = self.tuning or engine.calibrations, frozenset(engine.config.eos_token_ids)
        return Text(sequence, ids, len(ids) - 1, self.policy, sampling, limit, eos, costs, tuning=tuning)


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


def ways_of(size: int) -> dict[str, Way]:
    """Those with one policy from beginning to end."""
    made = {name: Way(policy) for name, policy in policies_of(size).items()}
    return {**made, "auto": Way(make_policy("auto", size)), "auto, cheap rows": Way(make_policy("auto", size), CHEAP)}


def write(engine: Engine, prompt: Sequence[int], sampling: Sampling, max_tokens: int) -> dict[str, Text]:
    """Texts of one prompt, in each way and autoregressive, which share its K/V and their passes."""
    backend, size = engine.backend, engine.config.block_size
    first, limit = _open(engine, prompt), min(len(prompt) + max_tokens, engine.context)
    ways = {"autoregressive": Way(make_policy("autoregressive", size)), **ways_of(size)}
    texts = {
        name: way.text(engine, backend.fork(first, len(prompt) - 1), prompt, sampling, limit)
        for name, way in ways.items()
    }
    run(engine, list(texts.values()))
    for sequence in (first, *(text.sequence for text in texts.values())):
        backend.close(sequence)
    return texts


def write_switched(engine: Engine, prompt: Sequence[int], sampling: Sampling, max_tokens: int, seed: int) -> list[int]:
    """A text in pieces, for each of which the way is drawn."""
    sequence, luck, ids = _open(engine, prompt), random.Random(seed), list(prompt)
    ways, limit = list(ways_of(engine.config.block_size).values()), min(len(prompt) + max_tokens, engine.context)
    while len(ids) < limit and (len(ids) == len(prompt) or ids[-1] not in engine.config.eos_token_ids):
        end = min(len(ids) + luck.randint(1, PIECE), limit)
        text = luck.choice(ways).text(engine, sequence, ids, sampling, end)
        run(engine, [text])
        ids = text.committed
        engine.backend.truncate(sequence, len(ids) - 1)
    engine.backend.close(sequence)
    return ids[len(prompt) :]


def run(engine: Engine, texts: list[Text]) -> None:
    """Write texts to their ends."""
    while any(text.goes_on for text in texts):
        texts = engine.loop.run(texts)
        for text in texts:
            while text.take():
                pass


def _open(engine: Engine, prompt: Sequence[int]) -> int:
    sequence = engine.backend.open()
    if len(prompt) > 1:
        prefill_by_steps(engine.backend, sequence, prompt[:-1], GREEDY)
    return sequence
