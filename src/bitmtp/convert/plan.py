"""Which layout each matrix of a full-precision or block-quantised model gets, and what that costs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from bitmtp.checkpoint import linear_shapes
from bitmtp.config import ModelConfig
from bitmtp.convert.lowbit import GROUP, LowBit, read_exactly, round_rows
from bitmtp.convert.rows import Opened
from bitmtp.errors import ConfigError
from bitmtp.layout import Layout, Layouts


@dataclass(frozen=True, slots=True)
class Planned:
    """A matrix of the result: taken as it is stored, or rounded to so many bits."""

    module: str
    layout: Layout
    exact: bool


def plan(opened: Opened, bits: int | None, table_bits: int | None) -> list[Planned]:
    """Every matrix, in the order of the file's model.

    A matrix is taken exactly if its type is a layout of at most ``bits`` bits (None: of any); otherwise it is rounded
    to ``bits`` (None: 8). ``table_bits`` stands in for ``bits`` where the matrix is the head. An embedding that is not
    the head costs no time, so it has 8 bits at most.
    """
    tied = opened.config.tie_embeddings
    matrices = {"embedding": _planned(opened, "embedding", table_bits or bits if tied else None)}
    if not tied:
        matrices["head"] = _planned(opened, "head", table_bits or bits)
    for index in range(opened.config.num_layers):
        prefix = f"layers.{index}"
        layer = {name: _planned(opened, f"{prefix}.{name}", bits) for name in linear_shapes(opened.config)}
        if layer["mlp.gate"].layout != layer["mlp.up"].layout:  # the format has the two alike
            for name in ("mlp.gate", "mlp.up"):
                layer[name] = Planned(f"{prefix}.{name}", Layout(bits or 8, GROUP), False)
        matrices |= {each.module: each for each in layer.values()}
    return list(matrices.values())


def _planned(opened: Opened, module: str, bits: int | None) -> Planned:
    stored = opened.exact.get(module)
    if stored is not None and stored.layout.bits <= (bits or 8):
        return Planned(module, stored.layout, True)
    return Planned(module, Layout(bits or 8, GROUP), False)


def planned_config(config: ModelConfig, planned: list[Planned]) -> ModelConfig:
    """The config of the result: 8-bit activations with a step for each 32 inputs.

    Raises:
        ConfigError: a size that is no multiple of 32.
    """
    for name in ("hidden_size", "intermediate_size", "attention_size"):
        if (size := getattr(config, name)) % GROUP:
            raise ConfigError(f"{name} is {size}; layers of 4 and 8 bits need a multiple of {GROUP}")
    return replace(
        config,
        group_size=GROUP,
        activation_scale="group",
        embedding_bits=8,
        head_activation_bits=8,
        layouts=_shortest(planned, config.num_layers),
    )


def _shortest(planned: list[Planned], layers: int) -> Layouts:
    """One entry for a product whose layout is the same in all layers."""
    layouts = {each.module: each.layout for each in planned}
    products = {module.split(".", 2)[2] for module in layouts if module.startswith("layers.")}
    for product in sorted(products):
        names = [f"layers.{index}.{product}" for index in range(layers)]
        if len({layouts[name] for name in names}) == 1:
            layouts[product] = layouts[names[0]]
            for name in names:
                del layouts[name]
    return tuple(layouts.items())


@dataclass(frozen=True, slots=True)
class Built:
    """A matrix of the result, its tensors, and its relative error."""

    planned: Planned
    stored_as: str
    tensors: Mapping[str, NDArray[Any]]
    error: float
    weights: int


def build(opened: Opened, planned: list[Planned]) -> Iterator[Built]:
    """Read and make one matrix after the other."""
    for each in planned:
        rows = opened.floats[f"{each.module}.weight"]
        matrix, error = _matrix(opened, each)
        yield Built(each, rows.stored_as, matrix.tensors(each.module), error, rows.shape[0] * rows.shape[1])


def _matrix(opened: Opened, planned: Planned) -> tuple[LowBit, float]:
    if planned.exact:
        return read_exactly(opened.exact[planned.module]), 0.0
    rounded = round_rows(opened.floats[f"{planned.module}.weight"], planned.layout.bits)
    return rounded.matrix, rounded.error


def summary(built: list[Built]) -> list[str]:
    """A line for each kind of matrix: what it was, what it is, and the largest error among its layers."""
    kinds: dict[tuple[str, str, Layout], list[Built]] = {}
    for each in built:
        kind = each.planned.module.split(".", 2)[-1]
        kinds.setdefault((kind, each.stored_as, each.planned.layout), []).append(each)
    return [_line(*kind, group) for kind, group in kinds.items()]


def _line(kind: str, stored_as: str, layout: Layout, group: list[Built]) -> str:
    worst = max(group, key=lambda each: each.error)
    loss = "exact" if all(each.planned.exact for each in group) else f"relative error at most {worst.error:.2g}"
    place = "" if loss == "exact" or len(group) == 1 else f" ({worst.planned.module})"
    return f"{kind} x{len(group)}: {stored_as} -> {layout}; {loss}{place}"
