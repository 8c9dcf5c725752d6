"""The launches of one pass, in order: from the rows in the pass structure to their logits and choices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitmtp.backends.base import Head, Row
from bitmtp.backends.cuda.attention import AttentionShape, attention_kernels, short_kernel
from bitmtp.backends.cuda.choose import Chooser
from bitmtp.backends.cuda.device import Gpu
from bitmtp.backends.cuda.heads import float_head
from bitmtp.backends.cuda.layout import MAX_WIDTH, OUTPUT, PASS
from bitmtp.backends.cuda.matrices import STEP_INPUTS, Layer, Uploader, round_up
from bitmtp.backends.cuda.products import Product, Role
from bitmtp.backends.weights import DraftHead, head_copy, head_name, rope_table
from bitmtp.checkpoint import Checkpoint

NOTHING = np.uintp(0)
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
# Blocks that share a window. As many as share a long history would have nothing to do, and keep multiprocessors from
# the kernels before and behind.
WINDOW_BLOCKS = 8


def width_class(width: int) -> int:
    """The smallest of :data:`WIDTHS` that holds ``width`` rows: what kernels and graphs are made for."""
    return next(largest for largest in WIDTHS if largest >= width)


@dataclass(frozen=True, slots=True)
class PassShape:
    """What the launches of a pass depend on; everything else is in device memory.

    Attributes:
        width: one of :data:`WIDTHS`.
        capacity: positions of history and pass that its attention reaches.
        sequences: 1, or more if any number of sequences may take part.
        filtered: rows may have penalties, biases, grammars or filters.
        masks: rows may be masks, which a chain chooses again.
        linear: every row stands right behind the one before it and sees all of the history: no trees, no windows.
        windowed: every row sees a window of the history only.
        heads: that its rows have; DRAFT only where it is not the exact one.
    """

    width: int
    capacity: int
    sequences: int = 1
    filtered: bool = False
    masks: bool = False
    linear: bool = True
    windowed: bool = False
    heads: tuple[Head, ...] = (Head.EXACT,)


@dataclass(frozen=True, slots=True)
class Activations:
    """Device memory of a pass; rows are padded to multiples of 16 floats."""

    state: Any  # one PASS record
    outputs: Any  # OUTPUT records
    x: Any
    x_stats: Any
    qkv: Any
    attended: Any
    attended_stats: Any
    inner: Any
    inner_stats: Any
    levels: Any
    steps: Any
    logits: Any


class Network:
    """A model on the device, and how to run it."""

    def __init__(self, gpu: Gpu, checkpoint: Checkpoint, context: int, draft_head: DraftHead = DraftHead.EXACT) -> None:
        config = checkpoint.config
        upload = Uploader(gpu, checkpoint)
        self.gpu, self.config = gpu, config
        self.layers = [upload.layer(index) for index in range(config.num_layers)]
        self.embedding = upload.vocabulary("embedding")
        self.head = self.embedding if config.tie_embeddings else upload.vocabulary(head_name(config))
        copy = head_copy(checkpoint, draft_head)
        self.draft_head = None if copy is None else upload.head_copy(copy)
        self._norm = upload.vector("norm.weight")
        masks = checkpoint.tensors.get("mask_embedding.weight")
        self._masks = NOTHING if masks is None else gpu.upload(masks)
        # Rows may stand at the last position of a context and still be padded with rows behind it.
        cosines, sines = rope_table(config, context + MAX_WIDTH)
        self._cosines, self._sines = gpu.upload(cosines), gpu.upload(sines)
        self.buffers = self._allocate()
        self._workspace = gpu.zeros(self._workspace_bytes(context + MAX_WIDTH))
        self.chooser = Chooser(gpu, checkpoint, self.logits_stride)
        self._eps = np.float32(config.norm_eps)

    @property
    def logits_stride(self) -> int:
        """Floats of a row of logits."""
        return round_up(self.config.vocab_size, 16)

    @property
    def weight_bytes(self) -> int:
        """What a pass reads of the model."""
        matrices = [m for layer in self.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return sum(matrix.nbytes for matrix in (*matrices, self.head))

    def _allocate(self) -> Activations:
        config, gpu = self.config, self.gpu
        hidden, attention = round_up(config.hidden_size, 16), round_up(config.attention_size, 16)
        inner = round_up(config.intermediate_size, 16)
        widest = round_up(max(hidden, attention, inner), 128)

        def floats(columns: int) -> Any:
            return gpu.zeros(MAX_WIDTH * columns * 4)

        def stats(columns: int) -> Any:
            return gpu.zeros(MAX_WIDTH * columns * 8)

        return Activations(
            state=gpu.zeros(PASS.itemsize),
            outputs=gpu.zeros(MAX_WIDTH * OUTPUT.itemsize),
            x=floats(hidden),
            x_stats=stats(hidden // 16),
            qkv=floats(self.layers[0].qkv.outputs),
            attended=floats(attention),
            attended_stats=stats(config.num_heads),
            inner=floats(inner),
            inner_stats=stats(inner // 16),
            levels=gpu.zeros(MAX_WIDTH * widest),
            steps=floats(widest // min(STEP_INPUTS)),
            logits=floats(self.logits_stride),
        )

    def _workspace_bytes(self, longest: int) -> int:
        shapes = [self._attention(PassShape(w, longest, sequences)) for w in WIDTHS for sequences in (1, MAX_WIDTH)]
        cuts = [(shape, blocks) for shape in shapes for blocks in (shape.blocks(self.gpu, longest), WINDOW_BLOCKS)]
        return max(shape.workspace_bytes(blocks, longest) for shape, blocks in cuts)

    def _attention(self, shape: PassShape) -> AttentionShape:
        return AttentionShape(
            self.config, round_up(shape.width, 8), shape.sequences, self.layers[0].qkv.outputs,
            round_up(self.config.attention_size, 16),
        )  # fmt: skip

    # Recording

    def record(self, stream: Any, shape: PassShape) -> None:
        """Launch a pass into a stream or a graph being built; its rows are in ``buffers.state``."""
        b = self.buffers
        self._embed(stream, shape)
        for index, layer in enumerate(self.layers):
            following = self.layers[index + 1].attention_norm if index + 1 < len(self.layers) else self._norm
            self._layer(stream, shape, index, layer, following)
        for head in shape.heads:
            self._logits(stream, shape, head)
        arguments = b.state, b.logits, b.x, b.outputs
        self.chooser.record(stream, shape.width, *arguments, filtered=shape.filtered, masks=shape.masks)

    def _embed(self, stream: Any, shape: PassShape) -> None:
        b, stride = self.buffers, round_up(self.config.hidden_size, 16)
        constants = {
            "INPUTS": self.config.hidden_size, "X_STRIDE": stride, "EMBEDDING_BITS": self.embedding.bits,
            "SCALE_GROUPS": self.embedding.scale_groups,
        }  # fmt: skip
        kernel = self.gpu.kernel("rows.cu", "embed", constants, grid=(shape.width,), block=256)
        first = self.layers[0].attention_norm
        table, scale = self.embedding.weights, self.embedding.scale
        self.gpu.launch(stream, kernel, b.state, table, scale, self._masks, first, b.x, b.x_stats)

    def _layer(self, stream: Any, shape: PassShape, index: int, layer: Layer, following: Any) -> None:
        b, config = self.buffers, self.config
        x_stride = round_up(config.hidden_size, 16)
        qkv = Product(layer.qkv, Role.STORE, True, x_stride // 16, x_stride, hasty=True)
        self._product(stream, shape, qkv, b.x, b.x_stats, layer.attention_norm, b.qkv)
        attention = self._attention(shape)
        arguments: tuple[Any, ...] = (
            b.state, np.int32(index), b.qkv, layer.q_norm or NOTHING, layer.k_norm or NOTHING,
            self._cosines, self._sines, layer.attention_sub_norm or NOTHING, b.attended, b.attended_stats,
        )  # fmt: skip
        kernel = short_kernel(self.gpu, attention, shape.capacity) if shape.linear else None
        if kernel is None:
            kernels = attention_kernels(self.gpu, attention, shape.capacity, WINDOW_BLOCKS if shape.windowed else 0)
            kernels.launch(stream, *arguments, self._workspace)
        else:
            self.gpu.launch(stream, kernel, *arguments)
        sub = config.sub_norm
        o = Product(layer.o, Role.RESIDUAL, sub, config.num_heads, round_up(config.attention_size, 16), hasty=True)
        after = b.x, b.x_stats, layer.mlp_norm
        self._product(stream, shape, o, b.attended, b.attended_stats, layer.attention_sub_norm, *after)
        gate_up = Product(layer.gate_up, Role(config.activation.upper()), True, x_stride // 16, x_stride)
        inner = b.inner, b.inner_stats, layer.mlp_sub_norm
        self._product(stream, shape, gate_up, b.x, b.x_stats, layer.mlp_norm, *inner)
        stride = round_up(config.intermediate_size, 16)
        down = Product(layer.down, Role.RESIDUAL, sub, stride // 16, stride, hasty=True)
        self._product(stream, shape, down, b.inner, b.inner_stats, layer.mlp_sub_norm, b.x, b.x_stats, following)

    def heads(self, rows: Iterable[Row]) -> tuple[Head, ...]:
        """The heads that a pass reads, for ``PassShape``."""
        if self.draft_head is None:
            return (Head.EXACT,)
        return tuple(sorted({row.head for row in rows if row.head})) or (Head.EXACT,)

    def _logits(self, stream: Any, shape: PassShape, head: Head) -> None:
        b, stride = self.buffers, round_up(self.config.hidden_size, 16)
        matrix = self.draft_head if self.draft_head and head is Head.DRAFT else self.head
        only = head if len(shape.heads) > 1 else Head.NONE
        if matrix.bits < 16:
            product = Product(matrix, Role.STORE, True, stride // 16, stride, streaming=True, head=only)
            self._product(stream, shape, product, b.x, b.x_stats, self._norm, b.logits)
            return
        kernel = float_head(self.gpu, matrix, shape.width, self.logits_stride, only)
        arguments = b.state, matrix.weights, b.x, b.x_stats, self._norm, b.logits, self._eps
        self.gpu.launch(stream, kernel, *arguments)

    def _product(
        self, stream: Any, shape: PassShape, product: Product, x: Any, stats: Any, gain: Any | None, out: Any,
        out_stats: Any = NOTHING, out_gain: Any | None = None,
    ) -> None:  # fmt: skip
        b, matrix = self.buffers, product.matrix
        if not product.sharers(shape.width, self.gpu):
            self._quantise(stream, shape, product, x, stats, gain)
        kernel = product.kernel(self.gpu, shape.width)
        self.gpu.launch(
            stream, kernel, b.state, matrix.weights, matrix.scale, matrix.bias or NOTHING, x, stats, gain or NOTHING,
            b.levels, b.steps, out, out_stats, out_gain or NOTHING, self._eps,
        )  # fmt: skip

    def _quantise(self, stream: Any, shape: PassShape, product: Product, x: Any, stats: Any, gain: Any | None) -> None:
        constants = {
            "INPUTS": product.matrix.inputs, "X_STRIDE": product.stride, "NORM": int(product.norm),
            "PARTS": product.parts, "STEP_INPUTS": product.matrix.step_inputs,
        }  # fmt: skip
        grid = (-(-product.matrix.cells * 128 // 1024), shape.width)
        kernel = self.gpu.kernel("rows.cu", "quantise", constants, grid=grid, block=256)
        b = self.buffers
        self.gpu.launch(stream, kernel, b.state, x, stats, gain or NOTHING, b.levels, b.steps, self._eps)
