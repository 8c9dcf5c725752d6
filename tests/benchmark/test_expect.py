"""What is expected of a model from some of its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bitmtp.backends import load_backend
from bitmtp.benchmark import expect
from bitmtp.benchmark.shapes import SHAPES, random_checkpoint
from bitmtp.errors import BackendError

pytest.importorskip("bitmtp.backends.cpu._native")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    """A shape of ten small layers."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "num_kv_heads": 1}
    shape = replace(SHAPES["bonsai-4b"], num_layers=10, vocab_size=1024, head_dim=64, **sizes)
    monkeypatch.setattr(expect, "SHAPES", {"small": shape})
    monkeypatch.setattr(expect, "VOCABULARY", 256)
    monkeypatch.setattr(expect, "LAYER_BYTES", 100e3)
    return "small"


def test_memory_is_that_of_the_whole_model(small: str) -> None:
    found = expect.expect(small, "cpu", 1)
    shape = expect.SHAPES[small]
    whole = load_backend("cpu", random_checkpoint(shape, small), threads=1, context=64)
    assert found.weight_bytes == pytest.approx(int(whole.describe()["weight bytes"]), rel=0.02)
    assert found.kv_bytes == expect.CONTEXT * shape.num_layers * 2 * 64 * (2 if shape.kv_type == "float16" else 4)
    assert found.checked_ratio > 0
    assert found.tokens_per_second > 0
    assert found.prompt_tokens_per_second > 0


def test_times_count_up_to_the_whole_model(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = expect._enough_layers(expect.SHAPES[small])
    assert 1 < layers < 10
    times = {1: expect._Parts(0.01, 0.002), expect.CHECKED: expect._Parts(0.02, 0.008)}
    monkeypatch.setattr(expect, "_times", lambda _: (0.5 * layers, times))
    found = expect.expect(small, "cpu", 1)
    assert found.tokens_per_second == pytest.approx(1 / (10 * 0.01 + 4 * 0.002))
    assert found.checked_ratio == pytest.approx((10 * 0.02 + 4 * 0.008) / (10 * 0.01 + 4 * 0.002))
    assert found.prompt_tokens_per_second == pytest.approx(expect.HISTORY / 5)


def test_a_backend_that_does_not_tell_its_weights(small: str) -> None:
    with pytest.raises(BackendError, match="use cpu or cuda"):
        expect.expect(small, "reference", None)
