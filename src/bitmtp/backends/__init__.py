"""Backends by name. A new one is a folder or file with a class that implements :class:`bitmtp.backends.base.Backend`,
and a loader here."""

from __future__ import annotations

import ctypes
import logging
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


def _cuda(checkpoint: Checkpoint, _: int | None, context: int) -> Backend:
    from bitmtp.backends.cuda.backend import CudaBackend

    return CudaBackend(checkpoint, context)


BACKENDS: dict[str, Callable[[Checkpoint, int | None, int], Backend]] = {
    "cpu": _cpu,
    "cuda": _cuda,
    "reference": _reference,
}


def _has_driver() -> bool:
    """Whether NVIDIA's driver is installed; asking costs a millisecond."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _fastest(checkpoint: Checkpoint, threads: int | None, context: int) -> Backend:
    """CUDA where there is a driver and it can run this model, otherwise the CPU, with a notice."""
    if _has_driver():
        try:
            return _cuda(checkpoint, threads, context)
        except BackendError as error:
            logging.getLogger("bitmtp").warning("running on the CPU: %s", error)
    return _cpu(checkpoint, threads, context)


def load_backend(name: str, checkpoint: Checkpoint, *, threads: int | None, context: int) -> Backend:
    """Load a backend; ``auto`` takes the fastest that runs here.

    Raises:
        BackendError: unknown name, or it cannot run on this machine.
    """
    if name == "auto":
        return _fastest(checkpoint, threads, context)
    if name not in BACKENDS:
        raise BackendError(f"unknown backend {name!r}; choose one of auto, {', '.join(BACKENDS)}")
    return BACKENDS[name](checkpoint, threads, context)
