"""The CUDA backend: see :class:`bitmtp.backends.base.Backend`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from bitmtp.backends.base import MAX_WIDTH, Head, Output, Ran, Row, Workload, prefill_by_steps
from bitmtp.backends.cuda.atlas import Atlas, capacity_class, capacity_classes
from bitmtp.backends.cuda.attention import AttentionShape, move_kernel
from bitmtp.backends.cuda.device import Gpu, Launch, Launches
from bitmtp.backends.cuda.layout import OUTPUT, TOP
from bitmtp.backends.cuda.network import WIDTHS, Network, PassShape, width_class
from bitmtp.backends.cuda.resident import Flight, ResidentLoop, choice_of
from bitmtp.backends.cuda.state import PassWriter, greedy, plain
from bitmtp.backends.cuda.store import Range, Store
from bitmtp.backends.weights import DraftHead
from bitmtp.checkpoint import Checkpoint
from bitmtp.core import _core
from bitmtp.errors import BackendError
from bitmtp.sampling import GREEDY, Choice

_REPLAYS = 3  # of a pass that is timed
_GREEDY = -1  # as a choice's number


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
        graph_replays: graphs launched so far; those of a resident loop run many passes each.

    Raises:
        BackendError: no usable GPU, not enough memory, or a model that this backend does not support.
    """

    name = "cuda"

    def __init__(
        self, checkpoint: Checkpoint, context: int | None = None, draft_head: DraftHead = DraftHead.EXACT
    ) -> None:
        self.config = checkpoint.config
        if self.config.layouts:
            raise BackendError("the cuda backend runs ternary layers only, this model has others; use --backend cpu")
        if self.config.drafter == "medusa":
            raise BackendError("the cuda backend does not run Medusa heads; use --backend cpu")
        self.context = context or self.config.max_position
        self.gpu = Gpu()
        self.network = Network(self.gpu, checkpoint, self.context, draft_head)
        self._stores = Store(self.gpu, self.config, self.context + MAX_WIDTH)
        self._writer = PassWriter(self.gpu)
        self._outputs = self.gpu.pinned(OUTPUT, (MAX_WIDTH,))
        self.atlas: Atlas[PassShape] = Atlas(self.gpu, self._record)
        self._resident = ResidentLoop(self.gpu, self.network, self.context)
        self._sequences: dict[int, SequenceState] = {}
        self._touched: list[SequenceState] = []
        self._next = 0
        self.graph_replays = 0
        self.shape: PassShape | None = None  # of the last pass
        self.prepare(Workload())

    def prepare(self, workload: Workload) -> None:
        """Capture every graph that such texts may need; those of an earlier call cost nothing."""
        self.gpu.enter()
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
        self.gpu.enter()
        return self._add(SequenceState(self._stores.open()))

    def _add(self, sequence: SequenceState) -> int:
        self._next += 1
        self._sequences[self._next] = sequence
        return self._next

    def sequence(self, handle: int) -> SequenceState:
        """What is behind a handle."""
        self.gpu.enter()
        if handle not in self._sequences:
            raise ValueError(f"sequence {handle} is not open")
        return self._sequences[handle]

    def close(self, sequence: int) -> None:
        """Give its memory back."""
        self.settle()
        state = self.sequence(sequence)
        self.gpu.stream.sync()
        self._stores.close(state.store)
        del self._sequences[sequence]

    def length(self, sequence: int) -> int:
        """How many positions are materialized."""
        self.settle()
        return self.sequence(sequence).length

    def truncate(self, sequence: int, length: int) -> None:
        """Forget every position from ``length`` on."""
        self.settle()
        state = self.sequence(sequence)
        if not 0 <= length <= state.length:
            raise ValueError(f"cannot truncate {state.length} positions to {length}")
        state.length, state.rows = length, []

    def fork(self, sequence: int, length: int) -> int:
        """A new sequence that begins with a copy of the first ``length`` positions."""
        self.settle()
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
        self.settle()
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
        self.graph_replays += 1
        self.atlas.launch(shape)
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

    def launches(self, shape: PassShape) -> list[Launch]:
        """The launches of a pass, one by one."""
        launches = Launches()
        self.network.record(launches, shape)
        return launches.made

    # Loops

    def can_run(self, texts: Sequence[_core.Text]) -> bool:
        """Whether the card goes on with these texts by itself: a single one that is begun and drafts chains, without
        penalties, grammar or log-probabilities. The graphs are captured before such a text begins."""
        if len(texts) != 1:
            return False
        self.gpu.enter()
        text, flight = texts[0], self._resident.flight
        if flight is not None and flight.text is text:
            return True
        if text.guarded or text.traced or text.top >= 0 or text.penalised or text.shaped or text.wants_windows:
            return False
        self._resident.prepare(text, not plain(choice_of(text)))
        return text.begun and not text.drafted and not text.status

    def run(self, batch: _core.Batch, texts: Sequence[_core.Text], prompt_rows: int, milliseconds: float) -> Ran:  # noqa: ARG002
        """A text's loop on the card; see :class:`bitmtp.backends.base.LoopBackend`. It goes on when this returns."""
        text = texts[0]
        before = self._resident.launched
        if self._resident.flight is None or self._resident.flight.text is not text:
            self.settle()
            self._take_off(text)
        self._resident.follow()
        self.graph_replays += self._resident.launched - before
        return Ran((), (0,))

    def _take_off(self, text: _core.Text) -> None:
        state, choice = self.sequence(text.sequence), choice_of(text)
        row = Row(text.sequence, text.tokens[-1], state.length, 1, choice=choice)
        filtered = self._writer.write([row], {text.sequence: [0]}, self._sequences, 0)
        self.gpu.copy_to_device(self.gpu.stream, self.network.buffers.state, self._writer.pinned)
        self.gpu.stream.sync()

        def ended() -> None:
            state.length, state.rows = text.materialized, []

        number = _GREEDY if greedy(choice) else 0
        reserve = partial(self.reserve, text.sequence)
        self._resident.begin(Flight(text, text.costs, filtered, number, reserve, ended))

    def settle(self) -> None:
        """End a loop that runs, with its iteration; everything that needs another pass, or K/V, calls it."""
        self._resident.settle()

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
            if row.token < 0 or row.window or row.bits != seen or row.position != state.length + place:
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
    return all(row.position == history + index and row.bits == (2 << index) - 1 for index, row in enumerate(siblings))


def check_visible(siblings: Sequence[Row], history: int) -> None:
    """Rows of one sequence see themselves, no position twice, none that is history or lies ahead.

    Raises:
        ValueError: one does not.
    """
    for index, row in enumerate(siblings):
        if row.bits >> len(siblings) or not row.bits >> index & 1:
            raise ValueError(f"row {index} of sequence {row.sequence}: its visibility bits are wrong")
        seen = [other.position for bit, other in enumerate(siblings) if row.bits >> bit & 1]
        if len(set(seen)) != len(seen) or min(seen) < history or max(seen) > row.position:
            raise ValueError(f"row {index} of sequence {row.sequence} sees positions that it must not")
