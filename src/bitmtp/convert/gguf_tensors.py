"""The tensors of a GGUF file by name: floats of every type the ``gguf`` package knows, and ternary matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, dequantize
from numpy.typing import NDArray

from bitmtp.convert.gguf_blocks import (
    BLOCK_TYPES,
    I2_S,
    I2_S_BLOCK,
    I2_S_TAIL,
    TWO_MEANINGS,
    BlockType,
    split_i2_s,
)
from bitmtp.convert.gguf_quants import EXACT_TYPES, ExactType
from bitmtp.convert.lowbit import LowBit, StoredLowBit
from bitmtp.convert.rows import Ternary, pack_codes, pieces
from bitmtp.errors import CheckpointError, ConfigError
from bitmtp.ternary import Float32, UInt8

Order = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies: ``room`` bytes from ``offset`` to the next tensor, or to the end of the file."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int
    room: int

    @property
    def weights(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def type_name(self) -> str:
        """Name of its type, or the number of one that the ``gguf`` package does not know."""
        names = {each.value: each.name for each in GGMLQuantizationType}
        return str(names.get(self.type_id, self.type_id))


class Reader(GGUFReader):
    """The package's reader, but for the tensors: it knows neither I2_S nor the ids of PrismML's fork."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> NDArray[Any]:
        if type(self.data) is not np.ndarray:  # slices of a memory map cost ten times as much
            self.data = cast(Any, self.data.view(np.ndarray))
        # A length beyond the end would be taken for what there is, and counted through to it.
        if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError("a length in it reaches beyond the end")
        found: NDArray[Any] = super()._get(offset, dtype, count, override_order)
        return found

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        self.begin = int(start_offs)
        offsets = [self.begin + int(field.parts[5][0]) for field in fields]
        ends = sorted({*offsets, len(self.data)})
        self.entries: dict[str, Entry] = {}
        for field, offset in zip(fields, offsets, strict=True):
            _, name, _, dims, type_id, _ = field.parts
            text = bytes(name).decode("utf-8")
            shape = tuple(int(size) for size in reversed(dims))
            if text in self.entries:
                raise ValueError(f"tensor {text} occurs twice")
            if not math.prod(shape) or not shape:
                raise ValueError(f"tensor {text} has shape {list(shape)}")
            if offset > len(self.data):
                raise ValueError(f"tensor {text} begins beyond the end")
            room = next((end for end in ends if end > offset), offset) - offset
            self.entries[text] = Entry(text, int(type_id[0]), shape, offset, room)


