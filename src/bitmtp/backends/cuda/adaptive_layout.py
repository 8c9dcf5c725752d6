"""The structures of ``kernels/adaptive.hpp`` as NumPy record types, and what the host puts into them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitmtp.backends.base import ResidentTuning
from bitmtp.backends.cuda.layout import MAX_WIDTH
from bitmtp.backends.resident.layout import MAX_BLOCK

GRAM = 3
NO_BODY = 13
MIX = 0x9E3779B1

TUNING = np.dtype(
    [
        ("milliseconds", "<f8", MAX_WIDTH + 1), ("per_pass", "<f8"), ("per_row", "<f8"), ("row", "<f8"),
        ("usual", "<f8"), ("temperatures", "<f8", MAX_BLOCK), ("offsets", "<f8", MAX_BLOCK),
        ("history", "<i4"), ("reserved", "<i4"),
    ],
    align=True,
)  # fmt: skip
PAST = np.dtype([("heads", "<u8"), ("links", "<u8"), ("text", "<u8"), ("shift", "<i4"), ("known", "<i4")], align=True)
ESTIMATE = np.dtype(
    [(name, "<f8") for name in ("ease", "faith", "entropy", "offset", "tokens", "milliseconds")], align=True
)
GUESS = np.dtype([("token", "<i4"), ("there", "<i4"), ("logit", "<f8")], align=True)
SHAPER = np.dtype(
    [
        ("past", PAST), ("estimate", ESTIMATE), ("awaited", GUESS), ("said", "<f8", MAX_WIDTH),
        ("first_entropy", "<f4"), ("seen", "<i4"), ("running", "<i4"), ("draft_width", "<i4"), ("body", "<i4"),
        ("reserved", "<i4", 3),
    ],
    align=True,
)  # fmt: skip


def tuning_record(tuning: ResidentTuning) -> Any:
    """The ``Tuning`` structure ``[]`` of a text."""
    record = np.zeros((), TUNING)
    for name in ("milliseconds", "row", "history"):
        record[name] = getattr(tuning, name)
    record["per_pass"], record["per_row"] = tuning.per_position
    record["usual"] = tuning.ease
    for name in ("temperatures", "offsets"):
        record[name][: len(tuning.temperatures)] = getattr(tuning, name)
    return record


def shaper_record(tuning: ResidentTuning, addresses: tuple[int, int, int], heads: int) -> Any:
    """The ``Shaper`` structure ``[]`` at a text's beginning.

    Args:
        addresses: of ``heads``, ``links`` and ``text``.
        heads: how many heads there are; a power of two.
    """
    record = np.zeros((), SHAPER)
    record["past"] = *addresses, 33 - heads.bit_length(), max(len(tuning.text), GRAM)
    record["estimate"]["ease"], record["estimate"]["faith"] = tuning.ease, tuning.faith
    record["estimate"]["entropy"] = 1.0
    record["body"] = NO_BODY
    return record


def chains(text: NDArray[np.int32], heads: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Where each gram of a text stood: hash chains through the ends of all but its last one.

    Args:
        text: ``[length]``.
        heads: of chains; a power of two.

    Returns:
        ``[heads]`` the latest end with each hash, and ``[length]`` the end before each with the same hash; 0: none.
    """
    first, links = np.zeros(heads, np.int32), np.zeros(len(text), np.int32)
    ends = np.arange(GRAM, len(text), dtype=np.int32)
    mixed = np.zeros(len(ends), np.uint32)
    for back in range(GRAM, 0, -1):
        mixed = (mixed + text[ends - back].astype(np.uint32)) * np.uint32(MIX)
    hashes = mixed >> np.uint32(33 - heads.bit_length())
    order = np.argsort(hashes, kind="stable")
    same = hashes[order][1:] == hashes[order][:-1]
    links[ends[order][1:][same]] = ends[order][:-1][same]
    first[hashes] = ends  # of those with one hash, the last is kept
    return first, links
