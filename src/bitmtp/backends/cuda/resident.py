"""A text's loop on the card: passes, and between them a turn of the core, without the host.

``kernels/loop.cu`` shows the graphs. The host reads committed tokens from a ring in pinned memory as they come, and may
leave the loop running while it does something else that needs no other pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitmtp.backends.cuda.atlas import Atlas, capacity_class
from bitmtp.backends.cuda.device import Gpu, Kernel
from bitmtp.backends.cuda.layout import MAX_WIDTH
from bitmtp.backends.cuda.network import WIDTHS, Network, PassShape, width_class
from bitmtp.backends.cuda.ring import RING, RingReader
from bitmtp.core import _core
from bitmtp.sampling import GREEDY, Choice, Sampling

_POLL_SECONDS = 20e-6
_ALWAYS, _NEVER = 0, 2  # of the core's ``Verify``
_ENDED, _PAUSED = 1, 2  # of ``ring.hpp``'s ``Rest``; beyond them, a loop that the host has to begin again
_NO_BODY = 13
_ITERATION = 3
_COURSE = 4 * 4  # bytes
_COSTS, _IMAGE = _COURSE, _COURSE + _core.COSTS_BYTES  # where they begin, behind the course


@dataclass(frozen=True, slots=True)
class LoopShape:
    """What a loop's graph depends on.

    Attributes:
        draft: width class of its (widest) draft passes.
        verify: width class of its verify passes; 0: there are none.
        capacity: positions that its passes reach.
        filtered: rows may have filters or biases.
        adaptive: each turn chooses the pass behind it.
    """

    draft: int
    verify: int
    capacity: int
    filtered: bool
    adaptive: bool


def loop_shape(text: _core.Text, capacity: int, filtered: bool) -> LoopShape:
    """The graph that runs a text; a lossy policy leaves up to a block of tokens pending."""
    block = text.block_size
    if text.adaptive:
        return LoopShape(width_class(block), 0, capacity, filtered, True)
    lossless = text.verify == _ALWAYS or block == 1
    widest = block if lossless else 2 * block - 1
    verify = 0 if text.verify == _NEVER or block == 1 else width_class(block)
    return LoopShape(width_class(widest), verify, capacity, filtered, False)


def bodies(block_size: int) -> list[tuple[int, bool]]:
    """The passes of an adaptive loop's switch, by number: width class, and whether rows may be masks."""
    drafts = [width for width in WIDTHS if 1 < width <= width_class(block_size)]
    return [*((width, False) for width in WIDTHS), *((width, True) for width in drafts)]


def choice_of(text: _core.Text) -> Choice:
    """How a text's tokens are chosen; without penalties and grammar."""
    temperature, top_k, top_p, min_p, repetition, presence, frequency, seed, choice, bias = text.sampling
    sampling = Sampling(
        temperature, top_k, top_p, min_p, seed, choice, repetition, presence, frequency, tuple(map(tuple, bias))
    )
    return GREEDY if not temperature and not bias else Choice(sampling)


@dataclass(slots=True)
class Flight:
    """A text whose loop runs.

    Attributes:
        costs: of the text; they learn on the card.
        reserve: maps memory for that many positions, as far as there may be, and returns for how many there is.
        ended: told that the loop has ended.
        event: behind the graph.
    """

    text: _core.Text
    costs: _core.Costs
    filtered: bool
    choice: int
    reserve: Callable[[int], int]
    ended: Callable[[], None]
    event: Any = None


