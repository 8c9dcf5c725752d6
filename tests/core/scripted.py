"""A backend without a model: the next token is a hash of the tokens that a row sees, and masks guess it or not."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bitmtp.backends.base import MAX_WIDTH, Head, Output, Row


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

    def step(self, rows: Sequence[Row], *, top: int = 0, logits: bool = False) -> list[Output | None]:  # noqa: ARG002
        """One pass."""
        assert 1 <= len(rows) <= MAX_WIDTH
        self.widths.append(len(rows))
        self._rows = {}
        return [self._output(row, top) for row in rows]

    def materialize(self, sequence: int, indices: Sequence[int]) -> None:
        """The rows must be plain tokens that see the whole history, each behind the one before."""
        rows = self._rows.pop(sequence)
        for place, index in enumerate(indices):
            assert rows[index].token >= 0
            assert rows[index].window is None
            assert rows[index].sees == sorted(indices[: place + 1])
            assert rows[index].position == len(self.history[sequence]) + place
        self.history[sequence] += [rows[index].token for index in indices]

    def _output(self, row: Row, top: int) -> Output | None:
        own = self._rows.setdefault(row.sequence, [])
        own.append(row)
        history = self.history[row.sequence]
        seen = [own[index] for index in row.sees]
        seen = sorted(seen, key=lambda other: other.position)
        assert [other.position for other in seen] == list(range(len(history), row.position + 1)), "no gap before it"
        assert all(other.window == row.window for other in seen)
        if row.head is Head.NONE:
            return None
        path = history + [other.token for other in seen if other.token >= 0]
        if row.token >= 0:
            assert min(path) >= 0
            if row.head is Head.EXACT:
                assert row.window is None
                return self._exact(path, top)
            assert row.window is not None, "a cheap head for an anchor that is checked later"
            return self._guess(path, 0, top)
        assert row.head is (Head.EXACT if row.window is None else Head.DRAFT)
        depth = -row.token
        assert [other.token for other in seen[-depth:]] == [-d for d in range(1, depth + 1)]
        return self._guess(path, depth, top)

    def _guess(self, path: Sequence[int], depth: int, top: int) -> Output:
        """Right with probability ``skill``, and if not, the right token is often the second choice."""
        luck = self._random(path, depth + 1)
        right = self.continuation(path, depth + 1)[-1]
        order = luck.sample(range(self.vocab_size), self.vocab_size)
        if luck.random() < self.skill:
            order.sort(key=lambda token: token != right)
        elif luck.random() < self.skill:
            order.insert(1, order.pop(order.index(right)))
        best = tuple((token, -float(rank)) for rank, token in enumerate(order[:top]))
        return Output(order[0], luck.random() ** 0.3, 1.0, best)

    def _exact(self, path: Sequence[int], top: int) -> Output:
        token = self.next_token(path)
        return Output(token, 0.5, self._random(path, -1).random() * 4, ((token, 0.0),) if top else ())

    def _random(self, path: Sequence[int], depth: int = 0) -> random.Random:
        """Luck that depends on what a row sees and on nothing else, as the contract has it."""
        return random.Random(f"{self._seed} {list(path)} {depth}")
