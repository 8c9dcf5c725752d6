"""The state of one text, and the rows that its passes run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from bitmtp.backends.base import Head, Row, Window, causal_rows
from bitmtp.decoding.topology import Kind
from bitmtp.decoding.tree import Tree
from bitmtp.numerics import UInt32
from bitmtp.sampling import Choice, Sampling


class Grammar(Protocol):
    """What may stand next; see :attr:`State.grammar`."""

    def allowed(self, path: Sequence[int]) -> UInt32 | None:
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
        return self._counting(path, None if self.grammar is None else self.grammar.allowed(path))

    def _counting(self, path: Sequence[int], allowed: UInt32 | None) -> Choice:
        if not self.sampling.penalised:
            return self._plain if allowed is None else replace(self._plain, allowed=allowed)
        seen = self._seen.copy()
        seen.update(path)
        return Choice.with_counts(self.sampling, seen, allowed)

    def accepts(self, path: Sequence[int]) -> int:
        """How many tokens of ``path`` the grammar lets stand; without a grammar, all of them."""
        return len(path) if self.grammar is None else self.grammar.accepts(path)

    def rows(self, tree: Tree, window: Window | None = None) -> list[Row]:
        """The pending tokens, the last of them the anchor, and the tree behind them.

        A row sees the pending ones before it, and of the tree its ancestors. A provisional draft (``window``), of which
        nothing is kept, has the draft head throughout; any other pass reads the exact head, for its masks too.
        """
        head = Head.EXACT if window is None else Head.DRAFT
        rows = [*self._pending_rows(head), *self._tree_rows(tree, head)]
        return rows if window is None else [replace(row, window=window) for row in rows]

    def _pending_rows(self, head: Head) -> list[Row]:
        pending = self.pending
        if not pending:
            return []
        heads = [Head.NONE] * (len(pending) - 1) + [head]
        choice = self._free() if head is Head.DRAFT else self.choice()
        return causal_rows(self.sequence, pending, self.materialized, heads, choice)

    def _tree_rows(self, tree: Tree, head: Head) -> list[Row]:
        """Rows of the nodes; all of them see the pending rows."""
        before, free, rows = len(self.committed) - self.materialized, self._free(), list[Row]()
        own_choice = self.sampling.penalised or self.grammar is not None
        last, pending = len(self.committed) - 1, (1 << before) - 1
        for index, (token, ancestors) in enumerate(zip(tree.tokens, tree.shape.visible, strict=True)):
            choice = free
            if own_choice and tree.shape.nodes[index].kind is Kind.PROPOSAL:
                choice = self.choice(tree.path(index))
            position = last + ancestors.bit_count()
            rows.append(Row(self.sequence, token, position, ancestors << before | pending, head, choice))
        return rows

    def _free(self) -> Choice:
        """How drafts are drawn: no grammar holds them."""
        return self._counting((), None)

    def piece_rows(self, width: int) -> list[Row]:
        """The first ``width`` pending tokens, to be materialized only."""
        tokens = self.pending[:width]
        return causal_rows(self.sequence, tokens, self.materialized, [Head.NONE] * len(tokens), self._plain)
