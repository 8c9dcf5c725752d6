"""How much a chooser can gain: recorded drafts, replayed under every setting and under hindsight, at given costs.

    python benchmarks/bound.py record --data FOLDER --drafts drafts.jsonl --limit 12
    python benchmarks/bound.py replay --drafts drafts.jsonl --tuning tuning.json

``--tuning`` is what benchmarks/depths.py writes; without it costs are measured here and now.

``record`` writes texts token by token and keeps, at every token, what the deepest draft there says. ``replay`` lets the
product's own decoder run over such texts, with a pass costing what the table says, so that the machine's noise is out
of it; and finds by dynamic programming the best that any choice of block and verified proposals could have done.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from shapes import SETS

from bitmtp.backends.base import Head, Output, Row
from bitmtp.benchmark.prompts import encode_prompts, read_prompts
from bitmtp.decoding.chooser import AdaptiveShaper
from bitmtp.decoding.costs import CostTable, Tuning
from bitmtp.decoding.decoder import Decoder, advance
from bitmtp.decoding.policies import make_policy
from bitmtp.decoding.policy import Policy
from bitmtp.decoding.shaper import Shaper
from bitmtp.decoding.state import State
from bitmtp.decoding.stats import Stats
from bitmtp.decoding.topology import Topology
from bitmtp.decoding.tree import masks
from bitmtp.engine import Engine
from bitmtp.errors import BitMTPError
from bitmtp.sampling import Sampling

RANKS = 3
LOOP = 24
COUNTS = ("passes", "iterations", "copied", "ahead", "ahead_used", "windowed")
BLOCKS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
BOUNDS = (0.0, 0.02, 0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Recording:
    """A text and its drafts.

    Attributes:
        kind: the prompt set.
        text: tokens behind the prompt, the first one included.
        drafts: ``drafts[i][d]``, what the draft whose anchor is ``text[i]`` says of place i + 1 + d.
    """

    kind: str
    prompt: list[int]
    sampling: Sampling
    text: list[int]
    drafts: list[list[Output]]

    @property
    def loops(self) -> bool:
        """Whether it ends repeating itself: its last tokens stood before, not far back."""
        end = self.text[-LOOP:]
        before = range(max(len(self.text) - 4 * LOOP, 0), len(self.text) - LOOP)
        return any(self.text[at : at + LOOP] == end for at in before)

    def stands(self, at: int) -> int:
        """How many proposals of the draft behind ``text[at]`` the text takes; the first is the exact head's."""
        came = self.text[at + 1 :]
        return next(
            (d for d, (output, token) in enumerate(zip(self.drafts[at], came, strict=False)) if output.token != token),
            min(len(came), len(self.drafts[at])),
        )

    def to_json(self) -> str:
        """One line."""
        drafts = [[[o.token, o.probability, o.entropy, o.top] for o in draft] for draft in self.drafts]
        sampling = [self.sampling.temperature, self.sampling.seed]
        return json.dumps([self.kind, self.prompt, sampling, self.text, drafts])

    @classmethod
    def from_json(cls, line: str) -> Recording:
        """Read :meth:`to_json`."""
        kind, prompt, (temperature, seed), text, drafts = json.loads(line)
        outputs = [[Output(t, p, e, tuple((i, x) for i, x in top)) for t, p, e, top in draft] for draft in drafts]
        return cls(kind, prompt, Sampling(temperature, seed=seed), text, outputs)


def record(engine: Engine, kind: str, prompt: list[int], sampling: Sampling, max_tokens: int) -> Recording:
    """Write a text one token at a time; at every token make the deepest draft."""
    backend, size = engine.backend, engine.config.block_size
    state = State(backend.open(), sampling, prompt.copy(), len(prompt))
    state.commit([backend.prefill(state.sequence, prompt, state.choice()).token], len(prompt))
    drafts: list[list[Output]] = []
    limit = min(engine.context - size, len(prompt) + max_tokens)
    while len(state.committed) < limit and state.committed[-1] not in engine.config.eos_token_ids:
        outputs = backend.step(state.rows(masks(size)), top=RANKS * (2 if sampling.temperature else 1))
        backend.materialize(state.sequence, [0])
        drafts.append([each for each in outputs if each is not None])
        state.commit([drafts[-1][0].token], 1)
    backend.close(state.sequence)
    return Recording(kind, prompt, sampling, state.committed[len(prompt) :], drafts)


