"""A BitNet as the start of a run: the student is the BitNet, and learns on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bitmtp import checkpoint
from bitmtp.errors import ConfigError
from bitmtp.ternary import unpack

from .files import write_hf
from .reading import IDS, converted, distance, logits
from .test_bitnet import BITNET, packed, quantised, ternary_tensors

torch = pytest.importorskip("torch", reason="pip install 'bitmtp[train]'")
pytest.importorskip("tensorboard", reason="pip install 'bitmtp[train]'")

from bitmtp.training.config import TrainConfig  # noqa: E402
from bitmtp.training.export import packed_tensors  # noqa: E402
from bitmtp.training.model import Model  # noqa: E402
from bitmtp.training.prepare import prepare  # noqa: E402
from bitmtp.training.report import Report  # noqa: E402
from bitmtp.training.train import run  # noqa: E402


@pytest.fixture
def bitnet(tmp_path: Path) -> Path:
    """A packed BitNet folder with squared ReLU and sub-norms."""
    data = BITNET | quantised("autobitlinear")
    return write_hf(tmp_path / "bitnet", data, packed(ternary_tensors(data, sub_norm=True, inverse=False)))


def settings(bitnet: Path, **changes: object) -> TrainConfig:
    """A run of three steps on a few lines of text."""
    text = bitnet.parent / "text.jsonl"
    lines = [
        json.dumps({"text": f"The river is {number} metres wide, and its water is cold."}) for number in range(400)
    ]
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    values: dict[str, object] = {
        "source": str(bitnet), "tokenizer": str(bitnet), "output": str(bitnet.parent / "run"), "data": {str(text): 1},
        "steps": 3, "blend": 0.0, "batch_size": 2, "seq_len": 24, "block_size": 5, "short_blocks": 3, "short_masks": 2,
        "long_blocks": 2, "chain_rank": 8, "calibration_rows": 2, "log_seconds": 0.0,
    }  # fmt: skip
    return TrainConfig(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def student(bitnet: Path, tmp_path: Path) -> Model:
    """What training starts with."""
    return prepare(settings(bitnet), torch.device("cpu"), Report(tmp_path)).student


def test_the_student_has_the_bitnets_weights_scales_and_sub_norms(student: Model, bitnet: Path, tmp_path: Path) -> None:
    exported, made = packed_tensors(student), converted(bitnet, tmp_path / "converted")
    for name in (name for name in made.tensors if name.endswith(".scale") and name.startswith("layers.")):
        weight = name.replace(".scale", ".weight")
        assert np.array_equal(exported[weight], made.tensors[weight]), weight
        used = unpack(exported[weight], 2).any(axis=1)
        assert np.allclose(exported[name][used], made.tensors[name][0], rtol=1e-5), name
    for name in (name for name in made.tensors if "sub_norm" in name):
        assert np.array_equal(exported[name], made.tensors[name])


def test_its_logits_are_the_bitnets(student: Model, bitnet: Path, tmp_path: Path) -> None:
    blend = torch.ones(())
    with torch.no_grad():
        rows = student(torch.tensor([IDS]), student.embedding_matrix(blend), None, blend)
        ours = student.head_rows(rows, blend) @ student.head_matrix(blend, student.embedding_matrix(blend)).T
    # The student's embedding and head have 8 bits, like those of a checkpoint converted with them.
    theirs = logits(converted(bitnet, tmp_path / "converted", embedding_bits=8))
    assert distance(ours[0].numpy(), theirs) < 0.1


def test_it_trains_from_there(bitnet: Path) -> None:
    config = settings(bitnet)
    assert run(config)
    made = checkpoint.read(Path(config.output) / "model").config
    assert (made.activation, made.sub_norm, made.block_size) == ("relu2", True, 5)


def test_fading_quantisation_in_is_refused(bitnet: Path) -> None:
    with pytest.raises(ConfigError, match="set blend = 0"):
        run(settings(bitnet, blend=0.08))
