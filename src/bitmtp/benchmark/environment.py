"""Where a measurement was made."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from bitmtp import __version__

# What the kernels may use, by the names of /proc/cpuinfo on x86-64 and aarch64.
_EXTENSIONS = ("avx2", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "amx_int8", "asimd", "asimddp", "i8mm", "sve")


@dataclass(frozen=True, slots=True)
class Environment:
    """Machine and versions.

    Attributes:
        cores: that this process may use.
        isa: architecture and the instruction set extensions that matter here.
        date: UTC, ISO 8601.
    """

    cpu: str
    cores: int
    isa: str
    system: str
    python: str
    numpy: str
    bitmtp: str
    date: str


def environment() -> Environment:
    """Describe this machine, now."""
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    machine = platform.machine()
    return Environment(
        cpu=info.get("model name") or platform.processor() or machine,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        isa=" ".join([machine, *(name for name in _EXTENSIONS if name in flags)]),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        numpy=np.__version__,
        bitmtp=__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def peak_memory_mb() -> float:
    """Most memory that this process held so far, in MB (10^6 bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def _cpuinfo() -> dict[str, str]:
    """The first processor of ``/proc/cpuinfo``; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return {}
    return {match[1]: match[2] for match in re.finditer(r"^([^\t:]+)\t*: (.*)$", text, re.MULTILINE)}
