"""Windowed drafts at long context: what a draft pass costs, what that saves, and what becomes of acceptance.

    python benchmarks/windows.py --text FILE --history 1000 4000 8000 --places 3
    python benchmarks/windows.py --history 1000 32000 --layers 2
    python benchmarks/windows.py --backend cuda --history 1000 32000 128000 1000000

Behind each history the same passes are timed (on the device, where the backend can tell), histories and passes taking
turns: a draft pass that sees all, one that sees a window, and a verify pass with and without the anchor's row (behind a
windowed draft it runs again). With ``--text`` the history is that text, and is continued under both drafts and
autoregressively; all three must be the same text. Without it the K/V are those of arbitrary tokens, or of none at all
where the backend can leave them out, at positions far beyond what the model was made for: such a run tells times only.
``--layers`` runs the first layers only, every one of which costs the same, where all would take too long to fill.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from bitmtp import checkpoint
from bitmtp.backends import load_backend
from bitmtp.backends.base import Backend, Head, Row, Window, causal_rows, mask
from bitmtp.checkpoint import Checkpoint, tensor_specs
from bitmtp.core.costs import Tuning, time_pass
from bitmtp.core.policies import make_policy
from bitmtp.core.policy import Policy, Verify
from bitmtp.core.text import Text
from bitmtp.errors import BitMTPError
from bitmtp.loop import Loop
from bitmtp.models import shipped_model
from bitmtp.sampling import GREEDY, Sampling
from bitmtp.tokenizer import Tokenizer

WINDOW = Window()
VERIFIED = 5  # proposals of the verify pass that is timed
MARGIN = 256  # positions behind the longest history


def pass_times(backend: Backend, sequence: int, histories: Sequence[int], size: int, repeats: int) -> list[list[float]]:
    """For each history, median milliseconds of: a draft pass, a windowed one, a verify pass, one that runs the anchor
    as well. All histories are beginnings of the sequence's, and take turns."""
    passes = [make for history in histories for make in _passes(backend.fork(sequence, history), history, size)]
    found: list[list[float]] = [[] for _ in passes]
    for _ in range(repeats + 1):
        for make, times in zip(passes, found, strict=True):
            times.append(time_pass(backend, make()))
    medians = [median(times[1:]) for times in found]  # buffers grow in the first round
    kinds = len(medians) // len(histories)
    return [medians[place : place + kinds] for place in range(0, len(medians), kinds)]


def _passes(sequence: int, history: int, size: int) -> list[Callable[[], list[Row]]]:
    draft = [5, *(mask(depth) for depth in range(1, size))]
    rows = causal_rows(sequence, draft, history, [Head.EXACT] * size, GREEDY)
    return [
        lambda: rows,
        lambda: [replace(row, head=Head.DRAFT, window=WINDOW) for row in rows],
        lambda: _verify_rows(sequence, history, VERIFIED),
        lambda: _verify_rows(sequence, history, VERIFIED + 1),
    ]


def _verify_rows(sequence: int, history: int, width: int) -> list[Row]:
    return causal_rows(sequence, [5] * width, history, [Head.EXACT] * width, GREEDY)


def continuation(backend: Backend, sequence: int, ids: Sequence[int], policy: Policy, tokens: int) -> Text:
    """Write on behind a history, in a fork of the sequence."""
    own, costs = backend.fork(sequence, len(ids) - 1), Tuning.usual().costs.core()
    text = Text(own, ids, len(ids) - 1, policy, Sampling(), len(ids) + tokens, frozenset(), costs)
    loop = Loop(backend, costs)
    while text.finish is None:
        loop.run([text])
        while text.take():
            pass
    backend.close(own)
    return text


def tokens_per_iteration(
    backend: Backend, sequence: int, ids: Sequence[int], options: argparse.Namespace
) -> list[float]:
    """With drafts that see all and with windowed ones; checks that both write the autoregressive text."""
    size = options.block_size
    policies = [
        make_policy("autoregressive", 1),
        Policy("full", size, Verify.ALWAYS),
        Policy("windowed", size, Verify.ALWAYS, window=WINDOW),
    ]
    texts = [continuation(backend, sequence, ids, each, options.tokens) for each in policies]
    if len({tuple(each.written) for each in texts}) > 1:
        raise SystemExit(f"MISMATCH at history {len(ids) - 1}")
    return [each.stats.mean_acceptance_length for each in texts[1:]]


