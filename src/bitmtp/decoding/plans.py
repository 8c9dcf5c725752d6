"""What a draft of each size promises: worked out once for each kind of moment, then looked up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from bitmtp.backends.base import Window
from bitmtp.decoding.costs import CostTable, sigmoid

WINDOW = Window()
SPAN = WINDOW.sinks + WINDOW.recent
FORESIGHT = 0.4  # how much of the knowledge that a draft brings is counted on before it is made
SUREST = 4.0  # log-odds beyond which no acceptance is believed
ODDS_STEPS, PRICE_STEPS, HISTORY_STEPS = 4, 8, 8  # to a nat, to the price of autoregressive decoding, to a doubling


def verify_gains(acceptance: float, costs: Sequence[float], least: float = 0.0) -> Iterator[float]:
    """Expected tokens, less the price of the pass, from verifying a draft of 1, 2, … rows that is not made yet.

    The first row's token is certain. A draft shows how far it will stand, but not surely: the gain lies between that of
    a verify pass of one fixed width and that of a pass just as wide as what will stand.

    Args:
        costs: of a pass of 1, 2, … rows, in tokens.
        least: what it brings not to verify at all.
    """
    reached, expected, blind, seen = 1.0, 0.0, least, 0.0
    for rows, cost in enumerate(costs, start=1):
        expected += reached
        blind = max(blind, expected - cost)
        exactly = max(rows - cost, least)
        yield (1 - FORESIGHT) * blind + FORESIGHT * (seen + reached * exactly)
        seen += reached * (1 - acceptance) * exactly
        reached *= acceptance


@dataclass(frozen=True, slots=True)
class Plan:
    """Drafts at one kind of moment.

    Attributes:
        gains: of verifying a draft of 1, 2, … rows that is there.
        worths: expected tokens of an iteration with a draft of 1, 2, … proposals, less the price of its passes; the
            first drafts nothing.
    """

    gains: tuple[float, ...]
    worths: tuple[float, ...]

    def best(self, room: int) -> int:
        """The size that promises most, of those that fit."""
        worths = self.worths[: max(room, 1)]
        return worths.index(max(worths)) + 1


@dataclass(slots=True)
class Plans:
    """The plans of one machine and model; texts share them.

    A moment is the acceptance expected (as log-odds), the price of a millisecond in tokens, and the length of the
    history; each is rounded, so that the same few plans serve nearly always.
    """

    costs: CostTable
    block_size: int
    _known: dict[tuple[int, int, int, bool], Plan] = field(default_factory=dict)

    def at(self, odds: float, price: float, history: int, *, windowed: bool) -> Plan:
        """The plan of a moment, for drafts that see all of the history or a window of it."""
        costs, level = self.costs, round(HISTORY_STEPS * math.log2(1 + history / 64))
        usual = 1 / costs.cost(1, history)
        key = (round(ODDS_STEPS * min(odds, SUREST)), round(PRICE_STEPS * price / usual), level, windowed)
        if key not in self._known:
            self._known[key] = self._make(*key)
        return self._known[key]

    def _make(self, odds: int, price: int, level: int, windowed: bool) -> Plan:
        history, costs = round(64 * (math.exp2(level / HISTORY_STEPS) - 1)), self.costs
        worth = price / PRICE_STEPS / costs.cost(1, history)
        prices = [worth * costs.cost(rows, history) for rows in range(1, self.block_size + 2)]
        # Behind a window the first proposal is no more than a guess, and the anchor's row has to run again to check it.
        least, certain = (-math.inf, 0) if windowed else (0.0, 1)
        gains = tuple(verify_gains(sigmoid(odds / ODDS_STEPS), prices, least))
        drafts = [1.0 - prices[0]]
        for size in range(2, self.block_size + 1):
            cost = worth * costs.cost(size, SPAN) if windowed else prices[size - 1]
            drafts.append(certain + gains[size - certain] - cost)
        return Plan(gains, tuple(drafts))


@lru_cache(maxsize=8)
def plans_of(costs: CostTable, block_size: int) -> Plans:
    """The plans that all texts of a machine and model share."""
    return Plans(costs, block_size)
