"""The CPU backend: C++ kernels behind nanobind."""

from bitmtp.backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
