"""A model's tensors on the device, repacked into the order of ``kernels/matrix.cuh``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitmtp.backends.cuda.device import Gpu
from bitmtp.backends.weights import HeadCopy
from bitmtp.checkpoint import Checkpoint, Tensor
from bitmtp.config import ModelConfig
from bitmtp.errors import BackendError
from bitmtp.numerics import Float32

GROUP = 128  # inputs of a cell
SMALL_GROUPS = (32, 64)  # that a scale may cover: what an instruction multiplies, or two of them
STEP_INPUTS = (32, 64, 128)  # that a step of the activations may cover, if not all


def round_up(value: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is not below ``value``."""
    return -(-value // unit) * unit


@dataclass(frozen=True, slots=True)
class Matrix:
    """An integer matrix on the device.

    Attributes:
        outputs: rows, each part of a stack padded to whole tiles of 16.
        scale_groups: scales a row has, a divisor or a multiple of :attr:`cells`; 0: one, applied to the integer sum.
        scale: float32 ``[outputs]`` or ``[outputs / 16, scale_groups, 16]``.
        step_inputs: inputs that share a step of the int8 activations; 0: all of them do.
    """

    bits: int
    inputs: int
    outputs: int
    scale_groups: int
    weights: Any
    scale: Any
    bias: Any | None
    step_inputs: int = 0

    @property
    def cells(self) -> int:
        """Groups of 128 inputs."""
        return -(-self.inputs // GROUP)

    @property
    def cell_scales(self) -> int:
        """Scales that a product takes with each cell of a row."""
        return -(-self.scale_groups // self.cells)

    @property
    def step_groups(self) -> int:
        """Steps of a row of activations, padded to whole cells; 0: one."""
        return self.cells * GROUP // self.step_inputs if self.step_inputs else 0

    @property
    def nbytes(self) -> int:
        """What a product reads of it."""
        return self.outputs * (self.cells * GROUP * self.bits // 8 + 4 * max(self.scale_groups, 1))


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's matrices and gains (None where the model has none)."""

    qkv: Matrix
    o: Matrix
    gate_up: Matrix  # tiles of gate and up in turn
    down: Matrix
    attention_norm: Any
    mlp_norm: Any
    attention_sub_norm: Any | None
    mlp_sub_norm: Any | None
    q_norm: Any | None
    k_norm: Any | None


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint matrix that becomes some rows of a stack."""

    weight: Tensor
    scale: Float32
    bias: Float32 | None = None


class Uploader:
    """Copies and repacks; the checkpoint's own arrays are left as they are."""

    def __init__(self, gpu: Gpu, checkpoint: Checkpoint) -> None:
        self._gpu, self._tensors, self.config = gpu, checkpoint.tensors, checkpoint.config
        size = self.config.group_size
        if self.config.ternary_scale == "group" and size % GROUP and size not in SMALL_GROUPS:
            raise BackendError(
                f"the cuda backend needs scale groups of {' or '.join(map(str, SMALL_GROUPS))} inputs or a multiple of "
                f"{GROUP}, this model has {size}; use --backend cpu"
            )
        self._step_inputs = size if self.config.activation_scale == "group" else 0
        if self._step_inputs not in (0, *STEP_INPUTS):
            raise BackendError(
                f"the cuda backend needs activation groups of {', '.join(map(str, STEP_INPUTS))} inputs, this model "
                f"has {size}; use --backend reference"
            )

    def optional(self, name: str) -> Any | None:
        """A float tensor, if the model has it."""
        return self.vector(name) if name in self._tensors else None

    def vector(self, name: str) -> Any:
        """A float tensor, padded with zeros to a multiple of 16."""
        values = self._tensors[name].astype(np.float32).reshape(-1)
        return self._gpu.upload(np.pad(values, (0, -len(values) % 16)))

    def layer(self, index: int) -> Layer:
        """One layer."""
        prefix = f"layers.{index}."
        return Layer(
            qkv=self._stack([self._part(f"{prefix}attention.{name}") for name in "qkv"]),
            o=self._stack([self._part(f"{prefix}attention.o")]),
            gate_up=self._stack([self._part(f"{prefix}mlp.gate"), self._part(f"{prefix}mlp.up")], interleave=True),
            down=self._stack([self._part(f"{prefix}mlp.down")]),
            attention_norm=self.vector(f"{prefix}attention_norm.weight"),
            mlp_norm=self.vector(f"{prefix}mlp_norm.weight"),
            attention_sub_norm=self.optional(f"{prefix}attention.sub_norm.weight"),
            mlp_sub_norm=self.optional(f"{prefix}mlp.sub_norm.weight"),
            q_norm=self.optional(f"{prefix}attention.q_norm.weight"),
            k_norm=self.optional(f"{prefix}attention.k_norm.weight"),
        )

    def vocabulary(self, name: str) -> Matrix:
        """The embedding or the head; 16-bit ones stay rows of float16."""
        bits, weight = self.config.embedding_bits, self._tensors[f"{name}.weight"]
        if bits < 16:
            return self._stack([Part(weight, self._tensors[f"{name}.scale"])], bits)
        return Matrix(16, weight.shape[1], len(weight), 0, self._gpu.upload(weight), self._gpu.empty(0), None)

    def head_copy(self, copy: HeadCopy) -> Matrix:
        """A head of fewer bits."""
        return self._stack([Part(copy.weight, copy.scale)], copy.bits)

    def _part(self, name: str) -> Part:
        return Part(self._tensors[f"{name}.weight"], self._tensors[f"{name}.scale"], self._tensors.get(f"{name}.bias"))

    def _stack(self, parts: Sequence[Part], bits: int = 2, interleave: bool = False) -> Matrix:
        inputs = parts[0].weight.shape[1] * 8 // bits
        if not interleave and any(len(part.weight) % 16 for part in parts[:-1]):
            raise BackendError("the cuda backend needs head sizes that fill tiles of 16; use --backend cpu")
        tiles = [-(-len(part.weight) // 16) for part in parts]
        cells, step = -(-inputs // GROUP), len(parts) if interleave else 1
        weights = self._gpu.zeros(sum(tiles) * cells * GROUP * 16 * bits // 8)
        for index, part in enumerate(parts):
            first = index if interleave else sum(tiles[:index])
            self._repack(part.weight, weights, inputs, bits, first, step)
        scale = _arrange([_row_scales(part, inputs) for part in parts], interleave)
        biases = [np.pad(part.bias, (0, -len(part.bias) % 16)) for part in parts if part.bias is not None]
        bias = self._gpu.upload(np.concatenate(biases)) if biases else None
        groups = scale.shape[1] if scale.ndim == 3 else 0
        return Matrix(bits, inputs, sum(tiles) * 16, groups, weights, self._gpu.upload(scale), bias, self._step_inputs)

    def _repack(self, weight: Tensor, out: Any, inputs: int, bits: int, first: int, step: int) -> None:
        threads = -(-len(weight) // 16) * -(-inputs // GROUP) * 32
        kernel = self._gpu.kernel(
            "repack.cu", "repack", {"BITS": bits, "INPUTS": inputs}, grid=(-(-threads // 256),), block=256
        )
        source = self._gpu.upload(weight)
        scalars = np.int32(len(weight)), out, np.int32(first), np.int32(step)
        self._gpu.launch(self._gpu.stream, kernel, source, *scalars, overlap=False)
        self._gpu.stream.sync()
        source.close()


def _row_scales(part: Part, inputs: int) -> Float32:
    """``[tiles, 16]``, or ``[tiles, 16, groups]``; padding, of rows or to whole cells, gets 0."""
    rows, scale = len(part.weight), part.scale
    each = np.broadcast_to(scale, (rows,)) if scale.ndim == 1 else scale
    groups = [(0, -each.shape[1] % max(GROUP * each.shape[1] // inputs, 1))] if each.ndim == 2 else []
    padded = np.pad(each, [(0, -rows % 16), *groups])
    return padded.reshape(-1, 16, *padded.shape[1:])


def _arrange(parts: Sequence[Float32], interleave: bool) -> Float32:
    stacked: Float32 = np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:]) if interleave else np.concatenate(parts)
    return np.moveaxis(stacked, 2, 1) if stacked.ndim == 3 else stacked.reshape(-1)


def rows_of(config: ModelConfig) -> tuple[int, int, int]:
    """Strides, in floats, of a pass's rows: residual stream, q/k/v, inner activation."""
    qkv = config.attention_size + 2 * config.kv_size
    return round_up(config.hidden_size, 16), round_up(qkv, 16), round_up(config.intermediate_size, 16)
