"""One token a pass: the baseline."""

from bitmtp.decoding.policy import Policy, Verify


def autoregressive() -> Policy:
    """Draft nothing; commit the exact head's token."""
    return Policy("autoregressive", block_size=1, verify=Verify.NEVER)
