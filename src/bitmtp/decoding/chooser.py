"""Shapes that follow the text: how deep to draft, what to copy, what to verify, and when not to draft at all.

Every decision weighs expected tokens against milliseconds, at the price that this text pays for a token so far: a pass
is worth running wider as long as the rows added bring more tokens than the same time brings elsewhere (the rule of
renewal-reward processes). Before a draft there is only an estimate of how easy the text is, from what stood so far and,
as in entropy-guided drafting, from the running entropy of the exact rows; and what the text's own past proposes. After
it, the proposals' own probabilities say far more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from bitmtp.backends.base import MAX_WIDTH, Output, ResidentTuning
from bitmtp.decoding.copies import LONGEST, Past, continuation
from bitmtp.decoding.costs import Tuning, sigmoid
from bitmtp.decoding.plans import SPAN, SUREST, WINDOW, Plan, plans_of
from bitmtp.decoding.policy import Policy
from bitmtp.decoding.shaper import Draft, Verified
from bitmtp.decoding.topology import Kind, Node, Topology, with_block
from bitmtp.decoding.tree import Guess

RANKS = 3
CHEAP = 0.1  # of a narrow pass: where a further row costs more, second choices are not worth looking at
MEMORY = 20  # passes of one row over which the price of a token is remembered
EASE = 1.0  # log-odds that a proposal stands, in a text of which nothing is known, at an entropy of 1 nat
SAMPLED = 1.4  # what sampling at temperature 1 takes from them
ENTROPY_WEIGHT = 0.4  # log-odds that a nat of running entropy takes away
ENTROPY_RATE, EASE_RATE, OFFSET_RATE = 0.5, 0.1, 0.1  # how fast the estimates follow
DRIFT = 0.003  # how fast an idle estimate returns to where it began, so that drafting is tried again
HOST = 0.5  # milliseconds that an iteration takes longer if the host drives it
LIKELY = 0.5  # where the text ends up less often, no draft hangs
# Log-odds that the text goes on as its past did: at the least, for each token that agrees, and under sampling.
FAITH, AGREEMENT, FAITH_SAMPLED, FAITH_RATE = 0.3, 0.12, 0.5, 0.1


@dataclass(slots=True)
class Estimate:
    """What is known of one text.

    Attributes:
        ease: log-odds that a proposal stands if the one before it did, at an entropy of 1 nat.
        blur: log-odds that a window takes from its drafts.
        faith: log-odds that the text goes on as its past did, but for how much of it agrees.
        entropy: running entropy of its exact rows, in nats.
        offset: log-odds by which its proposals stand more often than their calibrated probabilities say.
        tokens, milliseconds: what was committed lately, and what it cost.
        seen: how many proposals are known to have stood or not.
    """

    ease: float
    faith: float
    blur: float = 0.0
    entropy: float = 1.0
    offset: float = 0.0
    tokens: float = 0.0
    milliseconds: float = 0.0
    seen: int = 0

    def odds(self, windowed: bool) -> float:
        """Log-odds that a proposal stands if the one before it did."""
        return self.ease - ENTROPY_WEIGHT * (self.entropy - 1) - (self.blur if windowed else 0.0)

    def spend(self, tokens: int, milliseconds: float, memory: float) -> None:
        """An iteration is over; what lies ``memory`` milliseconds back counts a third. A text begins as if its tokens
        had come one a pass."""
        if not self.milliseconds:
            self.tokens, self.milliseconds = MEMORY, memory
        fade = math.exp(-milliseconds / memory)
        self.tokens = self.tokens * fade + tokens
        self.milliseconds = self.milliseconds * fade + milliseconds


@lru_cache(maxsize=4096)
def shape_of(places: tuple[tuple[int, int], ...]) -> Topology:
    """Proposals by (depth, rank), each behind the draft's own choice for the depth before, which comes earlier."""
    spine: dict[int, int] = {}
    nodes: list[Node] = []
    for depth, rank in places:
        nodes.append(Node(Kind.PROPOSAL, depth, rank, spine.get(depth - 1)))
        if rank == 0:
            spine[depth] = len(nodes) - 1
    return Topology(f"adaptive-{len(nodes)}", tuple(nodes))


with_next = lru_cache(maxsize=4096)(with_block)


