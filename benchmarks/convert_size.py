"""Converting models of true size: peak memory and time, from folders of random weights in the published layouts.

    python benchmarks/convert_size.py --shape bitnet-2b --shape bonsai-4b --work /tmp/sizes

Writes each source (1.2 GB and 8 GB), converts it in a process of its own, first with the check on plain text, which
random weights must fail, then without; removes both afterwards.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bitmtp.benchmark.shapes import SHAPES
from bitmtp.checkpoint import linear_shapes
from bitmtp.config import ModelConfig
from bitmtp.models import shipped_model

Raw = tuple[str, tuple[int, ...], bytes]  # safetensors type, shape, bytes
MODULES = {"attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj", "attention.v": "self_attn.v_proj"}
MODULES |= {"attention.o": "self_attn.o_proj"} | {f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}


def bfloat16(values: NDArray[np.float32]) -> bytes:
    """The upper halves of float32 numbers."""
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype("<u2").tobytes()


def bitnet_matrix(random: np.random.Generator, out: int, inputs: int) -> dict[str, Raw]:
    """Packed weights, four output rows a byte, and their scale."""
    codes = random.integers(0, 3, (4, out // 4, inputs), dtype=np.uint8)
    packed = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6
    scale = np.array([1 / np.sqrt(inputs * 2 / 3)], np.float32)
    return {"weight": ("U8", packed.shape, packed.tobytes()), "weight_scale": ("BF16", (1,), bfloat16(scale))}


def bonsai_matrix(random: np.random.Generator, out: int, inputs: int) -> dict[str, Raw]:
    """Ternary weights times a scale per 128 inputs, as bfloat16."""
    scale = random.uniform(0.01, 0.05, (out, inputs // 128, 1)).astype(np.float32)
    bits = (scale.view(np.uint32) >> 16).astype(np.uint16)
    kinds = random.integers(0, 3, (out, inputs // 128, 128), dtype=np.uint8)
    values = np.where(kinds == 1, np.uint16(0), bits | (kinds == 0).astype(np.uint16) << np.uint16(15))
    return {"weight": ("BF16", (out, inputs), values.astype("<u2").tobytes())}


def layer_tensors(name: str, config: ModelConfig, random: np.random.Generator) -> Iterator[tuple[str, Raw]]:
    """One layer's tensors; every layer gets the same."""
    matrix = bitnet_matrix if name == "bitnet-2b" else bonsai_matrix
    for ours, shape in linear_shapes(config).items():
        for part, raw in matrix(random, *shape).items():
            yield f"{MODULES[ours]}.{part}", raw
    norms = {"input_layernorm": config.hidden_size, "post_attention_layernorm": config.hidden_size}
    if config.sub_norm:
        norms |= {"self_attn.attn_sub_norm": config.hidden_size, "mlp.ffn_sub_norm": config.intermediate_size}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    for norm, size in norms.items():
        yield f"{norm}.weight", ("BF16", (size,), bfloat16(np.ones(size, np.float32)))


def write_safetensors(file: Path, tensors: dict[str, Raw]) -> None:
    """A file of raw tensors."""
    header, place = {}, 0
    for name, (kind, shape, data) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [place, place + len(data)]}
        place += len(data)
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            stream.write(data)


def write_source(folder: Path, name: str) -> None:
    """A sharded Hugging Face folder of a shape: one shard for the embedding, one for each layer."""
    config, random = SHAPES[name], np.random.default_rng(0)
    folder.mkdir(parents=True)
    table = (config.vocab_size, config.hidden_size)
    if name == "bitnet-2b":
        raw: Raw = ("BF16", table, bfloat16(random.normal(0, 1, table).astype(np.float32)))
    else:
        raw = bonsai_matrix(random, *table)["weight"]
    norm: Raw = ("BF16", (config.hidden_size,), bfloat16(np.ones(config.hidden_size, np.float32)))
    shards = {"embedding.safetensors": {"model.embed_tokens.weight": raw, "model.norm.weight": norm}}
    layer = dict(layer_tensors(name, config, random))
    for index in range(config.num_layers):
        shards[f"layer-{index}.safetensors"] = {f"model.layers.{index}.{part}": data for part, data in layer.items()}
    for file, tensors in shards.items():
        write_safetensors(folder / file, tensors)
    index_of = {tensor: file for file, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index_of}))
    (folder / "config.json").write_text(json.dumps(their_config(name, config)))


def their_config(name: str, config: ModelConfig) -> dict[str, object]:
    """``config.json`` as it is published."""
    data = {
        "model_type": "bitnet" if name == "bitnet-2b" else "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": True,
        "eos_token_id": list(config.eos_token_ids),
    }
    if name == "bitnet-2b":
        settings = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
        return data | {"hidden_act": "relu2", "quantization_config": settings}
    return data | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}}


def measure(arguments: list[str]) -> dict[str, object]:
    """Run a command; its exit code, seconds and peak resident bytes."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "bitmtp", *arguments], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = process.stderr.read().splitlines()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    return {
        "exit": os.waitstatus_to_exitcode(status),
        "seconds": round(seconds, 1),
        "peak GB": round(usage.ru_maxrss * 1024 / 1e9, 2),
        "progress lines": sum("M weights" in line for line in lines),
        "last": lines[-1] if lines else "",
    }


def main() -> None:
    """Measure each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=["bitnet-2b", "bonsai-1.7b", "bonsai-4b"], required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for the files, with 12 GB free")
    arguments = parser.parse_args()
    for name in arguments.shape:
        source, target = arguments.work / f"{name}-source", arguments.work / name
        for folder in (source, target):
            shutil.rmtree(folder, ignore_errors=True)
        # elsewhere, because a child's peak counts from what its parent holds
        writer = multiprocessing.get_context("spawn").Process(target=write_source, args=(source, name))
        writer.start()
        writer.join()
        size = sum(file.stat().st_size for file in source.iterdir()) / 1e9
        command = ["convert", str(source), str(target), "--tokenizer", str(shipped_model())]
        for more in ([], ["--unchecked"]):
            facts = measure([*command, *more])
            print(json.dumps({"shape": name, "source GB": round(size, 2), "flags": more, **facts}), flush=True)
        written = sum(file.stat().st_size for file in target.iterdir()) / 1e9
        print(json.dumps({"shape": name, "written GB": round(written, 2)}), flush=True)
        for folder in (source, target):
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
