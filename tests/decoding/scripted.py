"""A backend without a model: the next token is a hash of the tokens that a row sees, and masks guess it or not."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bitmtp.backends.base import MAX_WIDTH, Head, Output, Row
from bitmtp.sampling import GREEDY, Choice


class ScriptedBackend:
    """Knows the true continuation of every text, and checks that each pass is a draft or a verify pass.

    Attributes:
        history: tokens materialized, by sequence.
        widths: number of rows of each pass.
    """

    def __init__(self, seed: int, vocab_size: int = 6, skill: float = 0.7) -> None:
        self.vocab_size, self.skill = vocab_size, skill
        self.history: dict[int, list[int]] = {}
        self.widths: list[int] = []
        self._seed = seed
        self._rows: dict[int, list[Row]] = {}

    def next_token(self, path: Sequence[int]) -> int:
        """What the model writes after these tokens."""
        return self._random(path).randrange(self.vocab_size)

    def continuation(self, path: Sequence[int], count: int) -> list[int]:
        """The next ``count`` tokens."""
        text = list(path)
        for _ in range(count):
            text.append(self.next_token(text))
        return text[len(path) :]

    def open(self) -> int:
        """A new sequence."""
        handle = len(self.history) + 1
        self.history[handle] = []
        return handle

    def prefill(self, sequence: int, tokens: Sequence[int], choice: Choice = GREEDY) -> Output:  # noqa: ARG002
        """Materialize tokens."""
        assert tokens
        self.history[sequence] += tokens
        return self._exact(self.history[sequence])

    def step(self, rows: Sequence[Row]) -> list[Output | None]:
        """One pass."""
        assert 1 <= len(rows) <= MAX_WIDTH
        self.widths.append(len(rows))
        self._rows = {}
        return [self._output(row) for row in rows]

    def materialize(self, sequence: int, indices: Sequence[int]) -> None:
        """The rows must be plain tokens, in order from the first on."""
        assert list(indices) == list(range(len(indices)))
        rows = self._rows.pop(sequence)[: len(indices)]
        assert all(row.token >= 0 for row in rows)
        self.history[sequence] += [row.token for row in rows]

    def _output(self, row: Row) -> Output | None:
        own = self._rows.setdefault(row.sequence, [])
        own.append(row)
        history = self.history[row.sequence]
        assert row.position == len(history) + len(own) - 1, "rows stand behind the history, in order"
        assert row.visible == (1 << len(own)) - 1, "each sees everything before it"
        if row.head is Head.NONE:
            return None
        path = history + [other.token for other in own if other.token >= 0]
        if row.token >= 0:
            assert row.head is Head.EXACT
            assert min(path) >= 0
            return self._exact(path)
        assert row.head is Head.DRAFT
        depth = -row.token
        assert [other.token for other in own[-depth:]] == [-d for d in range(1, depth + 1)]
        luck = self._random(path, depth)
        right = luck.random() < self.skill
        token = self.continuation(path, depth + 1)[-1] if right else luck.randrange(self.vocab_size)
        return Output(token, luck.random() ** 0.3, 1.0)

    def _exact(self, path: Sequence[int]) -> Output:
        return Output(self.next_token(path), 0.5, 1.0)

    def _random(self, path: Sequence[int], depth: int = 0) -> random.Random:
        """Luck that depends on what a row sees and on nothing else, as the contract has it."""
        return random.Random(f"{self._seed} {list(path)} {depth}")
