"""Speculative decoding whose shapes follow the text: as lossless, and meant not to fall behind one token a pass."""

from bitmtp.core.policy import Policy, Verify


def auto(block_size: int = 16) -> Policy:
    """Draft up to ``block_size`` deep, verify what is likely, draft nothing where it does not pay."""
    return Policy("auto", block_size, Verify.ALWAYS, adaptive=True)
