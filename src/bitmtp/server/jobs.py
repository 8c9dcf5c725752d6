"""What goes to the scheduler and what comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bitmtp.backends.base import Output
from bitmtp.decoding.decoder import Source
from bitmtp.decoding.state import Grammar
from bitmtp.decoding.stats import Stats
from bitmtp.engine import Chunk, Request, Result
from bitmtp.server.errors import ApiError


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities (nats) of a token and of the likeliest ones, of the exact head's raw distribution."""

    chosen: float
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, output: Output, top: int) -> Logprobs:
        """From an output with logits and at least ``top`` alternatives."""
        assert output.logits is not None
        logits = output.logits.astype(np.float64)
        largest = logits.max()
        total = largest + np.log(np.exp(logits - largest).sum())
        best = tuple((token, float(raw - total)) for token, raw in output.top[:top])
        return cls(float(logits[output.token] - total), best)


@dataclass(frozen=True, slots=True)
class Piece:
    """A committed token, the text it settled (possibly none), and its log-probabilities if asked for."""

    id: int
    text: str
    source: Source
    logprobs: Logprobs | None = None

    @classmethod
    def of(cls, chunk: Chunk, top: int | None) -> Piece:
        """From a chunk of the engine; ``top`` is None where no log-probabilities were asked for."""
        token = chunk.token
        logprobs = None if top is None or token.output is None else Logprobs.of(token.output, top)
        return cls(token.id, chunk.text, token.source, logprobs)


@dataclass(frozen=True, slots=True)
class Update:
    """News of a job: what one pass committed; at the end the result, or what went wrong.

    Attributes:
        stats: counts behind the result's figures.
        cached: prompt tokens that were not run because another text began alike.
    """

    pieces: tuple[Piece, ...] = ()
    result: Result | None = None
    stats: Stats = field(default_factory=Stats)
    error: ApiError | None = None
    cached: int = 0


@dataclass(eq=False, slots=True)
class Job:
    """One text to write.

    Attributes:
        ids: the prompt, checked by :meth:`Engine.encode`.
        listen: told of each update, on the scheduler's thread; must return at once.
        deadline: on the clock of ``time.monotonic``.
        top: alternatives per token for log-probabilities; None: none are wanted.
        grammar: restricts the text.
    """

    request: Request
    ids: list[int]
    listen: Callable[[Update], None]
    deadline: float
    top: int | None = None
    grammar: Grammar | None = None
    cancelled: bool = False
    key: NDArray[np.int32] = field(init=False)
    submitted: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.key = np.array(self.ids, np.int32)
