"""Named shapes and the cost of a pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bitmtp.backends.reference import ReferenceBackend
from bitmtp.benchmark import widths
from bitmtp.benchmark.shapes import SHAPES, random_checkpoint, random_model
from bitmtp.benchmark.widths import measure_passes, needed_context
from bitmtp.checkpoint import linear_shapes, tensor_specs
from bitmtp.errors import RequestError

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1}


@pytest.mark.parametrize(
    ("name", "billions"),
    [("bonsai-1.7b", 1.72), ("bonsai-4b", 4.02), ("bonsai-8b", 8.19), ("bitnet-2b", 2.41), ("smollm2-135m", 0.1345)],
)
def test_shapes_have_the_sizes_of_their_models(name: str, billions: float) -> None:
    config = SHAPES[name]
    layers = config.num_layers * sum(out * inputs for out, inputs in linear_shapes(config).values())
    tables = 1 if config.tie_embeddings else 2
    assert (layers + tables * config.vocab_size * config.hidden_size) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("name", list(SHAPES))
def test_random_weights_are_a_sound_checkpoint(name: str) -> None:
    config = replace(SHAPES[name], vocab_size=96, head_dim=64, **SMALL)  # type: ignore[arg-type]
    made = random_checkpoint(config, name)
    specs = tensor_specs(config)
    assert list(made.tensors) == list(specs)
    for tensor, spec in specs.items():
        assert (made.tensors[tensor].shape, made.tensors[tensor].dtype.name) == (spec.shape, spec.dtype)
    packed = made.tensors["layers.1.mlp.up.weight"]
    assert not (packed & (packed >> 1) & 0x55).any()
    backend = ReferenceBackend(made, context=40)
    output = backend.prefill(backend.open(), list(range(30)))
    assert 0 < output.probability < 1
    assert np.isfinite(output.entropy)


def test_unknown_shape() -> None:
    with pytest.raises(RequestError, match="bonsai-4b"):
        random_model("cube")


def test_passes_leave_the_history_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widths, "PASSES_PER_ROUND", 2)
    config = replace(SHAPES["smollm2-135m"], vocab_size=64, head_dim=64, **SMALL)  # type: ignore[arg-type]
    backend = ReferenceBackend(random_checkpoint(config, "small"), context=needed_context(8, 5))
    steps: list[tuple[int, int]] = []
    step = backend.step

    def recording(rows: list[object], **options: object) -> object:
        steps.append((rows[0].position, len(rows)))  # type: ignore[attr-defined]
        return step(rows, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(backend, "step", recording)
    costs = measure_passes(backend, history=8, tokens=5, rounds=1)
    wide = [width for position, width in steps if position == 8]
    assert wide[: 3 * len(widths.WIDTHS)] == list(widths.WIDTHS) * 3  # warm-up and two turns
    assert [position for position, _ in steps[-4:]] == [8, 9, 10, 11]  # five tokens, the first from the prefill
    assert costs.costs[0].ratio == 1
