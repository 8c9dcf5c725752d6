"""BitNet b1.58 in Hugging Face folders against transformers' own BitNet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitmtp.checkpoint import linear_shapes
from bitmtp.config import ModelConfig
from bitmtp.convert.huggingface import model_config
from bitmtp.errors import CheckpointError, ConfigError

from .files import BITNET_SUB_NORMS, Array, hf_name, pack_bitnet, random_floats, write_hf
from .reading import IDS, converted, distance, logits, values

BITNET: dict[str, Any] = {
    "model_type": "bitnet",
    "architectures": ["BitNetForCausalLM"],
    "hidden_act": "relu2",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = BITNET | {"model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": False}
# 1bitLLM's names of the two sub-norms
REPRODUCTION = {"self_attn.inner_attn_ln": "attention.sub_norm", "mlp.ffn_layernorm": "mlp.sub_norm"}


def quantised(linear_class: str, mode: str = "offline") -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "bitnet", "linear_class": linear_class, "quantization_mode": mode}}


def modules(config: ModelConfig) -> list[str]:
    return [f"layers.{index}.{name}" for index in range(config.num_layers) for name in linear_shapes(config)]


def ternary_tensors(data: dict[str, Any], *, sub_norm: bool, inverse: bool) -> dict[str, Array]:
    """Tensors of a packed folder by Hugging Face's names: int8 weights (not yet packed) and their scales."""
    config = model_config(data, sub_norm=sub_norm)
    random = np.random.default_rng(1)
    tensors = random_floats(config)
    for name in ("embedding.weight", "head.weight"):
        if name in tensors:
            tensors[name] = tensors[name].astype(np.float16).astype(np.float32)
    for module in modules(config):
        shape = tensors[f"{module}.weight"].shape
        tensors[f"{module}.weight"] = random.integers(-1, 2, shape, dtype=np.int8)
        scale = np.float32(2.0 ** -random.integers(3, 5))  # exact both ways
        tensors[f"{module}.weight_scale"] = np.array([1 / scale if inverse else scale], np.float32)
    return {hf_name(name): tensor for name, tensor in tensors.items()}


def packed(tensors: dict[str, Array]) -> dict[str, Array]:
    return {name: pack_bitnet(each) if each.dtype == np.int8 else each for name, each in tensors.items()}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("shards", [1, 3])
def test_packed_folder_multiplies_its_scale(tmp_path: Path, shards: int, backend: str) -> None:
    from . import others

    data = BITNET | quantised("autobitlinear")
    tensors = ternary_tensors(data, sub_norm=True, inverse=False)
    made = converted(write_hf(tmp_path / "source", data, packed(tensors), shards), tmp_path / "model")
    assert (made.config.ternary_scale, made.config.activation, made.config.sub_norm) == ("tensor", "relu2", True)
    theirs = others.load(others.bitnet(data, "autobitlinear"), tensors)
    assert distance(logits(made, backend), others.logits(theirs, IDS)) < 0.03


@pytest.mark.parametrize("named", [True, False])
def test_older_folders_divide_by_their_scale(tmp_path: Path, named: bool) -> None:
    from . import others

    data = LLAMA | quantised("bitlinear")
    if not named:  # as HF1BitLLM and Falcon3 leave it
        data["quantization_config"] = {"quant_method": "bitnet"}
    tensors = packed(ternary_tensors(data, sub_norm=False, inverse=True))
    made = converted(write_hf(tmp_path / "source", data, tensors), tmp_path / "model")
    assert made.config.activation == "silu"
    theirs = others.load(others.bitnet(data, "bitlinear"), tensors)
    assert distance(logits(made), others.logits(theirs, IDS)) < 0.03


def test_packing_is_that_of_transformers() -> None:
    from . import others

    weights = np.random.default_rng(0).integers(-1, 2, (24, 8), dtype=np.int8)
    theirs = others.transformers.integrations.bitnet.pack_weights(others.torch.from_numpy(weights.copy()))
    assert np.array_equal(pack_bitnet(weights), theirs.numpy())


def test_the_direction_of_the_scale_shows(tmp_path: Path) -> None:
    """The same bytes under the other class are another model: what the config says is not ignored."""
    tensors = packed(ternary_tensors(BITNET, sub_norm=True, inverse=False))
    made = [
        converted(write_hf(tmp_path / kind, BITNET | quantised(kind), tensors), tmp_path / f"{kind}.out")
        for kind in ("autobitlinear", "bitlinear")
    ]
    name = "layers.0.mlp.up.scale"
    assert made[0].tensors[name][0] == pytest.approx(1 / made[1].tensors[name][0])
    assert distance(logits(made[1]), logits(made[0])) > 0.5


