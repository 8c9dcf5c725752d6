"""How a loop's tokens come to the host: the card's half (``ring.hpp``, by the system's compiler) beside the reader."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitmtp.backends.base import Head
from bitmtp.backends.cuda import layout, resident
from bitmtp.backends.cuda.compile import INCLUDES
from bitmtp.backends.cuda.ring import RING, RING_SIZE, RingReader
from bitmtp.core import _core
from bitmtp.core.policy import Verify

STRUCTURES = {
    "Row": layout.ROW,
    "Sequence": layout.SEQUENCE,
    "Choice": layout.CHOICE,
    "Output": layout.OUTPUT,
    "Pass": layout.PASS,
    "core::Ring": RING,
}
CONSTANTS = {
    "MAX_WIDTH": layout.MAX_WIDTH,
    "PIECE": layout.PIECE,
    "TOP": layout.TOP,
    "core::RING_SIZE": RING_SIZE,
    "core::ITERATION": resident._ITERATION,
    "core::ENDED": resident._ENDED,
    "core::PAUSED": resident._PAUSED,
    "core::RECORD_BYTES": _core.RECORD_BYTES,
    "core::MAX_NODES": layout.MAX_WIDTH,
    "sizeof(core::Course)": resident._COURSE,
    "offsetof(core::Course, capacity)": 4,
    "offsetof(core::Course, sent)": 8,
    "offsetof(core::Course, choice)": 12,
    **{f"core::VERIFY_{verify.name}": number for number, verify in enumerate(Verify)},
    **{f"HEAD_{head.name}": int(head) for head in Head},
    **{f"core::HEAD_{head.name}": int(head) for head in Head},
}
CARD = """
#include <cstring>
using namespace core;

static Text text;
static Kept kept;

extern "C" void send_tokens(Course* course, Ring* ring, int first, int count, int passes) {
    begin_kept(kept);
    kept.count = count, kept.passes = passes, kept.drafted = 1, kept.proposed = count + 1, kept.copied = passes & 1;
    for (int i = 0; i < count; ++i) kept.tokens[i] = first + i, kept.sources[i] = i ? SOURCE_ACCEPTED : SOURCE_EXACT;
    send(*course, kept, *ring);
}

