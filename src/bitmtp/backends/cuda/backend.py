"""The CUDA backend: see :class:`bitmtp.backends.base.Backend`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from bitmtp.backends.base import MAX_WIDTH, Head, Output, ResidentResult, ResidentText, Row, Workload, prefill_by_steps
from bitmtp.backends.cuda.atlas import Atlas, capacity_class, capacity_classes
from bitmtp.backends.cuda.attention import AttentionShape, move_kernel
from bitmtp.backends.cuda.device import Gpu, Launch, Launches
from bitmtp.backends.cuda.layout import OUTPUT, TOP
from bitmtp.backends.cuda.network import WIDTHS, Network, PassShape, width_class
from bitmtp.backends.cuda.resident import ResidentLoop, loop_shape
from bitmtp.backends.cuda.runtime import Runtime
from bitmtp.backends.cuda.state import PassWriter, plain
from bitmtp.backends.cuda.store import Range, Store
from bitmtp.backends.resident.layout import MAX_EOS
from bitmtp.backends.weights import DraftHead
from bitmtp.checkpoint import Checkpoint
from bitmtp.errors import BackendError
from bitmtp.sampling import GREEDY, Choice

_REPLAYS = 3  # of a pass that is timed


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

    Attributes:
        runtime: how much of the runtime takes part; may be changed between texts.
        graph_replays: graphs launched so far; those of a resident loop run many passes each.

    Raises:
        BackendError: no usable GPU, not enough memory, or a model that this backend does not support.
    """

    name = "cuda"

    def __init__(
        self, checkpoint: Checkpoint, context: int | None = None, draft_head: DraftHead = DraftHead.EXACT
    ) -> None:
        self.config = checkpoint.config
        if self.config.drafter == "medusa":
            raise BackendError("the cuda backend does not run Medusa heads; use --backend cpu")
        self.context = context or self.config.max_position
        self.gpu = Gpu()
        self.network = Network(self.gpu, checkpoint, self.context, draft_head)
        self._stores = Store(self.gpu, self.config, self.context + MAX_WIDTH)
        self._writer = PassWriter(self.gpu)
        self._outputs = self.gpu.pinned(OUTPUT, (MAX_WIDTH,))
        self.atlas: Atlas[PassShape] = Atlas(self.gpu, self._record)
        self._resident = ResidentLoop(self.gpu, self.network)
        self._sequences: dict[int, SequenceState] = {}
        self._touched: list[SequenceState] = []
        self._next = 0
        self.runtime = Runtime.RESIDENT
        self.graph_replays = 0
        self._launches: dict[PassShape, Launches] = {}  # of runtimes without graphs
        self.shape: PassShape | None = None  # of the last pass
        self.prepare(Workload())

    def prepare(self, workload: Workload) -> None:
        """Capture every graph that such texts may need; those of an earlier call cost nothing."""
        chained = self.config.chain_rank > 0
        kinds = list(product(*map(_may, (workload.several, workload.filtered, chained, workload.shaped))))
        shapes = []
        for capacity, width in product(capacity_classes(self.context + MAX_WIDTH), WIDTHS):
            for several, filtered, masks, shaped in kinds:
                if width > 1 or not (several or masks):
                    sequences = MAX_WIDTH if several else 1
                    shape = PassShape(width, capacity, sequences, filtered, masks, not shaped)
                    shapes += [replace(shape, heads=heads) for heads in self._heads(several, shaped)]
        if workload.shaped:
            shapes += [self._windowed(width, filtered) for width in WIDTHS[1:] for filtered in _may(workload.filtered)]
        self._capture([shape for shape in shapes if shape not in self.atlas])

    def _windowed(self, width: int, filtered: bool) -> PassShape:
        """A provisional draft of one text: the same behind any history, for it sees no more of a longer one."""
        capacity, masks = capacity_class(self.context + MAX_WIDTH), self.config.chain_rank > 0
        head = Head.EXACT if self.network.draft_head is None else Head.DRAFT
        return PassShape(width, capacity, 1, filtered, masks, linear=False, windowed=True, heads=(head,))

    def _capture(self, missing: Sequence[PassShape]) -> None:
        def record() -> None:
            for shape in missing:
                self.network.record(Launches(), shape)

        self.gpu.compile_ahead(record)
        for shape in missing:
            self.atlas.prepare(shape)

    def _heads(self, several: bool, shaped: bool) -> list[tuple[Head, ...]]:
        """Windows come with the draft head; several texts may have both in one pass."""
        if self.network.draft_head is None or not (shaped and several):
            return [(Head.EXACT,)]
        return [(Head.EXACT,), (Head.DRAFT,), (Head.DRAFT, Head.EXACT)]

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
        windowed, linear = self._writer.windowed, self._writer.linear
        capacity = capacity_class(self.context + MAX_WIDTH if windowed else longest)
        heads = self.network.heads(rows)
        shape = PassShape(width_class(len(rows)), capacity, sequences, filtered, masks, linear, windowed, heads)
        self.shape = shape
        self._run(shape)
        self.gpu.stream.sync()
        outputs: list[Output | None] = [None] * len(rows)
        for index, output in zip(order, self._read(len(rows), top, logits), strict=True):
            outputs[index] = output if rows[index].head else None
        return outputs

    def time_step(self, rows: Sequence[Row]) -> float:
        """Milliseconds of a pass on the card: what it costs where nothing waits for the host."""
        self.step(rows)
        shape = self.shape
        assert shape is not None
        return self.gpu.seconds(lambda: self.atlas.launch(shape), _REPLAYS) * 1e3

    @property
    def graphs_a_pass(self) -> int:
        """Graphs that the host launches for a pass that it runs by itself."""
        return int(self.runtime >= Runtime.GRAPHS)

    def _run(self, shape: PassShape) -> None:
        """Start the pass that the writer holds."""
        self.graph_replays += self.graphs_a_pass
        if self.graphs_a_pass:
            self.atlas.launch(shape)
            return
        self.gpu.copy_to_device(self.gpu.stream, self.network.buffers.state, self._writer.pinned)
        for launch in self.launches(shape):
            self.gpu.make(self.gpu.stream, launch)
        self.gpu.copy_to_host(self.gpu.stream, self._outputs, self.network.buffers.outputs)

    def launches(self, shape: PassShape) -> list[Launch]:
        """The launches of a pass, one by one, as the runtime would make them without graphs."""
        if self.runtime is Runtime.GENERIC:
            shape = replace(shape, width=WIDTHS[-1], masks=self.config.chain_rank > 0)
        if shape not in self._launches:
            self._launches[shape] = Launches()
            self.network.record(self._launches[shape], shape)
        return self._launches[shape].made

    def can_reside(self, text: ResidentText) -> bool:
        """Whether the resident loop takes this text; captures the graphs that it will need."""
        s = text.choice.sampling
        if self.runtime < (Runtime.ITERATION if text.adaptive is None else Runtime.RESIDENT):
            return False
        if s.penalised or text.choice.allowed is not None or len(text.eos_ids) > MAX_EOS:
            return False
        for capacity in self._resident.capacities(text):
            once = self.runtime is Runtime.ITERATION
            self._resident.atlas.prepare(loop_shape(text, capacity, not plain(text.choice), once))
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
            once = self.runtime is Runtime.ITERATION
            yield from self._resident.run(text, filtered, once, lambda n: self.reserve(sequence, n), result)
        finally:
            self.graph_replays += result.graph_replays
            state.length, state.rows = result.materialized, []

    def _begin(self, rows: Sequence[Row]) -> dict[int, list[int]]:
        """Check the whole pass, note its rows and make room for their K/V; row indices by sequence."""
        for state in self._touched:
            state.rows = []
        own: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            own.setdefault(row.sequence, []).append(index)
        siblings = {handle: [rows[index] for index in indices] for handle, indices in own.items()}
        for handle, each in siblings.items():
            self._check(each, self.sequence(handle).length)
        for handle, each in siblings.items():
            state = self._sequences[handle]
            self._stores.reserve(state.store, state.length + len(each))
            state.rows = each
        self._touched = [self._sequences[handle] for handle in own]
        return own

    def _check(self, siblings: Sequence[Row], history: int) -> None:
        """The rows of one sequence are rows of this model, and stand where they may."""
        last, lowest, vocabulary = (
            min(history + MAX_WIDTH, self.context),
            1 - self.config.block_size,
            self.config.vocab_size,
        )
        for row in siblings:
            if not history <= row.position < last:
                raise ValueError(f"position {row.position} is not close behind {history}, or outside {self.context}")
            if not lowest <= row.token < vocabulary:
                raise ValueError(f"token {row.token} is neither in the vocabulary nor a mask of this model")
        if not plainly_causal(siblings, history):
            check_visible(siblings, history)

    def _logits(self, width: int) -> Any:
        stride = self.network.logits_stride
        rows = self.gpu.read(self.network.buffers.logits, np.float32, (width, stride))
        return rows[:, : self.config.vocab_size]

    def _read(self, width: int, top: int, logits: bool) -> list[Output]:
        """The outputs of a pass that has run, in the order of its rows on the device."""
        records = self._outputs[:width]
        chosen = zip(*(records[name].tolist() for name in ("token", "probability", "entropy")), strict=True)
        if not top and not logits:
            return [Output(token, probability, entropy) for token, probability, entropy in chosen]
        raw = self._logits(width) if logits or top > TOP else [None] * width
        return [
            Output(token, probability, entropy, _best(record, own, top), own.copy() if logits else None)
            for (token, probability, entropy), record, own in zip(chosen, records, raw, strict=True)
        ]

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


def _best(record: Any, raw: Any, top: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens and their logits; those that the device does not report are looked for in ``raw``."""
    best = tuple(zip(record["top_ids"][:top].tolist(), record["top_logits"][:top].tolist(), strict=True))
    if top > TOP:
        known = {token for token, _ in best}
        order = np.lexsort((np.arange(len(raw)), -raw))
        best += tuple((int(i), float(raw[i])) for i in order if int(i) not in known)[: top - TOP]
    return best


def _may(happen: bool) -> tuple[bool, ...]:
    return (False, True) if happen else (False,)


def plainly_causal(siblings: Sequence[Row], history: int) -> bool:
    """Whether each stands right behind the one before it and sees all of them, as rows of a chain do."""
    return all(
        row.position == history + index and row.visible == (2 << index) - 1 for index, row in enumerate(siblings)
    )


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
