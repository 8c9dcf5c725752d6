"""How often two backends choose the same token on real text, and what bounds it.

    python benchmarks/agreement.py record --data eval --output cpu.npz
    python benchmarks/agreement.py record --like cpu.npz --backend cuda --output cuda.npz
    python benchmarks/agreement.py record --like cpu.npz --nudge --output nudged.npz
    python benchmarks/agreement.py compare cpu.npz cuda.npz --bound nudged.npz

Every position is teacher-forced: it sees the text, never what was chosen before it. What a difference is worth is told
by the gap between the two likeliest tokens. `--kv-type` keeps K/V in the other float type; `--nudge` moves every scale
of the embedding to the next float, up or down at random: what that changes, no two orders of summation can agree on.
`--layers` keeps the first layers only: chaos grows with depth.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitmtp import checkpoint
from bitmtp.backends import load_backend
from bitmtp.backends.base import MAX_WIDTH, Backend, Head, causal_rows
from bitmtp.checkpoint import Checkpoint
from bitmtp.errors import BitMTPError
from bitmtp.models import shipped_model
from bitmtp.sampling import GREEDY
from bitmtp.tokenizer import Tokenizer

ROW = 512
AGREEMENT, GAP = 0.985, 0.3  # wished for: this share of the positions, and elsewhere no gap as large as this
Tokens = NDArray[np.int32]
_SOURCES = (
    ("gsm8k/test.jsonl", "question", "answer"),
    ("humaneval/HumanEval.jsonl", "prompt", "canonical_solution"),
    ("math500/test.jsonl", "problem", "solution"),
)


def conversations(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """Question and answer of evaluation sets, which training never saw."""
    from bitmtp.training.data import read_records

    for file, asked, answered in _SOURCES:
        for record in read_records(folder / file):
            turns = [{"role": "user", "content": record[asked]}, {"role": "assistant", "content": record[answered]}]
            yield tokenizer.chat(turns, add_generation_prompt=False)


def text_rows(folder: Path, model: Checkpoint, count: int) -> Tokens:
    """``[count, ROW]`` tokens, spread evenly over all the texts."""
    from bitmtp.training.data import cut_rows

    tokenizer = Tokenizer(model.path, model.config.vocab_size)
    ids = tokenizer.encode_batch(list(conversations(folder, tokenizer)))
    eos = model.config.eos_token_ids[0]
    rows = cut_rows(np.concatenate([np.array([*each, eos], np.int32) for each in ids]), ROW)
    places = np.linspace(0, len(rows) - 1, count).astype(int)
    return rows[places, :ROW]


def nudged(model: Checkpoint) -> Checkpoint:
    """The model with every scale of its embedding moved by one unit in the last place."""
    scale = model.tensors["embedding.scale"]
    up = np.random.default_rng(0).integers(0, 2, scale.shape, dtype=np.int32) * 2 - 1
    moved = np.nextafter(scale, np.where(up > 0, np.inf, -np.inf).astype(np.float32))
    return replace(model, tensors={**model.tensors, "embedding.scale": moved})


def choices(backend: Backend, rows: Tokens) -> tuple[Tokens, NDArray[np.float32]]:
    """The likeliest token at every position, and the two largest logits ``[…, 2]``."""
    tokens, logits = np.empty_like(rows), np.empty((*rows.shape, 2), np.float32)
    for number, row in enumerate(rows):
        sequence = backend.open()
        for start in range(0, ROW, MAX_WIDTH):
            piece = row[start : start + MAX_WIDTH].tolist()
            outputs = backend.step(causal_rows(sequence, piece, start, [Head.EXACT] * len(piece), GREEDY), top=2)
            backend.materialize(sequence, range(len(piece)))
            for place, output in enumerate(outputs, start):
                assert output is not None
                tokens[number, place] = output.token
                logits[number, place] = [logit for _, logit in output.top]
        backend.close(sequence)
    return tokens, logits


def record(options: argparse.Namespace) -> None:
    """Run a backend over the text and keep what it chose."""
    model = checkpoint.read(options.model or shipped_model())
    if options.layers:
        model = replace(model, config=replace(model.config, num_layers=options.layers))
    if options.kv_type:
        model = replace(model, config=replace(model.config, kv_type=options.kv_type))
    if options.nudge:
        model = nudged(model)
    rows = np.load(options.like)["rows"] if options.like else text_rows(options.data, model, options.rows)
    backend = load_backend(options.backend, model, threads=options.threads, context=ROW)
    tokens, logits = choices(backend, rows)
    np.savez_compressed(options.output, rows=rows, tokens=tokens, logits=logits)
    print(
        f"{tokens.size:,} positions of {model.path.name}, {backend.name}, K/V in {model.config.kv_type}, "
        f"{model.config.num_layers} layers"
    )


def compare(files: Sequence[Path], bound: Path | None) -> bool:
    """Print how every file agrees with the first; whether all agree well, or at least as well as the bound does."""
    base, least = np.load(files[0]), AGREEMENT
    gap = base["logits"][..., 0] - base["logits"][..., 1]
    print(f"{files[0].stem}, {gap.size:,} positions; {(gap < GAP).mean():.1%} of them have a gap below {GAP}")
    if bound is not None:
        reached, _ = _agreement(base, gap, bound)
        least = reached - 2 * math.sqrt(2 * reached * (1 - reached) / gap.size)
    results = [_agreement(base, gap, file) for file in files[1:]]
    if bound is not None:
        print(f"  not to be expected above {bound.stem}'s {reached:.2%}; worse than chance allows below {least:.2%}")
    return all(agrees >= least and (worst < GAP or bound is not None) for agrees, worst in results)


def _agreement(base: Mapping[str, Any], gap: NDArray[np.float32], file: Path) -> tuple[float, float]:
    """Print how a file agrees with the base: share of the positions, and the largest gap where it does not."""
    other = np.load(file)
    if not np.array_equal(other["rows"], base["rows"]):
        raise BitMTPError(f"{file}: recorded on another text; record it with --like the file it is compared with")
    differs = other["tokens"] != base["tokens"]
    noise = (other["logits"][..., 0] - base["logits"][..., 0]).std()
    worst = float(gap[differs].max(initial=0.0))
    print(
        f"  {file.stem:24} agrees {(~differs).mean():.2%}; {differs.sum():4} differ, gaps up to {worst:.3f} "
        f"({(gap[differs] >= GAP).sum()} of {GAP} or more); the largest logit moves by {noise:.3f} (std)"
    )
    return float((~differs).mean()), worst


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--data", type=Path, help="folder with gsm8k, humaneval and math500")
    recording.add_argument("--like", type=Path, help="the text of another recording")
    recording.add_argument("--output", type=Path, required=True)
    recording.add_argument("--model", type=Path)
    recording.add_argument("--backend", default="cpu")
    recording.add_argument("--threads", type=int)
    recording.add_argument("--rows", type=int, default=12, help=f"texts of {ROW} tokens")
    recording.add_argument("--kv-type", choices=["float16", "float32"])
    recording.add_argument("--nudge", action="store_true")
    recording.add_argument("--layers", type=int)
    comparing = commands.add_parser("compare")
    comparing.add_argument("files", type=Path, nargs="+", help="recordings; the others are compared with the first")
    comparing.add_argument("--bound", type=Path, help="a recording that no other can be expected to surpass")
    options = parser.parse_args()
    if options.command == "record" and (options.data is None) == (options.like is None):
        parser.error("give --data or --like")
    return options


def main() -> int:
    """0 if everything compared agrees well."""
    options = parse()
    try:
        if options.command == "compare":
            return 0 if compare(options.files, options.bound) else 1
        record(options)
    except BitMTPError as error:
        print(f"agreement: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