class Replay:
    """A backend that knows one text and its drafts; adds up what its passes would cost.

    Attributes:
        milliseconds: of all passes so far.
    """

    def __init__(self, recording: Recording, costs: CostTable, host: float) -> None:
        self._recording, self._costs, self._host = recording, costs, host
        self._start = len(recording.prompt)
        self.milliseconds = 0.0

    def step(self, rows: Sequence[Row], *, top: int = 0) -> list[Output | None]:
        """One pass: recorded outputs for what lies on the text, nothing that fits anywhere else."""
        self.milliseconds += self._costs.cost(len(rows), rows[0].position) + self._host
        truth = [self._true(row) for row in rows]
        return [self._output(row, self._on_text(row, rows, truth), top) for row in rows]

    def materialize(self, sequence: int, indices: Sequence[int]) -> None:
        """Nothing is kept."""

    def _true(self, row: Row) -> bool:
        at = row.position - self._start
        return row.token < 0 or (at < len(self._recording.text) and self._recording.text[at] == row.token)

    def _on_text(self, row: Row, rows: Sequence[Row], truth: Sequence[bool]) -> bool:
        return all(truth[index] for index in range(len(rows)) if row.visible >> index & 1)

    def _output(self, row: Row, on_text: bool, top: int) -> Output | None:
        if row.head is Head.NONE:
            return None
        anchor, depth = row.position - self._start - max(-row.token, 0), max(-row.token, 0)
        if not on_text or not 0 <= anchor < len(self._recording.drafts):
            return Output(-1, 0.0, 0.0)
        found = self._recording.drafts[anchor][depth]
        return found if top else replace(found, top=())


def play(
    recording: Recording, policy: Policy, costs: CostTable, host: float, shaper: Shaper | None = None
) -> tuple[float, Stats]:
    """Milliseconds of the product's decoder on a recorded text, and what it did."""
    backend: Any = Replay(recording, costs, host)
    length, text = len(recording.prompt), recording.text
    state = State(0, recording.sampling, recording.prompt + text[:1], length, materialized=length)
    decoder = Decoder(state, policy, length + len(text), frozenset(), shaper=shaper)
    while len(state.committed) < decoder.limit:
        advance(backend, [decoder])
    assert state.committed[length:] == text
    return backend.milliseconds, decoder.stats


def hindsight(recording: Recording, costs: CostTable, host: float, *, alternatives: bool, fused: bool) -> float:
    """Milliseconds of the best series of passes, found backwards from the end of the text.

    Every draft is exactly as deep as what of it is verified and stands. With ``alternatives`` the right candidate of
    the first place where the draft's own choice falls is verified instead; with ``fused`` a verify pass may draft as
    well, always behind the right proposal.
    """
    last, size = len(recording.text) - 1, len(recording.drafts[0])
    best, ready = [0.0] * (last + size + 2), dict[tuple[int, int], float]()
    for at in range(last - 1, -1, -1):
        price = [costs.cost(max(width, 1), len(recording.prompt) + at) + host for width in range(2 * size + 1)]
        most = reach(recording, at, alternatives)
        for k in range(2, most + 1):
            ready[at, k] = price[k] + best[at + k + 1]
            for more in range(2, size + 1) if fused else ():
                ready[at, k] = min(ready[at, k], price[k + more - 1] + ready.get((at + k, more), 1e9))
        best[at] = min([price[1] + best[at + 1], *(price[k] + ready[at, k] for k in range(2, most + 1))])
    return best[0]


def reach(recording: Recording, at: int, alternatives: bool) -> int:
    """How many proposals can stand behind this token, and leave room for the verifier's own."""
    stands, left = recording.stands(at), len(recording.text) - at - 2
    if alternatives and stands < min(left, len(recording.drafts[at])):
        candidates = [token for token, _ in recording.drafts[at][stands].top[:RANKS]]
        stands += recording.text[at + 1 + stands] in candidates
    return min(stands, left)


class Uncopied(AdaptiveShaper):
    """The adaptive policy without copies."""

    def _copy(self, *_: object, **__: object) -> None:
        return None


class Unfused(AdaptiveShaper):
    """The adaptive policy without fused passes."""

    def _with_next_draft(self, shape: Topology, *_: object, **__: object) -> Topology:
        return shape