class AdaptiveShaper:
    """Shapes the passes of one text; see :class:`bitmtp.decoding.shaper.Shaper`.

    Args:
        policy: its block size is the largest that is drafted.
        tuning: what passes cost here, and what probabilities mean.
        temperature: of the text.
        linear: chains of one candidate a depth that see all of the history: no trees, no windows, no fused passes. What
            the resident loop runs by itself.
    """

    def __init__(self, policy: Policy, tuning: Tuning, temperature: float = 0.0, *, linear: bool = False) -> None:
        self._block, self._linear = policy.block_size, linear
        self._costs, self._near = tuning.costs, tuning.costs.near
        self._plans = plans_of(tuning.costs, policy.block_size)
        self._calibration = tuning.calibration_at(temperature)
        # More than one only where a row costs so little that a second choice can be worth it.
        self._row = self._costs.row
        self.ranks = 1 if linear or self._row >= CHEAP * self._near[1] else RANKS
        self._usual = EASE - SAMPLED * min(temperature, 1.0)
        self._estimate = Estimate(ease=self._usual, faith=FAITH - FAITH_SAMPLED * min(temperature, 1.0))
        self._past = Past()
        self._last = Draft(1)
        self._history, self._price, self._fixed, self._each = 0, 0.0, 0.0, 0.0
        # The first guess of a draft of which nothing is verified, and of the draft before it: the text tells.
        self._skipped: Guess | None = None
        self._awaited: Guess | None = None

    def resident(self, text: Sequence[int]) -> ResidentTuning:
        """What a backend needs to go on with ``text`` by itself, deciding as a linear shaper does that has seen nothing
        of it yet."""
        calibration = self._calibration.down_to(self._block)
        return ResidentTuning(
            milliseconds=self._near,
            per_position=self._costs.per_position,
            history=self._costs.history,
            row=self._row,
            temperatures=calibration.temperatures,
            offsets=calibration.offsets,
            ease=self._usual,
            faith=self._estimate.faith,
            text=tuple(text),
        )

    def wants_windows(self, history: int) -> bool:
        """Whether windowed drafts behind so long a text save more than it costs that the host drives them."""
        full, windowed = (self._costs.cost(self._block, seen) for seen in (history, SPAN))
        return full - windowed - self._row > HOST

    def draft(self, text: Sequence[int], room: int, history: int) -> Draft:
        """A copy, or the block that promises most."""
        self._moment(history)
        plan, price = self._plan(), self._price
        size = plan.best(min(self._block, room))
        self._last, worth = Draft(size), plan.worths[size - 1]
        if history > SPAN and not self._linear:
            blurred = self._plan(windowed=True)
            size = blurred.best(min(self._block, room))
            if blurred.worths[size - 1] > worth:
                self._last, worth = Draft(size, WINDOW), blurred.worths[size - 1]
        if (copied := self._copy(text, room, worth, price)) is not None:
            self._last = copied
        return self._last

    def _plan(self, windowed: bool = False) -> Plan:
        return self._plans.at(self._estimate.odds(windowed), self._price, self._history, windowed=windowed)

    def _copy(self, text: Sequence[int], room: int, worth: float, price: float) -> Draft | None:
        """What followed when the text last ended so, as far as it is worth its rows; None if a draft promises more."""
        shared, end = self._past.match(text)
        if not shared:
            return None
        reached, total, best, count = 1.0, 1.0, worth, 0
        chances: list[float] = []
        for rows in range(2, min(room, MAX_WIDTH) + 1):
            chances.append(self._agrees(shared + rows - 2))
            reached *= chances[-1]
            total += reached
            value = total - price * self._cost(rows)
            if value > best:
                best, count = value, rows - 1
            elif reached * 2 < price * self._row:
                break
        if not count:
            return None
        tokens = continuation(text, end, count)
        return Draft(1, copied=tuple(Guess((token,), (p,)) for token, p in zip(tokens, chances, strict=False)))

    def _agrees(self, shared: int) -> float:
        """Probability that the text goes on as it did where it last agreed in so many tokens."""
        return sigmoid(AGREEMENT * min(shared, LONGEST) + self._estimate.faith)

    def judge(self, guesses: Sequence[Guess], known: bool, room: int, history: int) -> int | Topology:
        """The likeliest nodes, as many as are worth their rows."""
        self._moment(history)
        price = self._price
        places, joint = self._candidates(guesses[: room - 1], known)
        pending = 0 if known else 1
        best, value, total = 0, 0.0 if known else -math.inf, float(pending)
        for width in range(0 if pending else 1, min(len(places), MAX_WIDTH - pending) + 1):
            total += joint[width - 1] if width else 0.0
            worth = total - price * self._cost(width + pending)
            if worth > value:
                best, value = width, worth
        if known and best < 2:
            self._skipped = guesses[1] if len(guesses) > 1 else None
            return 1
        shape = shape_of(tuple(places[:best]))
        return shape if self._linear else self._with_next_draft(shape, joint, pending, room)

    def _with_next_draft(self, shape: Topology, joint: Sequence[float], pending: int, room: int) -> Topology:
        """The shape, and behind the node where the text is likeliest to leave it the next draft's masks, if the pass
        that they may save is worth their rows."""
        ends = list(joint[: shape.width])
        for node, probability in zip(shape.nodes, joint, strict=False):
            if node.parent is not None:
                ends[node.parent] -= probability
        likeliest = max(ends, default=0.0)
        if likeliest < LIKELY:
            return shape
        anchor, width, price, plan = ends.index(likeliest), shape.width + pending, self._price, self._plan()
        longest = min(self._block, room - shape.nodes[anchor].depth, MAX_WIDTH - width) - 1
        plain, bare = max(plan.worths), self._cost(width)
        best, value = 0, 0.0
        for masks in range(1, longest + 1):
            worth = likeliest * (plan.gains[masks] - plain) - price * (self._cost(width + masks) - bare)
            if worth > value:
                best, value = masks, worth
        return with_next(shape, anchor, best + 1) if best else shape

    def _candidates(self, guesses: Sequence[Guess], known: bool) -> tuple[list[tuple[int, int]], list[float]]:
        """The draft's own choices and what stands beside them, as (depth, rank), by falling probability; parents come
        before children."""
        found: list[tuple[float, int, int]] = []
        reached = 1.0
        for depth, guess in enumerate(guesses, start=1):
            if depth > 1 or not known:
                found += [(-reached * p, rank, depth) for rank, p in enumerate(guess.probabilities[1:RANKS], start=1)]
                reached *= self._stands(depth - known, guess.probabilities[0])
            found.append((-reached, 0, depth))
        found.sort()
        return [(depth, rank) for _, rank, depth in found], [-probability for probability, _, _ in found]

    def learn(self, chosen: Sequence[Output], verified: Sequence[Verified], widths: Sequence[int]) -> None:
        """Follow the text: what stood, its entropy, what its tokens cost."""
        estimate, windowed = self._estimate, self._last.window is not None and len(widths) == 2
        spent = sum(self._cost(width) for width in widths)
        if windowed:
            spent += self._costs.cost(widths[0], SPAN) - self._cost(widths[0])
        estimate.spend(len(chosen), spent, MEMORY * self._cost(1))
        known = self._with_awaited(chosen, verified)
        if self._last.copied:
            self._learn_copies(verified)
        else:
            self._learn_drafts(known, windowed)
        self._idle(sum(widths) == 1, windowed)
        for output in chosen:
            estimate.entropy += ENTROPY_RATE * (output.entropy - estimate.entropy)

    def _learn_copies(self, verified: Sequence[Verified]) -> None:
        for each in verified:
            self._estimate.faith += FAITH_RATE * (each.stood - each.probability)

    def _with_awaited(self, chosen: Sequence[Output], verified: Sequence[Verified]) -> Sequence[Verified]:
        """What was verified, and what the text tells of a guess that was not."""
        guess, self._awaited, self._skipped = self._awaited, self._skipped, None
        if guess is None:
            return verified
        return [Verified(1, guess.probabilities[0], chosen[0].token == guess.tokens[0]), *verified]

    def _learn_drafts(self, verified: Sequence[Verified], windowed: bool) -> None:
        estimate = self._estimate
        acceptance = sigmoid(min(estimate.odds(windowed), SUREST))
        for each in verified:
            early = 1 / (estimate.seen + 2)  # a text that begins unlike the usual is believed at once
            estimate.offset += (OFFSET_RATE + early) * (each.stood - self._stands(each.depth, each.probability))
            news = (EASE_RATE + early) * (each.stood - acceptance)
            if windowed:
                estimate.blur -= news
            else:
                estimate.ease += news
            estimate.seen += 1

    def _idle(self, alone: bool, windowed: bool) -> None:
        """What is not tried drifts back to where it began."""
        if alone:
            self._estimate.ease += DRIFT * (self._usual - self._estimate.ease)
        if not windowed:
            self._estimate.blur -= DRIFT * self._estimate.blur

    def _stands(self, depth: int, probability: float) -> float:
        """Probability that a proposal stands if those before it do."""
        return sigmoid(self._calibration.logit(depth, probability) + self._estimate.offset)

    def _moment(self, history: int) -> None:
        """What passes cost behind this history, and what a millisecond is worth now."""
        self._history = history
        further = history - self._costs.history
        self._fixed, self._each = (further * part for part in self._costs.per_position)
        least, estimate = 1 / self._cost(1), self._estimate
        self._price = max(estimate.tokens / estimate.milliseconds, least) if estimate.milliseconds else least

    def _cost(self, width: int) -> float:
        return self._near[width] + self._fixed + self._each * width
