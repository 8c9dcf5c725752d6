"""Training text: read, rendered, tokenised once, then served as one shuffled stream cut into rows."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from bitmtp.errors import ConfigError
from bitmtp.tokenizer import Tokenizer

Tokens = NDArray[np.int32]
ENCODE_BATCH = 4096


def is_heldout(text: str) -> bool:
    """Whether a record is never trained on: one in 200, by the hash of its rendered text. Part of the repository's
    contract: published losses are measured on these records, so the rule never changes."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 200 == 0


def read_records(file: Path) -> Iterator[dict[str, Any]]:
    """JSON objects of a ``.jsonl``, ``.jsonl.gz`` or ``.jsonl.zst`` file.

    Raises:
        ConfigError: no such file, another ending, or a line that is not a JSON object.
    """
    if not file.exists():
        raise ConfigError(f"{file}: no such data file")
    with _open(file) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except ValueError:
                raise ConfigError(f"{file}: line {number} is not JSON") from None
            if not isinstance(record, dict):
                raise ConfigError(f"{file}: line {number} is not a JSON object")
            yield record


def _open(file: Path) -> io.TextIOBase:
    if file.name.endswith(".jsonl.zst"):
        return io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file.open("rb"), closefd=True), "utf-8")
    if file.name.endswith(".jsonl.gz"):
        return gzip.open(file, "rt", encoding="utf-8")
    if file.name.endswith(".jsonl"):
        return file.open(encoding="utf-8")
    raise ConfigError(f"{file}: expected .jsonl, .jsonl.gz or .jsonl.zst")


def render(record: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """The text of a record: ``{"text"}`` as it is, ``{"messages"}`` through the chat template.

    Raises:
        ConfigError: it has neither.
    """
    if isinstance(text := record.get("text"), str):
        return text
    if isinstance(messages := record.get("messages"), list):
        return tokenizer.chat(messages, add_generation_prompt=False)
    raise ConfigError(f'a record needs "text" or "messages"; this one has {sorted(record)}')


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokenised records: ``tokens`` one after the other, ``lengths`` and ``repeats`` (per epoch) of each."""

    tokens: Tokens
    lengths: NDArray[np.int64]
    repeats: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | Tokens], repeats: Sequence[int]) -> Corpus:
        """A corpus of token rows."""
        tokens = np.concatenate([np.asarray(row, np.int32) for row in rows]) if rows else np.zeros(0, np.int32)
        return cls(tokens, np.array([len(row) for row in rows], np.int64), np.array(repeats, np.int64))

    def plus(self, other: Corpus) -> Corpus:
        """Both corpora as one."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__slots__)
        return Corpus(*map(np.concatenate, pairs))

    def save(self, file: Path) -> None:
        """Write a ``.npz`` file."""
        np.savez(file, **{name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def load(cls, file: Path) -> Corpus:
        """Read what :meth:`save` wrote."""
        with np.load(file) as arrays:
            return cls(**arrays)

    def stream(self, order: NDArray[np.int64]) -> Tokens:
        """Tokens of the records of ``order``, joined."""
        ends = np.cumsum(self.lengths)
        starts = ends - self.lengths
        return np.concatenate([self.tokens[starts[index] : ends[index]] for index in order])

    def epoch(self, seed: int, number: int) -> Tokens:
        """The stream of one epoch: every record as often as it repeats, all shuffled together."""
        order = np.repeat(np.arange(len(self.lengths)), self.repeats)
        np.random.default_rng([seed, number]).shuffle(order)
        return self.stream(order)


def read_corpus(files: Mapping[str, int], tokenizer: Tokenizer, eos: int) -> tuple[Corpus, Corpus]:
    """Tokenise data files: (trained on, held out). A plain text ends with ``eos``, a chat as its template writes it.

    Raises:
        ConfigError: a file is missing or holds something else.
    """
    rows: tuple[list[Tokens], list[Tokens]] = ([], [])
    repeats: tuple[list[int], list[int]] = ([], [])
    for name, count in files.items():
        for records in _batched(read_records(Path(name)), ENCODE_BATCH):
            texts = [render(record, tokenizer) for record in records]
            for record, text, ids in zip(records, texts, tokenizer.encode_batch(texts), strict=True):
                side = int(is_heldout(text))
                rows[side].append(np.array([*ids, eos] if "text" in record else ids, np.int32))
                repeats[side].append(count)
    return Corpus.of(rows[0], repeats[0]), Corpus.of(rows[1], [1] * len(rows[1]))


def _batched(records: Iterator[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    while batch := list(islice(records, size)):
        yield batch


def cut_rows(stream: Tokens, seq_len: int) -> Tokens:
    """``[rows, seq_len + 1]``: the last token of a row is the first of the next. A remainder is dropped."""
    if len(stream) <= seq_len:
        return np.zeros((0, seq_len + 1), np.int32)
    return np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(stream, seq_len + 1)[::seq_len])


class Batches:
    """An endless sequence of batches ``[batch, seq_len + 1]``, epoch after epoch; ``position`` is all its state."""

    def __init__(self, corpus: Corpus, *, seed: int, batch_size: int, seq_len: int) -> None:
        self._corpus, self._seed = corpus, seed
        self._batch_size, self._seq_len = batch_size, seq_len
        self.position = (0, 0)  # epoch, batch within it
        self._rows, self._epoch = np.zeros((0, 0), np.int32), -1
        epoch_tokens = int((corpus.lengths * corpus.repeats).sum())
        if (epoch_tokens - 1) // seq_len < batch_size:
            raise ConfigError(f"the data ({epoch_tokens} tokens) does not fill one batch of {batch_size} × {seq_len}")

    def next(self) -> Tokens:
        """The next batch."""
        epoch, index = self.position
        if epoch != self._epoch:
            self._rows, self._epoch = cut_rows(self._corpus.epoch(self._seed, epoch), self._seq_len), epoch
        batch = self._rows[index * self._batch_size : (index + 1) * self._batch_size]
        last = (index + 2) * self._batch_size > len(self._rows)
        self.position = (epoch + 1, 0) if last else (epoch, index + 1)
        return batch
