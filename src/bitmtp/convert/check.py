"""Does a converted model read plain text? Weights in a wrong order, or wrongly scaled, do no better than chance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bitmtp import checkpoint
from bitmtp.backends import load_backend
from bitmtp.backends.base import MAX_WIDTH, Head, causal_rows
from bitmtp.errors import CheckpointError
from bitmtp.sampling import GREEDY
from bitmtp.tokenizer import Tokenizer

TEXT = (
    "The ferry leaves the harbour at seven in the morning and comes back before dark. Most of the people on board know "
    "each other, because they live on the same small island and work in the same town. When the weather is bad the "
    "boat stays where it is, the school is closed, and everybody waits for the wind to turn."
)
PASSES = 0.5  # of chance, in nats; models that work lie at a third


@dataclass(frozen=True, slots=True)
class Reading:
    """Mean loss on :data:`TEXT` in nats a token, and that of guessing blindly."""

    loss: float
    chance: float


def read_plain_text(folder: Path, threads: int | None = None) -> Reading:
    """Run the first tokens of :data:`TEXT` through a checkpoint, in one pass.

    Raises:
        CheckpointError: the loss is nearer to chance than that of any model that works.
        BackendError: no backend runs here.
    """
    loaded = checkpoint.read(folder)
    start = loaded.config.bos_token_id
    ids = [*([] if start is None else [start]), *Tokenizer(folder, loaded.config.vocab_size).encode(TEXT)][:MAX_WIDTH]
    backend = load_backend("auto", loaded, threads=threads, context=MAX_WIDTH)
    del loaded
    sequence = backend.open()
    outputs = backend.step(causal_rows(sequence, ids, 0, [Head.EXACT] * len(ids), GREEDY), logits=True)
    losses = [_loss(output.logits, token) for output, token in zip(outputs, ids[1:], strict=False) if output]
    reading = Reading(sum(losses) / len(losses), math.log(backend.config.vocab_size))
    if not reading.loss < PASSES * reading.chance:
        raise CheckpointError(
            f"the converted model hardly reads plain English ({reading.loss:.2f} nats a token; chance: "
            f"{reading.chance:.2f}): its weights are in another order or scale than the file says, or it is untrained; "
            "--unchecked keeps it all the same"
        )
    return reading


def _loss(logits: np.ndarray | None, token: int) -> float:
    assert logits is not None
    raw = logits.astype(np.float64)
    largest = raw.max()
    return float(np.log(np.exp(raw - largest).sum()) + largest - raw[token])
