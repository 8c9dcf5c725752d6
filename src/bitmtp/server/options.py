"""What a server can be told; ``bitmtp serve`` has a flag for each."""

from __future__ import annotations

from dataclasses import dataclass, field

from bitmtp.core.policy import Policy
from bitmtp.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Limits and habits of a server.

    Attributes:
        model_name: what clients call the model.
        policy: how requests decode that do not say.
        slots: texts that are written at once.
        queue: texts that may wait for a slot; beyond it the answer is 429.
        prefill_rows: rows of a pass that prompts may take while other texts are being written.
        prefix_cache_bytes: K/V of finished texts kept for prompts that begin alike.
        timeout: seconds a request may take, waiting included.
        grace: seconds that running requests get when the server stops.
        max_choices: texts that one request may ask for (prompts × ``n``).
        max_body_bytes: size of a request.
        receive_timeout: seconds within which a request must have arrived; an idle connection is kept as long.
        stall_timeout: seconds for which a client may leave what it asked for unread.
        max_connections: open connections; beyond it those that ask for nothing are closed, oldest first.
        api_keys: if there are any, a request must bring one.
        cors_origins: web origins that may call; none by default.
        log_prompts: whether prompts and texts appear in the log.
        lenient: whether parameters that are not known are ignored instead of refused.

    Raises:
        ConfigError: a value out of range.
    """

    model_name: str
    policy: Policy
    slots: int = 8
    queue: int = 64
    prefill_rows: int = 32
    prefix_cache_bytes: int = 256 * MIB
    timeout: float = 600.0
    grace: float = 30.0
    max_choices: int = 16
    max_body_bytes: int = 4 * MIB
    receive_timeout: float = 30.0
    stall_timeout: float = 30.0
    max_connections: int = 1000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    log_prompts: bool = False
    lenient: bool = False

    def __post_init__(self) -> None:
        for name in ("slots", "prefill_rows", "max_choices", "max_body_bytes", "max_connections"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("queue", "prefix_cache_bytes", "grace"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative")
        for name in ("timeout", "receive_timeout", "stall_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be positive")
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty")
