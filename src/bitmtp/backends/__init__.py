"""Backends by name. A new one is a folder or file with a class that implements :class:`bitmtp.backends.base.Backend`,
and a loader here."""

from __future__ import annotations

from collections.abc import Callable

from bitmtp.backends.base import Backend
from bitmtp.checkpoint import Checkpoint
from bitmtp.errors import BackendError


def _reference(checkpoint: Checkpoint, _: int | None, context: int) -> Backend:
    from bitmtp.backends.reference import ReferenceBackend

    return ReferenceBackend(checkpoint, context)


def _cpu(checkpoint: Checkpoint, threads: int | None, context: int) -> Backend:
    from bitmtp.backends.cpu import CpuBackend

    return CpuBackend(checkpoint, threads=threads, context=context)


BACKENDS: dict[str, Callable[[Checkpoint, int | None, int], Backend]] = {"cpu": _cpu, "reference": _reference}


def load_backend(name: str, checkpoint: Checkpoint, *, threads: int | None, context: int) -> Backend:
    """Load a backend; ``auto`` takes the fastest that runs here.

    Raises:
        BackendError: unknown name, or it cannot run on this machine.
    """
    if name == "auto":
        name = "cpu"
    if name not in BACKENDS:
        raise BackendError(f"unknown backend {name!r}; choose one of auto, {', '.join(BACKENDS)}")
    return BACKENDS[name](checkpoint, threads, context)
