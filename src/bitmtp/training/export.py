"""A student in training → the packed checkpoint that inference reads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitmtp import checkpoint
from bitmtp.config import ModelConfig
from bitmtp.ternary import pack, quantise_rows, ternarise
from bitmtp.training.model import Model


def student_config(source: ModelConfig, *, block_size: int, chain_rank: int) -> ModelConfig:
    """Config of the student made from a float model of ``source``."""
    return replace(
        source,
        sub_norm=True,
        ternary_scale="row",
        embedding_bits=8,
        head_activation_bits=8,
        block_size=block_size,
        chain_rank=chain_rank,
    )


def packed_tensors(model: Model) -> dict[str, NDArray[Any]]:
    """The checkpoint's tensors: what training computes at blend 1, in integers."""
    linears = checkpoint.linear_shapes(model.config)
    tensors: dict[str, NDArray[Any]] = {}
    for name, parameter in model.state_dict().items():
        values: NDArray[np.float32] = parameter.detach().float().cpu().numpy()
        module, kind = name.rsplit(".", 1)
        if name in ("embedding.weight", "head.weight"):
            tensors[name], step = quantise_rows(values)
            tensors[f"{module}.scale"] = step.reshape(-1)
        elif kind == "weight" and module.split(".", 2)[-1] in linears:
            codes, tensors[f"{module}.scale"] = ternarise(values, "row")
            tensors[name] = pack(codes, 2)
        else:
            tensors[name] = values
    return tensors


def export(config: ModelConfig, tensors: Mapping[str, NDArray[Any]], folder: Path, tokenizer_from: Path) -> None:
    """Write a checkpoint at ``folder``, in place of one that is there (which stays until the new one is whole)."""
    fresh, old = (folder.with_name(f"{folder.name}.{suffix}") for suffix in ("new", "old"))
    if old.exists() and not folder.exists():  # a run was killed between the two renames below
        os.rename(old, folder)
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    checkpoint.write(fresh, config, tensors, tokenizer_from)
    if folder.exists():
        os.rename(folder, old)
    os.rename(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)