@pytest.mark.parametrize("names", [BITNET_SUB_NORMS, REPRODUCTION])
def test_full_precision_weights_are_quantised_by_absmean(tmp_path: Path, names: dict[str, str]) -> None:
    from . import others

    microsoft = names is BITNET_SUB_NORMS
    data = BITNET | (quantised("autobitlinear", "online") if microsoft else {})
    own = random_floats(model_config(data, sub_norm=True))
    own["embedding.weight"] = own["embedding.weight"].astype(np.float16).astype(np.float32)
    on_disk = data if microsoft else data | {"model_type": "llama", "hidden_act": "silu", "weight_bits": 1}
    source = write_hf(tmp_path / "source", on_disk, {hf_name(name, names): each for name, each in own.items()})
    made = converted(source, tmp_path / "model")
    theirs = others.bitnet(data if microsoft else data | {"hidden_act": "silu"}, "autobitlinear", "online")
    others.load(theirs, {hf_name(name): tensor for name, tensor in own.items()})
    assert distance(logits(made), others.logits(theirs, IDS)) < 0.03
    weight = own["layers.1.attention.k.weight"]
    assert np.abs(values(made, "layers.1.attention.k")).max() == pytest.approx(np.abs(weight).mean(), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ({"quant_method": "bitnet", "linear_class": "bitlinear3"}, "linear_class is 'bitlinear3'"),
        ({"quant_method": "bitnet", "quantization_mode": "sometimes"}, "quantization_mode is 'sometimes'"),
        ({"quant_method": "bitnet", "use_rms_norm": True}, "use_rms_norm"),
        (None, "nothing says how its weights are to be read"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, settings: dict[str, Any] | None, message: str) -> None:
    data = BITNET | ({} if settings is None else {"quantization_config": settings})
    source = write_hf(tmp_path / "source", data, packed(ternary_tensors(BITNET, sub_norm=True, inverse=False)))
    with pytest.raises(ConfigError, match=message):
        converted(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()


UP = "model.layers.1.mlp.up_proj"


def _code_three(tensors: dict[str, Array]) -> None:
    tensors[f"{UP}.weight"][3, 5] |= 0b1100


def _transposed_packing(tensors: dict[str, Array]) -> None:
    """Four inputs a byte, not four output rows: the order of this project's own format."""
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].reshape(192, 32)


def _unpacked(tensors: dict[str, Array]) -> None:
    tensors[f"{UP}.weight"] = np.zeros((192, 128), np.float32)


def _no_scale(tensors: dict[str, Array]) -> None:
    del tensors[f"{UP}.weight_scale"]


def _scale(value: float) -> Any:
    def damage(tensors: dict[str, Array]) -> None:
        tensors[f"{UP}.weight_scale"] = np.array([value], np.float32)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_code_three, "code 3"),
        (_transposed_packing, r"expected U8 \[48, 128\]"),
        (_unpacked, "expected U8"),
        (_no_scale, "no weight_scale"),
        (_scale(float("nan")), "expected one above 0"),
        (_scale(float("inf")), "expected one above 0"),
        (_scale(0.0), "expected one above 0"),
        (_scale(-0.1), "expected one above 0"),
        (_scale(2.0**20), "in most layers"),
        (_scale(2.0**-30), "in most layers"),
    ],
)
def test_damage_is_loud(tmp_path: Path, damage: Any, message: str) -> None:
    data = BITNET | {"num_hidden_layers": 5} | quantised("autobitlinear")
    tensors = packed(ternary_tensors(data, sub_norm=True, inverse=False))
    damage(tensors)
    source = write_hf(tmp_path / "source", data, tensors)
    with pytest.raises(CheckpointError, match=message):
        converted(source, tmp_path / "model")
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("cut", [1, 5_000, 100_000, 190_000])
def test_a_file_cut_off_anywhere_is_loud(tmp_path: Path, cut: int) -> None:
    data = BITNET | quantised("autobitlinear")
    source = write_hf(tmp_path / "source", data, packed(ternary_tensors(data, sub_norm=True, inverse=False)))
    file = source / "model.safetensors"
    whole = file.read_bytes()
    assert len(whole) > cut
    file.write_bytes(whole[:-cut])
    with pytest.raises(CheckpointError, match=r"cut off|not a safetensors file"):
        converted(source, tmp_path / "model")
