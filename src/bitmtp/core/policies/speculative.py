"""Draft, then verify: lossless, two passes an iteration (block-wise parallel decoding, arXiv:1811.03115)."""

from bitmtp.core.policy import Policy, Verify


def speculative(block_size: int = 8, verify_bound: float = 0.1) -> Policy:
    """Verify the proposals whose joint probability is at least ``verify_bound``; the text is the autoregressive one."""
    return Policy("speculative", block_size, Verify.ALWAYS, verify_bound=verify_bound)
