"""A policy is data, and its decisions are a few short pure functions: the specification of every decoding loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from bitmtp.backends.base import Window
from bitmtp.decoding.costs import Calibration
from bitmtp.decoding.topology import Topology
from bitmtp.errors import RequestError


class Verify(StrEnum):
    """When the proposals of a draft pass go through a verify pass."""

    ALWAYS = "always"
    IF_SHORT = "if_short"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Policy:
    """What to do with the proposals of a draft pass.

    Attributes:
        block_size: proposals per draft pass, D; 1 drafts nothing.
        verify: when to run a verify pass.
        tau: a proposal is confident if its probability is at least this.
        calibration: what makes of a proposal's probability the chance that it stands, for ``tau`` to be compared with;
            None: it is taken as it is.
        min_prefix: under ``if_short``, a confident prefix shorter than this is verified instead of committed.
        verify_bound: of the proposals, only those whose joint probability is at least this are verified.
        topology: what is verified, at most; None: the chain of the draft's own choices.
        window: drafts are provisional and see this much of the history; None: they see all of it.
        adaptive: block size, window and what is verified follow the text, within ``block_size``; see ``chooser.py``.

    Raises:
        RequestError: a value out of range.
    """

    name: str
    block_size: int
    verify: Verify
    tau: float = 1.0
    min_prefix: int = 1
    verify_bound: float = 0.0
    topology: Topology | None = None
    window: Window | None = None
    adaptive: bool = False
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise RequestError(f"block size is {self.block_size}; it must be at least 1")
        for name in ("tau", "verify_bound"):
            if not 0 <= getattr(self, name) <= 1:
                raise RequestError(f"{name} is {getattr(self, name)}; it must lie between 0 and 1")
        if self.min_prefix < 1:
            raise RequestError(f"min_prefix is {self.min_prefix}; it must be at least 1")
        if self.min_prefix > self.block_size:
            raise RequestError(f"min_prefix {self.min_prefix} is larger than the block size {self.block_size}")
        if self.verify is not Verify.ALWAYS and (self.topology or self.window or self.adaptive):
            raise RequestError("trees, windows and adaptive shapes need every draft verified; choose a lossless policy")

    @property
    def shaped(self) -> bool:
        """Whether its passes may be trees or have windows."""
        return self.topology is not None or self.window is not None or self.adaptive

    @property
    def bars(self) -> tuple[float, ...]:
        """The probability that makes each proposal of a draft confident."""
        return confidence_bars(self.block_size, self.tau, self.calibration)

    @property
    def lossless(self) -> bool:
        """Whether the text is, bit for bit, the autoregressive one."""
        return self.verify is Verify.ALWAYS or self.block_size == 1


@dataclass(frozen=True, slots=True)
class Decision:
    """After a draft pass: commit this many proposals as they are, or verify this many. One of the two is 0."""

    commit: int = 0
    verify: int = 0


@lru_cache(maxsize=256)
def confidence_bars(block_size: int, tau: float, calibration: Calibration | None) -> tuple[float, ...]:
    """The probability that makes each proposal of a draft confident; the first needs none."""
    depths = range(1, block_size)
    return 0.0, *(tau if calibration is None else calibration.bar(depth, tau) for depth in depths)


def confident_prefix(probabilities: Sequence[float], bars: Sequence[float]) -> int:
    """The first proposal (the ordinary next token) and those after it while each reaches its bar."""
    length = 1
    while length < len(probabilities) and probabilities[length] >= bars[length]:
        length += 1
    return length


def worth_verifying(probabilities: Sequence[float], bound: float) -> int:
    """The longest prefix whose mask proposals have a joint probability of at least ``bound``; never less than 1."""
    joint, length = 1.0, 1
    while length < len(probabilities):
        joint *= probabilities[length]
        if joint < bound:
            break
        length += 1
    return length


def decide(policy: Policy, probabilities: Sequence[float], room: int) -> Decision:
    """What to do with the proposals of a draft pass.

    Args:
        probabilities: of each proposal; the first is the exact head's.
        room: how many more tokens may be committed (at least 1).
    """
    if len(probabilities) == 1:  # the exact head's own: there is nothing to verify
        return Decision(commit=1)
    confident = min(confident_prefix(probabilities, policy.bars), room)
    if policy.verify is Verify.NEVER or (policy.verify is Verify.IF_SHORT and confident >= policy.min_prefix):
        return Decision(commit=confident)
    # A verify pass commits at least one token of its own behind what it accepts.
    verify = min(worth_verifying(probabilities, policy.verify_bound), room - 1)
    return Decision(verify=verify) if verify else Decision(commit=1)