extern "C" int rest(const Course* course, const Ring* ring, int committed, int limit, int status, int drafted) {
    text.committed = committed, text.limit = limit, text.status = status, text.drafted = drafted;
    return rest_of(text, *course, {ring->received, ring->stop});
}
"""
RUNS, ENDED, PAUSED, NEEDS_MEMORY, RING_FULL = range(5)
FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")


def expected_numbers() -> dict[str, int]:
    """Sizes, offsets and constants, as Python has them."""
    expected = dict(CONSTANTS)
    for name, dtype in STRUCTURES.items():
        expected[f"sizeof({name})"] = dtype.itemsize
        for field in dtype.names or ():
            kind, offset = (dtype.fields or {})[field][:2]
            expected |= {f"offsetof({name}, {field})": offset, f"sizeof({name}::{field})": kind.itemsize}
    return expected


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("ring")
    source, built = folder / "ring.cpp", folder / "ring.so"
    listing = ", ".join(f"(long long)({name})" for name in expected_numbers())
    numbers = f'extern "C" const long long values[] = {{{listing}}};\n'
    source.write_text(f'#include <cstddef>\n#include "pass.cuh"\n#include "ring.hpp"\n{numbers}{CARD}')
    includes = [f"-I{Path(folder)}" for folder in INCLUDES]
    subprocess.run([compiler, *FLAGS, *includes, str(source), "-o", str(built)], check=True)
    return ctypes.CDLL(str(built))


class Card:
    """Writes to a ring as a loop's turns do."""

    def __init__(self, library: ctypes.CDLL, sent: int = 0) -> None:
        self._library = library
        aligned = np.zeros(RING.itemsize + 64, np.uint8)
        start = -aligned.ctypes.data % 64
        self.ring: Any = aligned[start : start + RING.itemsize].view(RING)[0:1].reshape(())
        self.course = np.array([0, 1 << 20, 0, -1], np.int32).view(np.uint32)
        self.course[2] = sent
        self.ring["received"] = sent
        self.reader = RingReader(self.ring, read=sent)
        self.tokens = 0

    def send(self, count: int, passes: int = 1) -> None:
        self._library.send_tokens(*self._pointers, self.tokens, count, passes)
        self.tokens += count

    def rest(self, committed: int = 10, limit: int = 1 << 20, status: int = 0, drafted: int = 0) -> int:
        return int(self._library.rest(*self._pointers, committed, limit, status, drafted))

    @property
    def _pointers(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        return ctypes.c_void_p(self.course.ctypes.data), ctypes.c_void_p(self.ring.ctypes.data)

    def taken(self) -> list[int]:
        """Tokens of the whole iterations that have come."""
        return [value for value, source in self.reader.drain(resident._ITERATION) if source != resident._ITERATION]


def test_structures_lie_as_the_compiler_lays_them(library: ctypes.CDLL) -> None:
    expected = expected_numbers()
    compiled = (ctypes.c_longlong * len(expected)).in_dll(library, "values")
    assert dict(zip(expected, compiled, strict=True)) == expected


@pytest.mark.parametrize("dtype", STRUCTURES.values(), ids=STRUCTURES)
def test_no_field_of_a_structure_is_left_out(dtype: np.dtype[Any]) -> None:
    """Nothing lies between the fields but what aligns them."""
    end = 0
    for field, offset, *_ in (dtype.fields or {}).values():
        assert offset == end or (offset == end + 4 and field.alignment == 8)
        end = offset + field.itemsize
    assert dtype.itemsize - end in (0, 4)


def test_an_iteration_says_what_it_counted(library: ctypes.CDLL) -> None:
    card = Card(library)
    card.send(3, passes=2)
    *tokens, (counts, last) = card.reader.drain(resident._ITERATION)
    assert tokens == [(0, 0), (1, 1), (2, 1)]
    assert last == resident._ITERATION
    assert (counts & 15, counts >> 4 & 1, counts >> 5 & 1, counts >> 8) == (2, 1, 0, 4)


def test_half_an_iteration_waits_for_its_end(library: ctypes.CDLL) -> None:
    card = Card(library)
    card.send(2)
    card.send(3)
    end = int(card.ring["entries"][6])
    card.ring["entries"][6] = 0
    assert card.taken() == [0, 1]
    assert card.taken() == []
    card.ring["entries"][6] = end
    assert card.taken() == [2, 3, 4]
    assert int(card.ring["received"]) == 7


@pytest.mark.parametrize("sent", [0, 5, RING_SIZE - 2, (1 << 30) - 3000, (1 << 32) - 3000], ids=str)
def test_a_full_ring_rests_before_it_overflows(library: ctypes.CDLL, sent: int) -> None:
    """Counters of entries wrap, at 2^30 those that entries carry."""
    card, luck = Card(library, sent), np.random.default_rng(1)
    for _ in range(3):
        begun = card.tokens
        while card.rest() == RUNS:
            card.send(int(luck.integers(1, layout.MAX_WIDTH + 2)))
        assert card.rest() == RING_FULL
        assert card.taken() == list(range(begun, card.tokens))
        assert card.tokens - begun > RING_SIZE - 3 * layout.MAX_WIDTH - 300
        assert card.taken() == []
        assert card.rest() == RUNS


def test_an_entry_of_an_earlier_lap_is_not_read_again(library: ctypes.CDLL) -> None:
    card = Card(library)
    for _ in range(RING_SIZE // 4):
        card.send(3)
        card.taken()
    assert card.ring["entries"].all()
    assert card.taken() == []


def test_memory_is_asked_for_only_when_it_is_needed(library: ctypes.CDLL) -> None:
    card = Card(library)
    card.course[1] = 100
    assert [card.rest(committed) for committed in (36, 37)] == [RUNS, NEEDS_MEMORY]
    assert card.rest(98, limit=100) == RUNS, "no pass reaches beyond the end"


def test_a_loop_ends_and_pauses_between_iterations(library: ctypes.CDLL) -> None:
    card = Card(library)
    assert [card.rest(status=status) for status in (1, 2)] == [ENDED, ENDED]
    card.reader.interrupt()
    assert card.rest(drafted=1) == RUNS, "an iteration is finished first"
    assert card.rest() == PAUSED
