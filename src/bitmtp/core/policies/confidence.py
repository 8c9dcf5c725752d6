"""Commit what the draft is sure of: one pass an iteration, lossy."""

from bitmtp.core.policy import Policy, Verify


def confidence(block_size: int = 8, tau: float = 0.9) -> Policy:
    """Commit the ordinary next token and the proposals after it while each has a probability of at least ``tau``."""
    return Policy("confidence", block_size, Verify.NEVER, tau=tau)
