"""The ring of ``kernels/iteration.hpp``, through which a loop's tokens come to the host."""

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
    """Reads tokens as the GPU writes them.

    Attributes:
        memory: one :data:`RING` record ``[]`` in pinned host memory, all zero at first.
    """

    memory: NDArray[Any]

    def drain(self) -> list[tuple[int, int]]:
        """The (token, number of its source) that arrived since the last call, in order; makes room for more."""
        entries, first = self.memory["entries"], int(self.memory["received"])
        arrived: list[tuple[int, int]] = []
        while True:
            number = first + len(arrived) & 0xFFFFFFFF
            entry = int(entries[number % RING_SIZE])
            if entry >> 34 != (number + 1) & 0x3FFFFFFF:  # what lies there is of an earlier lap
                break
            arrived.append((entry & 0xFFFFFFFF, entry >> 32 & 3))
        self.memory["received"] = number
        return arrived

    def interrupt(self, stop: bool = True) -> None:
        """Ask the loop to pause at the end of its iteration; ``False`` before it is begun again."""
        self.memory["stop"] = stop
