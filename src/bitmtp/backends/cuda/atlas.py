"""The graph atlas: a finite set of captured graphs, one for each shape of a pass, over one set of buffers.

Capacities grow geometrically, so any history is covered by logarithmically many graphs. Nothing of a sequence is
captured: addresses and lengths come from the pass structure, so one atlas serves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from bitmtp.backends.cuda.device import Gpu

SMALLEST = 512  # positions of the smallest capacity class

Key = TypeVar("Key", bound=Hashable)


def capacity_classes(longest: int) -> Iterator[int]:
    """Capacities from :data:`SMALLEST` on, each twice the one before; the last one is not below ``longest``."""
    capacity = SMALLEST
    while capacity < longest:
        yield capacity
        capacity *= 2
    yield capacity


def capacity_class(positions: int) -> int:
    """The smallest capacity class that holds ``positions``."""
    return max(SMALLEST, 1 << (positions - 1).bit_length())


@dataclass(slots=True)
class Atlas(Generic[Key]):
    """Graphs by key; ``record`` launches what a key stands for into a graph being built.

    Attributes:
        bytes: device memory that the graphs took.
    """

    gpu: Gpu
    record: Callable[[Any, Key], None]
    bytes: int = 0
    _graphs: dict[Key, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Key) -> bool:
        return key in self._graphs

    def prepare(self, key: Key) -> None:
        """Capture and upload the graph of a key, unless it is there."""
        if key in self._graphs:
            return
        free = self.gpu.free_bytes()
        builder = self.gpu.device.create_graph_builder()
        builder.begin_building()
        self.record(builder, key)
        graph = builder.end_building().complete()
        graph.upload(self.gpu.stream)
        self.gpu.stream.sync()
        self._graphs[key] = graph
        self.bytes += max(free - self.gpu.free_bytes(), 0)

    def launch(self, key: Key) -> None:
        """Run a key's graph in the device's stream."""
        self.prepare(key)
        self._graphs[key].launch(self.gpu.stream)
