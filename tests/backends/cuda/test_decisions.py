"""The decision headers against the Python decoder, step by step over random outputs; layouts; the kernels around it."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from bitmtp.backends.base import Backend, Head, Output, Row
from bitmtp.backends.cuda import layout
from bitmtp.backends.cuda.compile import ARCHITECTURES, INCLUDES, Constants, compile_kernels
from bitmtp.backends.cuda.ring import RING, RING_SIZE, RingReader
from bitmtp.backends.resident import layout as resident
from bitmtp.backends.resident.layout import LOOP, SOURCES, Status
from bitmtp.decoding.costs import Calibration
from bitmtp.decoding.decoder import Decoder, Finish, Token
from bitmtp.decoding.policy import Policy, Verify
from bitmtp.decoding.state import State
from bitmtp.sampling import Choice, Sampling

STEPS = Path(__file__).parent / "decisions_main.cpp"
VERSION = {"VERSION": zlib.crc32(STEPS.read_bytes())}  # the cache of kernels knows the package's sources only
CHOSEN = np.dtype([("token", "<i4"), ("probability", "<f4"), ("entropy", "<f4")])
KEPT = np.dtype([("count", "<i4"), ("tokens", "<i4", 64), ("sources", "<i4", 64)])
STRUCTURES = {
    "Row": layout.ROW,
    "Sequence": layout.SEQUENCE,
    "Choice": layout.CHOICE,
    "Output": layout.OUTPUT,
    "Pass": layout.PASS,
    "decisions::Policy": resident.POLICY,
    "decisions::Loop": LOOP,
    "decisions::Ring": RING,
    "decisions::Chosen": CHOSEN,
    "decisions::Kept": KEPT,
}
CONSTANTS = {
    "MAX_WIDTH": layout.MAX_WIDTH,
    "PIECE": layout.PIECE,
    "TOP": layout.TOP,
    "decisions::MAX_ROWS": layout.MAX_WIDTH,
    "decisions::MAX_BLOCK": resident.MAX_BLOCK,
    "decisions::MAX_EOS": resident.MAX_EOS,
    "decisions::RING_SIZE": RING_SIZE,
    **{f"decisions::VERIFY_{name.upper()}": number for number, name in enumerate(resident.VERIFY)},
    **{f"decisions::SOURCE_{name.upper()}": number for number, name in enumerate(SOURCES)},
    **{f"decisions::{status.name}": int(status) for status in Status},
    **{f"HEAD_{head.name}": int(head) for head in Head},
}


def build_library(source: Path, folder: Path) -> ctypes.CDLL:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    library = folder / f"{source.stem}.so"
    flags = [
        "-std=c++17",
        "-O1",
        "-shared",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-ffp-contract=off",
        *(f"-I{folder}" for folder in INCLUDES),
    ]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


# Layouts


Numbers = dict[str, int]


def measure(
    structures: dict[str, np.dtype[Any]], header: str, folder: Path, constants: dict[str, int] | None = None
) -> tuple[Numbers, Numbers]:
    """Sizes, offsets and constants, as a C++ compiler has them and as Python does."""
    expected = dict(constants or {})
    for name, dtype in structures.items():
        expected[f"sizeof({name})"] = dtype.itemsize
        for field in dtype.names or ():
            kind, offset = (dtype.fields or {})[field][:2]
            expected |= {f"offsetof({name}, {field})": offset, f"sizeof({name}::{field})": kind.itemsize}
    source = folder / "layout.cpp"
    listing = ", ".join(f"(long long)({value})" for value in expected)
    source.write_text(f'#include <cstddef>\n#include "{header}"\nextern "C" const long long values[] = {{{listing}}};')
    compiled = (ctypes.c_longlong * len(expected)).in_dll(build_library(source, folder), "values")
    return dict(zip(expected, compiled, strict=True)), expected


def check_fields(dtype: np.dtype[Any]) -> None:
    """Nothing lies between the fields but what aligns them."""
    end = 0
    for field, offset, *_ in (dtype.fields or {}).values():
        assert offset == end or (offset == end + 4 and field.alignment == 8)
        end = offset + field.itemsize
    assert dtype.itemsize - end in (0, 4)


def test_structures_lie_as_the_compiler_lays_them(tmp_path: Path) -> None:
    found, expected = measure(STRUCTURES, "iteration.hpp", tmp_path, CONSTANTS)
    assert found == expected


@pytest.mark.parametrize("dtype", STRUCTURES.values(), ids=STRUCTURES)
def test_no_field_of_a_structure_is_left_out(dtype: np.dtype[Any]) -> None:
    check_fields(dtype)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("file", "constants"), [("resident.cu", {}), (str(STEPS), VERSION)], ids=["resident", "steps"])
def test_kernels_compile_without_spills(file: str, constants: Constants, architecture: str) -> None:
    usage = compile_kernels(file, constants, architecture).usage
    assert {kernel.kernel for kernel in usage} == {"begin", "judge", "accept"}
    assert all(kernel.spill_bytes == 0 for kernel in usage)


# The loop beside the decoder


def aligned(dtype: np.dtype[Any]) -> NDArray[Any]:
    """A record of zeros on a 64-byte boundary."""
    memory = np.zeros(dtype.itemsize + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + dtype.itemsize].view(dtype)[0:1].reshape(())


@dataclass
class Twin:
    """The loop, and how one of its steps is run on the records of this object, in place."""

    loop: NDArray[Any]
    rows: NDArray[Any]
    outputs: NDArray[Any]
    kept: NDArray[Any]
    ring: NDArray[Any]
    step: Callable[[str, Sequence[NDArray[Any]]], None]

    def run(self, name: str) -> None:
        self.kept["count"] = -1
        self.step(name, [self.loop, self.rows, self.outputs, self.kept, self.ring])

    @property
    def status(self) -> Status:
        return Status(int(self.loop["status"]))


Step = Callable[[str, Sequence[NDArray[Any]]], None]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Step:
    library = build_library(STEPS, tmp_path_factory.mktemp("decisions"))

    def step(name: str, records: Sequence[NDArray[Any]]) -> None:
        getattr(library, name)(*(ctypes.c_void_p(record.ctypes.data) for record in records))

    return step


@pytest.fixture(scope="module")
def on_gpu(gpu: Any) -> Step:
    buffers: dict[int, Any] = {}

    def step(name: str, records: Sequence[NDArray[Any]]) -> None:
        arguments = [buffers.setdefault(index, gpu.empty(record.nbytes)) for index, record in enumerate(records)]
        for buffer, record in zip(arguments, records, strict=True):
            gpu.write(buffer, record)
        gpu.launch(gpu.stream, gpu.kernel(str(STEPS), name, VERSION, grid=(1,), block=32), *arguments, overlap=False)
        for buffer, record in zip(arguments, records, strict=True):
            record[...] = gpu.read(buffer, record.dtype, record.shape)

    return step


class NoModel:
    """Prefills to a given token and materializes nothing; outputs come from the test."""

    def __init__(self, first: int) -> None:
        self.first = first

    def prefill(self, sequence: int, tokens: Sequence[int], choice: Choice) -> Output:  # noqa: ARG002
        return Output(self.first, 0.5, 1.0)

    def materialize(self, sequence: int, indices: Sequence[int]) -> None:
        pass


LIKELY = float(
    np.float32(0.7)
)  # its powers are bounds that products of probabilities meet exactly, in double precision


def random_policy(luck: random.Random) -> Policy:
    block_size = luck.choice([1, 2, luck.randint(1, 32), 8])
    verify = luck.choice(list(Verify))
    tau = luck.choice([luck.random(), 0.9, float(np.float32(0.9)), 0.0, 1.0])
    bound = luck.choice([0.0, luck.random() ** 3, LIKELY**2, LIKELY**3])
    calibration = luck.choice([None, Calibration((0.75, 1.5), (1.3, -0.5))])
    return Policy("any", block_size, verify, tau, luck.randint(1, block_size), bound, calibration=calibration)


def random_decoder(luck: random.Random, vocabulary: int, room: int, policy: Policy) -> Decoder:
    prompt = [luck.randrange(vocabulary) for _ in range(luck.randint(1, 6))]
    eos = frozenset(luck.sample(range(vocabulary), luck.choice([0, 0, 1, 2])))
    decoder = Decoder(State(0, Sampling(), prompt, len(prompt)), policy, len(prompt) + room, eos)
    decoder.start(cast(Backend, NoModel(luck.randrange(vocabulary))))
    return decoder


def random_outputs(
    luck: random.Random, rows: Sequence[Row], vocabulary: int, bar: float, skill: float
) -> list[Output | None]:
    """One for each row with a head; with probability ``skill`` it names the token of the row behind it."""
    outputs: list[Output | None] = []
    for row, behind in zip(rows, [*rows[1:], None], strict=True):
        right = behind is not None and behind.token >= 0 and luck.random() < skill
        token = behind.token if right and behind else luck.randrange(vocabulary)
        probability = np.float32(luck.choice([luck.random() ** 0.1, luck.random(), bar, LIKELY, 1.0]))
        outputs.append(None if row.head is Head.NONE else Output(token, float(probability), 1.0))
    return outputs


def make_twin(step: Step, decoder: Decoder, choice: int, capacity: int, sent: int = 0) -> Twin:
    loop, policy, state = aligned(LOOP), decoder.policy, decoder.state
    for name in ("verify_bound", "block_size", "min_prefix"):
        loop["policy"][name] = getattr(policy, name)
    loop["policy"]["bars"][: policy.block_size] = policy.bars
    loop["policy"]["verify"] = resident.VERIFY.index(policy.verify.value)
    loop["limit"], loop["capacity"], loop["choice"], loop["sent"] = decoder.limit, capacity, choice, sent
    loop["num_eos"] = len(decoder.eos_ids)
    loop["eos"][: len(decoder.eos_ids)] = sorted(decoder.eos_ids)
    loop["committed"], loop["materialized"] = len(state.committed), state.materialized
    loop["pending"][: len(state.pending)] = state.pending
    outputs = np.zeros(layout.MAX_WIDTH, CHOSEN)
    loop["status"] = Status.STOP if decoder.finish is Finish.STOP else Status.RUNNING
    twin = Twin(loop, aligned(layout.PASS), outputs, aligned(KEPT), aligned(RING), step)
    twin.ring["received"] = sent
    numbers = np.arange(max(0, sent - RING_SIZE), sent, dtype=np.uint64)
    twin.ring["entries"][numbers % RING_SIZE] = (numbers + np.uint64(1)) << np.uint64(34)
    return twin


def check_rows(twin: Twin, rows: Sequence[Row], history: int) -> None:
    passed = twin.rows
    assert (passed["width"], passed["num_sequences"]) == (len(rows), 1)
    assert passed["sequences"][0].tolist() == (0, history, 0, len(rows), 1)
    expected = [
        (row.visible, row.token, row.position, 0, index, int(row.head), int(twin.loop["choice"]), 0, 0)
        for index, row in enumerate(rows)
    ]
    assert passed["rows"][: len(rows)].tolist() == expected
    assert history + len(rows) <= twin.loop["capacity"], "no row stands beyond the mapped memory"


def check_loop(twin: Twin, decoder: Decoder) -> None:
    loop, state, stats = twin.loop, decoder.state, decoder.stats
    assert (loop["committed"], loop["materialized"]) == (len(state.committed), state.materialized)
    assert loop["pending"][: len(state.pending)].tolist() == state.pending
    for name in ("passes", "iterations", "num_spec_steps", "proposed", "accepted", "copied"):
        assert loop[name] == getattr(stats, name), name
    assert loop["lengths"].tolist() == [stats.lengths[length] for length in range(65)]
    finished = {Status.STOP: Finish.STOP, Status.LENGTH: Finish.LENGTH}
    assert finished.get(twin.status) == decoder.finish


def check_kept(twin: Twin, committed: Sequence[Token]) -> None:
    count = int(twin.kept["count"])
    assert twin.kept["tokens"][:count].tolist() == [token.id for token in committed]
    assert [SOURCES[source] for source in twin.kept["sources"][:count]] == [token.source.value for token in committed]


def run_pass(twin: Twin, decoder: Decoder, luck: random.Random, vocabulary: int, skill: float) -> list[Token]:
    """The pass that both want next, with the same outputs for both."""
    history = decoder.state.materialized
    rows = decoder.rows()
    check_rows(twin, rows, history)
    outputs = random_outputs(luck, rows, vocabulary, min(luck.choice(decoder.policy.bars), 1.0), skill)
    twin.outputs["token"] = -7
    for index, output in enumerate(outputs):
        if output is not None:
            twin.outputs[index] = (output.token, output.probability, output.entropy)
    twin.run("accept" if twin.loop["num_proposals"] else "judge")
    committed = decoder.absorb(cast(Backend, NoModel(0)), outputs)
    check_kept(twin, committed)
    return committed


def resume(twin: Twin, reader: RingReader, text: list[tuple[int, int]], luck: random.Random) -> None:
    """What a host does after a pause."""
    if twin.status is Status.NEEDS_MEMORY:
        twin.loop["capacity"] += luck.randint(1, 40)
    elif twin.status is Status.RING_FULL:
        text += reader.drain()
    else:
        reader.interrupt(False)
    twin.run("begin")


def run_both(step: Step, seed: int, room: int) -> set[Status]:
    """A whole text by the loop and by the decoder, compared after every pass; returns what the loop paused for."""
    luck = random.Random(seed)
    vocabulary, paused = luck.choice([3, 10, 151_669]), set()
    skill = luck.choice([0.0, 0.7, 1.0])
    decoder = random_decoder(luck, vocabulary, room, random_policy(luck))
    sent = luck.choice([0, RING_SIZE - 3, (1 << 32) - 5])
    twin = make_twin(step, decoder, luck.choice([-1, 0]), luck.choice([0, decoder.limit]), sent)
    reader, text, first = RingReader(twin.ring), list[tuple[int, int]](), decoder.state.committed[-1]
    expected = [(first, SOURCES.index("exact"))]
    twin.run("begin")
    while decoder.finish is None:
        while twin.status is not Status.RUNNING:
            paused.add(twin.status)
            resume(twin, reader, text, luck)
        reader.interrupt(luck.random() < 0.1)
        committed = run_pass(twin, decoder, luck, vocabulary, skill)
        expected += [(token.id, SOURCES.index(token.source.value)) for token in committed]
        if committed:
            check_loop(twin, decoder)
            text += reader.drain() if luck.random() < 0.3 else []
    assert [(first, 0), *text, *reader.drain()] == expected
    twin.run("begin")
    check_loop(twin, decoder)  # what has ended stays ended
    return paused


@pytest.mark.parametrize("seed", range(20))
def test_the_loop_equals_the_decoder(on_cpu: Step, seed: int) -> None:
    paused = set[Status]()
    for trial in range(100):
        paused |= run_both(on_cpu, 1000 * seed + trial, room=1 + trial % 60)
    assert paused == {Status.NEEDS_MEMORY, Status.INTERRUPTED}


def test_one_warp_equals_the_decoder(on_gpu: Step) -> None:
    for trial in range(100):
        run_both(on_gpu, trial, room=1 + trial % 60)


LONG = Policy("any", 32, Verify.ALWAYS)


def full_ring(step: Step) -> tuple[Twin, RingReader, list[int]]:
    """A long text that nobody reads, up to the pause."""
    luck = random.Random(3)
    decoder = Decoder(State(0, Sampling(), [1], 1), LONG, 3 * RING_SIZE, frozenset())
    decoder.start(cast(Backend, NoModel(0)))
    twin = make_twin(step, decoder, -1, decoder.limit)
    twin.run("begin")
    while twin.status is Status.RUNNING:
        run_pass(twin, decoder, luck, 50, skill=1.0)
    return twin, RingReader(twin.ring), decoder.state.committed[2:]


def test_a_full_ring_pauses_before_it_overflows(on_cpu: Step) -> None:
    twin, reader, text = full_ring(on_cpu)
    assert twin.status is Status.RING_FULL
    assert RING_SIZE - 33 < len(text) <= RING_SIZE
    twin.run("begin")
    assert twin.status is Status.RING_FULL, "nothing was taken out"
    assert [token for token, _ in reader.drain()] == text
    assert reader.drain() == []
    twin.run("begin")
    assert twin.status is Status.RUNNING


def test_an_entry_of_an_earlier_lap_is_not_read_again(on_cpu: Step) -> None:
    twin, reader, text = full_ring(on_cpu)
    reader.drain()
    assert twin.ring["entries"][len(text) % RING_SIZE - 1] != 0
    twin.ring["received"] = len(text) + RING_SIZE - 1
    assert reader.drain() == []


def test_memory_is_asked_for_only_when_it_is_needed(on_cpu: Step) -> None:
    decoder = Decoder(State(0, Sampling(), [1], 1), Policy("any", 8, Verify.ALWAYS), 100, frozenset())
    decoder.start(cast(Backend, NoModel(0)))
    for capacity, status in ((9, Status.NEEDS_MEMORY), (10, Status.RUNNING)):  # 2 committed, and 8 rows behind them
        twin = make_twin(on_cpu, decoder, -1, capacity)
        twin.run("begin")
        assert twin.status is status
