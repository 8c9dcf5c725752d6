"""The card: memory, kernels and launches, through ``cuda.core``."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitmtp.backends.cuda.compile import Constants, check_compiler, compile_kernels
from bitmtp.errors import BackendError

SHARED_PERCENT = 72  # of the memory that L1 and shared memory divide: enough for three kernels at a time


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded kernel and the shape of its launches, all but the arguments."""

    name: str
    handle: Any
    grid: tuple[int, ...]
    block: int
    shared_bytes: int
    cluster: int = 1  # blocks of a cluster, along the grid's first dimension


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch, ready to be made."""

    name: str
    config: Any
    handle: Any
    arguments: tuple[Any, ...]


@dataclass(slots=True)
class Launches:
    """Stands where a stream would, and keeps the launches: to be looked at, or made one by one without a graph."""

    made: list[Launch] = field(default_factory=list)


class Gpu:
    """One CUDA device, one stream.

    Raises:
        BackendError: no driver, no device, one older than compute capability 8.0, or no compiler that suits both.
    """

    def __init__(self, index: int = 0) -> None:
        try:
            import cuda.core as core
        except ImportError as error:
            raise BackendError(
                f"the cuda backend needs cuda-core ({error}); run `pip install 'bitmtp[cuda]'`"
            ) from None
        self.core = core
        try:
            self.device = core.Device(index)
            self.device.set_current()
        except Exception as error:  # the bindings raise types of their own for a missing driver and a missing card
            raise BackendError(f"no usable NVIDIA GPU ({error}); use --backend cpu") from None
        capability = self.device.compute_capability
        if capability.major < 8:
            raise BackendError(
                f"{self.device.name} has compute capability {capability.major}.{capability.minor}; the cuda backend "
                "needs 8.0 (Ampere) or later; use --backend cpu"
            )
        self.architecture = f"sm_{capability.major}{capability.minor}"
        check_compiler(self.architecture, _driver_version())
        self.overlaps = capability.major >= 9  # programmatic dependent launch
        self.multiprocessors: int = self.device.properties.multiprocessor_count
        self.stream = self.device.create_stream()
        self._threads = threading.local()
        self._modules: dict[tuple[Any, ...], Any] = {}
        self._noted: set[tuple[Any, ...]] | None = None  # what `compile_ahead` was asked for

    def kernel(
        self,
        file: str,
        name: str,
        constants: Constants,
        *,
        grid: tuple[int, ...],
        block: int,
        shared_bytes: int = 0,
        cluster: int = 1,
    ) -> Kernel:
        """Compile (or take from the cache) and load one kernel; with clusters, ``grid`` counts those."""
        key = (file, tuple(sorted(constants.items())))
        if self._noted is not None:
            self._noted.add(key)
            return Kernel(name, None, grid, block, shared_bytes, cluster)
        if key not in self._modules:
            compiled = compile_kernels(file, constants, self.architecture)
            self._modules[key] = self.core.ObjectCode.from_cubin(compiled.code)
        handle = self._modules[key].get_kernel(name)
        self._divide_memory(handle)
        if shared_bytes > 48 << 10:
            self._allow_shared(handle, name, shared_bytes)
        return Kernel(name, handle, grid, block, shared_bytes, cluster)

    def compile_ahead(self, record: Callable[[], None]) -> None:
        """Compile, on all cores, the kernels of everything that ``record`` launches; nothing is launched."""
        self._noted = set()
        try:
            record()
        finally:
            noted, self._noted = self._noted, None
        missing = [key for key in noted if key not in self._modules]
        with ThreadPoolExecutor() as pool:
            compiled = pool.map(lambda key: compile_kernels(key[0], dict(key[1]), self.architecture), missing)
            for key, each in zip(missing, compiled, strict=True):
                self._modules[key] = self.core.ObjectCode.from_cubin(each.code)

    def _divide_memory(self, handle: Any) -> None:
        """Ask for the same division of a multiprocessor's memory whatever the kernel.

        One that wants another than the kernel before it could not start before that has ended.
        """
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        kernel, device = driver.CUkernel(int(handle.handle)), driver.CUdevice(self.device.device_id)
        check(driver.cuKernelSetAttribute(attribute, SHARED_PERCENT, kernel, device), "divide shared memory from L1")

    def _allow_shared(self, handle: Any, name: str, size: int) -> None:
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        kernel = driver.CUkernel(int(handle.handle))
        (status,) = driver.cuKernelSetAttribute(attribute, size, kernel, driver.CUdevice(self.device.device_id))
        if status != driver.CUresult.CUDA_SUCCESS:
            raise BackendError(f"kernel {name} needs {size} bytes of shared memory, more than {self.device.name} has")

    def launch(self, stream: Any, kernel: Kernel, *arguments: Any, overlap: bool = True) -> None:
        """Launch into a stream or a graph being built, or keep the launch for :meth:`make`.

        Args:
            arguments: buffers, or NumPy scalars of the exact type of the kernel's parameters.
            overlap: let it start before the kernel before it has ended (it waits by itself).
        """
        if self._noted is not None:
            return
        config = self.core.LaunchConfig(
            grid=kernel.grid,
            cluster=(kernel.cluster, 1, 1) if kernel.cluster > 1 else None,
            block=kernel.block,
            shmem_size=kernel.shared_bytes,
            programmatic_stream_serialization=overlap and self.overlaps,
        )
        launch = Launch(kernel.name, config, kernel.handle, arguments)
        if isinstance(stream, Launches):
            stream.made.append(launch)
        else:
            self.make(stream, launch)

    def make(self, stream: Any, launch: Launch) -> None:
        """Make a launch that was kept."""
        self.core.launch(stream, launch.config, launch.handle, *launch.arguments)

    def seconds(self, launch: Callable[[], None], count: int) -> float:
        """Time of one of ``count`` launches into the stream, by events."""
        options = self.core.EventOptions(timing_enabled=True)
        begin = self.stream.record(options=options)
        for _ in range(count):
            launch()
        end = self.stream.record(options=options)
        end.sync()
        return float(end - begin) / 1e3 / count

    def enter(self) -> None:
        """Make the card that of this thread: the driver's calls go to the thread's current one."""
        if not getattr(self._threads, "entered", False):
            self.device.set_current()
            self._threads.entered = True

    # Memory

    def empty(self, size: int) -> Any:
        """Device memory of ``size`` bytes, not initialised."""
        try:
            return self.device.allocate(max(size, 256), stream=self.stream)
        except Exception as error:
            raise BackendError(
                f"the GPU has no {size / 1e6:.0f} MB left ({error}); close sequences or programs"
            ) from None

    def zeros(self, size: int) -> Any:
        """Device memory of ``size`` bytes, all zero."""
        buffer = self.empty(size)
        buffer.fill(0, stream=self.stream)
        return buffer

    def upload(self, array: NDArray[Any]) -> Any:
        """A copy of an array on the device."""
        array = np.ascontiguousarray(array)
        buffer = self.empty(array.nbytes)
        self.write(buffer, array)
        return buffer

    def write(self, buffer: Any, array: NDArray[Any], offset: int = 0) -> None:
        """Copy an array into a buffer; returns when it is there."""
        from cuda.bindings import driver

        array, stream = np.ascontiguousarray(array), driver.CUstream(int(self.stream.handle))
        to = int(buffer.handle) + offset
        check(driver.cuMemcpyHtoDAsync(to, array.ctypes.data, array.nbytes, stream), "copy to the GPU")
        self.stream.sync()

    def pinned(self, dtype: Any, shape: Sequence[int]) -> NDArray[Any]:
        """Zeros in host memory that the GPU reads and writes at the same address; they live as long as the process."""
        from cuda.bindings import driver

        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        pointer = int(check(driver.cuMemHostAlloc(size, driver.CU_MEMHOSTALLOC_DEVICEMAP), "pin host memory"))
        ctypes.memset(pointer, 0, size)
        return np.frombuffer((ctypes.c_char * size).from_address(pointer), dtype).reshape(shape)

    def copy_to_device(self, stream: Any, buffer: Any, pinned: NDArray[Any]) -> None:
        """Copy pinned memory into a buffer, as work of a stream or of a graph being built."""
        from cuda.bindings import driver

        handle = driver.CUstream(int(_stream(stream).handle))
        check(
            driver.cuMemcpyHtoDAsync(int(buffer.handle), pinned.ctypes.data, pinned.nbytes, handle), "copy to the GPU"
        )

    def copy_to_host(self, stream: Any, pinned: NDArray[Any], buffer: Any) -> None:
        """Copy a buffer's beginning into pinned memory, as work of a stream or of a graph being built."""
        from cuda.bindings import driver

        handle = driver.CUstream(int(_stream(stream).handle))
        check(
            driver.cuMemcpyDtoHAsync(pinned.ctypes.data, int(buffer.handle), pinned.nbytes, handle), "copy from the GPU"
        )

    def free_bytes(self) -> int:
        """Memory that the card has left."""
        from cuda.bindings import driver

        return int(check(driver.cuMemGetInfo(), "ask for free memory"))

    def read(self, buffer: Any, dtype: Any, shape: Sequence[int], offset: int = 0) -> NDArray[Any]:
        """Wait for the stream, then copy a buffer's beginning to the host."""
        from cuda.bindings import driver

        array = np.empty(shape, dtype)
        self.stream.sync()
        check(driver.cuMemcpyDtoH(array.ctypes.data, int(buffer.handle) + offset, array.nbytes), "copy from the GPU")
        return array


def _driver_version() -> int:
    from cuda.bindings import driver

    return int(check(driver.cuDriverGetVersion(), "ask for the driver's version"))


def _stream(stream: Any) -> Any:
    """The stream itself, or the one that a graph is being built from."""
    return getattr(stream, "stream", stream)


def check(result: tuple[Any, ...], what: str) -> Any:
    """What a driver call returned besides its status.

    Raises:
        BackendError: the call failed.
    """
    if int(result[0]):
        raise BackendError(f"cannot {what}: {result[0].name}")
    return result[1] if len(result) > 1 else None
