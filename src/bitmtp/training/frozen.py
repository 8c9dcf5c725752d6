"""Block drafting bolted on to a finished checkpoint, which stays as it is: the literature's baselines.

What is learnt, fresh mask embeddings or Medusa heads, learns the frozen model's own next-token distributions: mask rows
towards the real rows that predict the same tokens, as in the joint loss once its students teach themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitmtp.checkpoint import Checkpoint, tensor_specs
from bitmtp.config import Drafter
from bitmtp.errors import ConfigError
from bitmtp.ternary import unpack
from bitmtp.training.config import TrainConfig
from bitmtp.training.layout import Layout
from bitmtp.training.model import Model, load, stretch
from bitmtp.training.objective import Metrics, depth_names, depth_weights, mask_loss

LAYOUTS: dict[str, tuple[Any, ...]] = {
    "ternary_scale": ("row", "tensor"),
    "embedding_bits": (8,),
    "activation_scale": ("row",),
}


def frozen_model(start: Checkpoint, config: TrainConfig, dtype: torch.dtype) -> Model:
    """A checkpoint as a model of the trainer that computes the same, but for the masks or heads that are to learn.

    Raises:
        ConfigError: its scales or its embedding are not those that training computes.
    """
    if start.config.layouts:
        raise ConfigError(f"{start.path}: has matrices with layouts; method {config.method} freezes models without")
    for name, known in LAYOUTS.items():
        if (value := getattr(start.config, name)) not in known:
            words = " or ".join(map(repr, known))
            raise ConfigError(f"{start.path}: {name} is {value!r}; method {config.method} freezes {words} only")
    drafter: Drafter = "medusa" if config.method == "medusa" else "masks"
    model = Model(replace(start.config, block_size=config.block_size, drafter=drafter, chain_rank=0), dtype)
    drafting = ("mask_embedding.", "medusa.", "chain.")
    names = (name for name in start.tensors if not name.startswith(drafting) and not name.endswith(".scale"))
    load(model, {name: _floats(start, name) for name in names})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(drafting))
    return model


def _floats(start: Checkpoint, name: str) -> NDArray[np.float32]:
    values, scale = start.tensors[name], start.tensors.get(name.removesuffix("weight") + "scale")
    if scale is None:
        return values.astype(np.float32)
    if name.startswith("layers."):
        return stretch(unpack(values, 2).astype(np.float32) * scale[:, None])
    return values.astype(np.float32) * scale[:, None]


def bolted_tensors(model: Model, start: Checkpoint) -> dict[str, NDArray[Any]]:
    """The checkpoint's tensors: those of ``start`` bit for bit, and what has been learnt."""
    specs = tensor_specs(model.config)
    tensors = {name: values for name, values in start.tensors.items() if name in specs}
    learnt = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return tensors | {
        name: parameter.detach().float().cpu().numpy().astype(specs[name].dtype) for name, parameter in learnt.items()
    }


class Bolted:
    """KL of the mask rows to the model's own next-token distributions, weighted by depth."""

    def __init__(self, model: Model, config: TrainConfig) -> None:
        self.model, self.config = model, config
        self.names, self.models = depth_names("plain", config), [model]
        self.whole = torch.ones((), device=model.embedding.weight.device)
        with torch.no_grad():
            self.embedding = model.embedding_matrix(self.whole)
            self.head = model.head_matrix(self.whole, self.embedding)

    @torch.no_grad()
    def original(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The frozen model's own rows and head."""
        normed = self.model(tokens, self.embedding, None, self.whole)
        return self.model.head_rows(normed, self.whole), self.head

    def __call__(self, tokens: Tensor, layout: Layout | None, blend: Tensor, **_: bool) -> Metrics:
        """The weighted mean of the KL; its blend is 1, and its target always the model itself."""
        assert layout is not None
        inputs = tokens[:, :-1]
        rows = self.model.head_rows(self.model(inputs, self.embedding, layout, blend), blend)
        own, masks = rows[:, : inputs.shape[1]], rows[:, inputs.shape[1] :]
        weight = depth_weights(layout, self.config)
        weight = weight / (len(tokens) * weight.sum())
        return Metrics(*mask_loss([masks], self.head, own, self.head, weight, layout, self.config.head_chunk))
