"""The packed checkpoint: a folder with ``config.json``, safetensors shards and the tokenizer (``docs/format.md``)."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bitmtp.config import ModelConfig
from bitmtp.errors import CheckpointError, ConfigError
from bitmtp.generation_config import GenerationConfig
from bitmtp.layout import Layout

Tensor = NDArray[Any]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHECKSUMS = "crc32"  # key of the shard's metadata: JSON, name of each tensor → CRC-32 of its bytes
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
SHARD_BYTES = 40 << 20


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor must be: its shape and NumPy dtype name."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as read: every tensor named by :func:`tensor_specs`, nothing else."""

    path: Path
    config: ModelConfig
    tensors: Mapping[str, Tensor]


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """``[out, in]`` of each low-bit product of a layer, by its name below ``layers.N``."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "attention.q": (config.attention_size, hidden),
        "attention.k": (config.kv_size, hidden),
        "attention.v": (config.kv_size, hidden),
        "attention.o": (hidden, config.attention_size),
        "mlp.gate": (inner, hidden),
        "mlp.up": (inner, hidden),
        "mlp.down": (hidden, inner),
    }


def _scale_shape(config: ModelConfig, out: int, inputs: int) -> tuple[int, ...]:
    return {"tensor": (1,), "row": (out,), "group": (out, inputs // config.group_size)}[config.ternary_scale]


def _layout_specs(name: str, layout: Layout, out: int, inputs: int) -> Iterator[tuple[str, TensorSpec]]:
    signed = layout.bits == 8 and not layout.minimum
    yield f"{name}.weight", TensorSpec((out, inputs * layout.bits // 8), "int8" if signed else "uint8")
    factors = TensorSpec(layout.scale_shape(out, inputs), "float32")
    yield f"{name}.scale", factors
    if layout.minimum:
        yield f"{name}.minimum", factors


def _vocabulary_specs(config: ModelConfig, name: str) -> Iterator[tuple[str, TensorSpec]]:
    vocab, hidden, bits = config.vocab_size, config.hidden_size, config.embedding_bits
    if layout := config.layout(name):
        yield from _layout_specs(name, layout, vocab, hidden)
        return
    if bits == 16:
        yield f"{name}.weight", TensorSpec((vocab, hidden), "float16")
        return
    packed = TensorSpec((vocab, hidden), "int8") if bits == 8 else TensorSpec((vocab, hidden * bits // 8), "uint8")
    yield f"{name}.weight", packed
    yield f"{name}.scale", TensorSpec((vocab,) if bits != 2 else _scale_shape(config, vocab, hidden), "float32")


def _layer_specs(config: ModelConfig, index: int) -> Iterator[tuple[str, TensorSpec]]:
    for name, (out, inputs) in linear_shapes(config).items():
        if layout := config.layout(f"layers.{index}.{name}"):
            yield from _layout_specs(name, layout, out, inputs)
        else:
            yield f"{name}.weight", TensorSpec((out, inputs // 4), "uint8")
            yield f"{name}.scale", TensorSpec(_scale_shape(config, out, inputs), "float32")
        if config.attention_bias and name in ("attention.q", "attention.k", "attention.v"):
            yield f"{name}.bias", TensorSpec((out,), "float32")
    norms = {"attention_norm": config.hidden_size, "mlp_norm": config.hidden_size}
    if config.sub_norm:
        norms |= {"attention.sub_norm": config.attention_size, "mlp.sub_norm": config.intermediate_size}
    if config.qk_norm:
        norms |= {"attention.q_norm": config.head_dim, "attention.k_norm": config.head_dim}
    for name, size in norms.items():
        yield f"{name}.weight", TensorSpec((size,), "float32")


def _drafter_specs(config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    masks, hidden = config.block_size - 1, config.hidden_size
    if config.drafter == "medusa":
        for index in range(masks):
            yield f"medusa.{index}.weight", TensorSpec((hidden, hidden), "float16")
            yield f"medusa.{index}.bias", TensorSpec((hidden,), "float32")
    elif masks:
        yield "mask_embedding.weight", TensorSpec((masks, hidden), "float32")


def tensor_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint with this config, by name."""
    specs = dict(_vocabulary_specs(config, "embedding"))
    if not config.tie_embeddings:
        specs |= dict(_vocabulary_specs(config, "head"))
    specs |= dict(_drafter_specs(config))
    if config.chain_rank:
        specs["chain.hidden.weight"] = TensorSpec((config.chain_rank, 2 * config.hidden_size), "float32")
        specs["chain.output.weight"] = TensorSpec((config.hidden_size, config.chain_rank), "float32")
    specs["norm.weight"] = TensorSpec((config.hidden_size,), "float32")
    for index in range(config.num_layers):
        specs |= {f"layers.{index}.{name}": spec for name, spec in _layer_specs(config, index)}
    return specs


