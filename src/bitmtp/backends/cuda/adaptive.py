"""The adaptive policy inside the resident loop: the GPU chooses which pass runs next.

    WHILE(again) { turn · SWITCH(body) { a pass of each width class, without masks and with } }

Decisions are ``kernels/adaptive.hpp``'s, the twin of ``bitmtp.decoding.chooser`` with linear shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bitmtp.backends.base import ResidentText
from bitmtp.backends.cuda.adaptive_layout import NO_BODY, SHAPER, TUNING, chains, shaper_record, tuning_record
from bitmtp.backends.cuda.atlas import capacity_class
from bitmtp.backends.cuda.device import Gpu
from bitmtp.backends.cuda.network import WIDTHS, Network, PassShape, width_class

_INT = np.dtype(np.int32).itemsize


@dataclass(frozen=True, slots=True)
class AdaptiveShape:
    """What an adaptive loop's graph depends on.

    Attributes:
        draft: width class of its widest draft passes.
        capacity: positions that its passes reach.
        filtered: rows may have filters or biases.
    """

    draft: int
    capacity: int
    filtered: bool


def bodies(block_size: int) -> list[tuple[int, bool]]:
    """The passes of the switch, by number: width class, and whether rows may be masks."""
    drafts = [width for width in WIDTHS if 1 < width <= width_class(block_size)]
    return [*((width, False) for width in WIDTHS), *((width, True) for width in drafts)]


class AdaptiveTurn:
    """The turn's memory, and its place in the graph. The text and its chains grow with the longest text's limit."""

    def __init__(self, gpu: Gpu, network: Network) -> None:
        self._gpu, self._network = gpu, network
        self._tuning, self._shaper = gpu.zeros(TUNING.itemsize), gpu.zeros(SHAPER.itemsize)
        self._past, self._positions = gpu.empty(0), 0

    def record(self, builder: Any, shape: AdaptiveShape, loop: Any, ring: np.uintp) -> None:
        """Launch a loop's graph into a graph being built.

        Args:
            loop: the ``Loop`` structure in device memory.
            ring: address of the ring.
        """
        buffers = self._network.buffers
        again = builder.create_condition(default_value=1)
        body = builder.while_loop(again).begin_building()
        chosen = body.create_condition(default_value=NO_BODY)
        kernel = self._gpu.kernel("adaptive.cu", "turn", {}, grid=(1,), block=32)
        handles = (np.uint64(int(each.handle)) for each in (again, chosen))
        records = loop, self._tuning, self._shaper, buffers.state, buffers.outputs, ring
        self._gpu.launch(body, kernel, *records, *handles, overlap=False)
        passes = bodies(shape.draft)
        for (width, masks), case in zip(passes, body.switch(chosen, len(passes)), strict=True):
            case.begin_building()
            self._network.record(case, PassShape(width, shape.capacity, 1, shape.filtered, masks))
            case.end_building()
        body.end_building()

    def load(self, text: ResidentText) -> None:
        """Put a text into device memory, as it stands before its first turn."""
        tuning = text.adaptive
        assert tuning is not None
        positions = capacity_class(text.limit)
        if positions > self._positions:
            self._past, self._positions = self._gpu.empty(3 * positions * _INT), positions
        tokens = np.array(tuning.text, np.int32)
        heads, links = chains(tokens, positions)
        places = tuple(index * positions * _INT for index in range(3))
        for offset, array in zip(places, (heads, links, tokens), strict=True):
            self._gpu.write(self._past, array, offset)
        start = int(self._past.handle)
        self._gpu.write(self._tuning, tuning_record(tuning))
        self._gpu.write(self._shaper, shaper_record(tuning, (start, start + places[1], start + places[2]), positions))
