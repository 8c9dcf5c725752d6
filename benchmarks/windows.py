"""Windowed drafts at long context: what a draft pass costs, and what becomes of acceptance.

    python benchmarks/windows.py --text FILE --history 1000 4000 7500

The file is any long text. Behind each history the same draft pass is timed with and without a window, taking turns, and
the text is continued under both, and autoregressively; all three must be the same text.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

from bitmtp.backends.base import Window
from bitmtp.decoding.decoder import Decoder, advance
from bitmtp.decoding.policies import make_policy
from bitmtp.decoding.policy import Policy, Verify
from bitmtp.decoding.state import State
from bitmtp.decoding.tree import masks
from bitmtp.engine import Engine
from bitmtp.errors import BitMTPError
from bitmtp.sampling import Sampling

WINDOW = Window()


def draft_times(engine: Engine, sequence: int, ids: list[int], size: int, repeats: int) -> dict[Window | None, float]:
    """Median milliseconds of a draft pass behind what the sequence holds."""
    state = State(sequence, Sampling(), ids, len(ids), materialized=len(ids) - 1)
    times: dict[Window | None, list[float]] = {None: [], WINDOW: []}
    for _ in range(repeats):
        for window, found in times.items():
            rows = state.rows(masks(size), window)
            begun = time.perf_counter()
            engine.backend.step(rows)
            found.append((time.perf_counter() - begun) * 1e3)
    return {window: median(found) for window, found in times.items()}


def continuation(engine: Engine, sequence: int, ids: list[int], policy: Policy, tokens: int) -> Decoder:
    """Write on behind a history, in a fork of the sequence."""
    own = engine.backend.fork(sequence, len(ids) - 1)
    state = State(own, Sampling(), ids.copy(), len(ids), materialized=len(ids) - 1)
    decoder = Decoder(state, policy, len(ids) + tokens, frozenset())
    decoder.start(engine.backend)
    while decoder.finish is None:
        advance(engine.backend, [decoder])
    engine.backend.close(own)
    return decoder


def run(options: argparse.Namespace) -> None:
    """Print one line a history."""
    engine = Engine.load(options.model, backend=options.backend, threads=options.threads)
    text = engine.tokenizer.encode(Path(options.text).read_text(encoding="utf-8")[: 8 * max(options.history)])
    policies = {
        "autoregressive": make_policy("autoregressive", 1),
        "full": Policy("full", options.block_size, Verify.ALWAYS),
        "windowed": Policy("windowed", options.block_size, Verify.ALWAYS, window=WINDOW),
    }
    sequence, done = engine.backend.open(), 0
    print("history  draft ms full  windowed   tokens per iteration full  windowed")
    for history in options.history:
        ids = text[: history + 1]
        engine.backend.prefill(sequence, ids[done:history])
        done = history
        times = draft_times(engine, sequence, ids, options.block_size, options.repeats)
        decoders = {name: continuation(engine, sequence, ids, each, options.tokens) for name, each in policies.items()}
        if len({tuple(each.state.committed) for each in decoders.values()}) > 1:
            raise SystemExit(f"MISMATCH at history {history}")
        rates = [decoders[name].stats.mean_acceptance_length for name in ("full", "windowed")]
        print(f"{history:7}  {times[None]:13.2f}  {times[WINDOW]:8.2f}  {rates[0]:25.2f}  {rates[1]:8.2f}", flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", required=True, help="a long text file")
    parser.add_argument("--history", type=int, nargs="+", default=[1000, 4000, 7500], help="ascending")
    parser.add_argument("--model", help="checkpoint folder; default: the shipped model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        run(parse())
    except BitMTPError as error:
        sys.exit(f"windows: {error}")
