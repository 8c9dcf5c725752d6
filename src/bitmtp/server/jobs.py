"""What goes to the scheduler and what comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bitmtp.core.stats import Stats
from bitmtp.core.text import Grammar, Logprobs, Source
from bitmtp.engine import Chunk, Request, Result
from bitmtp.server.errors import ApiError


@dataclass(frozen=True, slots=True)
class Piece:
    """A committed token, the text it settled (possibly none), and its log-probabilities if asked for."""

    id: int
    text: str
    source: Source
    logprobs: Logprobs | None = None

    @classmethod
    def of(cls, chunk: Chunk) -> Piece:
        """From a chunk of the engine."""
        token = chunk.token
        return cls(token.id, chunk.text, token.source, token.logprobs)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A token that a pass checked.

    Attributes:
        after: number of the proposal that it follows; -1: it follows the text.
    """

    id: int
    after: int


@dataclass(frozen=True, slots=True)
class Update:
    """News of a job: what one pass committed; at the end the result, or what went wrong.

    Attributes:
        read: log-probabilities of the prompt's tokens but the first, if the job wants them: before any piece.
        checked: the proposals of the pass, if the job wants a trace.
        at: when the pass was over, on the clock of ``time.monotonic``.
        stats: counts behind the result's figures.
        cached: prompt tokens that were not run because another text began alike.
    """

    pieces: tuple[Piece, ...] = ()
    read: tuple[Logprobs, ...] = ()
    checked: tuple[Proposal, ...] = ()
    at: float = field(default_factory=time.monotonic)
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
        scored: log-probabilities of the prompt are wanted too.
        grammar: restricts the text.
        trace: tell of proposals as well.
    """

    request: Request
    ids: list[int]
    listen: Callable[[Update], None]
    deadline: float
    top: int | None = None
    scored: bool = False
    grammar: Grammar | None = None
    trace: bool = False
    cancelled: bool = False
    key: NDArray[np.int32] = field(init=False)
    submitted: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.key = np.array(self.ids, np.int32)

    @property
    def reusable(self) -> int:
        """How much of the prompt need not be run if its K/V are there. The last token's output is the first token."""
        return 0 if self.scored else len(self.ids) - 1
