"""Next-token loss of models on text that training never saw, by this project's own engine.

    python benchmarks/heldout.py --model A --model B --train-data train --eval-data eval

Two sets, both cut in rows of 512 tokens, each row a text of its own:

- records: of the training files, the one in 200 that `bitmtp.training.data.is_heldout` keeps out of training;
- tests: question and answer of evaluation sets, which are no part of the training files at all: GSM8K test, the
  HumanEval solutions, the MATH-500 solutions.

The second is the fair one between two models, since another model may have been trained on any of the first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bitmtp.backends.base import MAX_WIDTH, Backend, Head, causal_rows
from bitmtp.engine import Engine
from bitmtp.errors import BitMTPError
from bitmtp.sampling import GREEDY
from bitmtp.tokenizer import Tokenizer
from bitmtp.training.data import cut_rows, is_heldout, read_records, render

ROW = 512
Rows = NDArray[np.int32]


def heldout_records(folder: Path) -> Iterator[Path]:
    """The training files, in a fixed order."""
    files = sorted(folder.glob("*.jsonl.zst"))
    if not files:
        raise BitMTPError(f"{folder}: holds no .jsonl.zst files")
    yield from files


def record_texts(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """Held-out records of the training files."""
    for file in heldout_records(folder):
        for record in read_records(file):
            text = render(record, tokenizer)
            if is_heldout(text):
                yield text


def test_texts(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """Evaluation sets as conversations."""
    sources = (
        ("gsm8k/test.jsonl", "question", "answer"),
        ("humaneval/HumanEval.jsonl", "prompt", "canonical_solution"),
        ("math500/test.jsonl", "problem", "solution"),
    )
    for file, asked, answered in sources:
        for record in read_records(folder / file):
            turns = [{"role": "user", "content": record[asked]}, {"role": "assistant", "content": record[answered]}]
            yield tokenizer.chat(turns, add_generation_prompt=False)


def rows_of(texts: Iterator[str], tokenizer: Tokenizer, eos: int) -> Rows:
    """Token rows ``[n, ROW + 1]`` of the joined texts."""
    ids = tokenizer.encode_batch(list(texts))
    stream = np.concatenate([np.array([*each, eos], np.int32) for each in ids])
    return cut_rows(stream, ROW)


def loss(backend: Backend, row: Rows) -> float:
    """Mean cross-entropy of a row's tokens after the first, in nats."""
    sequence, total = backend.open(), 0.0
    tokens = row.tolist()
    for start in range(0, ROW, MAX_WIDTH):
        piece = tokens[start : start + MAX_WIDTH]
        outputs = backend.step(causal_rows(sequence, piece, start, [Head.EXACT] * len(piece), GREEDY), logits=True)
        backend.materialize(sequence, range(len(piece)))
        logits = np.stack([output.logits for output in outputs if output is not None and output.logits is not None])
        targets = row[start + 1 : start + 1 + len(piece)]
        largest = logits.max(axis=1)
        normaliser = np.log(np.exp(logits - largest[:, None]).sum(axis=1, dtype=np.float64)) + largest
        total += float((normaliser - logits[np.arange(len(piece)), targets]).sum())
    backend.close(sequence)
    return total / ROW


def measure(engine: Engine, name: str, rows: Rows) -> NDArray[np.float64]:
    """Loss of each row."""
    losses = []
    for index, row in enumerate(rows):
        losses.append(loss(engine.backend, row))
        print(f"\r{name}: {index + 1} of {len(rows)} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return np.array(losses)


def with_error(values: NDArray[np.float64]) -> str:
    """Mean and its standard error."""
    return f"{values.mean():+.4f} ± {values.std() / np.sqrt(len(values)):.4f}"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, action="append", help="checkpoint folder; may be repeated")
    parser.add_argument("--train-data", type=Path, help="folder of the training files")
    parser.add_argument("--eval-data", type=Path, help="folder that holds gsm8k, humaneval and math500")
    parser.add_argument("--every", type=int, default=1, help="measure every n-th row only")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


def run(options: argparse.Namespace) -> None:
    """Measure every model on the sets whose data is given; models are compared row by row."""
    print(f"{'model':24}  {'set':8}  {'rows':>5}  nats per token      less the first model's, paired")
    sets = {"records": (options.train_data, record_texts), "tests": (options.eval_data, test_texts)}
    first: dict[str, NDArray[np.float64]] = {}
    for model in options.model:
        engine = Engine.load(model, backend=options.backend, threads=options.threads)
        eos, short = engine.config.eos_token_ids[0], Path(model).name
        for name, (folder, texts) in sets.items():
            if folder is None:
                continue
            rows = rows_of(texts(folder, engine.tokenizer), engine.tokenizer, eos)[:: options.every]
            losses = measure(engine, f"{short}, {name}", rows)
            difference = with_error(losses - first.setdefault(name, losses))
            print(f"{short[:24]:24}  {name:8}  {len(rows):5}  {with_error(losses)}  {difference}", flush=True)


if __name__ == "__main__":
    try:
        run(parse())
    except (BitMTPError, OSError) as problem:
        sys.exit(f"heldout: {problem}")
