"""What readers of model files share: float tensors read by rows, ternary matrices, and an opened model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from bitmtp.config import ModelConfig
from bitmtp.ternary import Float32, UInt8, unpack

if TYPE_CHECKING:
    from bitmtp.convert.lowbit import StoredLowBit

PIECE = 1 << 22  # weights that are unpacked at a time, so that memory stays small


class Rows(Protocol):
    """A float tensor in a file, read when asked."""

    @property
    def shape(self) -> tuple[int, ...]:
        """``[out, in]``, or ``[n]``."""

    @property
    def stored_as(self) -> str:
        """The file's type of its numbers, such as ``BF16``."""

    def read(self, start: int = 0, stop: int | None = None) -> Float32:
        """Rows ``start … stop`` (entries of a vector) as float32."""


@dataclass(frozen=True, slots=True)
class Ternary:
    """A ternary matrix in this project's layout: packed ``[out, in / 4]``, scale ``[1]`` or ``[out, in / group]``."""

    packed: UInt8
    scale: Float32

    def values(self) -> Float32:
        """The floats ``[out, in]`` that the weights stand for."""
        weights = unpack(self.packed, 2)
        if self.scale.ndim == 1:
            return weights * self.scale
        cells = weights.reshape(*self.scale.shape, -1) * self.scale[..., None]
        return cells.reshape(weights.shape)


@dataclass(frozen=True, slots=True)
class StoredTernary:
    """A ternary matrix in a file: its ``[out, in]`` shape, and the call that reads it."""

    shape: tuple[int, int]
    read: Callable[[], Ternary]


@dataclass(frozen=True, slots=True)
class Opened:
    """A model file (or folder) whose shape and layout are known and whose tensors are not yet read.

    Attributes:
        kind: what it was recognised as, in words.
        config: the checkpoint's config: scale layout of ``ternary``; ``embedding_bits`` 2 if the embedding is among it.
        floats: by this project's names.
        ternary: by module name, such as ``layers.0.mlp.up``; empty for a full-precision model.
        exact: those of ``floats`` whose type is a layout of this project, by module name.
        write_tokenizer: writes ``tokenizer.json`` and ``tokenizer_config.json`` into a folder.
    """

    origin: Path
    kind: str
    config: ModelConfig
    floats: Mapping[str, Rows]
    ternary: Mapping[str, StoredTernary]
    write_tokenizer: Callable[[Path], None]
    exact: Mapping[str, StoredLowBit] = field(default_factory=dict)


def pieces(rows: int, inputs: int) -> list[slice]:
    """Row ranges of about :data:`PIECE` weights."""
    step = max(PIECE // max(inputs, 1), 1)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def pack_codes(codes: NDArray[np.uint8]) -> UInt8:
    """Codes 0, 1, 2 ``[out, in]`` → bytes ``[out, in / 4]``, lowest bits first."""
    cells = codes.reshape(len(codes), -1, 4)
    packed: UInt8 = np.bitwise_or.reduce(cells << np.array([0, 2, 4, 6], np.uint8), axis=2)
    return packed
