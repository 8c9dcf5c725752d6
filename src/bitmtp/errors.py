"""Typed errors. Each message is one line: what was wrong and what to do. The CLI prints it and exits with 2."""


class BitMTPError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(BitMTPError, ValueError):
    """A configuration value is unknown, out of range, or contradicts another."""


class CheckpointError(BitMTPError):
    """A checkpoint is missing, damaged, truncated, unknown or inconsistent."""


class RequestError(BitMTPError, ValueError):
    """A generation request cannot be carried out as asked."""


class BackendError(BitMTPError):
    """A backend is unavailable on this machine, or does not support the model."""
