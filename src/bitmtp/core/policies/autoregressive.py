"""One token a pass: the baseline."""

from bitmtp.core.policy import Policy, Verify


def autoregressive() -> Policy:
    """Draft nothing; commit the exact head's token."""
    return Policy("autoregressive", block_size=1, verify=Verify.NEVER)
