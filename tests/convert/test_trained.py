"""The model that ships, rewritten as a GGUF file: text tells a right order and scale from a wrong one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bitmtp import checkpoint
from bitmtp.backends import load_backend
from bitmtp.checkpoint import Checkpoint, linear_shapes
from bitmtp.convert.convert import Options, convert
from bitmtp.errors import BackendError, CheckpointError
from bitmtp.models import shipped_model
from bitmtp.ternary import unpack

from .files import Array, Stored, f16, f32, gguf_fields, gguf_name, write_gguf
from .reading import Heard

pytest.importorskip("gguf", reason="the gguf package is not installed (pip install gguf)")
PLAIN = (0, 2, 4, 6)


@pytest.fixture(scope="module")
def shipped() -> Checkpoint:
    loaded = checkpoint.read(shipped_model())
    try:
        load_backend("cpu", loaded, threads=1, context=8)
    except BackendError as error:
        pytest.skip(f"too large for the reference backend: {error}")
    return loaded


def q2_0(weights: Array, scale: Array, shifts: tuple[int, ...]) -> bytes:
    """Blocks of 64: their row's scale, then two bits a weight."""
    codes = (weights + 1).astype(np.uint8).reshape(-1, 16, 4)
    packed = np.bitwise_or.reduce(codes << np.array(shifts, np.uint8), axis=2)
    steps = np.repeat(scale.astype("<f2"), weights.shape[1] // 64).view(np.uint8).reshape(-1, 2)
    return np.concatenate([steps, packed], axis=1).tobytes()


def write_shipped(file: Path, model: Checkpoint, *, shifts: tuple[int, ...] = PLAIN, inverse: bool = False) -> None:
    """It is a BitNet with SiLU, which llama.cpp calls ``bitnet``; masks and chain stay behind."""
    stored: dict[str, Stored] = {}
    for name, tensor in model.tensors.items():
        module = name.removesuffix(".weight")
        if name == "embedding.weight":
            stored[gguf_name(name)] = f16(tensor * model.tensors["embedding.scale"][:, None])
        elif module.split(".", 2)[-1] in linear_shapes(model.config):
            weights, scale = unpack(tensor, 2), model.tensors[f"{module}.scale"]
            scale = np.float32(0.01) / scale if inverse else scale
            stored[gguf_name(name)] = 42, weights.shape, q2_0(weights, scale, shifts)
        elif name.endswith("norm.weight"):
            stored[gguf_name(name)] = f32(tensor)
    write_gguf(file, gguf_fields("bitnet", model.config), stored)


def test_the_right_order_reads_text(shipped: Checkpoint, tmp_path: Path) -> None:
    write_shipped(tmp_path / "m.gguf", shipped)
    heard = Heard()
    reading = convert(tmp_path / "m.gguf", tmp_path / "model", Options(tokenizer=shipped.path), heard)
    assert reading is not None
    assert reading.loss < 4
    assert heard.lines[-1].startswith("check: ")
    made = checkpoint.read(tmp_path / "model")
    assert np.array_equal(made.tensors["layers.9.mlp.up.weight"], shipped.tensors["layers.9.mlp.up.weight"])


@pytest.mark.parametrize(
    ("shifts", "inverse"),
    [((6, 4, 2, 0), False), (PLAIN, True)],
    ids=["highest bits first", "inverse scale"],
)
def test_a_wrong_order_or_scale_is_loud(
    shipped: Checkpoint, tmp_path: Path, shifts: tuple[int, ...], inverse: bool
) -> None:
    """Every one of these files is in itself sound: sizes, codes and scales are as they should be."""
    write_shipped(tmp_path / "m.gguf", shipped, shifts=shifts, inverse=inverse)
    with pytest.raises(CheckpointError, match="hardly reads plain English"):
        convert(tmp_path / "m.gguf", tmp_path / "model", Options(tokenizer=shipped.path), Heard())
    assert not (tmp_path / "model").exists()


def test_one_wrong_matrix_at_the_end_is_loud(shipped: Checkpoint, tmp_path: Path) -> None:
    """That of another layer: sound in itself, and of the right size."""
    tensors = dict(shipped.tensors)
    for part in ("weight", "scale"):
        tensors[f"layers.29.mlp.gate.{part}"] = tensors[f"layers.6.mlp.gate.{part}"]
    write_shipped(tmp_path / "m.gguf", replace(shipped, tensors=tensors))
    with pytest.raises(CheckpointError, match="hardly reads plain English"):
        convert(tmp_path / "m.gguf", tmp_path / "model", Options(tokenizer=shipped.path), Heard())
