"""The K/V store: each sequence has a range of addresses for its whole context, and memory mapped into it as it grows.

Growth never moves a byte, so addresses that captured graphs or device structures hold stay valid (the driver's virtual
memory management; the idea of vAttention, arXiv:2405.04437). The layout inside a range is ``kernels/kv.cuh``'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bitmtp.backends.cuda.device import Gpu, check
from bitmtp.backends.cuda.layout import PIECE
from bitmtp.backends.cuda.matrices import round_up
from bitmtp.config import ModelConfig
from bitmtp.errors import BackendError


def block_bytes(config: ModelConfig) -> int:
    """Bytes of K and V of all layers at ``PIECE`` positions."""
    number = 2 if config.kv_type == "float16" else 4
    return config.num_layers * 2 * config.kv_size * PIECE * number


@dataclass(slots=True)
class Range:
    """Addresses of one sequence, mapped from the beginning up to ``mapped`` bytes."""

    address: int
    size: int
    mapped: int = 0
    chunks: list[tuple[int, int, Any]] = field(default_factory=list)  # offset, size, handle

    @property
    def ends(self) -> list[int]:
        """Where the mapped chunks end."""
        return [offset + size for offset, size, _ in self.chunks]


def spans(size: int, *ends: Iterable[int]) -> list[tuple[int, int]]:
    """The bytes from 0 to ``size``, cut at all of these ends: a copy must not cross from one mapping into another."""
    cuts = sorted({0, size, *(end for each in ends for end in each if end < size)})
    return list(pairwise(cuts))


class Store:
    """Hands out ranges and maps memory into them.

    Args:
        context: positions a sequence may have; rows of a pass need places behind them too.
    """

    def __init__(self, gpu: Gpu, config: ModelConfig, context: int) -> None:
        from cuda.bindings import driver

        self._driver, self._gpu = driver, gpu
        self._block = block_bytes(config)
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = gpu.device.device_id
        self._properties = properties
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self._page = int(check(driver.cuMemGetAllocationGranularity(properties, recommended), "ask for the page size"))
        self._size = round_up(-(-context // PIECE) * self._block, self._page)
        self.bytes = 0

    def open(self) -> Range:
        """A range with nothing mapped yet."""
        address = check(self._driver.cuMemAddressReserve(self._size, self._page, 0, 0), "reserve addresses for K/V")
        return Range(int(address), self._size)

    def capacity(self, held: Range) -> int:
        """Positions that memory is mapped for."""
        return held.mapped // self._block * PIECE

    def reserve(self, held: Range, positions: int) -> None:
        """Map memory for at least this many positions; doubles, so that growth is rare.

        Raises:
            BackendError: the GPU has no memory left; the sequence is as it was.
        """
        needed = -(-positions // PIECE) * self._block
        if needed <= held.mapped:
            return
        target = min(round_up(max(needed, 2 * held.mapped), self._page), held.size)
        self._map(held, target - held.mapped)

    def copied(self, source: Range, positions: int) -> Range:
        """A range of its own that begins with the same positions."""
        copy = self.open()
        if positions:
            self.reserve(copy, positions)
            size = -(-positions // PIECE) * self._block
            stream = self._driver.CUstream(int(self._gpu.stream.handle))
            for start, end in spans(size, source.ends, copy.ends):
                place, origin = copy.address + start, source.address + start
                check(self._driver.cuMemcpyDtoDAsync(place, origin, end - start, stream), "copy K/V")
        return copy

    def close(self, held: Range) -> None:
        """Unmap and give everything back. Nothing may still run that reads it."""
        for offset, size, handle in held.chunks:
            check(self._driver.cuMemUnmap(held.address + offset, size), "unmap K/V")
            check(self._driver.cuMemRelease(handle), "release K/V")
        check(self._driver.cuMemAddressFree(held.address, held.size), "free addresses of K/V")
        self.bytes -= held.mapped

    def _map(self, held: Range, size: int) -> None:
        driver = self._driver
        status, handle = driver.cuMemCreate(size, self._properties, 0)
        if int(status):
            raise BackendError(
                f"the GPU has no {size / 1e6:.0f} MB left for K/V ({status.name}); "
                "use a shorter --context or fewer sequences"
            )
        place = held.address + held.mapped
        check(driver.cuMemMap(place, size, 0, handle, 0), "map K/V")
        access = driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check(driver.cuMemSetAccess(place, size, [access], 1), "allow access to K/V")
        held.chunks.append((held.mapped, size, handle))
        held.mapped += size
        self.bytes += size
