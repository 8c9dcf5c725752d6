"""The policies by name. A new one is a file with a function that returns a :class:`Policy`, and a line here."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from bitmtp.core.policies.auto import auto
from bitmtp.core.policies.autoregressive import autoregressive
from bitmtp.core.policies.confidence import confidence
from bitmtp.core.policies.hybrid import hybrid
from bitmtp.core.policies.speculative import speculative
from bitmtp.core.policy import Policy
from bitmtp.errors import RequestError

POLICIES: dict[str, Callable[..., Policy]] = {
    "autoregressive": autoregressive,
    "speculative": speculative,
    "auto": auto,
    "confidence": confidence,
    "hybrid": hybrid,
}


def make_policy(name: str, model_block_size: int, **options: float | None) -> Policy:
    """A policy by name; options that are None take the policy's default.

    Args:
        model_block_size: what the model was trained for; the default block size is the smaller of it and the policy's.

    Raises:
        RequestError: no such policy, an option it does not have, or a block size above the model's.
    """
    if name not in POLICIES:
        raise RequestError(f"unknown policy {name!r}; choose one of {', '.join(POLICIES)}")
    make, given = POLICIES[name], {key: value for key, value in options.items() if value is not None}
    parameters = inspect.signature(make).parameters
    for key in given:
        if key not in parameters:
            raise RequestError(f"{key} has no meaning under the {name} policy; leave it out")
    if "block_size" in parameters:
        given.setdefault("block_size", min(parameters["block_size"].default, model_block_size))
    if "min_prefix" in parameters:
        given.setdefault("min_prefix", min(parameters["min_prefix"].default, given["block_size"]))
    policy = make(**given)
    if policy.block_size > model_block_size:
        taught = f"drafts blocks of up to {model_block_size}" if model_block_size > 1 else "was never taught to draft"
        hint = "choose a smaller block size" if model_block_size > 1 else "`bitmtp train` teaches it"
        raise RequestError(f"block size {policy.block_size} asked for, but this model {taught}; {hint}")
    return policy