def read_config(path: Path) -> ModelConfig:
    """Read ``config.json`` of a checkpoint folder.

    Raises:
        CheckpointError: no such folder or file, or a config this reader does not accept.
    """
    if (found := _convertible(path)) is not None:
        kind, source = found
        raise CheckpointError(f"{path}: {kind}, not a checkpoint; make one of it: {_conversion(source)}")
    if path.is_file():
        raise CheckpointError(f"{path}: a file; give the folder that holds the model's config.json")
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such model folder; give a folder that holds config.json")
    file = path / "config.json"
    try:
        return ModelConfig.from_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}); a checkpoint folder must hold it") from None
    except (ConfigError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: {error}") from None


def _convertible(path: Path) -> tuple[str, Path] | None:
    """What ``bitmtp convert`` could read there: what it is, and its place; None where there is nothing of that kind."""
    if path.is_file():
        return ("a GGUF file", path) if path.suffix == ".gguf" else None
    try:
        data = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        files = sorted(path.glob("*.gguf"))
        return ("a folder of GGUF files", files[0]) if files else None
    published = isinstance(data, dict) and "format" not in data and ("model_type" in data or "architectures" in data)
    return ("a Hugging Face folder", path) if published else None


def _conversion(source: Path) -> str:
    """The command that converts it, into a new folder of the working directory."""
    name = source.stem if source.is_file() else source.resolve().name
    return f"`{shlex.join(['bitmtp', 'convert', str(source), f'{name}-bitmtp'])}`"


def read(path: str | Path) -> Checkpoint:
    """Read and check a whole checkpoint; nothing is returned unless every tensor is right.

    Raises:
        CheckpointError: names the file, the tensor, and what was expected.
    """
    folder = Path(path)
    config = read_config(folder)
    specs = tensor_specs(config)
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        for name, tensor in _read_shard(file, specs, config):
            if name in tensors:
                raise CheckpointError(f"{file}: tensor {name} stands in another shard too")
            tensors[name] = tensor
    if missing := [name for name in specs if name not in tensors]:
        spec = specs[missing[0]]
        raise CheckpointError(f"{folder}: tensor {missing[0]} is missing; expected {spec.dtype} {list(spec.shape)}")
    return Checkpoint(folder, config, tensors)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        if not (folder / WEIGHTS).exists():
            raise CheckpointError(f"{folder / WEIGHTS}: missing (and no {INDEX} beside it)")
        return [folder / WEIGHTS]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not an index of shards ({error!r})") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: shard {name!r} is not a file name of this folder")
        if not (folder / name).exists():
            raise CheckpointError(f"{folder / name}: missing; {INDEX} names it")
    return [folder / name for name in names]


def _read_shard(file: Path, specs: Mapping[str, TensorSpec], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="numpy") as shard:
            sums = _checksums(file, shard.metadata() or {})
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                if name not in specs:
                    raise CheckpointError(f"{file}: unexpected tensor {name}; config.json does not call for it")
                tensor = _get_tensor(file, shard, name, specs[name])
                _check_tensor(file, name, tensor, specs[name], config)
                if sums and sums.get(name) != zlib.crc32(tensor.data):
                    raise CheckpointError(f"{file}: tensor {name} is not as it was written; copy the file again")
                yield name, tensor
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: damaged or cut off ({error}); copy the file again") from None


