"""The adaptive header against the Python decoder with the linear shaper, pass by pass over random texts; layouts."""

from __future__ import annotations

import ctypes
import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from test_decisions import (
    CHOSEN,
    KEPT,
    NoModel,
    aligned,
    build_library,
    check_fields,
    check_kept,
    check_loop,
    check_rows,
    measure,
)

from bitmtp.backends.base import Backend, Output, Row
from bitmtp.backends.cuda import adaptive_layout, layout
from bitmtp.backends.cuda.adaptive import bodies
from bitmtp.backends.cuda.adaptive_layout import SHAPER, TUNING, chains, shaper_record, tuning_record
from bitmtp.backends.cuda.compile import ARCHITECTURES, compile_kernels
from bitmtp.backends.cuda.network import width_class
from bitmtp.backends.cuda.ring import RING, RING_SIZE, RingReader
from bitmtp.backends.resident.layout import LOOP, SOURCES, Status
from bitmtp.decoding import chooser, copies, plans
from bitmtp.decoding.chooser import AdaptiveShaper
from bitmtp.decoding.copies import Past
from bitmtp.decoding.costs import Calibration, CostTable, Tuning
from bitmtp.decoding.decoder import Decoder, Finish, Token
from bitmtp.decoding.policy import Policy, Verify
from bitmtp.decoding.state import State
from bitmtp.sampling import Sampling

TURN = Path(__file__).parent / "adaptive_main.cpp"
VERSION = {"VERSION": zlib.crc32(TURN.read_bytes())}  # the cache of kernels knows the package's sources only
HEADS = 16  # few, so that grams share them
STRUCTURES = {
    "adaptive::Tuning": TUNING,
    "adaptive::Past": adaptive_layout.PAST,
    "adaptive::Estimate": adaptive_layout.ESTIMATE,
    "adaptive::Guess": adaptive_layout.GUESS,
    "adaptive::Shaper": SHAPER,
}
CONSTANTS = {
    chooser: (
        "MEMORY", "ENTROPY_WEIGHT", "AGREEMENT", "DRIFT", "ENTROPY_RATE", "EASE_RATE", "OFFSET_RATE", "FAITH_RATE",
    ),
    plans: ("FORESIGHT", "SUREST", "ODDS_STEPS", "PRICE_STEPS", "HISTORY_STEPS"),
    copies: ("GRAM", "LONGEST"),
    adaptive_layout: ("GRAM", "NO_BODY", "MIX"),
}  # fmt: skip


# Layouts


def test_structures_lie_as_the_compiler_lays_them(tmp_path: Path) -> None:
    found, expected = measure(STRUCTURES, "adaptive.hpp", tmp_path)
    assert found == expected


@pytest.mark.parametrize("dtype", STRUCTURES.values(), ids=STRUCTURES)
def test_no_field_of_a_structure_is_left_out(dtype: np.dtype[Any]) -> None:
    check_fields(dtype)


def test_constants_are_the_python_s(tmp_path: Path) -> None:
    named = [(module, name) for module, names in CONSTANTS.items() for name in names]
    listing = ", ".join(f"double(adaptive::{name})" for _, name in named)
    source = tmp_path / "constants.cpp"
    source.write_text(f'#include "adaptive.hpp"\nextern "C" const double values[] = {{{listing}}};')
    compiled = (ctypes.c_double * len(named)).in_dll(build_library(source, tmp_path), "values")
    assert list(compiled) == [float(getattr(module, name)) for module, name in named]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_turn_compiles_without_spills(architecture: str) -> None:
    usage = compile_kernels(str(TURN), VERSION, architecture).usage
    assert [(kernel.kernel, kernel.spill_bytes) for kernel in usage] == [("turn", 0)]


@pytest.mark.parametrize("length", [0, 2, 3, 4, 5, 60, 3000])
@pytest.mark.parametrize("vocabulary", [2, 50_000])
def test_chains_lead_to_every_place_with_the_same_gram(length: int, vocabulary: int) -> None:
    text = np.random.default_rng(length).integers(0, vocabulary, length).astype(np.int32)
    heads, links = chains(text, 1024)
    known, past = dict[tuple[int, ...], list[int]](), Past()
    past.match(text.tolist())
    for end in range(3, length):
        known.setdefault(tuple(text[end - 3 : end].tolist()), []).insert(0, end)
    followed = 0
    for head in heads.tolist():
        found = []
        while head:
            found.append(head)
            head = int(links[head])
        assert found == sorted(found, reverse=True)
        followed += len(found)
        for gram in {tuple(text[end - 3 : end].tolist()) for end in found}:
            assert [end for end in found if tuple(text[end - 3 : end].tolist()) == gram] == known[gram]
    assert followed == max(length - 3, 0)


