"""Random use of a backend: the same calls on two backends must give the same bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bitmtp.backends.base import MAX_WIDTH, Backend, Head, Output, Row, Window, mask
from bitmtp.config import ModelConfig
from bitmtp.sampling import GREEDY, Choice, Sampling


def random_choice(random: np.random.Generator, vocabulary: int) -> Choice:
    """Greedy, or sampling parameters and a past."""
    if random.random() < 0.3:
        return GREEDY
    sampling = Sampling(
        temperature=float(random.choice([0, 0.3, 1, 2.5])),
        top_k=int(random.choice([0, 0, 1, 7, 90, 10_000])),
        top_p=float(random.choice([1, 1, 0.95, 0.5, 0])),
        min_p=float(random.choice([0, 0, 0.02, 1])),
        seed=int(random.integers(0, 1 << 63)),
        choice=int(random.integers(0, 3)),
        repetition_penalty=float(random.choice([1, 1, 1.3, 0.7])),
        presence_penalty=float(random.choice([0, 0, 0.8, -0.5])),
        frequency_penalty=float(random.choice([0, 0, 0.4])),
        logit_bias=tuple((int(t), float(random.normal(0, 3))) for t in random.integers(0, vocabulary, 3)),
    )
    seen = {int(token): int(random.integers(0, 4)) for token in random.integers(0, vocabulary, 12)}
    return Choice.with_counts(sampling, seen, _allowed(random, vocabulary))


def _allowed(random: np.random.Generator, vocabulary: int) -> NDArray[np.uint32] | None:
    """All tokens, most, few, or none."""
    share = random.choice([-1, -1, 0.9, 0.01, 0])
    bits = random.random(-(-vocabulary // 32) * 32) < share
    return None if share < 0 else np.packbits(bits, bitorder="little").view(np.uint32)


def random_tree(
    random: np.random.Generator, config: ModelConfig, sequence: int, length: int, count: int, *, shuffled: bool
) -> list[Row]:
    """Rows of which each sees its ancestors: a chain at times, a bush at others; tokens, masks, windows, heads."""
    branching = random.choice([0.0, 0.4])
    parents = [int(random.integers(-1, i)) if random.random() < branching else i - 1 for i in range(count)]
    place = random.permutation(count) if shuffled else np.arange(count)
    rows: list[Row | None] = [None] * count
    visible, position, tokens = [0] * count, [0] * count, list[int]()
    for index in range(count):
        tokens.append(_random_token(random, config, parents, tokens))
        parent = parents[index]
        own = int(place[index])
        visible[index] = 1 << own | (visible[parent] if parent >= 0 else 0)
        position[index] = position[parent] + 1 if parent >= 0 else length
        window = Window(int(random.integers(0, 6)), int(random.integers(1, 300))) if random.random() < 0.2 else None
        head = Head(int(random.choice([0, 1, 2], p=[0.2, 0.3, 0.5])))
        choice = random_choice(random, config.vocab_size)
        rows[own] = Row(sequence, tokens[index], position[index], visible[index], head, choice, window)
    return [row for row in rows if row is not None]


def _random_token(random: np.random.Generator, config: ModelConfig, parents: list[int], tokens: list[int]) -> int:
    """The next row's token. Medusa masks hang from tokens, and tokens from tokens, if need be from another parent."""
    index, depths = len(tokens), list(range(1, config.block_size))
    masked = config.block_size > 1 and index > 0 and random.random() < 0.4
    if config.drafter == "medusa":
        while not masked and parents[index] >= 0 and tokens[parents[index]] < 0:
            parents[index] = parents[parents[index]]
        above = _ancestors(parents, index)
        depths = [depth for depth in depths if depth <= len(above) and tokens[above[depth - 1]] >= 0]
        masked = masked and bool(depths)
        if not masked and above and tokens[above[0]] < 0:
            parents[index] = -1
    return mask(int(random.choice(depths))) if masked else int(random.integers(config.vocab_size))


def _ancestors(parents: list[int], index: int) -> list[int]:
    """Nearest first."""
    above = []
    while (index := parents[index]) >= 0:
        above.append(index)
    return above


