"""The ring of ``kernels/ring.hpp``, through which a loop's tokens come to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RING_SIZE = 4096

RING = np.dtype(
    [("received", "<u4"), ("stop", "<i4"), ("reserved", "<i4", 14), ("entries", "<u8", RING_SIZE)], align=True
)


@dataclass(slots=True)
class RingReader:
    """Reads entries as the GPU writes them.

    Attributes:
        memory: one :data:`RING` record ``[]`` in pinned host memory, all zero at first.
        read: entries taken so far.
    """

    memory: NDArray[Any]
    read: int = 0

    def drain(self, last: int) -> list[tuple[int, int]]:
        """The (value, source) that arrived since the last call, in order, up to the last one whose source is ``last``;
        makes room for more."""
        entries, arrived = self.memory["entries"], list[tuple[int, int]]()
        whole = 0
        while True:
            number = self.read + len(arrived) & 0xFFFFFFFF
            entry = int(entries[number % RING_SIZE])
            if entry >> 34 != (number + 1) & 0x3FFFFFFF:  # what lies there is of an earlier lap
                break
            arrived.append((entry & 0xFFFFFFFF, entry >> 32 & 3))
            whole = len(arrived) if arrived[-1][1] == last else whole
        self.read = self.read + whole & 0xFFFFFFFF
        self.memory["received"] = self.read
        return arrived[:whole]

    def interrupt(self) -> None:
        """Ask the loop to pause at the end of its iteration."""
        self.memory["stop"] = 1
