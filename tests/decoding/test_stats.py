"""Figures by hand."""

from __future__ import annotations

from bitmtp.decoding.stats import Stats


def test_by_hand() -> None:
    stats = Stats(passes=7)
    stats.record(committed=5, drafted=True, proposed=3, accepted=3)
    stats.record(committed=2, drafted=True, proposed=3, accepted=0)
    stats.record(committed=2, drafted=True, proposed=3, accepted=1)
    stats.record(committed=1, drafted=False, proposed=0, accepted=0)
    assert stats.tokens == 10
    assert stats.iterations == 4
    assert stats.num_spec_steps == 3
    assert stats.mean_acceptance_length == 2.5
    assert stats.draft_acceptance_rate == 4 / 9
    assert stats.tokens_per_pass == 10 / 7
    assert stats.acceptance_histogram(4) == [1, 2, 0, 0, 1]


def test_nothing_happened() -> None:
    stats = Stats()
    assert (stats.tokens, stats.mean_acceptance_length, stats.draft_acceptance_rate, stats.tokens_per_pass) == (0,) * 4
    assert stats.acceptance_histogram(8) == [0] * 9
    assert stats.acceptance_histogram(1) == [0, 0]
