"""Figures of one generation, named as in vLLM where it has a name for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


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

    def record(self, committed: int, *, drafted: bool, proposed: int, accepted: int) -> None:
        """One iteration that committed this many tokens, of which ``accepted`` of ``proposed`` mask proposals."""
        self.iterations += 1
        self.num_spec_steps += drafted
        self.proposed += proposed
        self.accepted += accepted
        self.lengths[committed] += 1

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
