"""Safetensors files by hand: NumPy has no bfloat16, in which most models are published, and large tensors are read
by rows."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from bitmtp.errors import CheckpointError
from bitmtp.ternary import Float32, UInt8

INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "u1"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file; ``offset`` is its first byte."""

    file: Path
    name: str
    stored_as: str
    shape: tuple[int, ...]
    offset: int

    def read(self, start: int = 0, stop: int | None = None) -> Float32:
        """Rows as float32."""
        if self.stored_as == "U8":
            raise CheckpointError(f"{self.file}: {self.name} is U8 {list(self.shape)}; expected floating point numbers")
        values = self._numbers(start, stop)
        if self.stored_as == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        floats: Float32 = values.astype(np.float32, copy=False)
        return floats

    def bytes(self) -> UInt8:
        """The whole of a U8 tensor."""
        if self.stored_as != "U8":
            raise CheckpointError(f"{self.file}: {self.name} is {self.stored_as}; expected U8 (packed weights)")
        values: UInt8 = self._numbers(0, None)
        return values

    def _numbers(self, start: int, stop: int | None) -> Any:
        dtype = np.dtype(_DTYPES[self.stored_as])
        rows, width = self.shape[0] if self.shape else 1, math.prod(self.shape[1:])
        count = (rows if stop is None else min(stop, rows)) - start
        place = self.offset + start * width * dtype.itemsize
        values = np.fromfile(self.file, dtype, count * width, offset=place)
        return values.reshape(count, *self.shape[1:]) if self.shape else values


def open_file(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name, none of them read.

    Raises:
        CheckpointError: it is missing, damaged or cut off, or holds a type of number that is not known here.
    """
    try:
        with safe_open(file, framework="numpy"), file.open("rb") as stream:  # the library checks every extent
            start = 8 + int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(start - 8))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: damaged or cut off ({error}); copy the file again") from None
    header.pop("__metadata__", None)
    return {name: _stored(file, name, entry, start) for name, entry in header.items()}


def _stored(file: Path, name: str, entry: dict[str, Any], start: int) -> StoredTensor:
    kind = entry["dtype"]
    if kind not in _DTYPES:
        raise CheckpointError(f"{file}: {name} is {kind}; supported: {', '.join(_DTYPES)}")
    return StoredTensor(file, name, kind, tuple(entry["shape"]), start + entry["data_offsets"][0])


def open_folder(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of ``model.safetensors``, or of the shards that the index names.

    Raises:
        CheckpointError: as :func:`open_file`; or a shard is missing, or holds what another holds too.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in _weight_files(folder):
        for name, tensor in open_file(file).items():
            if name in tensors:
                raise CheckpointError(f"{file}: tensor {name} stands in {tensors[name].file.name} too")
            tensors[name] = tensor
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        if not names or any(Path(name).name != name for name in names):
            raise CheckpointError(f"{index}: not an index of shards")
        return [folder / name for name in names]
    if not (folder / "model.safetensors").exists():
        raise CheckpointError(f"{folder}: holds no model.safetensors and no index of shards")
    return [folder / "model.safetensors"]


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: it is missing, or something else.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{file}: missing; give a Hugging Face folder or a .gguf file") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file}: expected a JSON object")
    return data
