"""Proposals that need no draft: what followed the last time that the text ended as it does now.

Texts quote themselves and their prompts, small models more than most. The text's own past then proposes what comes, as
in prompt lookup decoding (Saxena, 2023; LLMA, arXiv:2304.04487), and one pass both verifies and goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

GRAM = 3  # tokens that have to agree at least
LONGEST = 32  # agreement beyond this says no more


@dataclass(slots=True)
class Past:
    """Where each run of ``GRAM`` tokens stood last; follows one text as it grows."""

    _after: dict[tuple[int, ...], int] = field(default_factory=dict)
    _known: int = GRAM

    def match(self, text: Sequence[int]) -> tuple[int, int]:
        """How many tokens the text's end shares with the latest place where its last ``GRAM`` tokens stood before, and
        where that place ends; (0, 0) if there is none.

        Args:
            text: the one of the last call, or longer.
        """
        for end in range(self._known, len(text)):
            self._after[tuple(text[end - GRAM : end])] = end
        self._known = max(len(text), GRAM)
        end = self._after.get(tuple(text[-GRAM:]), 0)
        if not end:
            return 0, 0
        shared = GRAM
        while shared < min(LONGEST, end) and text[end - 1 - shared] == text[-1 - shared]:
            shared += 1
        return shared, end


def continuation(text: Sequence[int], end: int, count: int) -> list[int]:
    """The ``count`` tokens that followed the place that ends at ``end``; what repeats itself is taken to go on so."""
    period = len(text) - end
    return [text[end + index % period] for index in range(count)]
