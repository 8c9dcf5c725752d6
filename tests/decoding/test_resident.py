"""Which texts a backend may write by itself."""

from __future__ import annotations

from dataclasses import replace

from test_chooser import POLICY, USUAL

from bitmtp.backends.base import Window
from bitmtp.decoding.chooser import AdaptiveShaper
from bitmtp.decoding.costs import Calibration, Tuning
from bitmtp.decoding.decoder import Decoder
from bitmtp.decoding.plans import SPAN
from bitmtp.decoding.policies import make_policy
from bitmtp.decoding.policy import Policy, Verify
from bitmtp.decoding.resident import resident_text
from bitmtp.decoding.shaper import FixedShaper, Shaper
from bitmtp.decoding.state import State
from bitmtp.decoding.topology import chain
from bitmtp.sampling import Sampling

PLAIN = make_policy("speculative", 8)


def decoder_of(policy: Policy, shaper: Shaper | None = None, sampling: Sampling | None = None) -> Decoder:
    state = State(1, sampling or Sampling(), [5, 6, 7], 2, materialized=2)
    return Decoder(state, policy, 40, frozenset([3]), shaper=shaper)


def test_a_fixed_policy_needs_no_numbers() -> None:
    text = resident_text(decoder_of(PLAIN))
    assert text is not None
    assert (text.block_size, text.committed, text.pending, text.limit) == (8, 3, (7,), 40)
    assert text.adaptive is None


def test_the_adaptive_policy_brings_its_own() -> None:
    shaper = AdaptiveShaper(POLICY, Tuning(USUAL))
    text = resident_text(decoder_of(POLICY, shaper))
    assert text is not None
    assert text.adaptive == shaper.resident([5, 6, 7])


def test_what_only_the_host_can_look_at_stays_there() -> None:
    shaper = AdaptiveShaper(POLICY, Tuning(USUAL))
    assert resident_text(decoder_of(POLICY, shaper, Sampling(presence_penalty=0.5))) is None
    assert resident_text(decoder_of(PLAIN, FixedShaper(PLAIN))) is None
    for changes in ({"topology": chain(3)}, {"window": Window()}):
        assert resident_text(decoder_of(replace(PLAIN, **changes))) is None  # type: ignore[arg-type]


def test_calibrated_bars_go_along() -> None:
    calibration = Calibration((0.5, 2.0), (0.5, -0.5))
    policy = Policy("hybrid", 4, Verify.IF_SHORT, tau=0.8, calibration=calibration)
    text = resident_text(decoder_of(policy))
    assert text is not None
    assert text.bars == (0.0, calibration.bar(1, 0.8), calibration.bar(2, 0.8), calibration.bar(3, 0.8))


def test_long_texts_whose_windows_pay_stay_on_the_host() -> None:
    costs = replace(USUAL, per_position=(0.0, 1e-4))
    shaper = AdaptiveShaper(POLICY, Tuning(costs))
    assert not shaper.wants_windows(SPAN)
    assert shaper.wants_windows(SPAN + 100_000)
    free = AdaptiveShaper(POLICY, Tuning(replace(costs, per_position=(0.0, 0.0))))
    assert not free.wants_windows(SPAN + 1_000_000)
