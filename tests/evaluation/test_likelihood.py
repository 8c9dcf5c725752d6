"""Log-likelihoods of continuations."""

from __future__ import annotations

import numpy as np
import pytest

from bitmtp.engine import Engine, Request
from bitmtp.evaluation.likelihood import log_likelihood

PROMPT, LONG = [5, 9, 60, 7], 70  # longer than a pass is wide


def test_sums_over_every_next_token(tiny_engine: Engine) -> None:
    first = np.array([log_likelihood(tiny_engine, PROMPT, [token])[0] for token in range(320)])
    assert np.exp(first).sum() == pytest.approx(1, abs=1e-6)


def test_a_continuation_of_several_passes(tiny_engine: Engine) -> None:
    tokens = np.random.default_rng(0).integers(3, 320, LONG).tolist()
    whole, _ = log_likelihood(tiny_engine, PROMPT, tokens)
    parts = [log_likelihood(tiny_engine, [*PROMPT, *tokens[:i]], [tokens[i]])[0] for i in range(LONG)]
    assert whole == pytest.approx(sum(parts), rel=1e-9)


def test_greedy_is_what_is_generated(tiny_engine: Engine) -> None:
    text = tiny_engine.generate(Request(PROMPT, 8)).token_ids
    assert log_likelihood(tiny_engine, PROMPT, text)[1]
    other = [*text[:-1], (text[-1] + 1) % 320]
    assert not log_likelihood(tiny_engine, PROMPT, other)[1]
    assert log_likelihood(tiny_engine, PROMPT[:1], [3])[0] < 0  # a context of one token
