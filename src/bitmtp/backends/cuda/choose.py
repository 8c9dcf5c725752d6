"""Choosing tokens on the device: launch shapes and workspace of ``choose.cu``, and the tables of the chain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitmtp.backends.cuda.compile import Constants
from bitmtp.backends.cuda.device import Gpu, Kernel
from bitmtp.backends.cuda.layout import MAX_WIDTH
from bitmtp.backends.weights import dequantise_rows
from bitmtp.checkpoint import Checkpoint
from bitmtp.config import ModelConfig
from bitmtp.errors import BackendError
from bitmtp.numerics import Float32, norm

CHUNK = 1024
LISTED = 8192
_THREADS = {
    "partials": 256, "partials_adjusted": 256, "merge": 256, "gather": 256, "filter": 1024, "chain_hidden": 128,
    "chain": 512,
}  # fmt: skip
_PARTIAL, _STATS, _CANDIDATES = 32, 8, 144  # bytes of the structures of choose_common.cuh
_STATIC_SHARED = 12288  # what the kernel of the chain and the system keep for themselves
_TILE = 15  # links whose tables the chain fetches at once, where there is room

Half = NDArray[np.float16]


@dataclass(frozen=True, slots=True, eq=False)
class ChainTables:
    """The chain's matrices, multiplied out as far as tokens alone decide (``kernels/choose_chain.cuh``).

    Attributes:
        hidden: ``[rank, hidden]``, the half of ``chain.hidden.weight`` for the row, times the final norm's gain.
        before: P ``[vocab, rank]``: the other half times the normed embedding of each token.
        after: Q ``[vocab, rank]``: each row of the head times ``chain.output.weight``.

    ``rank`` is padded with zeros to a multiple of 256.
    """

    hidden: Float32
    before: Half
    after: Half


def chain_tables(checkpoint: Checkpoint, block: int = 8192) -> ChainTables | None:
    """Multiply the chain's matrices with every token's rows; None for a model without a chain."""
    config, tensors = checkpoint.config, checkpoint.tensors
    if not config.chain_rank:
        return None
    size, missing = config.hidden_size, _padded(config.chain_rank) - config.chain_rank
    inner = np.pad(tensors["chain.hidden.weight"], ((0, missing), (0, 0)))
    outer = np.pad(tensors["chain.output.weight"], ((0, 0), (0, missing)))
    head = "embedding" if config.tie_embeddings else "head"
    before = np.empty((config.vocab_size, len(inner)), np.float16)
    after = np.empty_like(before)
    ones = np.ones(size, np.float32)
    for start in range(0, config.vocab_size, block):
        ids = np.arange(start, min(start + block, config.vocab_size), dtype=np.int32)
        before[ids] = norm(dequantise_rows(checkpoint, "embedding", ids), ones, config.norm_eps) @ inner[:, size:].T
        after[ids] = dequantise_rows(checkpoint, head, ids) @ outer
    gain = np.asarray(tensors["norm.weight"], np.float32)
    return ChainTables(inner[:, :size] * gain, before, after)


class Chooser:
    """From raw logits to ``Output`` records, for every row of a pass that has a head.

    Args:
        gpu: where.
        checkpoint: the model; of its tensors only the chain and what it multiplies with are read.
        stride: floats from one row of logits to the next, a multiple of 16.

    Raises:
        BackendError: the chain's rank needs more shared memory than the card has.
    """

    def __init__(self, gpu: Gpu, checkpoint: Checkpoint, stride: int) -> None:
        config = checkpoint.config
        chain = chain_tables(checkpoint)
        self._gpu = gpu
        self._chunks = -(-config.vocab_size // CHUNK)
        self._rank = _padded(config.chain_rank)
        self._tile = _tile(gpu, self._rank) if chain else 0
        self._eps = np.float32(config.norm_eps)
        self.constants = choose_constants(config, stride, self._tile)
        self._partials = gpu.empty(MAX_WIDTH * self._chunks * _PARTIAL)
        self._slices = gpu.empty(MAX_WIDTH * self._chunks * 8 * 4)
        self._stats = gpu.empty(MAX_WIDTH * _STATS)
        self._candidates = gpu.empty(MAX_WIDTH * _CANDIDATES)
        self._scaled = gpu.empty(MAX_WIDTH * stride * 4)
        self._totals = gpu.empty(MAX_WIDTH * self._chunks * 8)
        self._lists = gpu.empty(MAX_WIDTH * LISTED * 8)
        self._counts = gpu.zeros(MAX_WIDTH * 4)
        if chain:
            self._hidden, self._before, self._after = (gpu.upload(x) for x in (chain.hidden, chain.before, chain.after))
            self._inner = gpu.empty(MAX_WIDTH * self._rank * 4)

    def record(
        self, stream: Any, width: int, state: Any, logits: Any, x: Any, outputs: Any, *, filtered: bool, masks: bool
    ) -> None:
        """Launch everything that follows the head.

        Args:
            width: at least the pass's.
            filtered: rows may have penalties, bias, a grammar, top-k, top-p or min-p.
            masks: rows may be masks; the chain, if the model has one, chooses for them again.
            state: the ``PASS`` record.
            logits: ``[MAX_WIDTH][stride]``.
            x: the residual stream before the final norm, rows padded to 16 floats.
            outputs: ``OUTPUT`` records; those of rows without a head are left as they are.
        """
        self._plain(stream, width, filtered, state, logits, outputs)
        if filtered:
            self._filter(stream, width, state, logits, outputs)
        if masks and self._rank:
            self._chain(stream, width, state, x, outputs)

    def _plain(self, stream: Any, width: int, filtered: bool, state: Any, logits: Any, outputs: Any) -> None:
        launch, common, grid = self._gpu.launch, (self._partials, self._slices), (self._chunks, width)
        if filtered:
            launch(stream, self._kernel("partials_adjusted", grid), state, logits, *common, self._scaled)
        else:
            launch(stream, self._kernel("partials", grid), state, logits, *common)
        launch(
            stream, self._kernel("merge", (width,)), state, logits, *common, self._stats, self._candidates, outputs
        )  # fmt: skip

    def _filter(self, stream: Any, width: int, state: Any, logits: Any, outputs: Any) -> None:
        launch, lists = self._gpu.launch, (self._totals, self._lists, self._counts)
        gather, last = self._kernel("gather", (self._chunks, width)), self._kernel("filter", (width,))
        launch(stream, gather, state, self._scaled, self._partials, *lists)
        launch(stream, last, state, logits, self._scaled, self._partials, self._stats, *lists, outputs)

    def _chain(self, stream: Any, width: int, state: Any, x: Any, outputs: Any) -> None:
        """A sequence has at least one row, so ``width`` blocks are enough."""
        launch, tables = self._gpu.launch, (self._inner, self._before, self._after)
        hidden = self._kernel("chain_hidden", (self._rank * 32 // _THREADS["chain_hidden"], (width + 1) // 2))
        launch(stream, hidden, state, x, self._hidden, self._eps, self._inner)
        chain = self._kernel("chain", (width,), _chain_shared(self._rank, self._tile))
        launch(stream, chain, state, self._candidates, *tables, outputs)

    def _kernel(self, name: str, grid: tuple[int, ...], shared_bytes: int = 0) -> Kernel:
        block = _THREADS[name]
        return self._gpu.kernel("choose.cu", name, self.constants, grid=grid, block=block, shared_bytes=shared_bytes)


def choose_constants(config: ModelConfig, stride: int, tile: int) -> Constants:
    """What ``choose.cu`` is compiled for; ``tile``: links of the chain whose tables are fetched at once."""
    return {
        "VOCAB": config.vocab_size, "VOCAB_PADDED": stride, "RANK": _padded(config.chain_rank),
        "HIDDEN": config.hidden_size, "X_STRIDE": -(-config.hidden_size // 16) * 16, "CHAIN_TILE": tile,
    }  # fmt: skip


def _padded(rank: int) -> int:
    return -(-rank // 256) * 256


def _chain_shared(rank: int, tile: int) -> int:
    """Dynamic shared memory: the inner layer, and for each link 16 rows of Q and P, one more of P, and H."""
    return rank * 4 + tile * rank * (16 * 2 * 2 + 2 + 4)


def _tile(gpu: Gpu, rank: int) -> int:
    room = int(gpu.device.properties.max_shared_memory_per_block_optin) - _STATIC_SHARED
    tile = min(_TILE, (room - _chain_shared(rank, 0)) // (_chain_shared(rank, 1) - _chain_shared(rank, 0)))
    if tile < 1:
        raise BackendError(f"a chain of rank {rank} does not fit {gpu.device.name}'s shared memory; use --backend cpu")
    return tile
