"""How much of the runtime takes part: a ladder whose rungs each hold all those below, to measure what each is worth."""

from __future__ import annotations

from enum import IntEnum


class Runtime(IntEnum):
    """Rungs of the ladder; texts are the same on all of them.

    Attributes:
        GENERIC: every pass runs the kernels of the widest class, whatever its rows are, launched one by one.
        WIDTHS: kernels made for the width and the role of the pass (M1).
        GRAPHS: one captured graph a pass (M2).
        ITERATION: one graph an iteration, which prepares the verify pass by itself (M3); the host begins each.
        RESIDENT: whole texts without the host.
    """

    GENERIC = 0
    WIDTHS = 1
    GRAPHS = 2
    ITERATION = 3
    RESIDENT = 4

    @property
    def label(self) -> str:
        """For tables."""
        return ("generic", "+ M1 widths and roles", "+ M2 graph atlas", "+ M3 verify inputs", "+ resident loop")[self]