class ResidentLoop:
    """Runs one text at a time; the pass structure must hold its sequence's store and its choice before.

    On the card lie, one behind the other, how the loop stands with the host, the costs, and the text's image.
    """

    def __init__(self, gpu: Gpu, network: Network, context: int) -> None:
        self._gpu, self._network = gpu, network
        self._memory = gpu.empty(_IMAGE + _core.image_bytes(context))
        self.ring = RingReader(gpu.pinned(RING, ()))
        self.atlas: Atlas[LoopShape] = Atlas(gpu, self._record)
        self.flight: Flight | None = None
        self.launched = 0

    # The graphs

    def _turn(self, adaptive: bool) -> Kernel:
        return self._gpu.kernel("loop.cu", "turn", {"ADAPTIVE": int(adaptive)}, grid=(1,), block=32)

    def _record(self, builder: Any, shape: LoopShape) -> None:
        ring = np.uintp(self.ring.memory.ctypes.data)
        again = builder.create_condition(default_value=1 if shape.adaptive else 0)
        if shape.adaptive:
            body = builder.while_loop(again).begin_building()
            self._record_switch(body, shape, ring, again)
        else:
            self._launch(builder, shape, ring, again, again, overlap=False)
            body = builder.while_loop(again).begin_building()
            self._record_passes(body, shape, ring, again)
        body.end_building()

    def _launch(
        self, builder: Any, shape: LoopShape, ring: np.uintp, again: Any, body: Any, *, overlap: bool = True
    ) -> None:
        buffers = self._network.buffers
        course, costs, image = (np.uintp(self._address + offset) for offset in (0, _COSTS, _IMAGE))
        arguments = image, costs, course, buffers.state, buffers.outputs, ring
        handles = (np.uint64(int(each.handle)) for each in (again, body))
        self._gpu.launch(builder, self._turn(shape.adaptive), *arguments, *handles, overlap=overlap)

    def _record_switch(self, body: Any, shape: LoopShape, ring: np.uintp, again: Any) -> None:
        chosen = body.create_condition(default_value=_NO_BODY)
        self._launch(body, shape, ring, again, chosen, overlap=False)
        passes = bodies(shape.draft)
        for (width, masks), case in zip(passes, body.switch(chosen, len(passes)), strict=True):
            case.begin_building()
            self._network.record(case, PassShape(width, shape.capacity, 1, shape.filtered, masks))
            case.end_building()

    def _record_passes(self, body: Any, shape: LoopShape, ring: np.uintp, again: Any) -> None:
        self._network.record(body, PassShape(shape.draft, shape.capacity, 1, shape.filtered, shape.draft > 1))
        if not shape.verify:
            self._launch(body, shape, ring, again, again)
            return
        check = body.create_condition(default_value=0)
        self._launch(body, shape, ring, again, check)
        then = body.if_then(check).begin_building()
        self._network.record(then, PassShape(shape.verify, shape.capacity, 1, shape.filtered))
        self._launch(then, shape, ring, again, again)
        then.end_building()

    def prepare(self, text: _core.Text, filtered: bool) -> None:
        """Capture the graphs that a text will need, from where it stands to its limit."""
        capacity, last = capacity_class(text.committed + MAX_WIDTH), capacity_class(text.limit + MAX_WIDTH)
        while capacity <= last:
            if (shape := loop_shape(text, capacity, filtered)) not in self.atlas:
                self.settle()  # a capture waits for the card
                self.atlas.prepare(shape)
            capacity *= 2

    # The loop

    def begin(self, flight: Flight) -> None:
        """Start a text's loop from where the text stands."""
        self.ring.memory["received"] = self.ring.memory["stop"] = 0
        self.ring.memory["entries"] = 0
        self.ring.read = 0
        self.flight = flight
        self._launch_graph(flight, 0, flight.costs.image() + flight.text.image(self._address + _IMAGE))

    @property
    def _address(self) -> int:
        return int(self._memory.handle)

    def _launch_graph(self, flight: Flight, sent: int, behind: bytes = b"") -> None:
        """Begin or go on; ``behind``: what is written with the course."""
        capacity = capacity_class(flight.text.committed + MAX_WIDTH)
        mapped = min(flight.reserve(capacity), capacity)
        course = np.array([0, mapped, sent, flight.choice], np.int32).tobytes()
        self._gpu.write(self._memory, np.frombuffer(course + behind, np.uint8))
        self.atlas.launch(loop_shape(flight.text, capacity, flight.filtered))
        self.launched += 1
        flight.event = self._gpu.stream.record()

    def follow(self) -> None:
        """Take what has come: at least one iteration, unless the text ends before. The loop goes on meanwhile."""
        heard = False
        while not heard and (flight := self.flight) is not None:
            done = flight.event.is_done
            heard = self._drain(flight) or heard
            if done:
                self._resume(flight)
            elif not heard:
                time.sleep(_POLL_SECONDS)

    def _drain(self, flight: Flight) -> bool:
        """Hand the iterations that have come to the text; whether there were any."""
        tokens: list[int] = []
        sources: list[int] = []
        any_came = False
        for value, source in self.ring.drain(_ITERATION):
            if source != _ITERATION:
                tokens.append(value)
                sources.append(source)
                continue
            counts = [0, value & 15, value >> 4 & 1, value >> 8, value >> 5 & 1]
            flight.text.record(tokens, sources, counts)
            tokens, sources, any_came = [], [], True
        return any_came

    def _resume(self, flight: Flight) -> None:
        """A graph has ended: so has the text, or it waits for the host."""
        memory = self._gpu.read(self._memory, np.uint8, (_IMAGE + _core.RECORD_BYTES,)).tobytes()
        rest, _, sent, _ = np.frombuffer(memory[:_COURSE], np.int32).tolist()
        if rest not in (_ENDED, _PAUSED):
            self._launch_graph(flight, sent)
            return
        flight.costs.load(memory[_COSTS:_IMAGE])
        flight.text.load(memory[_IMAGE:])
        self.flight = None
        flight.ended()

    def settle(self) -> None:
        """End the loop that runs, with its iteration; the text stands where it has come."""
        if self.flight is None:
            return
        flight, text = self.flight, self.flight.text
        ended, length = text.status, text.committed
        self.ring.interrupt()
        while self.flight is not None:
            flight.event.sync()
            self._drain(flight)
            self._resume(flight)
        if ended and text.committed > length:  # the host has ended it meanwhile
            text.end(length)