def _checksums(file: Path, metadata: Mapping[str, str]) -> dict[str, int]:
    try:
        return dict(json.loads(metadata.get(CHECKSUMS, "{}")))
    except (ValueError, TypeError, RecursionError):
        raise CheckpointError(f"{file}: its checksums cannot be read; copy the file again") from None


def _get_tensor(file: Path, shard: Any, name: str, spec: TensorSpec) -> Tensor:
    try:
        return np.asarray(shard.get_tensor(name))
    except TypeError:  # a type that NumPy lacks, such as bfloat16
        found = shard.get_slice(name).get_dtype()
        raise CheckpointError(f"{file}: tensor {name} is {found}; expected {spec.dtype} {list(spec.shape)}") from None


def _is_ternary(name: str, config: ModelConfig) -> bool:
    """Whether a weight tensor holds the codes 0, 1 and 2 only."""
    module, _, part = name.rpartition(".")
    table = module in ("embedding", "head")
    return part == "weight" and config.layout(module) is None and (not table or config.embedding_bits == 2)


def _check_tensor(file: Path, name: str, tensor: Tensor, spec: TensorSpec, config: ModelConfig) -> None:
    if tensor.shape != spec.shape or tensor.dtype.name != spec.dtype:
        found = f"{tensor.dtype.name} {list(tensor.shape)}"
        raise CheckpointError(f"{file}: tensor {name} is {found}; expected {spec.dtype} {list(spec.shape)}")
    if spec.dtype.startswith("float") and not np.isfinite(tensor).all():
        raise CheckpointError(f"{file}: tensor {name} holds values that are not finite numbers")
    if name.endswith(".scale") and config.layout(name.removesuffix(".scale")) is None and (tensor < 0).any():
        raise CheckpointError(f"{file}: tensor {name} holds a negative scale")
    if spec.dtype == "uint8" and _is_ternary(name, config) and (tensor & (tensor >> 1) & 0x55).any():
        raise CheckpointError(f"{file}: tensor {name} holds the code 3; expected only 0, 1 and 2")


def write(path: str | Path, config: ModelConfig, tensors: Mapping[str, Tensor], tokenizer_from: str | Path) -> None:
    """Write a checkpoint folder, whole or not at all (a temporary folder, then a rename).

    Args:
        path: the new folder; it must not exist.
        tensors: exactly those of :func:`tensor_specs`.
        tokenizer_from: a folder whose tokenizer files are copied along, and what it says of sampling.

    Raises:
        CheckpointError: the folder exists, or a tensor is missing, unexpected, or of the wrong shape or type.
    """
    target = Path(path)
    if target.exists():
        raise CheckpointError(f"{target}: exists already; choose another folder or remove it")
    specs = tensor_specs(config)
    if wrong := sorted(set(specs) ^ set(tensors)):
        raise CheckpointError(f"{target}: tensor {wrong[0]} is missing or unexpected")
    for name, tensor in tensors.items():
        _check_tensor(target, name, tensor, specs[name], config)
    for name in TOKENIZER_FILES:
        if not (Path(tokenizer_from) / name).is_file():
            raise CheckpointError(f"{Path(tokenizer_from) / name}: missing; a checkpoint needs its tokenizer")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        (staging / "config.json").write_text(config.to_json(), encoding="utf-8")
        _write_shards(staging, {name: tensors[name] for name in specs})
        for name in TOKENIZER_FILES:
            shutil.copyfile(Path(tokenizer_from) / name, staging / name)
        GenerationConfig.read(Path(tokenizer_from)).write(staging)
        staging.chmod(0o755)
        os.rename(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = np.ascontiguousarray(tensor)
        size += tensor.nbytes
    if len(shards) == 1:
        _save_shard(shards[0], folder / WEIGHTS)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _save_shard(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _save_shard(shard: dict[str, Tensor], file: Path) -> None:
    sums = {name: zlib.crc32(tensor.data) for name, tensor in shard.items()}
    try:
        save_file(shard, file, metadata={CHECKSUMS: json.dumps(sums)})
    except SafetensorError as error:  # the library's own name for a disk that refuses
        raise OSError(f"{file.name}: {error}") from None
