"""Backends by name. A new one is a folder or file with a class that implements :class:`bitmtp.backends.base.Backend`,
and a loader here."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable

from bitmtp.backends.base import Backend
from bitmtp.backends.weights import DraftHead
from bitmtp.checkpoint import Checkpoint
from bitmtp.errors import BackendError


def _reference(checkpoint: Checkpoint, _: int | None, context: int, draft_head: DraftHead) -> Backend:
    from bitmtp.backends.reference import ReferenceBackend

    return ReferenceBackend(checkpoint, context, draft_head)


def _cpu(checkpoint: Checkpoint, threads: int | None, context: int, draft_head: DraftHead) -> Backend:
    from bitmtp.backends.cpu import CpuBackend

    if draft_head is not DraftHead.EXACT:
        raise BackendError(f"the cpu backend has no {draft_head} draft head; use `exact`, or --backend cuda")
    return CpuBackend(checkpoint, threads=threads, context=context)


def _cuda(checkpoint: Checkpoint, _: int | None, context: int, draft_head: DraftHead) -> Backend:
    from bitmtp.backends.cuda.backend import CudaBackend

    return CudaBackend(checkpoint, context, draft_head)


BACKENDS: dict[str, Callable[[Checkpoint, int | None, int, DraftHead], Backend]] = {
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


def _fastest(checkpoint: Checkpoint, threads: int | None, context: int, draft_head: DraftHead) -> Backend:
    """CUDA where there is a driver and it can run this model, otherwise the CPU, with a notice."""
    if _has_driver():
        try:
            return _cuda(checkpoint, threads, context, draft_head)
        except BackendError as error:
            logging.getLogger("bitmtp").warning("running on the CPU: %s", error)
    return _cpu(checkpoint, threads, context, draft_head)


def load_backend(
    name: str, checkpoint: Checkpoint, *, threads: int | None, context: int, draft_head: str = DraftHead.EXACT
) -> Backend:
    """Load a backend; ``auto`` takes the fastest that runs here.

    Args:
        draft_head: a :class:`DraftHead`; only provisional drafts use it.

    Raises:
        BackendError: unknown name, or it cannot run on this machine.
    """
    if draft_head not in list(DraftHead):
        raise BackendError(f"unknown draft head {draft_head!r}; choose one of {', '.join(DraftHead)}")
    kind = DraftHead(draft_head)
    if name == "auto":
        return _fastest(checkpoint, threads, context, kind)
    if name not in BACKENDS:
        raise BackendError(f"unknown backend {name!r}; choose one of auto, {', '.join(BACKENDS)}")
    return BACKENDS[name](checkpoint, threads, context, kind)
