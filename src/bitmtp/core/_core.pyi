from collections.abc import Sequence
from typing import Any

TEXT_BYTES: int
RECORD_BYTES: int
COSTS_BYTES: int
MAX_NODES: int
MAX_RANKS: int
KNOTS: list[int]

def image_bytes(limit: int) -> int: ...

class Costs:
    def __init__(
        self,
        milliseconds: Sequence[float],
        per_position: tuple[float, float],
        history: int,
        learning: bool,
        known: Sequence[float],
        counts: Sequence[int],
        far: Sequence[tuple[float, float, float, int]] = (),
    ) -> None: ...
    def learn(self, width: int, history: int, milliseconds: float) -> None: ...
    def cost(self, width: int, history: int) -> float: ...
    def image(self) -> bytes: ...
    def load(self, record: bytes) -> None: ...
    row: float
    reach: int
    learning: int
    known: list[float]
    counts: list[int]
    far: list[tuple[float, float, float, int]]
    per_position: tuple[float, float]

class Batch:
    def __init__(self, costs: Costs) -> None: ...
    def plan(self, texts: Sequence[Text], width: int, prompt_rows: int) -> list[int]: ...
    def spend(self, committed: int, rows: int, texts: int, history: int, elapsed: float) -> None: ...
    price: float

class Text:
    def __init__(
        self,
        ids: Sequence[int],
        materialized: int,
        limit: int,
        eos: Sequence[int],
        policy: dict[str, Any],
        sampling: tuple[Any, ...],
        costs: Costs,
    ) -> None: ...
    def plan(self, width: int) -> int: ...
    def rows(self) -> list[tuple[int, int, int, int, int, int, bool, int, int]]: ...
    def absorb(self, outputs: Sequence[Any], legal: int) -> list[int]: ...
    def absorb_waiting(self, legal: int) -> list[int]: ...
    def waiting_tokens(self) -> list[int]: ...
    def take(self) -> list[tuple[Any, ...]]: ...
    def take_scores(self) -> list[tuple[float, list[tuple[int, float]]]]: ...
    def targets(self) -> list[int]: ...
    def cut(self, wanted: Sequence[bool]) -> None: ...
    def end(self, length: int) -> None: ...
    def seen(self, node: int) -> tuple[list[int], list[int]]: ...
    def path(self, node: int) -> list[int]: ...
    def proposals(self) -> tuple[list[list[int]], list[bool]]: ...
    def attach(self, masks: Sequence[Sequence[int]]) -> None: ...
    def image(self, address: int) -> bytes: ...
    def load(self, record: bytes) -> None: ...
    def record(self, tokens: Sequence[int], sources: Sequence[int], counts: Sequence[int]) -> None: ...
    costs: Costs
    sequence: int
    top: int
    scored: int
    guarded: bool
    ready: bool
    traced: bool
    waiting: bool
    linear: bool
    ranks: int
    running: int
    width: int
    drafted: bool
    committed: int
    materialized: int
    status: int
    begun: bool
    penalised: bool
    sampling: tuple[Any, ...]
    adaptive: bool
    shaped: bool
    wants_windows: bool
    block_size: int
    verify: int
    limit: int
    num_eos: int
    tokens: list[int]
    estimate: tuple[float, float, float, float, float, float, float]
