"""The oracle: ``docs/numerics.md`` in plain NumPy, one row at a time where order matters. Slow on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bitmtp.backends.base import MAX_WIDTH, Head, Output, Row, prefill_by_steps
from bitmtp.backends.weights import DraftHead, dequantise_rows, head_copy, head_name, integers, rope_table
from bitmtp.checkpoint import Checkpoint, linear_shapes
from bitmtp.numerics import Float32, blocked_sum, dot_chain, exp, fold, lane_sum, log, norm
from bitmtp.sampling import GREEDY, Choice, choose
from bitmtp.ternary import quantise_rows, unpack

PIECE = 256
CANDIDATES = 16
_F = np.float32


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Integer weights ``[out, in]`` (kept in float64, where their products are exact), scales and maybe minimums.

    ``activation_group`` inputs share a step of the quantised row; 0: all of them do.
    """

    weights: NDArray[np.float64]
    scale: Float32
    minimum: Float32 | None = None
    bias: Float32 | None = None
    activation_group: int = 0

    def product(self, rows: Float32) -> Float32:
        inputs = rows.shape[1]
        step_groups = inputs // self.activation_group if self.activation_group else 1
        scale_last = self.scale.ndim == 1 and self.minimum is None
        groups = max(step_groups, self.scale.shape[1] if self.scale.ndim == 2 else 1)
        levels, step = quantise_rows(rows.reshape(len(rows) * step_groups, -1))
        cells = levels.astype(np.float64).reshape(len(rows), groups, -1)
        terms = self._group_sums(cells)
        if not scale_last:
            terms = terms * self._by_group(self.scale, groups)
        if self.minimum is not None:
            totals = cells.sum(axis=2).astype(np.float32)
            terms = terms + totals.T[:, :, None] * self._by_group(self.minimum, groups)
        if self.activation_group:
            steps = np.repeat(step.reshape(len(rows), step_groups), groups // step_groups, axis=1)
            terms = terms * steps.T[:, :, None]
        y = fold(terms)
        if scale_last:
            y = y * self.scale
        if not self.activation_group:
            y = y * step
        return y if self.bias is None else y + self.bias

    def _by_group(self, factors: Float32, groups: int) -> Float32:
        """``[out]`` or ``[out, in / g]`` for each of more groups: ``[groups, 1, out]``."""
        columns = factors.reshape(len(factors), -1)
        return np.repeat(columns, groups // columns.shape[1], axis=1).T[:, None, :]

    def _group_sums(self, cells: NDArray[np.float64]) -> Float32:
        """``[groups, rows, out]``: exact sums of levels times weights over the inputs of each group."""
        weights = self.weights.reshape(len(self.weights), *cells.shape[1:])
        sums: Float32 = np.einsum("ngi,ogi->gno", cells, weights, optimize=True).astype(np.float32)
        return sums


@dataclass(slots=True)
class _Store:
    """K/V of one sequence, ``[layers, kv_heads, positions, head_dim]``; ``length`` positions are history."""

    keys: Float32
    values: Float32
    length: int = 0
    rows: list[Row] = field(default_factory=list)  # of the last pass, at slots length, length + 1, …


class ReferenceBackend:
    """The NumPy backend; see :class:`bitmtp.backends.base.Backend`."""

    name = "reference"

    def __init__(
        self, checkpoint: Checkpoint, context: int | None = None, draft_head: DraftHead = DraftHead.EXACT
    ) -> None:
        self.config = checkpoint.config
        self._checkpoint = checkpoint
        self._activation_group = self.config.group_size if self.config.activation_scale == "group" else 0
        self._layers = [self._layer(index) for index in range(self.config.num_layers)]
        self._cos, self._sin = rope_table(self.config, context or self.config.max_position)
        self._head_name = head_name(self.config)
        exact = self._head_matrix()
        self._head = {Head.EXACT: exact, Head.DRAFT: self._copied_head(draft_head) or exact}
        self._stores: dict[int, _Store] = {}
        self._next = 0

    def _tensor(self, name: str) -> Float32:
        return np.asarray(self._checkpoint.tensors[name])

    def _layer(self, index: int) -> dict[str, _Matrix]:
        return {name: self._matrix(f"layers.{index}.{name}") for name in linear_shapes(self.config)}

    def _matrix(self, module: str) -> _Matrix:
        tensors = self._checkpoint.tensors
        minimum, bias = (tensors.get(f"{module}.{part}") for part in ("minimum", "bias"))
        weights = integers(self._checkpoint, module).astype(np.float64)
        return _Matrix(weights, tensors[f"{module}.scale"], minimum, bias, self._activation_group)

    def _head_matrix(self) -> _Matrix | None:
        return None if self.config.embedding_bits == 16 else self._matrix(self._head_name)

    def _copied_head(self, kind: DraftHead) -> _Matrix | None:
        copy = head_copy(self._checkpoint, kind)
        if copy is None:
            return None
        levels = unpack(copy.weight, copy.bits).astype(np.float64)
        return _Matrix(levels, copy.scale, activation_group=self._activation_group)

    def describe(self) -> dict[str, str]:
        """What runs."""
        return {"kernels": "NumPy", "threads": "1"}

    # Sequences

    def open(self) -> int:
        """A new, empty sequence."""
        shape = (self.config.num_layers, self.config.num_kv_heads, 0, self.config.head_dim)
        return self._add(_Store(np.zeros(shape, np.float32), np.zeros(shape, np.float32)))

    def _add(self, store: _Store) -> int:
        self._next += 1
        self._stores[self._next] = store
        return self._next

    def _store(self, sequence: int) -> _Store:
        if sequence not in self._stores:
            raise ValueError(f"sequence {sequence} is not open")
        return self._stores[sequence]

    def close(self, sequence: int) -> None:
        """Give its memory back."""
        self._store(sequence)
        del self._stores[sequence]

    def length(self, sequence: int) -> int:
        """How many positions are materialized."""
        return self._store(sequence).length

    def truncate(self, sequence: int, length: int) -> None:
        """Forget every position from ``length`` on."""
        store = self._store(sequence)
        if not 0 <= length <= store.length:
            raise ValueError(f"cannot truncate {store.length} positions to {length}")
        store.length, store.rows = length, []

    def fork(self, sequence: int, length: int) -> int:
        """A new sequence that shares the first ``length`` positions."""
        store = self._store(sequence)
        if not 0 <= length <= store.length:
            raise ValueError(f"cannot fork {length} of {store.length} positions")
        return self._add(_Store(store.keys[:, :, :length].copy(), store.values[:, :, :length].copy(), length))

    def prefill(self, sequence: int, tokens: Sequence[int], choice: Choice = GREEDY) -> Output:
        """Materialize tokens and return the output of the last one."""
        return prefill_by_steps(self, sequence, tokens, choice)

    def materialize(self, sequence: int, indices: Sequence[int]) -> None:
        """Append rows of the last pass to the history, in this order."""
        store, seen = self._store(sequence), list[int]()
        for place, index in enumerate(indices):
            if not 0 <= index < len(store.rows):
                raise ValueError(f"row {index} was not in the last pass of sequence {sequence}")
            row, seen = store.rows[index], sorted([*seen, index])
            if row.token < 0 or row.window or row.sees != seen or row.position != store.length + place:
                raise ValueError(f"row {index} does not continue the history of sequence {sequence}")
        slots = [store.length + index for index in indices]
        keep = [*range(store.length), *slots]
        store.keys, store.values = store.keys[:, :, keep], store.values[:, :, keep]
        store.length, store.rows = len(keep), []

    # The pass

    def step(self, rows: Sequence[Row], *, top: int = 0, logits: bool = False) -> list[Output | None]:
        """One pass over 1 … 64 rows."""
        if not 1 <= len(rows) <= MAX_WIDTH:
            raise ValueError(f"a pass has 1 to {MAX_WIDTH} rows, not {len(rows)}")
        self._begin(rows)
        final = self._hidden(rows)
        outputs: list[Output | None] = [None] * len(rows)
        # A mask's parent stands before it in the text, wherever it stands in the pass.
        for index in sorted(range(len(rows)), key=lambda i: rows[i].position):
            row = rows[index]
            parent = self._parent(rows, outputs, index) if self.config.chain_rank and row.token < 0 else None
            outputs[index] = self._output(row, final[index], parent, top, logits) if row.head else None
        return outputs

    def _hidden(self, rows: Sequence[Row]) -> list[Float32]:
        """Final-normed rows; those of Medusa heads pass through no layer."""
        medusa, slots = self.config.drafter == "medusa", self._slots(rows)
        through = [index for index, row in enumerate(rows) if row.token >= 0 or not medusa]
        passing, places = [rows[index] for index in through], [slots[index] for index in through]
        x = np.stack([self._embed(row.token) for row in passing])
        for index, layer in enumerate(self._layers):
            x = self._attend(x, passing, places, index, layer)
            x = self._feed_forward(x, index, layer)
        normed = dict(zip(through, norm(x, self._tensor("norm.weight"), self.config.norm_eps), strict=True))
        return [normed[index] if index in normed else self._guess(rows, normed, index) for index in range(len(rows))]

    def _guess(self, rows: Sequence[Row], normed: dict[int, Float32], index: int) -> Float32:
        """A mask row of a Medusa head, from its anchor's."""
        depth = -rows[index].token
        anchor = self._seen_at(rows, index, rows[index].position - depth)
        assert anchor is not None
        weight = self._tensor(f"medusa.{depth - 1}.weight").astype(np.float32)
        return normed[anchor] + _silu(lane_sum(weight * normed[anchor]) + self._tensor(f"medusa.{depth - 1}.bias"))

    def _slots(self, rows: Sequence[Row]) -> list[int]:
        """Where each row's K/V goes, behind its sequence's history."""
        next_slot = {row.sequence: self._stores[row.sequence].length for row in rows}
        slots = []
        for row in rows:
            slots.append(next_slot[row.sequence])
            next_slot[row.sequence] += 1
        return slots

    def _begin(self, rows: Sequence[Row]) -> None:
        """Check the whole pass, then note its rows and make room for their K/V."""
        for store in self._stores.values():
            store.rows = []
        own: dict[int, list[Row]] = {}
        for row in rows:
            self._store(row.sequence)
            own.setdefault(row.sequence, []).append(row)
            if not 0 <= row.position < len(self._cos):
                raise ValueError(f"position {row.position} is outside the context of {len(self._cos)}")
            if not 1 - self.config.block_size <= row.token < self.config.vocab_size:
                raise ValueError(f"token {row.token} is neither in the vocabulary nor a mask of this model")
        for sequence, siblings in own.items():
            for index in range(len(siblings)):
                _check_visible(siblings, index, self._stores[sequence].length)
                if self.config.drafter == "medusa":
                    _check_anchor(siblings, index)
        for sequence, siblings in own.items():
            store = self._stores[sequence]
            store.rows = siblings
            missing = max(store.length + len(siblings) - store.keys.shape[2], 0)
            grow = ((0, 0), (0, 0), (0, missing), (0, 0))
            store.keys, store.values = np.pad(store.keys, grow), np.pad(store.values, grow)

    def _embed(self, token: int) -> Float32:
        if token < 0:
            row: Float32 = self._tensor("mask_embedding.weight")[-token - 1]
        else:
            row = dequantise_rows(self._checkpoint, "embedding", np.array([token], np.int32))[0]
        return row

    def _attend(
        self, x: Float32, rows: Sequence[Row], slots: Sequence[int], index: int, layer: dict[str, _Matrix]
    ) -> Float32:
        config, prefix = self.config, f"layers.{index}."
        h = norm(x, self._tensor(f"{prefix}attention_norm.weight"), config.norm_eps)
        q, k, v = (self._heads(layer[f"attention.{name}"].product(h)) for name in "qkv")
        if config.qk_norm:
            q = norm(q, self._tensor(f"{prefix}attention.q_norm.weight"), config.norm_eps)
            k = norm(k, self._tensor(f"{prefix}attention.k_norm.weight"), config.norm_eps)
        positions = [row.position for row in rows]
        q = self._rope(q, positions) * (_F(1) / np.sqrt(_F(config.head_dim)))
        k = self._rope(k, positions)
        kept = np.dtype(config.kv_type)
        k, v = k.astype(kept).astype(np.float32), v.astype(kept).astype(np.float32)
        for row, slot, key, value in zip(rows, slots, k, v, strict=True):
            store = self._stores[row.sequence]
            store.keys[index, :, slot], store.values[index, :, slot] = key, value
        attended = self._attention(rows, q, index).reshape(len(rows), -1)
        if config.sub_norm:
            attended = norm(attended, self._tensor(f"{prefix}attention.sub_norm.weight"), config.norm_eps)
        return x + layer["attention.o"].product(attended)

    def _heads(self, x: Float32) -> Float32:
        return x.reshape(len(x), -1, self.config.head_dim)

    def _rope(self, x: Float32, positions: list[int]) -> Float32:
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _attention(self, rows: Sequence[Row], q: Float32, layer: int) -> Float32:
        """``[rows, heads, head_dim]`` → the same: softmax over the visible positions, in pieces of 256."""
        keys, values, seen = self._by_position(rows, layer)
        scores = dot_chain(np.moveaxis(q[:, :, None], -1, 0), np.moveaxis(keys, -1, 0))
        scores = np.where(seen[:, None], scores, _F(-np.inf))
        whole = _Softmax.nothing(q.shape)
        for start in range(0, seen.shape[1], PIECE):
            piece = slice(start, start + PIECE)
            whole = _merge(
                whole, _piece(scores[:, :, piece], values[:, :, piece]), np.logical_or.reduce(seen[:, piece], axis=1)
            )
        return whole.values / whole.weight[..., None]

    def _by_position(self, rows: Sequence[Row], layer: int) -> tuple[Float32, Float32, NDArray[np.bool_]]:
        """Keys and values ``[rows, heads, positions, head_dim]`` that rows see, zeros elsewhere; and which."""
        config = self.config
        shape = (len(rows), config.num_kv_heads, max(row.position for row in rows) + 1, config.head_dim)
        keys, values, seen = np.zeros(shape, np.float32), np.zeros(shape, np.float32), np.zeros(shape[::2], np.bool_)
        for index, row in enumerate(rows):
            store = self._stores[row.sequence]
            slots = _visible_slots(row, store)
            positions = list(slots)
            keys[index][:, positions] = store.keys[layer][:, list(slots.values())]
            values[index][:, positions] = store.values[layer][:, list(slots.values())]
            seen[index, positions] = True
        group = config.num_heads // config.num_kv_heads
        return np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1), seen

    def _feed_forward(self, x: Float32, index: int, layer: dict[str, _Matrix]) -> Float32:
        config, prefix = self.config, f"layers.{index}."
        h = norm(x, self._tensor(f"{prefix}mlp_norm.weight"), config.norm_eps)
        gate, up = layer["mlp.gate"].product(h), layer["mlp.up"].product(h)
        if config.activation == "silu":
            inner = _silu(gate) * up
        else:
            positive = np.maximum(gate, _F(0))
            inner = (positive * positive) * up
        if config.sub_norm:
            inner = norm(inner, self._tensor(f"{prefix}mlp.sub_norm.weight"), config.norm_eps)
        return x + layer["mlp.down"].product(inner)

    # Heads

    def _logits(self, hidden: Float32, head: Head) -> Float32:
        matrix = self._head[head]
        if matrix is not None:
            logits: Float32 = matrix.product(hidden[None])[0]
            return logits
        return lane_sum(self._tensor(f"{self._head_name}.weight").astype(np.float32) * hidden)

    def _parent(self, rows: Sequence[Row], outputs: list[Output | None], index: int) -> int | None:
        """Token chosen by the row this mask continues, if that row has a head."""
        place = self._seen_at(rows, index, rows[index].position - 1)
        parent = None if place is None else outputs[place]
        return None if parent is None else parent.token

    def _seen_at(self, rows: Sequence[Row], index: int, position: int) -> int | None:
        """Place in the pass of the row that this one sees at a position."""
        row = rows[index]
        own = [place for place, other in enumerate(rows) if other.sequence == row.sequence]
        return next((own[i] for i in row.sees if rows[own[i]].position == position), None)

    def _output(self, row: Row, hidden: Float32, parent: int | None, top: int, want: bool) -> Output:
        raw = self._logits(hidden, row.head)
        largest = raw.max()
        e = exp(raw - largest)
        z = blocked_sum(e)
        entropy = log(np.array([z]))[0] - blocked_sum(e * (raw - largest)) / z
        ids = np.arange(len(raw), dtype=np.int32)
        order = np.lexsort((ids, -raw))
        if parent is None:
            token = choose(ids, raw, row.choice, row.position + 1)
            probability, best = e[token] / z, order[:top]
            alternatives = [(int(i), float(raw[i])) for i in best]
        else:
            candidates = order[:CANDIDATES].astype(np.int32)
            scored = raw[candidates] + self._chain(hidden, parent, candidates)
            place = choose(candidates, scored, row.choice, row.position + 1)
            own = exp(scored - scored.max())
            share = lane_sum(e[candidates]) / z
            token, probability = int(candidates[place]), (own[place] / lane_sum(own)) * share
            rescored = [(int(candidates[i]), float(scored[i])) for i in np.lexsort((candidates, -scored))]
            alternatives = (rescored + [(int(i), float(raw[i])) for i in order[CANDIDATES:]])[:top]
        return Output(token, float(probability), float(entropy), tuple(alternatives), raw if want else None)

    def _chain(self, hidden: Float32, parent: int, candidates: NDArray[np.int32]) -> Float32:
        """What the chain adds to the candidates' logits once the proposal before them is ``parent``."""
        size = self.config.hidden_size
        before = norm(self._embed(parent), np.ones(size, np.float32), self.config.norm_eps)
        a, b = self._tensor("chain.hidden.weight"), self._tensor("chain.output.weight")
        inner = _silu(lane_sum(a[:, :size] * hidden) + lane_sum(a[:, size:] * before))
        shift = lane_sum(b * inner)
        return lane_sum(shift * dequantise_rows(self._checkpoint, self._head_name, candidates))


def _check_visible(siblings: Sequence[Row], index: int, history: int) -> None:
    row = siblings[index]
    if row.since < 0 or index not in row.sees or row.sees[-1] >= len(siblings):
        raise ValueError(f"row {index} of sequence {row.sequence}: its visibility bits are wrong")
    seen = [siblings[i].position for i in row.sees]
    if len(set(seen)) != len(seen) or min(seen) < history or max(seen) > row.position:
        raise ValueError(f"row {index} of sequence {row.sequence} sees positions that it must not")


def _check_anchor(siblings: Sequence[Row], index: int) -> None:
    """Rows of Medusa heads are made of their anchor's last row, and have no K/V that another row could see."""
    row, seen = siblings[index], [siblings[i] for i in siblings[index].sees]
    if row.token >= 0:
        fits = all(other.token >= 0 for other in seen)
    else:
        fits = any(other.token >= 0 and other.position == row.position + row.token for other in seen)
    if not fits:
        what = "sees a mask, which has no keys" if row.token >= 0 else "is a mask that does not see its anchor"
        raise ValueError(f"row {index} of sequence {row.sequence} {what}")


def _silu(x: Float32) -> Float32:
    result: Float32 = x / (_F(1) + exp(-x))
    return result


def _visible_slots(row: Row, store: _Store) -> dict[int, int]:
    """Visible position → slot in the store, positions ascending."""
    history = range(store.length)
    if row.window:
        first_recent = row.position - row.window.recent
        history = [p for p in history if p < row.window.sinks or p > first_recent]  # type: ignore[assignment]
    slots = {position: position for position in history}
    for index in sorted(row.sees, key=lambda i: store.rows[i].position):
        slots[store.rows[index].position] = store.length + index
    return slots


@dataclass(frozen=True, slots=True)
class _Softmax:
    """A softmax not yet divided: maximum, sum of weights ``[rows, heads]``; weighted values ``[rows, heads, dim]``."""

    largest: Float32
    weight: Float32
    values: Float32

    @classmethod
    def nothing(cls, shape: tuple[int, ...]) -> _Softmax:
        zeros = np.zeros(shape[:2], np.float32)
        return cls(np.full_like(zeros, -np.inf), zeros, np.zeros(shape, np.float32))


def _piece(scores: Float32, values: Float32) -> _Softmax:
    """One piece; ``scores [rows, heads, positions]`` are -inf where a row sees nothing."""
    largest = scores.max(axis=-1)
    e = exp(scores - np.where(np.isinf(largest), _F(0), largest)[..., None])
    lanes = np.zeros((*e.shape[:2], PIECE), np.float32)
    lanes[..., : e.shape[-1]] = e
    return _Softmax(largest, lane_sum(lanes), dot_chain(np.moveaxis(e[..., None], 2, 0), np.moveaxis(values, 2, 0)))


def _merge(whole: _Softmax, piece: _Softmax, sees: NDArray[np.bool_]) -> _Softmax:
    """Add a piece to those before it, for the rows that see some of it; a row's first piece is taken as it is."""
    first = np.isinf(whole.largest)
    largest = np.maximum(whole.largest, piece.largest)
    safe = np.where(np.isinf(largest), _F(0), largest)
    keep, add = exp(whole.largest - safe), exp(piece.largest - safe)
    weight = np.where(first, piece.weight, whole.weight * keep + piece.weight * add)
    values = np.where(first[..., None], piece.values, whole.values * keep[..., None] + piece.values * add[..., None])
    rows = sees[:, None]
    return _Softmax(
        np.where(rows, largest, whole.largest),
        np.where(rows, weight, whole.weight),
        np.where(rows[..., None], values, whole.values),
    )
