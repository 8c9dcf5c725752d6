"""The structures of ``kernels/decisions.hpp`` as NumPy record types, field by field, and the host's end of the ring."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitmtp.backends.cuda.layout import MAX_WIDTH

MAX_BLOCK = 32
MAX_EOS = 16
RING_SIZE = 4096
VERIFY = ("always", "if_short", "never")  # in the order of the numbers that stand for them
SOURCES = ("exact", "accepted", "confident")

POLICY = np.dtype(
    [
        ("bars", "<f8", MAX_BLOCK), ("verify_bound", "<f8"),
        ("block_size", "<i4"), ("verify", "<i4"), ("min_prefix", "<i4"), ("reserved", "<i4", 3),
    ],
    align=True,
)  # fmt: skip
LOOP = np.dtype(
    [
        ("policy", POLICY), ("limit", "<i4"), ("capacity", "<i4"), ("choice", "<i4"),
        ("num_eos", "<i4"), ("eos", "<i4", MAX_EOS),
        ("committed", "<i4"), ("materialized", "<i4"), ("status", "<i4"), ("sent", "<u4"),
        ("pending", "<i4", MAX_BLOCK), ("proposals", "<i4", MAX_WIDTH), ("num_proposals", "<i4"),
        ("passes", "<i4"), ("iterations", "<i4"), ("num_spec_steps", "<i4"), ("proposed", "<i4"), ("accepted", "<i4"),
        ("copied", "<i4"), ("lengths", "<i4", MAX_WIDTH + 1),
    ],
    align=True,
)  # fmt: skip
RING = np.dtype(
    [("received", "<u4"), ("stop", "<i4"), ("reserved", "<i4", 14), ("entries", "<u8", RING_SIZE)], align=True
)


class Status(IntEnum):
    """Where the loop stands; the last three are pauses, after which it may be begun again."""

    RUNNING = 0
    STOP = 1  # an end-of-sequence token
    LENGTH = 2  # the limit
    INTERRUPTED = 3  # the host asked for it
    NEEDS_MEMORY = 4  # the next iteration may reach beyond ``capacity``
    RING_FULL = 5  # the host has to take tokens out first


@dataclass(slots=True)
class RingReader:
    """Reads tokens as the GPU writes them.

    Attributes:
        memory: one :data:`RING` record ``[]`` in pinned host memory, all zero at first.
    """

    memory: NDArray[Any]

    def drain(self) -> list[tuple[int, int]]:
        """The (token, index into :data:`SOURCES`) that arrived since the last call, in order; makes room for more."""
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