def committed_order(rows: list[Row], length: int, random: np.random.Generator) -> list[int]:
    """Rows that may be materialized one after the other, a random number of them."""
    order: list[int] = []
    seen = 0
    while len(order) < random.integers(0, len(rows) + 1):
        plain = [i for i, row in enumerate(rows) if row.token >= 0 and not row.window]
        fits = [i for i in plain if rows[i].position == length + len(order) and rows[i].visible == seen | 1 << i]
        if not fits:
            break
        order.append(int(random.choice(fits)))
        seen |= 1 << order[-1]
    return order


def interleave(random: np.random.Generator, groups: list[list[Row]]) -> list[Row]:
    """Merge the rows of several sequences at random, each sequence's in order."""
    groups = [list(group) for group in groups]
    merged: list[Row] = []
    while any(groups):
        group = groups[int(random.choice([i for i, group in enumerate(groups) if group]))]
        merged.append(group.pop(0))
    return merged


def for_sequences(rows: list[Row], names: dict[int, int]) -> list[Row]:
    """The same rows under another backend's handles."""
    return [replace(row, sequence=names[row.sequence]) for row in rows]


def same(first: Output | None, second: Output | None) -> bool:
    """Equal to the bit, logits included."""
    if first is None or second is None:
        return first is second
    a, b = replace(first, logits=None), replace(second, logits=None)
    return a == b and np.array_equal(first.logits, second.logits)  # type: ignore[arg-type]


class Pair:
    """Two backends in step: every call goes to both."""

    def __init__(self, oracle: Backend, subject: Backend) -> None:
        self.oracle, self.subject = oracle, subject
        self.names: dict[int, int] = {}  # the oracle's handle → the subject's

    def open(self, tokens: list[int]) -> int:
        """A sequence prefilled on both."""
        handle, other = self.oracle.open(), self.subject.open()
        self.names[handle] = other
        assert self.oracle.prefill(handle, tokens) == self.subject.prefill(other, tokens)
        return handle

    def fork(self, handle: int, length: int) -> int:
        """A fork on both."""
        fork = self.oracle.fork(handle, length)
        self.names[fork] = self.subject.fork(self.names[handle], length)
        return fork

    def step(self, rows: list[Row], top: int) -> None:
        """One pass on both, compared."""
        expected = self.oracle.step(rows, top=top, logits=True)
        found = self.subject.step(for_sequences(rows, self.names), top=top, logits=True)
        for index, (a, b) in enumerate(zip(expected, found, strict=True)):
            assert same(a, b), f"row {index}: {rows[index]}\n{a}\n{b}"

    def materialize(self, handle: int, order: list[int]) -> None:
        """The same rows on both."""
        self.oracle.materialize(handle, order)
        self.subject.materialize(self.names[handle], order)

    def truncate(self, handle: int, length: int) -> None:
        """The same length on both."""
        self.oracle.truncate(handle, length)
        self.subject.truncate(self.names[handle], length)

    def close(self, handle: int) -> None:
        """Close on both."""
        self.oracle.close(handle)
        self.subject.close(self.names.pop(handle))


def exercise(pair: Pair, seed: int, *, passes: int = 6, history: int = 20, width: int = MAX_WIDTH) -> None:
    """Random passes over up to three sequences, with forks, truncations and out-of-order materialization between."""
    random = np.random.default_rng(seed)
    config = pair.oracle.config
    live = [pair.open(random.integers(0, config.vocab_size, max(1, history - 7 * i)).tolist()) for i in range(2)]
    for _ in range(passes):
        if len(live) < 3:
            live.append(pair.fork(live[0], int(random.integers(0, pair.oracle.length(live[0]) + 1))))
        counts = random.multinomial(int(random.integers(1, width + 1)), np.ones(len(live)) / len(live))
        groups = []
        for handle, count in zip(live, counts, strict=True):
            shuffled = not config.chain_rank and random.random() < 0.5
            room = config.max_position - pair.oracle.length(handle)
            count = min(int(count), room)
            groups.append(random_tree(random, config, handle, pair.oracle.length(handle), count, shuffled=shuffled))
        if rows := interleave(random, groups):
            pair.step(rows, top=int(random.choice([0, 3, 20])))
        for handle, group in zip(list(live), groups, strict=True):
            pair.materialize(handle, committed_order(group, pair.oracle.length(handle), random))
            if random.random() < 0.3:
                pair.truncate(handle, int(random.integers(0, pair.oracle.length(handle) + 1)))
        if random.random() < 0.3:
            pair.close(live.pop())
