"""Figures of one generation, named as in vLLM where it has a name for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Stats:
    """Counts of one generation.

    Attributes:
        passes: forward runs that this text took part in, prefill left out.
        graph_replays: graphs that the host launched for them; a loop on the device runs many passes in one.
        iterations: times that tokens were committed, the first token left out.
        num_spec_steps: of those, the ones that drafted.
        proposed: mask proposals that could have been committed; the anchor's own is no draft.
        accepted: mask proposals that were.
        lengths: tokens committed per iteration → how often.
        windowed: draft passes that saw a window of the history only.
        copied: passes whose proposals were copied from the text, so that there was no draft pass.
        ahead: verify passes that also drafted the next block.
        ahead_used: of those, the ones whose draft the text came to need.
    """

    passes: int = 0
    graph_replays: int = 0
    iterations: int = 0
    num_spec_steps: int = 0
    proposed: int = 0
    accepted: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    windowed: int = 0
    copied: int = 0
    ahead: int = 0
    ahead_used: int = 0

    def add(self, event: Sequence[Any], committed: int, accepted: int) -> None:
        """One iteration of the core (``Kept`` of ``text.hpp``), of which the text took ``committed`` tokens.

        ``accepted`` of these were mask proposals. What lies behind the end of the text was never proposed.
        """
        tokens, _, _, begins, passes, drafted, proposed, _, windowed, copied, ahead, ahead_used, _, _ = event
        if begins:
            return
        self.iterations += 1
        self.passes += passes
        self.num_spec_steps += drafted
        self.proposed += accepted if committed < len(tokens) else proposed
        self.accepted += accepted
        self.lengths[committed] += 1
        self.windowed += windowed
        self.copied += copied
        self.ahead += ahead
        self.ahead_used += ahead_used

    @property
    def tokens(self) -> int:
        """Tokens committed, the first one (prefill's) left out."""
        return sum(length * count for length, count in self.lengths.items())

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per iteration."""
        return self.tokens / self.iterations if self.iterations else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted ÷ proposed mask proposals."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens committed per forward run."""
        return self.tokens / self.passes if self.passes else 0.0

    def acceptance_histogram(self, block_size: int) -> list[int]:
        """How often 1, 2, … D+1 tokens were committed."""
        return [self.lengths[length] for length in range(1, max(block_size + 1, *self.lengths, 2) + 1)]
