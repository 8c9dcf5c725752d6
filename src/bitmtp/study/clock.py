"""Time by kind of pass: a backend that asks another one and looks at the clock."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

from bitmtp.backends.base import Backend, Output, ResidentBackend, ResidentResult, ResidentText, Row
from bitmtp.sampling import GREEDY, Choice

STAGES = ("prefill", "draft", "exact")  # exact: passes without masks, that is verification or one token a pass


class Clock:
    """A backend with a clock, for one whose passes the host can time.

    Attributes:
        milliseconds: spent in each of :data:`STAGES` since :meth:`reset`.
    """

    def __init__(self, backend: Backend) -> None:
        self.name, self.config = backend.name, backend.config
        self._backend = backend
        self.milliseconds = dict.fromkeys(STAGES, 0.0)

    def reset(self) -> None:
        """Begin at 0."""
        self.milliseconds = dict.fromkeys(STAGES, 0.0)

    def _add(self, stage: str, begun: float) -> None:
        self.milliseconds[stage] += (time.perf_counter() - begun) * 1e3

    def describe(self) -> dict[str, str]:
        """As the backend."""
        return self._backend.describe()

    def open(self) -> int:
        """As the backend."""
        return self._backend.open()

    def close(self, sequence: int) -> None:
        """As the backend."""
        self._backend.close(sequence)

    def length(self, sequence: int) -> int:
        """As the backend."""
        return self._backend.length(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """As the backend."""
        self._backend.truncate(sequence, length)

    def fork(self, sequence: int, length: int) -> int:
        """As the backend."""
        return self._backend.fork(sequence, length)

    def prefill(self, sequence: int, tokens: Sequence[int], choice: Choice = GREEDY) -> Output:
        """As the backend; timed."""
        begun = time.perf_counter()
        output = self._backend.prefill(sequence, tokens, choice)
        self._add("prefill", begun)
        return output

    def step(self, rows: Sequence[Row], *, top: int = 0, logits: bool = False) -> list[Output | None]:
        """As the backend; timed."""
        begun = time.perf_counter()
        outputs = self._backend.step(rows, top=top, logits=logits)
        self._add("draft" if any(row.token < 0 for row in rows) else "exact", begun)
        return outputs

    def materialize(self, sequence: int, indices: Sequence[int]) -> None:
        """As the backend."""
        self._backend.materialize(sequence, indices)

    def can_reside(self, text: ResidentText) -> bool:
        """As the backend."""
        return isinstance(self._backend, ResidentBackend) and self._backend.can_reside(text)

    def decode_resident(
        self, sequence: int, text: ResidentText, result: ResidentResult
    ) -> Generator[list[tuple[int, str]], None, None]:
        """As the backend, which tells the time itself."""
        assert isinstance(self._backend, ResidentBackend)
        try:
            yield from self._backend.decode_resident(sequence, text, result)
        finally:
            self.milliseconds["draft"] += result.draft_ms
            self.milliseconds["exact"] += result.exact_ms
