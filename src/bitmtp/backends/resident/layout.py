"""The structures of ``decisions.hpp`` as NumPy record types, field by field; what goes into them, and comes out."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from bitmtp.backends.base import MAX_WIDTH, ResidentResult, ResidentText

MAX_BLOCK = 32
MAX_EOS = 16
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


class Status(IntEnum):
    """Where the loop stands; the last three are pauses, after which it may be begun again."""

    RUNNING = 0
    STOP = 1  # an end-of-sequence token
    LENGTH = 2  # the limit
    INTERRUPTED = 3  # the host asked for it
    NEEDS_MEMORY = 4  # the next iteration may reach beyond ``capacity``
    RING_FULL = 5  # the host has to take tokens out first


def loop_record(text: ResidentText, choice: int) -> Any:
    """The ``Loop`` structure at a text's beginning; ``choice``: what stands for the text's in a row."""
    loop = np.zeros((), LOOP)
    policy = loop["policy"]
    policy["bars"][: len(text.bars)] = text.bars
    policy["verify"] = VERIFY.index(text.verify)
    for name in ("verify_bound", "block_size", "min_prefix"):
        policy[name] = getattr(text, name)
    loop["limit"], loop["committed"] = text.limit, text.committed
    loop["materialized"] = text.committed - len(text.pending)
    loop["num_eos"] = len(text.eos_ids)
    loop["eos"][: len(text.eos_ids)] = sorted(text.eos_ids)
    loop["pending"][: len(text.pending)] = text.pending
    loop["choice"] = choice
    return loop


def fill(result: ResidentResult, loop: Any) -> None:
    """Note where a text stands."""
    for name in ("materialized", "passes", "iterations", "num_spec_steps", "proposed", "accepted", "copied"):
        setattr(result, name, int(loop[name]))
    result.lengths = {length: int(count) for length, count in enumerate(loop["lengths"]) if count}