# The turn beside the decoder


@dataclass
class Machine:
    """Runs a turn on records in place, and holds what they point to.

    Attributes:
        place: puts an array where the turn can reach it; its address.
    """

    turn: Callable[[Sequence[NDArray[Any]]], None]
    place: Callable[[NDArray[Any]], int]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    library, held = build_library(TURN, tmp_path_factory.mktemp("adaptive")), list[NDArray[Any]]()

    def turn(records: Sequence[NDArray[Any]]) -> None:
        library.turn(*(ctypes.c_void_p(record.ctypes.data) for record in records))

    def place(array: NDArray[Any]) -> int:
        held[:] = [*held[-2:], array]
        return array.ctypes.data

    return Machine(turn, place)


@pytest.fixture(scope="module")
def on_gpu(gpu: Any) -> Machine:
    buffers, held = dict[int, Any](), list[Any]()

    def turn(records: Sequence[NDArray[Any]]) -> None:
        arguments = [buffers.setdefault(index, gpu.empty(record.nbytes)) for index, record in enumerate(records)]
        for buffer, record in zip(arguments, records, strict=True):
            gpu.write(buffer, record)
        gpu.launch(gpu.stream, gpu.kernel(str(TURN), "turn", VERSION, grid=(1,), block=32), *arguments, overlap=False)
        for buffer, record in zip(arguments, records, strict=True):
            record[...] = gpu.read(buffer, record.dtype, record.shape)

    def place(array: NDArray[Any]) -> int:
        held[:] = [*held[-2:], gpu.upload(array)]
        return int(held[-1].handle)

    return Machine(turn, place)


@dataclass
class Twin:
    """The loop and its shaper on a machine; the field names of the loop's are those of test_decisions."""

    machine: Machine
    loop: NDArray[Any]
    tuning: NDArray[Any]
    shaper: NDArray[Any]
    rows: NDArray[Any] = field(default_factory=lambda: aligned(layout.PASS))
    outputs: NDArray[Any] = field(default_factory=lambda: np.zeros(layout.MAX_WIDTH, CHOSEN))
    kept: NDArray[Any] = field(default_factory=lambda: aligned(KEPT))
    ring: NDArray[Any] = field(default_factory=lambda: aligned(RING))

    def turn(self) -> None:
        self.kept["count"] = 0
        self.machine.turn([self.loop, self.tuning, self.shaper, self.rows, self.outputs, self.kept, self.ring])

    @property
    def status(self) -> Status:
        return Status(int(self.loop["status"]))


def make_twin(machine: Machine, decoder: Decoder, shaper: AdaptiveShaper, capacity: int) -> Twin:
    loop, state = aligned(LOOP), decoder.state
    loop["policy"]["block_size"] = decoder.policy.block_size
    loop["limit"], loop["capacity"], loop["choice"] = decoder.limit, capacity, -1
    loop["num_eos"] = len(decoder.eos_ids)
    loop["eos"][: len(decoder.eos_ids)] = sorted(decoder.eos_ids)
    loop["committed"], loop["materialized"] = len(state.committed), state.materialized
    loop["pending"][: len(state.pending)] = state.pending
    loop["status"] = Status.STOP if decoder.finish is Finish.STOP else Status.RUNNING
    known = shaper.resident(state.committed)
    text, links = np.full(decoder.limit, -9, np.int32), np.full(decoder.limit, -9, np.int32)
    text[: len(known.text)] = known.text
    heads, links[: len(known.text)] = chains(text[: len(known.text)], HEADS)
    addresses = machine.place(heads), machine.place(links), machine.place(text)
    records = [aligned(TUNING), aligned(SHAPER)]
    records[0][...], records[1][...] = tuning_record(known), shaper_record(known, addresses, HEADS)
    return Twin(machine, loop, *records)


def random_costs(luck: random.Random) -> CostTable:
    """Rows that are free, dear, or cost a step at each width class; histories that hardly count, or much."""
    kind, base, slope = luck.random(), luck.uniform(0.2, 5), luck.choice([0.0, 0.003, 0.03, 0.2, 1.0])
    widths = sorted({1, *luck.sample(range(2, 65), luck.randint(1, 9))})
    costs = [base * (1 + slope * (width_class(width) if kind < 0.5 else width)) for width in widths]
    if luck.random() < 0.2:
        costs = [cost * luck.uniform(0.5, 1.5) for cost in costs]
    growth = luck.choice([(0.0, 0.0), (0.001 * base, 0.0002 * base), (0.0, 0.01 * base)])
    return CostTable(tuple(widths), tuple(costs), luck.choice([1, 16]), growth)