@dataclass
class Comparison:
    """Settings on the same recordings, one line each."""

    recordings: list[Recording]
    tuning: Tuning
    host: float
    _bases: list[float] = field(default_factory=list)
    _best: float = 0.0

    def run(self) -> None:
        """Print everything."""
        print(f"{len(self.recordings)} texts, {sum(len(each.text) for each in self.recordings)} tokens")
        print(f"{'x autoregressive':34}", *(f"{kind:>9}" for kind in SETS), "      mix  x best static")
        self._bases = self._played(make_policy("autoregressive", 1))
        statics = self._statics()
        self._best = max(self._mix(times) for times in statics.values())
        for name, times in sorted(statics.items(), key=lambda each: -self._mix(each[1]))[:3]:
            self._line(name, times)
        kinds = [each.kind for each in self.recordings]
        rates = {name: dict(zip(SETS, self._rates(times), strict=True)) for name, times in statics.items()}
        own = {kind: max(statics, key=lambda name: rates[name][kind]) for kind in SETS}
        self._line("best static of each set", [statics[own[kind]][i] for i, kind in enumerate(kinds)])
        self._line("best static of each text", [min(each) for each in zip(*statics.values(), strict=True)])
        self._adaptive()
        for alternatives, fused in ((False, False), (True, False), (False, True), (True, True)):
            name = "hindsight" + ", alternatives" * alternatives + ", fused" * fused
            found = [
                hindsight(each, self.tuning.costs, self.host, alternatives=alternatives, fused=fused)
                for each in self.recordings
            ]
            self._line(name, found)

    def _statics(self) -> dict[str, list[float]]:
        size, found = len(self.recordings[0].drafts[0]), {}
        for block in (each for each in BLOCKS if each <= size):
            for bound in BOUNDS:
                policy = make_policy("speculative", size, block_size=block, verify_bound=bound)
                found[f"static D={block}, bound {bound:g}"] = self._played(policy)
        return found

    def _adaptive(self) -> None:
        policy = make_policy("auto", len(self.recordings[0].drafts[0]))
        kinds: dict[str, Callable[..., Shaper]] = {
            "auto": AdaptiveShaper,
            "auto, no fused": Unfused,
            "auto, no copies": Uncopied,
            "auto, linear": partial(AdaptiveShaper, linear=True),
        }
        for name, kind in kinds.items():
            total: Counter[str] = Counter()
            self._line(name, self._played(policy, partial(kind, policy, self.tuning), total))
            print("   ", ", ".join(f"{count} {what}" for what, count in total.items()))

    def _played(
        self, policy: Policy, shaper: Callable[[float], Shaper] | None = None, total: Counter[str] | None = None
    ) -> list[float]:
        """Milliseconds of each text."""
        times = []
        for each in self.recordings:
            own = None if shaper is None else shaper(each.sampling.temperature)
            taken, stats = play(each, policy, self.tuning.costs, self.host, own)
            times.append(taken)
            if total is not None:
                total.update({name: getattr(stats, name) for name in COUNTS})
        return times

    def _rates(self, times: Sequence[float]) -> list[float]:
        """Times autoregressive, for each prompt set."""
        found = []
        for kind in SETS:
            own = [index for index, each in enumerate(self.recordings) if each.kind == kind]
            found.append(sum(self._bases[index] for index in own) / sum(times[index] for index in own) if own else 1.0)
        return found

    def _mix(self, times: Sequence[float]) -> float:
        rates = self._rates(times)
        return len(rates) / sum(1 / rate for rate in rates)

    def _line(self, name: str, times: Sequence[float]) -> None:
        rates = "".join(f"{rate:10.3f}" for rate in self._rates(times))
        print(f"{name:34}{rates}{self._mix(times):10.3f}{self._mix(times) / self._best:8.3f}", flush=True)


def run_record(options: argparse.Namespace) -> None:
    """Write the file of recordings."""
    engine = Engine.load(options.model, backend=options.backend, threads=options.threads)
    unfinished = Path(f"{options.drafts}.part")
    with unfinished.open("w", encoding="utf-8") as file:
        for name, (source, template) in SETS.items():
            read = read_prompts(Path(options.data) / source)
            chosen = read[options.start :: max(len(read) // options.limit, 1)][: options.limit]
            for number, prompt in enumerate(encode_prompts(engine, chosen, template)):
                sampling = Sampling(options.temperature, seed=number + 1)
                file.write(record(engine, name, prompt, sampling, options.max_tokens).to_json() + "\n")
            print(f"{name} done", file=sys.stderr)
    os.replace(unfinished, options.drafts)


def run_replay(options: argparse.Namespace) -> None:
    """Print the tables."""
    with Path(options.drafts).open(encoding="utf-8") as file:
        recordings = [Recording.from_json(line) for line in file]
    if options.tuning:
        tuning = Tuning.from_json(Path(options.tuning).read_text(encoding="utf-8"))
    else:
        tuning = Engine.load(options.model, backend=options.backend, threads=options.threads).tuning
    costs = tuning.costs
    print("cost table, ms:", dict(zip(costs.widths, (round(each, 2) for each in costs.milliseconds), strict=True)))
    print("a position of history adds, ms a pass and a row:", costs.per_position, "; host, ms a pass:", options.host)
    Comparison(recordings, tuning, options.host).run()
    print("\nOf these, the texts that do not end in a loop:")
    Comparison([each for each in recordings if not each.loops], tuning, options.host).run()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["record", "replay"])
    parser.add_argument("--drafts", required=True, help="the file of recordings")
    parser.add_argument("--data", help="record: folder of the four prompt sets")
    parser.add_argument("--limit", type=int, default=12, help="record: prompts of each set, spread over it")
    parser.add_argument("--start", type=int, default=0, help="record: the first of them")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tuning", help="replay: costs and calibration")
    parser.add_argument("--host", type=float, default=0.3, help="replay: milliseconds of host work a pass")
    parser.add_argument("--model", help="checkpoint folder; default: the shipped model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        options = parse()
        run_record(options) if options.what == "record" else run_replay(options)
    except BitMTPError as error:
        sys.exit(f"bound: {error}")
