"""Texts over a backend, driven by the loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitmtp.core.costs import CostTable, Tuning
from bitmtp.core.policy import Policy
from bitmtp.core.text import Text, Token
from bitmtp.loop import Loop
from bitmtp.sampling import Sampling

CHEAP = Tuning(CostTable((1, 64), (3.0, 3.5)))  # where rows cost next to nothing: trees, copies and fused passes
DEAR = Tuning(CostTable((1, 64), (1.0, 64.0)))
USUAL = Tuning(CostTable((1, 8, 64), (3.0, 6.0, 40.0), per_position=(1e-4, 1e-4)))


@dataclass
class Listener:
    """Hears each token and ends the text at the chosen one."""

    end_at: int | None = None
    heard: list[Token] = field(default_factory=list)

    def __call__(self, token: Token) -> bool:
        self.heard.append(token)
        return len(self.heard) == self.end_at


def make_text(
    backend: Any,
    prompt: Sequence[int],
    policy: Policy,
    room: int,
    *,
    sampling: Sampling | None = None,
    eos: frozenset[int] = frozenset(),
    tuning: Tuning = CHEAP,
    **options: Any,
) -> Text:
    """A text that may write ``room`` tokens behind its prompt."""
    chosen, limit = sampling or Sampling(), len(prompt) + room
    costs = tuning.costs.core()
    return Text(backend.open(), list(prompt), 0, policy, chosen, limit, eos, costs, tuning=tuning, **options)


def iterations(backend: Any, texts: Sequence[Text], tuning: Tuning = CHEAP) -> Iterator[tuple[Text, list[Token]]]:
    """Runs texts to their ends; what each iteration committed, as it is taken."""
    loop, order = Loop(backend, tuning.costs.core()), list(texts)
    while any(text.finish is None for text in texts):
        order = loop.run(order)
        for text in texts:
            while tokens := text.take():
                yield text, tokens


def written(backend: Any, *texts: Text, tuning: Tuning = CHEAP) -> list[list[int]]:
    """What texts write, all in the same passes."""
    for _ in iterations(backend, texts, tuning):
        pass
    return [text.written for text in texts]
