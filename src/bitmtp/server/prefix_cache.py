"""K/V of finished texts, kept for prompts that begin alike."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from bitmtp.backends.base import Backend
from bitmtp.config import ModelConfig

Ids = NDArray[np.int32]
PIECE = 256


def common_length(a: Ids, b: Ids) -> int:
    """How many ids at the beginning of ``a`` and ``b`` are the same."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def position_bytes(config: ModelConfig) -> int:
    """Bytes of K/V of one position."""
    return 2 * config.num_layers * config.kv_size * np.dtype(config.kv_type).itemsize


class PrefixCache:
    """Sequences by their token ids, the least recently used given up first.

    Sizes are counted in whole pieces of 256 positions, as backends hold them, and as if nothing were shared: memory
    stays below the budget.
    """

    def __init__(self, backend: Backend, budget: int) -> None:
        self._backend = backend
        self._positions = budget // position_bytes(backend.config)
        self._entries: OrderedDict[int, Ids] = OrderedDict()

    @property
    def positions(self) -> int:
        """Positions held, in whole pieces."""
        return sum(-(-len(key) // PIECE) * PIECE for key in self._entries.values())

    def match(self, key: Ids) -> tuple[int, int]:
        """The sequence that shares the longest beginning with ``key``, and its length (0: there is none)."""
        found, longest = 0, 0
        for sequence, known in self._entries.items():
            length = common_length(known, key)
            if length > longest:
                found, longest = sequence, length
        if longest:
            self._entries.move_to_end(found)
        return found, longest

    def put(self, sequence: int, key: Ids) -> None:
        """Take over a sequence whose materialized tokens are ``key``."""
        for other, known in list(self._entries.items()):
            shared = common_length(known, key)
            if shared == len(key):
                self._entries.move_to_end(other)
                self._backend.close(sequence)
                return
            if shared == len(known):
                self._drop(other)
        self._entries[sequence] = key
        while self.positions > self._positions:
            self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        """Give everything back."""
        for sequence in list(self._entries):
            self._drop(sequence)

    def _drop(self, sequence: int) -> None:
        del self._entries[sequence]
        self._backend.close(sequence)
