"""Shapes that follow the text: how deep to draft, what of a draft to verify, and when not to draft at all.

Every decision weighs expected tokens against milliseconds, at the price that this text pays for a token so far: a pass
is worth running wider as long as the rows added bring more tokens than the same time brings elsewhere (the rule of
renewal-reward processes). Before a draft there is only an estimate of how easy the text is, from what stood so far and,
as in entropy-guided drafting, from the running entropy of the exact rows. After it, the proposals' own probabilities
say far more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bitmtp.backends.base import MAX_WIDTH, Output, Window
from bitmtp.decoding.costs import Tuning, sigmoid
from bitmtp.decoding.policy import Policy
from bitmtp.decoding.shaper import Draft, Verified
from bitmtp.decoding.topology import Kind, Node, Topology, with_block
from bitmtp.decoding.tree import Guess

RANKS = 3
WINDOW = Window()
SPAN = WINDOW.sinks + WINDOW.recent
MEMORY = 40  # passes of one row over which the price of a token is remembered
EASE = 1.0  # log-odds that a proposal stands, in a text of which nothing is known, at an entropy of 1 nat
SAMPLED = 1.4  # what sampling at temperature 1 takes from them
ENTROPY_WEIGHT = 0.4  # log-odds that a nat of running entropy takes away
ENTROPY_RATE, EASE_RATE, OFFSET_RATE = 0.5, 0.2, 0.1  # how fast the estimates follow
DRIFT = 0.003  # how fast an idle estimate returns to where it began, so that drafting is tried again
FORESIGHT = 0.4  # how much of the knowledge that a draft brings is counted on before it is made
LIKELY = 0.3  # where the text ends up less often, no draft hangs
RELUCTANCE = 0.02  # tokens that another block size must promise beyond the last one's


@dataclass(slots=True)
class Estimate:
    """What is known of one text.

    Attributes:
        ease: log-odds that a proposal stands if the one before it did, at an entropy of 1 nat.
        blur: log-odds that a window takes from its drafts.
        entropy: running entropy of its exact rows, in nats.
        offset: log-odds by which its proposals stand more often than their calibrated probabilities say.
        tokens, milliseconds: what was committed lately, and what it cost.
        seen: how many proposals are known to have stood or not.
    """

    tokens: float
    milliseconds: float
    ease: float
    entropy: float = 1.0
    offset: float = 0.0
    blur: float = 0.0
    seen: int = 0

    def acceptance(self, windowed: bool) -> float:
        """Probability that a proposal stands if the one before it did."""
        odds = self.ease - ENTROPY_WEIGHT * (self.entropy - 1) - (self.blur if windowed else 0.0)
        return min(sigmoid(odds), 0.98)

    def spend(self, tokens: int, milliseconds: float, memory: float) -> None:
        """An iteration is over; what lies ``memory`` milliseconds back counts a third."""
        fade = math.exp(-milliseconds / memory)
        self.tokens = self.tokens * fade + tokens
        self.milliseconds = self.milliseconds * fade + milliseconds


def verify_gains(acceptance: float, costs: Sequence[float]) -> Iterator[float]:
    """Expected tokens, less the price of the pass, from verifying a draft of 1, 2, … rows that is not made yet.

    The first row's token is certain. A draft shows how far it will stand, but not surely: the gain lies between that of
    a verify pass of one fixed width and that of a pass just as wide as what will stand.

    Args:
        costs: of a pass of 1, 2, … rows, in tokens.
    """
    reached, expected, blind, seen = 1.0, 0.0, 0.0, 0.0
    for rows, cost in enumerate(costs, start=1):
        expected += reached
        blind = max(blind, expected - cost)
        exactly = max(rows - cost, 0.0)
        yield (1 - FORESIGHT) * blind + FORESIGHT * (seen + reached * exactly)
        seen += reached * (1 - acceptance) * exactly
        reached *= acceptance


class AdaptiveShaper:
    """Shapes the passes of one text; see :class:`bitmtp.decoding.shaper.Shaper`.

    Args:
        policy: its block size is the largest that is drafted.
        tuning: what passes cost here, and what probabilities mean.
        temperature: of the text.
    """

    ranks = RANKS

    def __init__(self, policy: Policy, tuning: Tuning, temperature: float = 0.0) -> None:
        self._block = policy.block_size
        self._costs = tuning.costs
        # Read between entries once: every decision weighs many widths.
        self._near = [self._costs.cost(max(width, 1), self._costs.history) for width in range(MAX_WIDTH + 1)]
        self._calibration = tuning.calibration_at(temperature)
        self._memory = MEMORY * self._costs.milliseconds[0]
        self._usual = EASE - SAMPLED * min(temperature, 1.0)
        self._estimate = Estimate(MEMORY, self._memory, self._usual)
        self._last = Draft(1)
        self._history = 0
        # The first guess of a draft of which nothing is verified, and of the draft before it: the text tells.
        self._skipped: Guess | None = None
        self._awaited: Guess | None = None

    def draft(self, room: int, history: int) -> Draft:
        """The block that promises most; the last one's size unless another is clearly better."""
        self._history = history
        self._last = max(self._drafts(room), key=lambda option: option[1])[0]
        return self._last

    def _drafts(self, room: int) -> Iterator[tuple[Draft, float]]:
        """The possible drafts, and the expected tokens of each, less its price."""
        price, size = self._price, max(min(self._block, room), 1)
        gains, blurred = self._gains(size + 1), self._gains(size + 1, windowed=True)
        for width in range(1, size + 1):
            same = RELUCTANCE if width == self._last.size else 0.0
            gain = gains[width - 1] if width > 1 else 0.0
            yield Draft(width), 1 + gain - price * self._cost(width) + same
            if width > 1 and self._history > SPAN:
                # Its first proposal is no more than a guess, and the anchor's row is run again to check it.
                yield Draft(width, WINDOW), blurred[width] - price * self._costs.cost(width, SPAN) + same

    def judge(self, guesses: Sequence[Guess], known: bool, room: int, history: int) -> int | Topology:
        """The likeliest nodes, as many as are worth their rows."""
        self._history = history
        nodes, joint = self._candidates(guesses[: room - 1], known)
        price, pending = self._price, 0 if known else 1
        best, value, total = 0, 0.0 if known else -math.inf, float(pending)
        for width in range(0 if pending else 1, min(len(nodes), MAX_WIDTH - pending) + 1):
            total += joint[width - 1] if width else 0.0
            worth = total - price * self._cost(width + pending)
            if worth > value:
                best, value = width, worth
        if known and best < 2:
            self._skipped = guesses[1] if len(guesses) > 1 else None
            return 1
        return self._with_next_draft(Topology(f"adaptive-{best}", tuple(nodes[:best])), joint, pending, room)

    def _with_next_draft(self, shape: Topology, joint: Sequence[float], pending: int, room: int) -> Topology:
        """The shape, and behind the node where the text is likeliest to leave it the next draft's masks, if the pass
        that they may save is worth their rows."""
        ends = list(joint[: shape.width])
        for node, probability in zip(shape.nodes, joint, strict=False):
            if node.parent is not None:
                ends[node.parent] -= probability
        anchor = ends.index(max(ends, default=0.0)) if ends else 0
        if not ends or ends[anchor] < LIKELY:
            return shape
        width, price = shape.width + pending, self._price
        longest = min(self._block, room - shape.nodes[anchor].depth, MAX_WIDTH - width) - 1
        gains, plain = self._gains(longest + 1), max(gain for _, gain in self._drafts(room))
        worth = [
            ends[anchor] * (gains[masks] - plain) - price * (self._cost(width + masks) - self._cost(width))
            for masks in range(1, longest + 1)
        ]
        best = max(worth, default=0.0)
        return with_block(shape, anchor, worth.index(best) + 2) if best > 0 else shape

    def _gains(self, rows: int, windowed: bool = False) -> list[float]:
        """See :func:`verify_gains`."""
        price = self._price
        costs = [price * self._cost(width) for width in range(1, rows + 1)]
        return list(verify_gains(self._estimate.acceptance(windowed), costs))

    def _candidates(self, guesses: Sequence[Guess], known: bool) -> tuple[list[Node], list[float]]:
        """The draft's own choices and what stands beside them, by falling probability; parents come before children."""
        found: list[tuple[float, tuple[int, int]]] = []
        reached = 1.0
        for depth, guess in enumerate(guesses, start=1):
            found += [(reached * p, (depth, rank)) for rank, p in enumerate(guess.probabilities[1:RANKS], start=1)]
            if depth > 1 or not known:
                reached *= self._stands(depth - known, guess.probabilities[0])
            else:
                found = []
            found.append((reached, (depth, 0)))
        found.sort(key=lambda entry: (-entry[0], entry[1][1], entry[1][0]))
        places: dict[int, int] = {}
        nodes: list[Node] = []
        for place, (_, (depth, rank)) in enumerate(found):
            nodes.append(Node(Kind.PROPOSAL, depth, rank, places.get(depth - 1)))
            if rank == 0:
                places[depth] = place
        return nodes, [probability for probability, _ in found]

    def learn(self, chosen: Sequence[Output], verified: Sequence[Verified], widths: Sequence[int]) -> None:
        """Follow the text: what stood, its entropy, what its tokens cost."""
        estimate, windowed = self._estimate, self._last.window is not None and len(widths) == 2
        spent = sum(self._cost(width) for width in widths)
        if windowed:
            spent += self._costs.cost(widths[0], SPAN) - self._cost(widths[0])
        estimate.spend(len(chosen), spent, self._memory)
        acceptance = estimate.acceptance(windowed)
        if (guess := self._awaited) is not None:
            verified = [Verified(1, guess.probabilities[0], chosen[0].token == guess.tokens[0]), *verified]
        self._awaited, self._skipped = self._skipped, None
        for each in verified:
            early = 1 / (estimate.seen + 2)  # a text that begins unlike the usual is believed at once
            estimate.offset += (OFFSET_RATE + early) * (each.stood - self._stands(each.depth, each.probability))
            news = (EASE_RATE + early) * (each.stood - acceptance)
            if windowed:
                estimate.blur -= news
            else:
                estimate.ease += news
            estimate.seen += 1
        self._idle(sum(widths) == 1, windowed)
        for output in chosen:
            estimate.entropy += ENTROPY_RATE * (output.entropy - estimate.entropy)

    def _idle(self, alone: bool, windowed: bool) -> None:
        """What is not tried drifts back to where it began."""
        if alone:
            self._estimate.ease += DRIFT * (self._usual - self._estimate.ease)
        if not windowed:
            self._estimate.blur -= DRIFT * self._estimate.blur

    def _stands(self, depth: int, probability: float) -> float:
        """Probability that a proposal stands if those before it do."""
        return sigmoid(self._calibration.logit(depth, probability) + self._estimate.offset)

    @property
    def _price(self) -> float:
        """Tokens that a millisecond brings: as lately, or one token a pass if that is more."""
        return max(self._estimate.tokens / self._estimate.milliseconds, 1 / self._cost(1))

    def _cost(self, width: int) -> float:
        fixed, each = self._costs.per_position
        return self._near[width] + (self._history - self._costs.history) * (fixed + each * width)