def fill(backend: Backend, sequence: int, tokens: Sequence[int], length: int) -> None:
    """Make the history ``length`` positions long."""
    if hasattr(backend, "reserve"):  # the CUDA backend: whatever K/V lie there do
        backend.reserve(sequence, length + MARGIN)
        backend.sequence(sequence).length = length  # type: ignore[attr-defined]
    else:
        backend.prefill(sequence, tokens[backend.length(sequence) : length])


def report(histories: Sequence[int], times: Sequence[Sequence[float]], rates: Sequence[Sequence[float]]) -> None:
    """One line a history."""
    for history, (full, windowed, verify, again), found in zip(histories, times, rates, strict=True):
        saved = (full + verify - windowed - again) / (full + verify)
        line = f"{history:8}  {full:8.2f}  {windowed:8.2f}  {windowed / times[0][1]:12.2f}  {verify:9.2f}  {saved:6.0%}"
        print(line + "".join(f"  {rate:8.2f}" for rate in found))


def run_text(loaded: Checkpoint, backend: Backend, options: argparse.Namespace) -> None:
    """Real text; times are those of the first place, tokens an iteration the mean over places."""
    longest, rates = max(options.history), []
    ids = Tokenizer(loaded.path, loaded.config.vocab_size).encode(Path(options.text).read_text(encoding="utf-8"))
    if len(ids) < options.places * (longest + 1):
        raise SystemExit(f"{options.text}: {len(ids)} tokens, {options.places * (longest + 1)} needed")
    starts = [place * (len(ids) - longest - 1) // max(options.places - 1, 1) for place in range(options.places)]
    sequences = [backend.open() for _ in starts]
    for history in options.history:
        found = []
        for start, sequence in zip(starts, sequences, strict=True):
            backend.prefill(sequence, ids[start + backend.length(sequence) : start + history])
            found.append(tokens_per_iteration(backend, sequence, ids[start : start + history + 1], options))
        rates.append([sum(each) / len(each) for each in zip(*found, strict=True)])
    times = pass_times(backend, sequences[0], options.history, options.block_size, options.repeats)
    report(options.history, times, rates)


def run_synthetic(backend: Backend, options: argparse.Namespace) -> None:
    """Times only."""
    sequence, longest = backend.open(), max(options.history)
    fill(backend, sequence, [5 + index % 1000 for index in range(longest)], longest)
    times = pass_times(backend, sequence, options.history, options.block_size, options.repeats)
    report(options.history, times, [()] * len(times))


def cut(loaded: Checkpoint, layers: int | None, positions: int) -> Checkpoint:
    """The model with its first layers only, and with room for so many positions."""
    config = replace(loaded.config, num_layers=layers or loaded.config.num_layers, max_position=positions)
    return Checkpoint(loaded.path, config, {name: loaded.tensors[name] for name in tensor_specs(config)})


def run(options: argparse.Namespace) -> None:
    """Print the table."""
    loaded = checkpoint.read(options.model or shipped_model())
    positions = max(loaded.config.max_position, max(options.history) + MARGIN)
    if not options.text:
        loaded = cut(loaded, options.layers, positions)
    backend = load_backend(options.backend, loaded, threads=options.threads, context=loaded.config.max_position)
    names = ["history", "draft ms", "windowed", "÷ the first's", "verify ms", "saved"]
    print("  ".join(names) + ("  tokens an iteration: full, windowed" if options.text else ""), flush=True)
    if options.text:
        run_text(loaded, backend, options)
    else:
        run_synthetic(backend, options)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", help="a long text file")
    parser.add_argument("--history", type=int, nargs="+", default=[1000, 4000, 8000], help="ascending")
    parser.add_argument("--places", type=int, default=1, help="stretches of the text to continue")
    parser.add_argument("--layers", type=int, help="without --text: run so many layers only")
    parser.add_argument("--model", help="checkpoint folder; default: the shipped model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        run(parse())
    except BitMTPError as error:
        sys.exit(f"windows: {error}")
