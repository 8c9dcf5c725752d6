"""The structures of ``kernels/pass.cuh`` as NumPy record types, field by field."""

from __future__ import annotations

import numpy as np

MAX_WIDTH = 64
PIECE = 64
TOP = 32

ROW = np.dtype(
    [
        ("visible", "<u8"), ("token", "<i4"), ("position", "<i4"), ("sequence", "<i4"), ("index", "<i4"),
        ("head", "<i4"), ("choice", "<i4"), ("sinks", "<i4"), ("recent", "<i4"),
    ],
    align=True,
)  # fmt: skip
SEQUENCE = np.dtype(
    [("store", "<u8"), ("length", "<i4"), ("first", "<i4"), ("rows", "<i4"), ("linear", "<i4")], align=True
)
CHOICE = np.dtype(
    [
        ("key", "<u8"), ("seen", "<u8"), ("counts", "<u8"), ("biased", "<u8"), ("bias", "<u8"), ("allowed", "<u8"),
        ("num_seen", "<i4"), ("num_biased", "<i4"), ("temperature", "<f4"), ("repetition", "<f4"),
        ("presence", "<f4"), ("frequency", "<f4"), ("top_k", "<i4"), ("top_p", "<f4"), ("min_p", "<f4"),
    ],
    align=True,
)  # fmt: skip
OUTPUT = np.dtype(
    [
        ("token", "<i4"), ("probability", "<f4"), ("entropy", "<f4"), ("parent", "<i4"),
        ("top_ids", "<i4", TOP), ("top_logits", "<f4", TOP),
    ],
    align=True,
)  # fmt: skip
PASS = np.dtype(
    [
        ("width", "<i4"), ("num_sequences", "<i4"), ("top", "<i4"), ("reserved", "<i4"),
        ("rows", ROW, MAX_WIDTH), ("sequences", SEQUENCE, MAX_WIDTH), ("choices", CHOICE, MAX_WIDTH),
    ],
    align=True,
)  # fmt: skip
