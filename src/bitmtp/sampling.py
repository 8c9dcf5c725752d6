"""How a row's token is chosen: penalties, bias, temperature, top-k, top-p, min-p and keyed noise.

``docs/sampling.md`` is the specification; every backend returns the same token. The sample at a position is a function
of (logits, parameters, seed, position) alone, so a drafted token can be checked by sampling the verifier's row again,
and proposals drawn with the same noise agree more often.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bitmtp.errors import RequestError
from bitmtp.numerics import Float32, UInt32, blocked_sum, exp, gumbel

Int32 = NDArray[np.int32]
_F = np.float32


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high or math.isnan(value):
        raise RequestError(f"{name} is {value}; it must lie between {low:g} and {high:g}")


class _NoSeed(int):
    """The 0 of whoever names no seed, told apart from a 0 that was named."""


NO_SEED = _NoSeed()


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one request; the defaults are greedy.

    Attributes:
        seed: 64-bit; together with ``choice`` it keys the noise.
        choice: index of this text among several asked for with one seed.
        logit_bias: (token id, value) pairs, added after penalties.

    Raises:
        RequestError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = NO_SEED
    choice: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if self.temperature:
            _check("temperature (unless 0)", self.temperature, 0.001, 100)
        _check("top_k", self.top_k, 0, 1 << 30)
        _check("top_p", self.top_p, 0, 1)
        _check("min_p", self.min_p, 0, 1)
        _check("seed", self.seed, 0, (1 << 64) - 1)
        _check("choice", self.choice, 0, (1 << 31) - 1)
        _check("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check("presence_penalty", self.presence_penalty, -100, 100)
        _check("frequency_penalty", self.frequency_penalty, -100, 100)
        for _, value in self.logit_bias:
            _check("logit_bias", value, -1e9, 1e9)

    @property
    def seeded(self) -> bool:
        """Whether a seed was named."""
        return not isinstance(self.seed, _NoSeed)

    @property
    def penalised(self) -> bool:
        """Whether the tokens seen so far change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def filtered(self) -> bool:
        """Whether anything besides the temperature changes what may be chosen."""
        filters = self.temperature and (self.top_k or self.top_p < 1 or self.min_p)
        return bool(filters or self.penalised or self.logit_bias)


def _no_ids() -> Int32:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """How one row's token is chosen: the parameters and, for penalties, what its own path has seen.

    Attributes:
        seen: ids of the tokens of prompt and text up to and including the row, ascending, each once.
        counts: how often each stands in the generated text.
        allowed: bit ``id % 32`` of word ``id // 32`` is set if a grammar allows the token; None allows all.
    """

    sampling: Sampling = field(default_factory=Sampling)
    seen: Int32 = field(default_factory=_no_ids)
    counts: Int32 = field(default_factory=_no_ids)
    allowed: UInt32 | None = None

    @classmethod
    def with_counts(cls, sampling: Sampling, counts: Mapping[int, int], allowed: UInt32 | None = None) -> Choice:
        """From a mapping of seen token → occurrences in the generated text (0: in the prompt only)."""
        ids = np.array(sorted(counts), np.int32)
        return cls(sampling, ids, np.array([counts[token] for token in ids.tolist()], np.int32), allowed)


GREEDY = Choice()


def adjust(ids: Int32, raw: Float32, choice: Choice) -> Float32:
    """Logits after penalties, bias and grammar; ``ids[n]`` names the entries of ``raw[n]``."""
    sampling, logits = choice.sampling, raw.copy()
    if sampling.penalised and len(choice.seen):
        place = np.searchsorted(choice.seen, ids)
        hit = choice.seen[np.minimum(place, len(choice.seen) - 1)] == ids
        count = choice.counts[place[hit]].astype(np.float32)
        l, repetition = logits[hit], _F(sampling.repetition_penalty)
        l = np.where(l > 0, l / repetition, l * repetition)
        presence = np.where(count > 0, _F(sampling.presence_penalty), _F(0))
        logits[hit] = l - (_F(sampling.frequency_penalty) * count + presence)
    for token, value in sampling.logit_bias:
        logits[ids == token] += _F(value)
    if choice.allowed is not None:
        open_ids = (choice.allowed[ids >> 5] >> (ids & 31).astype(np.uint32) & np.uint32(1)).astype(np.bool_)
        if open_ids.any():
            logits[~open_ids] = -np.inf
    return logits


def choose(ids: Int32, raw: Float32, choice: Choice, position: int) -> int:
    """Index into ``ids`` of the chosen token.

    Args:
        ids: token ids ``[n]``; ``arange(vocabulary)`` for a whole row.
        raw: their raw logits ``[n]``.
        position: where the chosen token will stand.
    """
    sampling = choice.sampling
    logits = adjust(ids, raw, choice)
    if sampling.temperature == 0:
        return _best(ids, logits)
    z = logits / _F(sampling.temperature)
    kept = _filters(ids, z, sampling)
    noisy = z + gumbel(sampling.seed, sampling.choice, position, ids)
    return _best(ids, np.where(kept, noisy, _F(-np.inf)))


def _best(ids: Int32, values: Float32) -> int:
    ties = np.flatnonzero(values == values.max())
    return int(ties[np.argmin(ids[ties])])


def _filters(ids: Int32, z: Float32, sampling: Sampling) -> NDArray[np.bool_]:
    order = np.lexsort((ids, -z))
    kept = np.ones(len(ids), np.bool_)
    if 0 < sampling.top_k < len(ids):
        kept[order[sampling.top_k :]] = False
    weights = np.where(kept, exp(z - z[order[0]]), _F(0))
    if sampling.top_p < 1:
        ranked = np.add.accumulate(weights[order], dtype=np.float32)
        before = np.concatenate([np.zeros(1, np.float32), ranked[:-1]])
        kept[order[before >= _F(sampling.top_p) * blocked_sum(weights)]] = False
    kept &= weights >= _F(sampling.min_p)
    kept[order[0]] = True
    return kept