def open_gguf_tensors(file: Path) -> Reader:
    """Open a file, read its header.

    Raises:
        CheckpointError: no such file, or not a GGUF file, or cut off inside its header.
    """
    if not file.exists():
        raise CheckpointError(f"{file}: no such file")
    try:
        return Reader(file)
    except (ValueError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a GGUF file, or cut off inside its header ({error})") from None


def block_types(file: Path, reader: Reader) -> dict[int, BlockType]:
    """The layout of each ternary type that occurs, told from the bytes that its tensors have.

    Raises:
        CheckpointError: some tensor fits no layout, or all of them fit two, or the file is cut off.
    """
    found: dict[int, BlockType] = {}
    for type_id in sorted({entry.type_id for entry in reader.entries.values()} & set(BLOCK_TYPES)):
        entries = [entry for entry in reader.entries.values() if entry.type_id == type_id]
        layouts = BLOCK_TYPES[type_id]
        fitting = [each for each in layouts if all(_fits(entry, each, reader.alignment) for entry in entries)]
        if len(fitting) > 1:
            raise CheckpointError(f"{file}: its tensors of type {type_id} are too small to tell group 64 from 128")
        if not fitting:
            names = " or ".join(each.name for each in layouts)
            raise CheckpointError(
                f"{file}: the sizes of its tensors of type {type_id} are not those of {names}; cut off?"
            )
        found[type_id] = fitting[0]
    _check_extents(file, reader, found)
    return found


def _check_extents(file: Path, reader: Reader, layouts: Mapping[int, BlockType]) -> None:
    """Every tensor begins where the one before it ends, as the format has it: no overlap, no gap."""
    place = reader.begin
    for entry in sorted(reader.entries.values(), key=lambda entry: entry.offset):
        layout = layouts.get(entry.type_id)
        needed = entry.weights // layout.group * layout.size if layout else _needed(file, entry)
        if entry.offset + needed > len(reader.data):
            raise CheckpointError(f"{file}: cut off inside {entry.name}; copy the file again")
        if entry.offset != place:
            raise CheckpointError(
                f"{file}: {entry.name} begins at byte {entry.offset}; by the sizes of the tensors before it, it must "
                f"begin at {place}"
            )
        place += needed + -needed % int(reader.alignment)


def _fits(entry: Entry, layout: BlockType, alignment: int) -> bool:
    if entry.shape[-1] % layout.group:
        return False
    needed = entry.weights // layout.group * layout.size
    # two layouts of one type differ by more than the padding behind a tensor
    return needed <= entry.room and (entry.type_id != TWO_MEANINGS or entry.room < needed + alignment)


def _needed(file: Path, entry: Entry) -> int:
    """Bytes of a tensor that is not made of ternary blocks."""
    if entry.type_id == I2_S:
        return entry.weights // 4 + I2_S_TAIL
    group, size = GGML_QUANT_SIZES[_float_type(file, entry)]
    if entry.shape[-1] % group:
        raise CheckpointError(
            f"{file}: {entry.name} has rows of {entry.shape[-1]}, which are not whole blocks of {group}"
        )
    return int(entry.weights // group * size)


def _float_type(file: Path, entry: Entry) -> Any:
    try:
        return GGMLQuantizationType(entry.type_id)
    except ValueError:
        raise ConfigError(f"{file}: {entry.name} has type {entry.type_id}, which is not supported") from None


@dataclass(frozen=True, slots=True)
class GgufRows:
    """A float tensor; ``order`` (of rows) undoes a permutation that the file's writer made."""

    file: Path
    data: UInt8
    entry: Entry
    order: Order | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """``[out, in]`` or ``[n]``."""
        return self.entry.shape

    @property
    def stored_as(self) -> str:
        """Name of the GGUF type."""
        return str(_float_type(self.file, self.entry).name)

    def read(self, start: int = 0, stop: int | None = None) -> Float32:
        """Rows as float32."""
        kind = _float_type(self.file, self.entry)
        if len(self.shape) == 1:
            values = _floats(self._bytes(), kind).reshape(-1)
            return (values if self.order is None else values[self.order])[start:stop]
        return _floats(self.raw(start, stop), kind)

    def raw(self, start: int = 0, stop: int | None = None) -> UInt8:
        """Rows of a matrix as they are stored: ``[rows, bytes]``."""
        raw = self._bytes()
        return raw[start:stop] if self.order is None else raw[self.order[start:stop]]

    def _bytes(self) -> UInt8:
        size, rows = _needed(self.file, self.entry), self.entry.weights // self.shape[-1]
        return self.data[self.entry.offset : self.entry.offset + size].reshape(rows, -1)

    def exact(self) -> StoredLowBit | None:
        """The matrix in the layout that its type is; None if it is none."""
        kind = EXACT_TYPES.get(self.stored_as)
        if kind is None or len(self.shape) != 2:
            return None
        out, inputs = self.shape
        return StoredLowBit((out, inputs), kind.layout, partial(self._low_bit, kind))

    def _low_bit(self, kind: ExactType, start: int, stop: int) -> LowBit:
        matrix = kind.rows(self.raw(start, stop))
        factors = matrix.scale if matrix.minimum is None else np.concatenate([matrix.scale, matrix.minimum])
        if not np.isfinite(factors).all():
            raise CheckpointError(f"{self.file}: {self.entry.name} has a scale that is not a number; damaged?")
        return matrix


def _floats(raw: UInt8, kind: Any) -> Float32:
    return np.asarray(dequantize(np.ascontiguousarray(raw), kind), np.float32)


def read_blocks(file: Path, data: UInt8, entry: Entry, layout: BlockType, order: Order | None, group: int) -> Ternary:
    """A matrix of ternary blocks, with one scale for each ``group`` inputs (``group`` divides the block)."""
    out, inputs = entry.shape
    blocks, repeat = inputs // layout.group, layout.group // group
    raw = data[entry.offset : entry.offset + out * blocks * layout.size].reshape(out, blocks * layout.size)
    packed, scale = np.empty((out, inputs // 4), np.uint8), np.empty((out, inputs // group), np.float32)
    for piece in pieces(out, inputs):
        rows = raw[piece] if order is None else raw[order[piece]]
        codes, steps = layout.split(np.ascontiguousarray(rows).reshape(-1, layout.size))
        _check(file, entry, codes, steps)
        codes[steps == 0] = 1  # such a group is all zero whatever its codes say
        packed[piece] = pack_codes(codes.reshape(-1, inputs))
        scale[piece] = np.repeat(steps.reshape(-1, blocks), repeat, axis=1)
    return Ternary(packed, scale)


def read_i2_s(file: Path, data: UInt8, entry: Entry, order: Order | None) -> Ternary:
    """An I2_S matrix: codes of the whole tensor, then its scale."""
    out, inputs = entry.shape
    count = entry.weights // 4
    if inputs % I2_S_BLOCK:
        raise CheckpointError(f"{file}: {entry.name} has rows of {inputs}, which are not whole blocks of {I2_S_BLOCK}")
    raw = data[entry.offset : entry.offset + count].reshape(out, inputs // 4)
    tail = data[entry.offset + count : entry.offset + count + 4]
    scale = np.frombuffer(tail.tobytes(), "<f4").astype(np.float32)
    packed = np.empty((out, inputs // 4), np.uint8)
    for piece in pieces(out, inputs):
        codes = split_i2_s(np.ascontiguousarray(raw[piece] if order is None else raw[order[piece]]))
        _check(file, entry, codes, scale)
        packed[piece] = pack_codes(codes.reshape(-1, inputs))
    if scale[0] == 0:
        raise CheckpointError(f"{file}: {entry.name} has the scale 0")
    return Ternary(packed, scale)


def _check(file: Path, entry: Entry, codes: UInt8, scales: Float32) -> None:
    if (codes > 2).any():
        raise CheckpointError(f"{file}: {entry.name} holds the code 3: it is damaged, or its weights are not ternary")
    if not np.isfinite(scales).all() or (scales < 0).any():
        raise CheckpointError(f"{file}: {entry.name} has a scale that is negative or not a number")


def is_ternary(entry: Entry) -> bool:
    """Whether the type of a tensor is a ternary one."""
    return entry.type_id == I2_S or entry.type_id in BLOCK_TYPES
