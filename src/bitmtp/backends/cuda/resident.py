"""The resident loop: whole iterations (draft, decide, verify, accept, commit) as one graph, without the host.

    begin · WHILE(again) { draft pass · judge · IF(verify) { verify pass · accept } }

The host reads finished tokens from a ring in pinned memory as they come. Decisions are those of
``backends/resident/decisions.hpp``, the twin of ``bitmtp.decoding.policy``. The adaptive policy has a graph of its own,
in ``adaptive.py``; all around it is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from bitmtp.backends.base import ResidentResult, ResidentText
from bitmtp.backends.cuda.adaptive import AdaptiveShape, AdaptiveTurn
from bitmtp.backends.cuda.atlas import Atlas, capacity_class
from bitmtp.backends.cuda.device import Gpu, Kernel
from bitmtp.backends.cuda.layout import MAX_WIDTH
from bitmtp.backends.cuda.network import Network, PassShape, width_class
from bitmtp.backends.cuda.ring import RING, RingReader
from bitmtp.backends.cuda.state import greedy
from bitmtp.backends.resident.layout import LOOP, SOURCES, Status, fill, loop_record

_POLL_SECONDS = 20e-6
_GREEDY = -1  # as a choice's number


@dataclass(frozen=True, slots=True)
class LoopShape:
    """What a loop's graph depends on.

    Attributes:
        draft: width class of its draft passes.
        verify: width class of its verify passes; 0: there are none.
        capacity: positions that its passes reach.
        filtered: rows may have filters or biases.
        once: it ends with its first iteration.
    """

    draft: int
    verify: int
    capacity: int
    filtered: bool
    once: bool


AnyShape: TypeAlias = LoopShape | AdaptiveShape


def loop_shape(text: ResidentText, capacity: int, filtered: bool, once: bool) -> AnyShape:
    """The graph that runs a text; a lossy policy leaves up to a block of tokens pending."""
    if text.adaptive is not None:
        return AdaptiveShape(width_class(text.block_size), capacity, filtered)
    pending = 1 if text.verify == "always" else text.block_size
    widest = max(pending, len(text.pending)) + text.block_size - 1
    verify = 0 if text.verify == "never" else width_class(text.block_size)
    return LoopShape(width_class(widest), verify, capacity, filtered, once)


class ResidentLoop:
    """Runs one text at a time; the pass structure must hold its sequence's store and its choice before."""

    def __init__(self, gpu: Gpu, network: Network) -> None:
        self._gpu, self._network = gpu, network
        self._loop = gpu.zeros(LOOP.itemsize)
        self.ring = RingReader(gpu.pinned(RING, ()))
        self._turn = AdaptiveTurn(gpu, network)
        self.atlas: Atlas[AnyShape] = Atlas(gpu, self._record)

    def _kernel(self, name: str) -> Kernel:
        return self._gpu.kernel("resident.cu", name, {}, grid=(1,), block=32)

    def _record(self, builder: Any, shape: AnyShape) -> None:
        ring = np.uintp(self.ring.memory.ctypes.data)
        if isinstance(shape, AdaptiveShape):
            self._turn.record(builder, shape, self._loop, ring)
        else:
            self._record_fixed(builder, shape, ring)

    def _record_fixed(self, builder: Any, shape: LoopShape, ring: np.uintp) -> None:
        launch, state, outputs = self._gpu.launch, self._network.buffers.state, self._network.buffers.outputs
        again = builder.create_condition(default_value=0)
        handle = np.uint64(int(again.handle))
        launch(builder, self._kernel("begin"), self._loop, state, ring, handle, overlap=False)
        body = (builder.if_then if shape.once else builder.while_loop)(again).begin_building()
        self._network.record(body, PassShape(shape.draft, shape.capacity, 1, shape.filtered, shape.draft > 1))
        arguments = self._loop, state, outputs, ring, handle
        if not shape.verify:  # what is never true may be written to the other condition, which is set after it
            launch(body, self._kernel("judge"), *arguments, handle)
        else:
            verify = body.create_condition(default_value=0)
            launch(body, self._kernel("judge"), *arguments, np.uint64(int(verify.handle)))
            then = body.if_then(verify).begin_building()
            self._network.record(then, PassShape(shape.verify, shape.capacity, 1, shape.filtered))
            launch(then, self._kernel("accept"), *arguments)
            then.end_building()
        body.end_building()

    def capacities(self, text: ResidentText) -> Iterator[int]:
        """The capacity classes that a text passes through from where it stands to its limit."""
        capacity, last = capacity_class(text.committed + MAX_WIDTH), capacity_class(text.limit + MAX_WIDTH)
        while capacity <= last:
            yield capacity
            capacity *= 2

    def run(
        self, text: ResidentText, filtered: bool, once: bool, reserve: Callable[[int], int], result: ResidentResult
    ) -> Iterator[list[tuple[int, str]]]:
        """Tokens and their sources, as they come, until the text ends or its reader goes away.

        Args:
            once: the host begins every iteration.
            reserve: maps memory for that many positions, as far as there may be, and returns for how many there is.
        """
        self.ring.memory["received"] = self.ring.memory["stop"] = 0
        self.ring.memory["entries"] = 0
        if text.adaptive is not None:
            self._turn.load(text)
        loop, status = loop_record(text, _GREEDY if greedy(text.choice) else 0), Status.NEEDS_MEMORY
        while status in (Status.RUNNING, Status.NEEDS_MEMORY, Status.RING_FULL):
            capacity = capacity_class(int(loop["committed"]) + MAX_WIDTH)
            loop["capacity"] = min(reserve(capacity), capacity)
            self._gpu.write(self._loop, loop)
            shape = loop_shape(text, capacity, filtered, once)
            try:
                yield from self._begin_each(shape, result) if once else self._follow(shape, result)
            finally:
                loop = self._gpu.read(self._loop, LOOP, ())
                status = Status(int(loop["status"]))
                fill(result, loop)

    def _start(self, shape: AnyShape, result: ResidentResult) -> Any:
        """Launch a graph; the event behind it."""
        self.atlas.launch(shape)
        result.graph_replays += 1
        return self._gpu.stream.record()

    def _arrived(self) -> list[tuple[int, str]]:
        return [(token, SOURCES[source]) for token, source in self.ring.drain()]

    def _begin_each(self, shape: AnyShape, result: ResidentResult) -> Iterator[list[tuple[int, str]]]:
        """Tokens of iterations that the host begins, each while the one before it runs.

        Returns when none came: the loop rests, or they came early, together with those before them.
        """
        running = self._start(shape, result)
        try:
            while True:
                following = self._start(shape, result)
                running.sync()
                if arrived := self._arrived():
                    yield arrived
                    running = following
                    continue
                following.sync()
                if arrived := self._arrived():
                    yield arrived
                return
        finally:
            self._gpu.stream.sync()

    def _follow(self, shape: AnyShape, result: ResidentResult) -> Iterator[list[tuple[int, str]]]:
        """Tokens of a graph as it runs; returns when it has ended and the ring is empty."""
        event = self._start(shape, result)
        try:
            while True:
                done = event.is_done
                if arrived := self._arrived():
                    yield arrived
                elif done:
                    return
                else:
                    time.sleep(_POLL_SECONDS)
        finally:
            if not event.is_done:  # the reader went away: end the iteration that runs
                self.ring.interrupt()
                self._gpu.stream.sync()
