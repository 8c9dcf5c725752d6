"""Low-bit matrices: each block type keeps its values; full precision is rounded, and the error is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import write_tokenizer

from bitmtp.backends.weights import dequantise_rows
from bitmtp.checkpoint import read
from bitmtp.convert.convert import Options, convert
from bitmtp.convert.huggingface import model_config
from bitmtp.convert.lowbit import round_values
from bitmtp.errors import CheckpointError, ConfigError

from .files import Array, Stored, f32, gguf_fields, gguf_name, hf_name, random_floats, write_gguf, write_hf
from .reading import Heard, logits

gguf: Any = pytest.importorskip("gguf", reason="the gguf package is not installed (pip install gguf)")
from bitmtp.convert.gguf_quants import EXACT_TYPES  # noqa: E402 (it needs the package)

from .test_gguf import ARCHITECTURES, SHAPE, permuted  # noqa: E402

SCALES = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}  # bytes of a block that are float16; else 0 and 2
LLAMA = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip


def random_blocks(kind: str, shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """Any bits, and scales of either sign: ``[out, bytes]``."""
    exact = EXACT_TYPES[kind]
    blocks = random.integers(0, 256, (shape[0] * shape[1] // exact.block, exact.size), dtype=np.uint8)
    for place in SCALES.get(kind, (0, 2)):
        scale = random.uniform(-2e-3, 2e-3, (len(blocks), 1)).astype("<f2")
        blocks[:, place : place + 2] = scale.view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write_model(file: Path, kinds: dict[str, str], architecture: str = "qwen2") -> dict[str, Array]:
    """A model whose matrices are of the types given by the end of their names; what each stands for, by our names."""
    config = replace(SHAPE, **ARCHITECTURES[architecture])
    random = np.random.default_rng(3)
    expected: dict[str, Array] = {}
    stored: dict[str, Stored] = {}
    for name, tensor in random_floats(config).items():
        kind = next((kind for end, kind in kinds.items() if name.removesuffix(".weight").endswith(end)), None)
        if tensor.ndim == 1 or kind is None:
            stored[gguf_name(name)] = f32(tensor)
            continue
        raw, type_id = random_blocks(kind, tensor.shape, random), gguf.GGMLQuantizationType[kind]
        expected[name.removesuffix(".weight")] = gguf.dequantize(raw, type_id)
        heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(name.split(".")[-2])
        written = permuted(raw, heads) if architecture == "llama" and heads else raw
        stored[gguf_name(name)] = int(type_id), tensor.shape, written.tobytes()
    write_gguf(file, gguf_fields(architecture, config), stored)
    write_tokenizer(file.parent)
    return expected


def convert_file(file: Path, **options: Any) -> tuple[Any, list[str]]:
    heard = Heard()
    convert(file, file.parent / "model", Options(checked=False, tokenizer=file.parent, **options), heard)
    return read(file.parent / "model"), heard.lines


def values(made: Any, module: str) -> Array:
    return dequantise_rows(made, module, np.arange(len(made.tensors[f"{module}.weight"]), dtype=np.int32))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", EXACT_TYPES)
def test_every_type_keeps_its_values(tmp_path: Path, kind: str, architecture: str) -> None:
    expected = write_model(tmp_path / "m.gguf", {"": kind}, architecture)
    made, lines = convert_file(tmp_path / "m.gguf")
    assert len(expected) == 8 + (not made.config.tie_embeddings)
    for module, matrix in expected.items():
        assert np.array_equal(values(made, module), matrix), module
    assert all("exact" in line for line in lines if "->" in line)


def test_mixed_types_give_the_reference_bits(tmp_path: Path) -> None:
    kinds = {".v": "Q6_K", ".q": "Q5_0", ".k": "Q5_0", ".o": "Q8_0", ".down": "Q4_K", "": "Q4_1"}
    write_model(tmp_path / "m.gguf", kinds)
    made, _ = convert_file(tmp_path / "m.gguf")
    assert {layout.bits for _, layout in made.config.layouts} == {4, 8}
    assert {layout.group_size for _, layout in made.config.layouts} == {16, 32}
    assert np.array_equal(logits(made, "reference"), logits(made, "cpu"))


def test_gate_and_up_of_two_types_are_rounded_alike(tmp_path: Path) -> None:
    expected = write_model(tmp_path / "m.gguf", {".gate": "Q4_0", "": "Q8_0"})
    made, lines = convert_file(tmp_path / "m.gguf")
    assert made.config.layout("layers.0.mlp.gate") == made.config.layout("layers.0.mlp.up")
    matrix = expected["layers.0.mlp.gate"]
    assert np.abs(values(made, "layers.0.mlp.gate") - matrix).max() < 0.01 * np.abs(matrix).max()
    assert any("mlp.gate" in line and "relative error" in line for line in lines)


def test_four_bits_leave_an_embedding_that_is_not_the_head(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", {"": "Q8_0"}, "llama")
    made, _ = convert_file(tmp_path / "m.gguf", bits=4)
    bits = {name: layout.bits for name, layout in made.config.layouts}
    assert (bits["embedding"], bits["head"], bits["mlp.down"]) == (8, 4, 4)


@pytest.mark.parametrize(("bits", "most"), [(8, 0.006), (4, 0.11)])
def test_full_precision_is_rounded(tmp_path: Path, bits: int, most: float) -> None:
    tensors = random_floats(model_config(LLAMA))
    source = write_hf(tmp_path / "source", LLAMA, {hf_name(name): each for name, each in tensors.items()})
    heard = Heard()
    convert(source, tmp_path / "model", Options(bits=bits, checked=False), heard)
    assert any(f"{bits} bits" in line and "relative error at most" in line for line in heard.lines)
    made = read(tmp_path / "model")
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            back = values(made, name.removesuffix(".weight"))
            assert np.linalg.norm(back - tensor) < most * np.linalg.norm(tensor), name
    assert np.array_equal(logits(made, "reference"), logits(made, "cpu"))


@pytest.mark.parametrize(("bits", "most"), [(8, 0.006), (4, 0.11)])
def test_rounding_error(bits: int, most: float) -> None:
    """Normally distributed weights; a group of zeros stays zero."""
    floats = np.random.default_rng(0).normal(0, 0.02, (64, 128)).astype(np.float32)
    floats[3, 32:64] = 0
    back = round_values(floats, bits).values()
    assert np.linalg.norm(back - floats) < most * np.linalg.norm(floats)
    assert not back[3, 32:64].any()


def test_damage_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_model(file, {"": "Q4_0"})
    whole = file.read_bytes()
    file.write_bytes(whole[:-4096])
    with pytest.raises(CheckpointError, match="cut off"):
        convert_file(file)
    assert not (tmp_path / "model").exists()


def test_bits_of_a_ternary_model_are_refused(tmp_path: Path) -> None:
    from .test_gguf import write_model as write_ternary

    write_ternary(tmp_path / "m.gguf", "TQ2_0")
    with pytest.raises(ConfigError, match=r"--bits 4: .* is ternary"):
        convert_file(tmp_path / "m.gguf", bits=4)


def test_a_ternary_model_with_a_narrow_embedding(tmp_path: Path) -> None:
    from .test_gguf import write_model as write_ternary

    write_ternary(tmp_path / "m.gguf", "TQ2_0", table="F16")
    made, lines = convert_file(tmp_path / "m.gguf", embedding_bits=4)
    layout = made.config.layout("embedding")
    assert layout is not None
    assert (layout.bits, made.config.layout("layers.0.mlp.up")) == (4, None)
    assert any("embedding" in line and "relative rounding error" in line for line in lines)
    assert np.array_equal(logits(made, "reference"), logits(made, "cpu"))
