"""The state of one text, and the rows that its passes run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bitmtp.backends.base import Head, Row, causal_rows, mask
from bitmtp.sampling import Choice, Sampling


class Grammar(Protocol):
    """What may stand next; see :attr:`State.grammar`."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.uint32] | None:
        """Bit set of the tokens allowed behind the committed text and ``path``; None if ``path`` itself is not."""
        ...

    def accepts(self, path: Sequence[int]) -> int:
        """How many tokens of ``path``, from its beginning, may stand behind the committed text."""
        ...

    def commit(self, tokens: Sequence[int]) -> None:
        """These tokens are text now."""
        ...


@dataclass(slots=True)
class State:
    """Committed tokens and how many of them have their K/V in the store.

    The identity at every iteration boundary: ``len(committed) == materialized + len(pending)`` and
    ``len(pending) >= 1``. The last pending token is the anchor.

    Attributes:
        sequence: the backend's handle.
        committed: prompt and text.
        prompt_length: how many of them are the prompt.
        materialized: how many have their causal K/V in the store.
        grammar: restricts the tokens of exact rows along each row's own path; drafts are drawn freely, and cut where
            they leave it.
    """

    sequence: int
    sampling: Sampling
    committed: list[int]
    prompt_length: int
    materialized: int = 0
    grammar: Grammar | None = None
    _plain: Choice = field(init=False)
    _seen: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._plain = Choice(self.sampling)
        self._seen.update(dict.fromkeys(self.committed[: self.prompt_length], 0))
        self._seen.update(self.committed[self.prompt_length :])

    @property
    def pending(self) -> list[int]:
        """Committed tokens whose K/V are not in the store."""
        return self.committed[self.materialized :]

    @property
    def generated(self) -> int:
        """How many tokens were written so far."""
        return len(self.committed) - self.prompt_length

    def commit(self, tokens: Sequence[int], materialized: int) -> None:
        """Append tokens to the text; ``materialized`` more positions are now in the store."""
        self.committed.extend(tokens)
        self._seen.update(tokens)
        if self.grammar is not None:
            self.grammar.commit(tokens)
        self.materialized += materialized
        assert len(self.pending) >= 1, "an iteration ends with at least one pending token"

    def choice(self, path: Sequence[int] = ()) -> Choice:
        """How the token behind the committed text and ``path`` is chosen."""
        allowed = None if self.grammar is None else self.grammar.allowed(path)
        if not self.sampling.penalised:
            return self._plain if allowed is None else replace(self._plain, allowed=allowed)
        seen = self._seen.copy()
        seen.update(path)
        return Choice.with_counts(self.sampling, seen, allowed)

    def accepts(self, path: Sequence[int]) -> int:
        """How many tokens of ``path`` the grammar lets stand; without a grammar, all of them."""
        return len(path) if self.grammar is None else self.grammar.accepts(path)

    def draft_rows(self, block_size: int) -> list[Row]:
        """Pending rows, the last one the anchor, and ``block_size - 1`` masks: every row sees all before it."""
        pending = self.pending
        tokens = [*pending, *(mask(depth) for depth in range(1, block_size))]
        heads = [Head.NONE] * (len(pending) - 1) + [Head.EXACT] + [Head.DRAFT] * (block_size - 1)
        choice = self.choice()
        rows = causal_rows(self.sequence, tokens, self.materialized, heads, choice)
        if choice.allowed is None:
            return rows
        free = replace(choice, allowed=None)
        return [replace(row, choice=free) if row.head is Head.DRAFT else row for row in rows]

    def piece_rows(self, width: int) -> list[Row]:
        """The first ``width`` pending tokens, to be materialized only."""
        tokens = self.pending[:width]
        return causal_rows(self.sequence, tokens, self.materialized, [Head.NONE] * len(tokens), self._plain)

    def verify_rows(self, proposals: Sequence[int]) -> list[Row]:
        """The proposals as ordinary rows behind a text that is materialized to the end."""
        start = len(self.committed)
        rows = causal_rows(self.sequence, proposals, start, [Head.EXACT] * len(proposals), self._plain)
        if not self.sampling.penalised and self.grammar is None:
            return rows
        return [replace(row, choice=self.choice(proposals[: index + 1])) for index, row in enumerate(rows)]
