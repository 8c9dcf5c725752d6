"""Where the time of a pass goes: one graph for each class of kernels, replayed alone.

A graph hides its kernels, and events between them would keep them from overlapping. So the launches of a class (all
layers' q/k/v products, say) are captured by themselves, several times over, between two events. The bias: neighbours
are of the same class, so a kernel's tail overlaps its own kind's beginning, and what fits the cache stays there. The
sum of the classes is reported beside the pass, and the difference is what the classes gain or lose together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from statistics import median
from typing import Any

from bitmtp.backends.base import Head, causal_rows, mask
from bitmtp.backends.cuda.backend import CudaBackend
from bitmtp.backends.cuda.device import Gpu, Launch, check
from bitmtp.backends.cuda.matrices import Matrix
from bitmtp.backends.cuda.network import Network, PassShape
from bitmtp.sampling import GREEDY

_LAUNCHES = 240  # of a class in its graph, at least
_ROUNDS, _REPLAYS = 7, 10


_CHOICE = {"partials", "partials_adjusted", "merge", "gather", "filter", "chain_hidden", "chain"}


class Part(StrEnum):
    """Of a pass."""

    LAYERS = "layers"  # the embedding and the quantisation before the head among them
    HEAD = "head"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A class of kernels in one pass.

    Attributes:
        microseconds: of all its launches in a pass together.
        bytes: weights and K/V that they read.
    """

    name: str
    launches: int
    microseconds: float
    bytes: int

    @property
    def part(self) -> Part:
        """What it belongs to."""
        return Part.HEAD if self.name.endswith("head") else Part.CHOICE if self.name in _CHOICE else Part.LAYERS


@dataclass(frozen=True, slots=True)
class PassProfile:
    """A pass of ``width`` rows (a draft if ``masks``) behind ``history`` positions, and its classes of kernels.

    Attributes:
        microseconds: of the pass's own graph, the copies of its rows and outputs included.
    """

    width: int
    masks: bool
    history: int
    microseconds: float
    kernels: tuple[KernelTime, ...]

    @property
    def total(self) -> float:
        """Microseconds of all classes, each replayed alone."""
        return sum(each.microseconds for each in self.kernels)

    @property
    def bytes(self) -> int:
        """What the pass reads."""
        return sum(each.bytes for each in self.kernels)

    def parts(self) -> dict[Part, float]:
        """Microseconds of each part."""
        return {part: sum(each.microseconds for each in self.kernels if each.part is part) for part in Part}


def profile_pass(backend: CudaBackend, width: int, history: int, masks: bool = False) -> PassProfile:
    """Time a pass and its classes of kernels (whatever K/V lie in the history).

    Args:
        masks: all rows behind the first are masks.
    """
    gpu, matrices = backend.gpu, _matrices(backend.network)
    classes: dict[str, list[Launch]] = {}
    with prepared_pass(backend, width, history, masks) as shape:
        whole = median(gpu.seconds(lambda: backend.atlas.launch(shape), _REPLAYS) for _ in range(_ROUNDS))
        for launch in backend.launches(shape):
            classes.setdefault(_class_of(launch, matrices), []).append(launch)
        taken = {name: _alone(gpu, launches) * 1e6 for name, launches in classes.items()}
    read = {name: sum(matrix.nbytes for _, matrix in _read(launches, matrices)) for name, launches in classes.items()}
    read["attention"] = history_bytes(backend, history)
    kernels = [KernelTime(name, len(launches), taken[name], read[name]) for name, launches in classes.items()]
    return PassProfile(width, masks, history, whole * 1e6, tuple(kernels))


@contextmanager
def prepared_pass(backend: CudaBackend, width: int, history: int, masks: bool = False) -> Iterator[PassShape]:
    """Such a pass has run once, so that its rows are on the card and its K/V mapped; yields the graph that it took."""
    sequence = backend.open()
    backend.reserve(sequence, history + width)
    backend.sequence(sequence).length = history
    tokens = [5, *(mask(depth) for depth in range(1, width))] if masks else list(range(5, 5 + width))
    backend.step(causal_rows(sequence, tokens, history, [Head.EXACT] * width, GREEDY))
    assert backend.shape is not None
    yield backend.shape
    backend.close(sequence)


def copy_speed(gpu: Gpu) -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    from cuda.bindings import driver

    size = min(2 << 30, gpu.free_bytes() // 4)
    a, b = gpu.zeros(size), gpu.zeros(size)
    stream = driver.CUstream(int(gpu.stream.handle))

    def copy() -> None:
        check(driver.cuMemcpyDtoDAsync(int(a.handle), int(b.handle), size, stream), "copy")

    speed = 2 * size / median(gpu.seconds(copy, 1) for _ in range(9))
    a.close()
    b.close()
    return speed


def history_bytes(backend: CudaBackend, history: int) -> int:
    """What attention reads of a history."""
    config = backend.config
    return history * config.num_layers * 2 * config.kv_size * (2 if config.kv_type == "float16" else 4)


def _alone(gpu: Gpu, launches: Sequence[Launch]) -> float:
    """Seconds of these launches, one behind the other and again and again."""
    times = -(-_LAUNCHES // len(launches))
    builder = gpu.device.create_graph_builder()
    builder.begin_building()
    for _ in range(times):
        for launch in launches:
            gpu.make(builder, launch)
    graph = builder.end_building().complete()
    graph.upload(gpu.stream)
    graph.launch(gpu.stream)
    return median(gpu.seconds(lambda: graph.launch(gpu.stream), _REPLAYS) for _ in range(_ROUNDS)) / times


def _matrices(network: Network) -> dict[int, tuple[str, Matrix]]:
    """Names of the matrices, by the address of their weights."""
    found = {int(network.head.weights.handle): ("head", network.head)}
    for layer in network.layers:
        for field in fields(layer):
            matrix = getattr(layer, field.name)
            if isinstance(matrix, Matrix):
                found[int(matrix.weights.handle)] = (field.name, matrix)
    return found


def _read(launches: Sequence[Launch], matrices: dict[int, tuple[str, Matrix]]) -> list[tuple[str, Matrix]]:
    """The matrices that these launches multiply with; rows of the embedding alone are next to nothing."""
    products = [launch for launch in launches if "embed" not in launch.name]
    addresses = [_address(argument) for launch in products for argument in launch.arguments]
    return [matrices[address] for address in addresses if address in matrices]


def _address(argument: Any) -> int:
    return int(getattr(argument, "handle", 0) or 0)


def _class_of(launch: Launch, matrices: dict[int, tuple[str, Matrix]]) -> str:
    """``product qkv`` and the like; variants of attention are one class, and other kernels are called what they are."""
    if launch.name.startswith("attention"):
        return "attention"
    names = [name for name, _ in _read([launch], matrices)]
    return f"product {names[0]}" if names else launch.name
