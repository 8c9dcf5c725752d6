"""What conversion does around the weights: the destination, the embedding, the tokenizer, progress, full precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TEMPLATE, write_tokenizer

from bitmtp import checkpoint
from bitmtp.convert.convert import Options, convert
from bitmtp.convert.huggingface import model_config
from bitmtp.core.policies import make_policy
from bitmtp.engine import Engine, Request
from bitmtp.errors import CheckpointError, ConfigError, RequestError

from .files import hf_name, random_floats, write_hf
from .reading import Heard
from .test_bitnet import BITNET, packed, quantised, ternary_tensors

UNCHECKED = Options(checked=False, embedding_bits=16)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    data = BITNET | quantised("autobitlinear")
    return write_hf(tmp_path / "source", data, packed(ternary_tensors(data, sub_norm=True, inverse=False)), shards=2)


def test_it_says_what_it_was_given(source: Path, tmp_path: Path) -> None:
    heard = Heard()
    convert(source, tmp_path / "model", UNCHECKED, heard)
    kind, shape, table = heard.lines
    assert (
        "BitNet b1.58, packed 2-bit weights (autobitlinear: the stored scale multiplies); Hugging Face folder" in kind
    )
    assert "2 layers, hidden 128, 320 tokens" in shape
    assert "16-bit embedding" in shape
    assert table == "embedding: F32 kept in 16 bits; relative rounding error 0"
    done = [step[0] for step in heard.steps]
    assert done == sorted(done)
    assert done[-1] == heard.steps[-1][1] == heard.steps[0][1]


def test_an_embedding_in_8_bits_says_its_error(source: Path, tmp_path: Path) -> None:
    heard = Heard()
    convert(source, tmp_path / "model", Options(embedding_bits=8, checked=False), heard)
    made = checkpoint.read(tmp_path / "model")
    rows = random_floats(model_config(BITNET, sub_norm=True))["embedding.weight"]
    rows = rows.astype(np.float16).astype(np.float32)
    back = made.tensors["embedding.weight"] * made.tensors["embedding.scale"][:, None]
    error = np.sqrt(np.square(rows - back).sum() / np.square(rows).sum())
    assert 0.001 < error < 0.01
    assert heard.lines[2] == f"embedding: F32 kept in 8 bits; relative rounding error {error:.2g}"
    assert (made.config.embedding_bits, made.config.head_activation_bits) == (8, 8)


def test_an_embedding_beyond_float16_is_loud(tmp_path: Path) -> None:
    data = BITNET | quantised("autobitlinear")
    tensors = packed(ternary_tensors(data, sub_norm=True, inverse=False))
    tensors["model.embed_tokens.weight"][7, 7] = 1e6
    source = write_hf(tmp_path / "source", data, tensors)
    with pytest.raises(CheckpointError, match=rf"{source}: tensor embedding\.weight holds values that are not finite"):
        convert(source, tmp_path / "model", UNCHECKED, Heard())


def test_a_tokenizer_that_does_not_fit_is_named_where_it_stands(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=rf"^{source / 'tokenizer.json'}: not a tokenizer"):
        convert(source, tmp_path / "model", UNCHECKED, Heard())


def test_an_existing_folder_is_kept(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "mine.txt").write_text("kept")
    with pytest.raises(CheckpointError, match=r"exists already; .*--force"):
        convert(source, target, UNCHECKED, Heard())
    assert (target / "mine.txt").read_text() == "kept"
    convert(source, target, Options(overwrite=True, checked=False), Heard())
    assert not (target / "mine.txt").exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model", "source"]


def test_a_failure_leaves_what_was_there(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "mine.txt").write_text("kept")
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing; .*--tokenizer"):
        convert(source, target, Options(overwrite=True, checked=False), Heard())
    assert (target / "mine.txt").read_text() == "kept"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model", "source"]


def test_a_model_that_knows_no_text_is_refused(source: Path, tmp_path: Path) -> None:
    """Random weights are as good as weights in a wrong order."""
    with pytest.raises(CheckpointError, match=r"hardly reads plain English \(.* chance: 5\.77\).*--unchecked"):
        convert(source, tmp_path / "model", Options(), Heard())
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    "changes", [{"model_type": "llama"}, {"model_type": "qwen2"}, {"model_type": "qwen3", "head_dim": 32}]
)
def test_full_precision_is_a_start_for_training(tmp_path: Path, changes: dict[str, Any]) -> None:
    data = BITNET | {"hidden_act": "silu"} | changes
    tensors = {hf_name(name): each for name, each in random_floats(model_config(data)).items()}
    source = write_hf(tmp_path / "source", data, tensors)
    with pytest.raises(ConfigError, match=r"not a ternary model .* full precision.* a start for `bitmtp train`"):
        convert(source, tmp_path / "model", UNCHECKED, Heard())
    assert not (tmp_path / "model").exists()


def test_tokenizer_settings(source: Path, tmp_path: Path) -> None:
    """A template in its own file, special tokens with their properties, and settings of no use here."""
    settings = {"bos_token": {"content": "<|start|>", "lstrip": False}, "eos_token": "<|end|>", "padding_side": "left"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "chat_template.jinja").write_text(TEMPLATE)
    convert(source, tmp_path / "model", UNCHECKED, Heard())
    written = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert written == {"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}


def test_how_the_source_samples_goes_along(source: Path, tmp_path: Path) -> None:
    said = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2], "transformers_version": "5"}
    (source / "generation_config.json").write_text(json.dumps(said))
    convert(source, tmp_path / "model", UNCHECKED, Heard())
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text()) == {"temperature": 0.6, "top_p": 0.9}


@pytest.mark.parametrize(
    ("template", "said"),
    [([1, "x", {"name": "default"}], None), ([{"name": "default", "template": 5}], "chat_template is 5; expected"),
     ("\ud800", None), (1.5, "chat_template is 1.5")],
)  # fmt: skip
def test_tokenizer_settings_of_another_kind(source: Path, tmp_path: Path, template: Any, said: str | None) -> None:
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    if said is None:
        convert(source, tmp_path / "model", UNCHECKED, Heard())
    else:
        with pytest.raises(CheckpointError, match=said):
            convert(source, tmp_path / "model", UNCHECKED, Heard())


def test_another_tokenizer(source: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    (tmp_path / "words").mkdir()
    write_tokenizer(tmp_path / "words")
    convert(source, tmp_path / "model", Options(tokenizer=tmp_path / "words", checked=False), Heard())
    assert (tmp_path / "model" / "tokenizer.json").exists()


@pytest.mark.parametrize("name", ["speculative", "confidence", "hybrid"])
def test_a_converted_model_runs_and_does_not_draft(source: Path, tmp_path: Path, backend_name: str, name: str) -> None:
    convert(source, tmp_path / "model", Options(embedding_bits=8, checked=False), Heard())
    engine = Engine.load(tmp_path / "model", backend=backend_name, threads=1)
    result = engine.generate(Request("the", max_tokens=5))
    assert (result.policy.name, result.policy.block_size) == ("auto", 1), "copies need no draft"
    assert result.token_ids
    with pytest.raises(RequestError, match=r"never taught to draft.*`bitmtp train` teaches it"):
        make_policy(name, engine.config.block_size, block_size=4)


# After conversion: the checkpoint itself


def flip(file: Path, tensor: str, byte: int) -> None:
    """Change one bit of a tensor on disk."""
    raw = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8:start])[tensor]["data_offsets"]
    assert byte < end - begin
    raw[start + begin + byte] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize("tensor", ["layers.1.mlp.up.scale", "norm.weight", "embedding.weight"])
def test_one_flipped_bit_is_loud_when_it_loads(source: Path, tmp_path: Path, tensor: str) -> None:
    convert(source, tmp_path / "model", UNCHECKED, Heard())
    flip(tmp_path / "model" / "model.safetensors", tensor, 0)
    with pytest.raises(CheckpointError, match=f"tensor {tensor} is not as it was written"):
        checkpoint.read(tmp_path / "model")


def test_swapped_weights_are_loud_when_it_loads(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "model", UNCHECKED, Heard())
    file = tmp_path / "model" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8:start])["layers.0.mlp.gate.weight"]["data_offsets"]
    rows = raw[start + begin : start + end]
    raw[start + begin : start + end] = rows[32:] + rows[:32]
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.gate\.weight is not as it was written"):
        checkpoint.read(tmp_path / "model")
