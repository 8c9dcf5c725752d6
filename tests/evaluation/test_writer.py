"""Texts that share passes are the texts that they would be alone."""

from __future__ import annotations

from bitmtp.core.policies import make_policy
from bitmtp.engine import Engine, Request
from bitmtp.evaluation.writer import write_texts


def test_same_texts_in_any_batch(tiny_engine: Engine) -> None:
    policies = [make_policy("autoregressive", 16), make_policy("speculative", 16), make_policy("hybrid", 16, tau=0.1)]
    requests = [Request([3 + n, 40, 7 * n + 5], 5 + 4 * n, policies[n % 3]) for n in range(7)]
    alone = [tiny_engine.generate(request).token_ids for request in requests]
    for batch in (1, 3, 20):
        written = dict(write_texts(tiny_engine, requests, batch))
        assert [written[index].result.token_ids for index in range(len(requests))] == alone


def test_sequences_are_closed_when_the_caller_stops(tiny_engine: Engine) -> None:
    for _ in range(3):
        texts = write_texts(tiny_engine, [Request([4, 5], 40), Request([6, 7], 3)], 2)
        next(texts)
        texts.close()  # type: ignore[attr-defined]
    handle = tiny_engine.backend.open()
    tiny_engine.backend.close(handle)
