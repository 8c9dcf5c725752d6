"""Fills the pass structure in pinned memory, which the graph of a pass copies to the device."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np

from bitmtp.backends.base import Row
from bitmtp.backends.cuda.device import Gpu
from bitmtp.backends.cuda.layout import MAX_WIDTH, PASS, ROW, SEQUENCE
from bitmtp.backends.cuda.matrices import round_up
from bitmtp.backends.cuda.store import Range
from bitmtp.numerics import mix64
from bitmtp.sampling import GREEDY, Choice

_ROW = struct.Struct("<Q8i")
_FIELDS = 9  # of a row
_SEQUENCE = struct.Struct("<Q4i")
_HEAD = struct.Struct("<4i")
_ROWS = _HEAD.size
_SEQUENCES = _ROWS + MAX_WIDTH * _ROW.size
assert (_ROW.size, _SEQUENCE.size) == (ROW.itemsize, SEQUENCE.itemsize)
_ALIGN = 16
_GREEDY_INDEX = -1


class Stored(Protocol):
    """What is needed of a sequence."""

    store: Range
    length: int


def greedy(choice: Choice) -> bool:
    """Whether a choice takes the largest raw logit."""
    return choice is GREEDY or (choice.sampling.temperature == 0 and plain(choice))


def plain(choice: Choice) -> bool:
    """Whether a choice is greedy or temperature alone: what the unfiltered kernels do."""
    return not choice.sampling.filtered and choice.allowed is None


class PassWriter:
    """Writes one pass at a time; :attr:`pinned` is what the device gets."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.pinned = gpu.pinned(PASS, (1,))
        self._bytes = memoryview(self.pinned.view(np.uint8).data).cast("B")
        self._arena = gpu.empty(1 << 20)
        self._arena_size = 1 << 20
        self.linear, self.windowed = True, False  # of the last pass, as in ``PassShape``

    def write(
        self, rows: Sequence[Row], own: Mapping[int, Sequence[int]], sequences: Mapping[int, Stored], top: int
    ) -> bool:
        """Rows grouped by sequence, in the order of ``own``; true if the pass needs the filtered kernels."""
        _HEAD.pack_into(self._bytes, 0, len(rows), len(own), top, 0)
        numbers: dict[int, int] = {}
        kept: list[Choice] = []
        fields: list[int] = []
        self.linear = all(row.window is None for row in rows)
        self.windowed = len(own) == 1 and all(row.window for row in rows)
        for number, (handle, indices) in enumerate(own.items()):
            state, first = sequences[handle], len(fields) // _FIELDS
            linear = all(rows[index].position == state.length + i for i, index in enumerate(indices))
            self.linear &= linear
            values = state.store.address, state.length, first, len(indices), int(linear)
            _SEQUENCE.pack_into(self._bytes, _SEQUENCES + number * _SEQUENCE.size, *values)
            for i, index in enumerate(indices):
                row = rows[index]
                choice = _number(row.choice, numbers, kept) if row.head else _GREEDY_INDEX
                sinks, recent = (row.window.sinks, row.window.recent) if row.window else (0, 0)
                fields += row.bits, row.token, row.position, number, i, row.head, choice, sinks, recent
        _rows(len(rows)).pack_into(self._bytes, _ROWS, *fields)
        if kept:
            self._write_choices(kept)
        return any(not plain(choice) for choice in kept)

    def _write_choices(self, kept: Sequence[Choice]) -> None:
        arrays: list[tuple[int, str, np.ndarray[Any, Any]]] = []
        records = self.pinned["choices"][0]
        for index, choice in enumerate(kept):
            s = choice.sampling
            records[index] = 0
            record = records[index]
            record["key"] = mix64(s.seed + 0x9E3779B97F4A7C15 * (s.choice + 1))
            for name in ("temperature", "top_k", "top_p", "min_p"):
                record[name] = getattr(s, name)
            record["repetition"], record["presence"] = s.repetition_penalty, s.presence_penalty
            record["frequency"] = s.frequency_penalty
            if s.penalised:
                record["num_seen"] = len(choice.seen)
                arrays += [(index, "seen", choice.seen), (index, "counts", choice.counts)]
            if s.logit_bias:
                biases = _added(s.logit_bias)
                record["num_biased"] = len(biases)
                ids = np.array(sorted(biases), np.int32)
                arrays += [(index, "biased", ids)]
                arrays += [(index, "bias", np.array([biases[int(token)] for token in ids], np.float32))]
            if choice.allowed is not None:
                arrays.append((index, "allowed", choice.allowed))
        self._place(arrays, records)

    def _place(self, arrays: Sequence[tuple[int, str, Any]], records: Any) -> None:
        """Copy the arrays behind one another into the arena, and note where each went."""
        size = sum(round_up(array.nbytes, _ALIGN) for _, _, array in arrays)
        if size > self._arena_size:
            self._arena_size = 2 * size
            self._arena = self._gpu.empty(self._arena_size)
        packed, offset = np.zeros(size, np.uint8), 0
        for index, name, array in arrays:
            packed[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
            records[index][name] = int(self._arena.handle) + offset
            offset += round_up(array.nbytes, _ALIGN)
        if size:
            self._gpu.write(self._arena, packed)


@cache
def _rows(count: int) -> struct.Struct:
    return struct.Struct("<" + _ROW.format.removeprefix("<") * count)


def _number(choice: Choice, numbers: dict[int, int], kept: list[Choice]) -> int:
    """Where a choice stands in the pass; those that are not greedy are kept, each once."""
    number = numbers.get(id(choice))
    if number is None:
        number = _GREEDY_INDEX
        if not greedy(choice):
            number = len(kept)
            kept.append(choice)
        numbers[id(choice)] = number
    return number


def _added(pairs: Sequence[tuple[int, float]]) -> dict[int, np.float32]:
    """Biases by token; one named twice gets both, in order."""
    total: dict[int, np.float32] = {}
    for token, value in pairs:
        total[token] = total.get(token, np.float32(0)) + np.float32(value)
    return total
