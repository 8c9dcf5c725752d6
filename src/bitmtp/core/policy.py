"""A policy is data; what it decides is the core's (``policy.hpp``, ``auto.hpp``)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from bitmtp.backends.base import Window
from bitmtp.core.costs import Calibration
from bitmtp.core.topology import Topology
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
        adaptive: block size, window and what is verified follow the text, within ``block_size``; see ``auto.hpp``.

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
        """Whether its passes are trees or have windows all along."""
        return self.topology is not None or self.window is not None

    @property
    def bars(self) -> tuple[float, ...]:
        """The probability that makes each proposal of a draft confident."""
        return confidence_bars(self.block_size, self.tau, self.calibration)

    @property
    def lossless(self) -> bool:
        """Whether the text is, bit for bit, the autoregressive one."""
        return self.verify is Verify.ALWAYS or self.block_size == 1


@lru_cache(maxsize=256)
def confidence_bars(block_size: int, tau: float, calibration: Calibration | None) -> tuple[float, ...]:
    """The probability that makes each proposal of a draft confident; the first needs none."""
    depths = range(1, block_size)
    return 0.0, *(tau if calibration is None else calibration.bar(depth, tau) for depth in depths)
