"""The CUDA backend: see :class:`bitmtp.backends.base.Backend`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bitmtp.backends.base import MAX_WIDTH, Output, ResidentResult, ResidentText, Row, prefill_by_steps
from bitmtp.backends.cuda.atlas import Atlas, capacity_class, capacity_classes
from bitmtp.backends.cuda.attention import AttentionShape, move_kernel
from bitmtp.backends.cuda.device import Gpu
from bitmtp.backends.cuda.layout import OUTPUT, TOP
from bitmtp.backends.cuda.network import WIDTHS, Network, PassShape, width_class
from bitmtp.backends.cuda.resident import ResidentLoop, loop_shape
from bitmtp.backends.cuda.resident_layout import MAX_EOS
from bitmtp.backends.cuda.state import PassWriter, plain
from bitmtp.backends.cuda.store import Range, Store
from bitmtp.checkpoint import Checkpoint
from bitmtp.sampling import GREEDY, Choice


@dataclass(slots=True)
class SequenceState:
    """A sequence: its K/V, how many positions are history, and its rows in the last pass."""

    store: Range
    length: int = 0
    rows: list[Row] = field(default_factory=list)


class CudaBackend:
    """Kernels compiled for the card at hand, one graph a pass.

    Args:
        checkpoint: the model; its tensors are repacked, not kept.
        context: positions a sequence may have; the model's own limit if not given.

    Raises:
        BackendError: no usable GPU, not enough memory, or a model that this backend does not support.
    """

    name = "cuda"

    def __init__(self, checkpoint: Checkpoint, context: int | None = None) -> None:
        self.config = checkpoint.config
        self.context = context or self.config.max_position
        self.gpu = Gpu()
        self.network = Network(self.gpu, checkpoint, self.context)
        self._stores = Store(self.gpu, self.config, self.context + MAX_WIDTH)
        self._writer = PassWriter(self.gpu)
        self._outputs = self.gpu.pinned(OUTPUT, (MAX_WIDTH,))
        self.atlas: Atlas[PassShape] = Atlas(self.gpu, self._record)
        self._resident = ResidentLoop(self.gpu, self.network)
        self._sequences: dict[int, SequenceState] = {}
        self._touched: list[SequenceState] = []
        self._next = 0
        self.graph_replays = 0
        self.shape: PassShape | None = None  # of the last pass
        self._prepare(sequences=1)

    def _prepare(self, sequences: int, filtered: bool = False, linear: bool = True) -> None:
        """Capture every graph that a generation may need, before it starts."""
        drafts = (False, True) if self.config.chain_rank else (False,)
        for capacity in capacity_classes(self.context + MAX_WIDTH):
            for width in WIDTHS[1 if sequences > 1 else 0 :]:
                for masks in drafts[: 1 if width == 1 else 2]:
                    self.atlas.prepare(PassShape(width, capacity, sequences, filtered, masks, linear))

    def _record(self, stream: Any, shape: PassShape) -> None:
        self.gpu.copy_to_device(stream, self.network.buffers.state, self._writer.pinned)
        self.network.record(stream, shape)
        self.gpu.copy_to_host(stream, self._outputs[: shape.width], self.network.buffers.outputs)

    def describe(self) -> dict[str, str]:
        """Device, bytes of weights and K/V, graphs."""
        return {
            "kernels": self.gpu.architecture,
            "device": str(self.gpu.device.name),
            "weight bytes": str(self.network.weight_bytes),
            "kv bytes": str(self._stores.bytes),
            "graphs": str(len(self.atlas)),
            "graph bytes": str(self.atlas.bytes),
        }

    # Sequences

    def open(self) -> int:
        """A new, empty sequence."""
        return self._add(SequenceState(self._stores.open()))

    def _add(self, sequence: SequenceState) -> int:
        self._next += 1
        self._sequences[self._next] = sequence
        if len(self._sequences) == 2:
            self._prepare(sequences=MAX_WIDTH)
        return self._next

    def sequence(self, handle: int) -> SequenceState:
        """What is behind a handle."""
        if handle not in self._sequences:
            raise ValueError(f"sequence {handle} is not open")
        return self._sequences[handle]

    def close(self, sequence: int) -> None:
        """Give its memory back."""
        state = self.sequence(sequence)
        self.gpu.stream.sync()
        self._stores.close(state.store)
        del self._sequences[sequence]

    def length(self, sequence: int) -> int:
        """How many positions are materialized."""
        return self.sequence(sequence).length

    def truncate(self, sequence: int, length: int) -> None:
        """Forget every position from ``length`` on."""
        state = self.sequence(sequence)
        if not 0 <= length <= state.length:
            raise ValueError(f"cannot truncate {state.length} positions to {length}")
        state.length, state.rows = length, []

    def fork(self, sequence: int, length: int) -> int:
        """A new sequence that begins with a copy of the first ``length`` positions."""
        state = self.sequence(sequence)
        if not 0 <= length <= state.length:
            raise ValueError(f"cannot fork {length} of {state.length} positions")
        return self._add(SequenceState(self._stores.copied(state.store, length), length))

    def reserve(self, sequence: int, positions: int) -> int:
        """Map memory for this many positions; returns how many there is memory for."""
        state = self.sequence(sequence)
        self._stores.reserve(state.store, min(positions, self.context + MAX_WIDTH))
        return self._stores.capacity(state.store)

    # The pass

    def prefill(self, sequence: int, tokens: Sequence[int], choice: Choice = GREEDY) -> Output:
        """Materialize tokens and return the output of the last one."""
        return prefill_by_steps(self, sequence, tokens, choice)

    def step(self, rows: Sequence[Row], *, top: int = 0, logits: bool = False) -> list[Output | None]:
        """One pass over 1 … 64 rows."""
        if not 1 <= len(rows) <= MAX_WIDTH:
            raise ValueError(f"a pass has 1 to {MAX_WIDTH} rows, not {len(rows)}")
        own = self._begin(rows)
        order = [index for indices in own.values() for index in indices]
        filtered = self._writer.write(rows, own, self._sequences, min(top, TOP))
        longest = max(self._sequences[handle].length + len(indices) for handle, indices in own.items())
        masks = self.config.chain_rank > 0 and any(row.token < 0 for row in rows)
        sequences = 1 if len(own) == 1 else MAX_WIDTH
        capacity, linear = capacity_class(longest), self._writer.linear
        shape = PassShape(width_class(len(rows)), capacity, sequences, filtered, masks, linear)
        if shape not in self.atlas:
            self._prepare(sequences, filtered, linear)
        self.shape = shape
        self.atlas.launch(shape)
        self.graph_replays += 1
        self.gpu.stream.sync()
        raw = self._logits(len(rows)) if logits or top > TOP else None
        outputs: list[Output | None] = [None] * len(rows)
        for place, index in enumerate(order):
            if rows[index].head:
                outputs[index] = self._output(place, top, logits, None if raw is None else raw[place])
        return outputs

    def can_reside(self, text: ResidentText) -> bool:
        """Whether the resident loop takes this text; captures the graphs that it will need."""
        s = text.choice.sampling
        if s.penalised or text.choice.allowed is not None or len(text.eos_ids) > MAX_EOS:
            return False
        for capacity in self._resident.capacities(text):
            self._resident.atlas.prepare(loop_shape(text, capacity, not plain(text.choice)))
        return True

    def decode_resident(
        self, sequence: int, text: ResidentText, result: ResidentResult
    ) -> Generator[list[tuple[int, str]], None, None]:
        """Whole iterations on the device; see :class:`bitmtp.backends.base.ResidentBackend`."""
        state = self.sequence(sequence)
        row = Row(sequence, text.pending[-1], state.length, 1, choice=text.choice)
        filtered = self._writer.write([row], {sequence: [0]}, self._sequences, 0)
        self.gpu.copy_to_device(self.gpu.stream, self.network.buffers.state, self._writer.pinned)
        self.gpu.stream.sync()
        try:
            yield from self._resident.run(text, filtered, lambda n: self.reserve(sequence, n), result)
        finally:
            state.length, state.rows = result.materialized, []

    def _begin(self, rows: Sequence[Row]) -> dict[int, list[int]]:
        """Check the whole pass, note its rows and make room for their K/V; row indices by sequence."""
        for state in self._touched:
            state.rows = []
        own: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            own.setdefault(row.sequence, []).append(index)
            history = self.sequence(row.sequence).length
            if not history <= row.position < min(history + MAX_WIDTH, self.context):
                raise ValueError(f"position {row.position} is not close behind {history}, or outside {self.context}")
            if not 1 - self.config.block_size <= row.token < self.config.vocab_size:
                raise ValueError(f"token {row.token} is neither in the vocabulary nor a mask of this model")
        for handle, indices in own.items():
            check_visible([rows[index] for index in indices], self._sequences[handle].length)
        for handle, indices in own.items():
            state = self._sequences[handle]
            self._stores.reserve(state.store, state.length + len(indices))
            state.rows = [rows[index] for index in indices]
        self._touched = [self._sequences[handle] for handle in own]
        return own

    def _logits(self, width: int) -> Any:
        stride = self.network.logits_stride
        rows = self.gpu.read(self.network.buffers.logits, np.float32, (width, stride))
        return rows[:, : self.config.vocab_size]

    def _output(self, place: int, top: int, logits: bool, raw: Any) -> Output:
        record = self._outputs[place]
        best = tuple(zip(record["top_ids"][:top].tolist(), record["top_logits"][:top].tolist(), strict=True))
        if top > TOP:
            known = {token for token, _ in best}
            order = np.lexsort((np.arange(len(raw)), -raw))
            best += tuple((int(i), float(raw[i])) for i in order if int(i) not in known)[: top - TOP]
        token, probability, entropy = record.item()[:3]
        return Output(token, probability, entropy, best, raw.copy() if logits else None)

    def materialize(self, sequence: int, indices: Sequence[int]) -> None:
        """Append rows of the last pass to the history, in this order; free if they already lie in it."""
        state, seen = self.sequence(sequence), 0
        for place, index in enumerate(indices):
            if not 0 <= index < len(state.rows):
                raise ValueError(f"row {index} was not in the last pass of sequence {sequence}")
            row, seen = state.rows[index], seen | 1 << index
            if row.token < 0 or row.window or row.visible != seen or row.position != state.length + place:
                raise ValueError(f"row {index} does not continue the history of sequence {sequence}")
        if list(indices) != list(range(len(indices))):
            self._move(state, indices)
        state.length += len(indices)
        state.rows = []

    def _move(self, state: SequenceState, indices: Sequence[int]) -> None:
        kernel = move_kernel(self.gpu, AttentionShape(self.config, 64))
        numbers = self.gpu.upload(np.array(indices, np.int32))
        scalars = np.uintp(state.store.address), np.int32(state.length)
        self.gpu.launch(self.gpu.stream, kernel, *scalars, numbers, np.int32(len(indices)), overlap=False)
        self.gpu.stream.sync()
        numbers.close()


def check_visible(siblings: Sequence[Row], history: int) -> None:
    """Rows of one sequence see themselves, no position twice, none that is history or lies ahead.

    Raises:
        ValueError: one does not.
    """
    for index, row in enumerate(siblings):
        if row.visible >> len(siblings) or not row.visible >> index & 1:
            raise ValueError(f"row {index} of sequence {row.sequence}: its visibility bits are wrong")
        seen = [other.position for bit, other in enumerate(siblings) if row.visible >> bit & 1]
        if len(set(seen)) != len(seen) or min(seen) < history or max(seen) > row.position:
            raise ValueError(f"row {index} of sequence {row.sequence} sees positions that it must not")
