"""Commit a long confident prefix, verify otherwise: one or two passes an iteration, lossy."""

from bitmtp.core.policy import Policy, Verify


def hybrid(block_size: int = 8, tau: float = 0.9, min_prefix: int = 3, verify_bound: float = 0.1) -> Policy:
    """Commit the confident prefix if it has at least ``min_prefix`` tokens, otherwise verify as speculative does."""
    return Policy("hybrid", block_size, Verify.IF_SHORT, tau, min_prefix, verify_bound)
