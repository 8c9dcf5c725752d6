"""The CPU backend: one call into C++ runs a whole pass, or many of them, on all threads with the GIL released."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from bitmtp.backends.base import MAX_WIDTH, Output, Ran, Row, prefill_by_steps
from bitmtp.backends.weights import rope_table
from bitmtp.checkpoint import Checkpoint
from bitmtp.errors import BackendError
from bitmtp.sampling import GREEDY, Choice

_PLAIN = -1  # index of a choice that needs no parameters: the largest logit


def _load_native() -> Any:
    try:
        importlib.import_module("bitmtp.core._core")  # whose texts it takes
        return importlib.import_module("bitmtp.backends.cpu._native")
    except ImportError as error:
        hint = "run `pip install .` with a C++20 compiler"
        raise BackendError(f"the CPU kernels are not built ({error}); {hint}") from None


def available_threads() -> int:
    """Processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class CpuBackend:
    """C++ kernels for x86-64 and arm64; see :class:`bitmtp.backends.base.Backend`.

    Args:
        checkpoint: the model; its tensors are repacked, not kept.
        context: positions a sequence may have; the model's own limit if not given.
        threads: all processors of this process if not given.

    Raises:
        BackendError: the extension is not built, or the model or instruction set is not supported.
    """

    name = "cpu"

    def __init__(self, checkpoint: Checkpoint, context: int | None = None, threads: int | None = None) -> None:
        self.config = checkpoint.config
        cos, sin = rope_table(self.config, context or self.config.max_position)
        tensors = {name: np.ascontiguousarray(tensor) for name, tensor in checkpoint.tensors.items()}
        tensors |= {"rope.cos": cos, "rope.sin": sin}
        raw = {name: t.view(np.uint16) if t.dtype == np.float16 else t for name, t in tensors.items()}
        native = _load_native()
        try:
            self._model = native.Model(self.config, raw, threads or available_threads())
        except ValueError as error:
            raise BackendError(f"the CPU backend cannot run this model: {error}") from None

    def describe(self) -> dict[str, str]:
        """Instruction set, threads, bytes of weights and of K/V."""
        return {
            "kernels": self._model.isa,
            "threads": str(self._model.threads),
            "weight bytes": str(self._model.weight_bytes),
            "kv bytes": str(self._model.kv_bytes),
        }

    def open(self) -> int:
        """A new, empty sequence."""
        return int(self._model.open())

    def close(self, sequence: int) -> None:
        """Give its memory back."""
        self._model.close(sequence)

    def length(self, sequence: int) -> int:
        """How many positions are materialized."""
        return int(self._model.length(sequence))

    def truncate(self, sequence: int, length: int) -> None:
        """Forget every position from ``length`` on."""
        self._model.truncate(sequence, length)

    def fork(self, sequence: int, length: int) -> int:
        """A new sequence that shares the first ``length`` positions, memory included until one of them writes."""
        return int(self._model.fork(sequence, length))

    def prefill(self, sequence: int, tokens: Sequence[int], choice: Choice = GREEDY) -> Output:
        """Materialize tokens and return the output of the last one."""
        return prefill_by_steps(self, sequence, tokens, choice)

    def materialize(self, sequence: int, indices: Sequence[int]) -> None:
        """Append rows of the last pass to the history, in this order."""
        self._model.materialize(sequence, list(indices))

    def step(self, rows: Sequence[Row], *, top: int = 0, logits: bool = False) -> list[Output | None]:
        """One pass over 1 … 64 rows."""
        if not 1 <= len(rows) <= MAX_WIDTH:
            raise ValueError(f"a pass has 1 to {MAX_WIDTH} rows, not {len(rows)}")
        choices: list[tuple[Any, ...]] = []
        packed = [_row(row, choices) for row in rows]
        raw = np.empty((len(rows), self.config.vocab_size), np.float32) if logits else None
        results = self._model.step(packed, choices, top, raw)
        return [
            Output(token, probability, entropy, tuple(best), None if raw is None else raw[index]) if row.head else None
            for index, (row, (token, probability, entropy, best)) in enumerate(zip(rows, results, strict=True))
        ]

    def can_run(self, texts: Sequence[Any]) -> bool:
        """Whether the loop takes these texts: it takes all."""
        return bool(texts)

    def run(self, batch: Any, texts: Sequence[Any], prompt_rows: int, milliseconds: float) -> Ran:
        """Passes in C++; see :class:`bitmtp.backends.base.LoopBackend`."""
        widths, order, spent = self._model.run(batch, texts, MAX_WIDTH, prompt_rows, milliseconds)
        return Ran(widths, order, spent)

    def settle(self) -> None:
        """No loop goes on between two calls."""


def _row(row: Row, choices: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The fields of ``RowTuple`` in bindings.cpp; adds the row's choice to ``choices`` if it has parameters."""
    window = (row.window.sinks, row.window.recent) if row.window else None
    index = _PLAIN
    if row.choice is not GREEDY and row.head:
        index = len(choices)
        choices.append(_choice(row.choice))
    return (row.sequence, row.token, row.position, row.visible, row.since, int(row.head), window, index)


def _choice(choice: Choice) -> tuple[Any, ...]:
    """The fields of ``ChoiceTuple`` in bindings.cpp."""
    s = choice.sampling
    return (
        s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty,
        s.seed, s.choice, choice.seen, choice.counts, list(s.logit_bias), choice.allowed,
    )  # fmt: skip