def random_calibration(luck: random.Random) -> Calibration:
    depths = luck.choice([1, 3, 31])
    pairs = [(luck.uniform(0.4, 2.5), luck.uniform(-1, 2)) for _ in range(depths)]
    return Calibration(*map(tuple, zip(*pairs, strict=True)))


def random_truth(luck: random.Random, length: int, vocabulary: int) -> list[int]:
    """A text that quotes itself, runs in circles, and says something new at times."""
    text = [luck.randrange(vocabulary) for _ in range(luck.randint(1, 20))]
    while len(text) < length:
        piece, start = luck.randint(1, 40), luck.randrange(len(text))
        what = luck.random()
        if what < 0.4:
            text += text[start : start + piece]
        elif what < 0.7:
            text += text[start : start + 8] * (piece // 4)
        else:
            text += [luck.randrange(vocabulary) for _ in range(piece)]
    return text


@dataclass
class Model:
    """Says what stands in a text of its own, mostly.

    Attributes:
        skill: of rows with tokens, and of masks.
        sure: how much more probable what is right is.
    """

    luck: random.Random
    truth: list[int]
    vocabulary: int
    skill: tuple[float, float]
    sure: float
    entropy: float

    def outputs(self, rows: Sequence[Row]) -> list[Output | None]:
        return [self._output(row) for row in rows]

    def _output(self, row: Row) -> Output:
        right = self.luck.random() < self.skill[row.token < 0]
        token = self.truth[row.position + 1] if right else self.luck.randrange(self.vocabulary)
        power = self.luck.choice([0.1, 1.0, 3.0]) * (self.sure if right else 1.0)
        probability = float(np.float32(self.luck.choice([self.luck.random() ** power, 0.0, 1.0, 0.9, 0.9, 0.99])))
        return Output(token, probability, float(np.float32(self.luck.expovariate(self.entropy))))


@dataclass
class Case:
    """A text for both."""

    decoder: Decoder
    shaper: AdaptiveShaper
    model: Model
    twin: Twin
    luck: random.Random


def make_case(machine: Machine, seed: int, room: int, stops: bool = True) -> Case:
    luck = random.Random(seed)
    vocabulary, block_size = luck.choice([3, 50, 151_669]), luck.choice([1, 2, 8, 16, 32, luck.randint(1, 32)])
    prompt_length = luck.choice([1, 2, 3, 4, luck.randint(1, 200)])
    limit = prompt_length + room
    truth = random_truth(luck, limit + 80, vocabulary)
    policy = Policy("auto", block_size, Verify.ALWAYS, adaptive=True)
    tuning = Tuning(random_costs(luck), random_calibration(luck), random_calibration(luck))
    shaper = AdaptiveShaper(policy, tuning, luck.choice([0.0, 0.0, 0.7, 1.0]), linear=True)
    eos = frozenset([truth[luck.randrange(prompt_length, limit)]] if stops and luck.random() < 0.2 else [])
    state = State(0, Sampling(), truth[:prompt_length], prompt_length)
    decoder = Decoder(state, policy, limit, eos, shaper=shaper)
    decoder.start(cast(Backend, NoModel(truth[prompt_length])))
    skill = luck.choice([1.0, 0.98, 0.9]), luck.choice([0.0, 0.5, 0.8, 1.0])
    model = Model(luck, truth, vocabulary, skill, luck.choice([1.0, 0.2]), luck.choice([0.3, 1.0, 5.0]))
    twin = make_twin(machine, decoder, shaper, luck.choice([0, limit]))
    return Case(decoder, shaper, model, twin, luck)


def body_of(rows: Sequence[Row]) -> int:
    masks = any(row.token < 0 for row in rows)
    return bodies(32).index((width_class(len(rows)), masks))


def check_shaper(case: Case, within: float) -> None:
    estimate, record = case.shaper._estimate, case.twin.shaper
    for name in adaptive_layout.ESTIMATE.names or ():
        assert float(record["estimate"][name]) == pytest.approx(getattr(estimate, name), rel=within, abs=within), name
    assert record["seen"] == estimate.seen


def resume(case: Case, reader: RingReader, text: list[tuple[int, int]]) -> None:
    """What a host does after a pause."""
    twin = case.twin
    if twin.status is Status.NEEDS_MEMORY:
        twin.loop["capacity"] += case.luck.randint(1, 90)
    elif twin.status is Status.RING_FULL:
        text += reader.drain()
    else:
        reader.interrupt(False)
    assert twin.shaper["running"] == 0
    assert twin.shaper["body"] == adaptive_layout.NO_BODY
    twin.turn()


def run_pass(case: Case, within: float) -> list[Token]:
    """The pass that both want next, with the same outputs for both."""
    twin, decoder = case.twin, case.decoder
    history, rows = decoder.state.materialized, decoder.rows()
    check_rows(twin, rows, history)
    assert twin.shaper["body"] == body_of(rows)
    outputs = case.model.outputs(rows)
    twin.outputs["token"] = -7
    for index, output in enumerate(outputs):
        if output is not None:
            twin.outputs[index] = (output.token, output.probability, output.entropy)
    twin.turn()
    committed = decoder.absorb(cast(Backend, NoModel(0)), outputs)
    check_kept(twin, committed)
    if committed:
        check_loop(twin, decoder)
        check_shaper(case, within)
    return committed


def run_both(machine: Machine, seed: int, room: int, within: float = 0.0) -> Counter[str]:
    """A whole text by both, compared after every pass; what it paused for and how its passes came about."""
    case, seen = make_case(machine, seed, room), Counter[str]()
    twin, decoder, luck = case.twin, case.decoder, case.luck
    reader, text, first = RingReader(twin.ring), list[tuple[int, int]](), decoder.state.committed[-1]
    expected = [(first, SOURCES.index("exact"))]
    twin.turn()
    while decoder.finish is None:
        while twin.status is not Status.RUNNING:
            seen[twin.status.name] += 1
            resume(case, reader, text)
        reader.interrupt(luck.random() < 0.1)
        committed = run_pass(case, within)
        expected += [(token.id, SOURCES.index(token.source.value)) for token in committed]
        seen[f"body {int(twin.shaper['body'])}"] += 1
        if committed:
            text += reader.drain() if luck.random() < 0.3 else []
    assert [(first, 0), *text, *reader.drain()][-len(expected) :] == expected
    twin.turn()
    check_loop(twin, decoder)  # what has ended stays ended
    stats = decoder.stats
    seen.update(
        copied=stats.copied, iterations=stats.iterations, deep=stats.lengths[64], stop=twin.status is Status.STOP
    )
    return seen


@pytest.mark.parametrize("seed", range(12))
def test_the_turn_equals_the_decoder(on_cpu: Machine, seed: int) -> None:
    seen = Counter[str]()
    for trial in range(40):
        seen.update(run_both(on_cpu, 1000 * seed + trial, room=1 + 11 * trial))
    assert seen["copied"] > 100
    assert seen["stop"] > 0
    assert {"NEEDS_MEMORY", "INTERRUPTED"} <= set(seen)
    assert {f"body {number}" for number in range(11)} <= set(seen), "passes of all widths"


def endless_case(machine: Machine, room: int) -> Case:
    """A text that nothing ends or pauses but its length and a ring that nobody reads; its first turn has run."""
    case = make_case(machine, 1, room, stops=False)
    case.twin.loop["capacity"] = case.decoder.limit
    case.twin.turn()
    return case


def test_no_acceptance_is_believed_beyond_the_surest(on_cpu: Machine) -> None:
    case = endless_case(on_cpu, 4000)
    case.model.truth = [case.luck.randrange(100_000) for _ in range(case.decoder.limit + 80)]
    case.model.skill = (1.0, 1.0)
    while case.decoder.finish is None:
        run_pass(case, 0.0)
    assert case.shaper._estimate.odds(False) > plans.SUREST + 0.2


def test_a_full_ring_pauses_before_it_overflows(on_cpu: Machine) -> None:
    case = endless_case(on_cpu, 3 * RING_SIZE)
    twin, reader = case.twin, RingReader(case.twin.ring)
    text = list[int]()
    while twin.status is Status.RUNNING:
        text += [token.id for token in run_pass(case, 0.0)]
    assert twin.status is Status.RING_FULL
    assert RING_SIZE - 65 <= len(text) <= RING_SIZE
    twin.turn()
    assert twin.status is Status.RING_FULL, "nothing was taken out"
    assert [token for token, _ in reader.drain()] == text
    twin.turn()
    assert twin.status is Status.RUNNING
    run_pass(case, 0.0)


def test_one_warp_nearly_equals_the_decoder(on_gpu: Machine) -> None:
    """The last bits of exp and log are the card's own, so that a decision between equals may fall otherwise."""
    failed = []
    for trial in range(60):
        try:
            run_both(on_gpu, trial, room=1 + 5 * trial, within=1e-9)
        except AssertionError as error:
            failed.append(f"{trial}: {error}")
    assert len(failed) <= 3, failed
