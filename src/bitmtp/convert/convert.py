"""A model from elsewhere, ternary or of other low bits → this project's checkpoint."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bitmtp import checkpoint
from bitmtp.config import ActivationScale, ModelConfig
from bitmtp.convert.check import Reading, read_plain_text
from bitmtp.convert.lowbit import GROUP, round_rows
from bitmtp.convert.plan import Planned, build, plan, planned_config, summary
from bitmtp.convert.rows import Opened, Rows, Ternary, pieces
from bitmtp.convert.source import open_model
from bitmtp.convert.tokenizer_files import copy_tokenizer
from bitmtp.errors import CheckpointError, ConfigError
from bitmtp.generation_config import GenerationConfig
from bitmtp.layout import TABLES, Layout
from bitmtp.ternary import Float32, quantise_rows
from bitmtp.tokenizer import Tokenizer

Tensors = dict[str, NDArray[Any]]
OUTLIER = 1000.0  # a scale so many times its matrix's median is damage, not training


@dataclass(frozen=True, slots=True)
class Options:
    """How to convert.

    Attributes:
        bits: 4 or 8, of the matrices of a model that is not ternary; None: as the file has them.
        embedding_bits: of an embedding (and head) that is not ternary: 4, 8 or, in a ternary model, 16; None: 8 in a
            ternary model, in others as ``bits``.
        activation_scale: inputs of ternary products share a step by ``row`` or by ``group`` of ``group_size``.
        tokenizer: a folder with tokenizer files; None: those of the source.
        overwrite: replace the destination if it exists.
        checked: run some text through the result before it takes its place.
    """

    bits: int | None = None
    embedding_bits: int | None = None
    activation_scale: ActivationScale = "row"
    tokenizer: Path | None = None
    overwrite: bool = False
    checked: bool = True


class Listener(Protocol):
    """Who hears how far a conversion is."""

    def say(self, line: str) -> None:
        """One fact."""

    def advance(self, done: int, total: int) -> None:
        """``done`` of ``total`` weights are read."""


def convert(source: str | Path, target: str | Path, options: Options, listener: Listener) -> Reading | None:
    """Write ``source`` as a checkpoint at ``target``, whole or not at all.

    Returns: how well it reads text; None if that was not checked.

    Raises:
        CheckpointError: the source is damaged, or ``target`` exists, or the result hardly reads text.
        ConfigError: the source is not supported, or is a full-precision model and ``options`` give no bits.
    """
    target = Path(target)
    if target.exists() and not options.overwrite:
        raise CheckpointError(f"{target}: exists already; choose another folder, or --force to replace it")
    opened = open_model(source)
    listener.say(f"source: {opened.kind}")
    config, read = _low_bit(opened, options) if not opened.ternary else _ternary(opened, options)
    listener.say(f"model: {describe(config)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        fresh, words = Path(scratch) / "model", Path(scratch) / "tokenizer"
        with _blamed_on(str(source), fresh), _blamed_on(str(options.tokenizer or source), words):
            _write(opened, config, read, options, fresh, words, listener)
            reading = _check(fresh, listener) if options.checked else None
        _replace(fresh, target)
    return reading


@contextmanager
def _blamed_on(source: str, scratch: Path) -> Iterator[None]:
    """What is wrong with the result is wrong with the source; the scratch folder will be gone."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(scratch), source)) from None


def _check(fresh: Path, listener: Listener) -> Reading:
    reading = read_plain_text(fresh)
    listener.say(f"check: {reading.loss:.2f} nats a token on plain English (chance: {reading.chance:.2f})")
    return reading


Read = Callable[[Listener], Tensors]


def _ternary(opened: Opened, options: Options) -> tuple[ModelConfig, Read]:
    if options.bits:
        raise ConfigError(f"--bits {options.bits}: {opened.origin} is ternary and is taken as it is; leave --bits out")
    config = replace(opened.config, activation_scale=options.activation_scale)
    if config.embedding_bits == 16 and options.embedding_bits != 16:
        config = replace(config, embedding_bits=8, head_activation_bits=8)
        if options.embedding_bits == 4:
            tables = TABLES[:1] if config.tie_embeddings else TABLES
            config = replace(config, layouts=tuple((table, Layout(4, GROUP)) for table in tables))
    return config, partial(_read_all, opened, config)


def _low_bit(opened: Opened, options: Options) -> tuple[ModelConfig, Read]:
    if not opened.exact and options.bits is None:
        raise ConfigError(
            f"{opened.origin} is not a ternary model ({opened.kind}): say how many bits its weights get, --bits 8 or "
            f'--bits 4; it is also a start for `bitmtp train`: name it as `source = "{opened.origin}"` in the recipe'
        )
    if options.embedding_bits == 16:
        raise ConfigError("--embedding-bits 16 is for ternary models; choose 4 or 8")
    matrices = plan(opened, options.bits, options.embedding_bits)
    config = planned_config(opened.config, matrices)
    return config, partial(_read_planned, opened, matrices)


def _read_planned(opened: Opened, matrices: list[Planned], listener: Listener) -> Tensors:
    modules = {f"{each.module}.weight" for each in matrices}
    tensors: Tensors = {name: rows.read() for name, rows in opened.floats.items() if name not in modules}
    total, done = sum(int(np.prod(opened.floats[name].shape)) for name in modules), 0
    built = []
    for each in build(opened, matrices):
        tensors |= each.tensors
        built.append(replace(each, tensors={}))
        done += each.weights
        listener.advance(done, total)
    for line in summary(built):
        listener.say(line)
    return tensors


def describe(config: ModelConfig) -> str:
    """Shape, layout and numbers of a config in one line."""
    if not set(TABLES) >= {name for name, _ in config.layouts}:
        return _describe_low_bit(config)
    scale = {"tensor": "tensor", "row": "row", "group": f"{config.group_size} inputs"}[config.ternary_scale]
    steps = "row" if config.activation_scale == "row" else f"{config.group_size} inputs"
    layout = config.layout("embedding")
    bits = layout.bits if layout else config.embedding_bits
    embedding = "ternary" if bits == 2 else f"{bits}-bit"
    stretched = f", {config.rope_scaling.kind} x{config.rope_scaling.factor:g}" if config.rope_scaling else ""
    return (
        f"{config.num_layers} layers, hidden {config.hidden_size}, {config.vocab_size} tokens, context "
        f"{config.max_position}{stretched}; ternary, a scale per {scale}; 8-bit activations, a step per {steps}; "
        f"{embedding} embedding; drafts nothing (`bitmtp train` teaches it)"
    )


def _describe_low_bit(config: ModelConfig) -> str:
    bits = sorted({layout.bits for _, layout in config.layouts})
    return (
        f"{config.num_layers} layers, hidden {config.hidden_size}, {config.vocab_size} tokens, context "
        f"{config.max_position}; weights of {' and '.join(map(str, bits))} bits; 8-bit activations, a step per "
        f"{config.group_size} inputs"
    )


def _write(
    opened: Opened, config: ModelConfig, read: Read, options: Options, fresh: Path, words: Path, listener: Listener
) -> None:
    words.mkdir()
    # first, because a missing tokenizer is found out at once
    if options.tokenizer is None:
        opened.write_tokenizer(words)
    else:
        copy_tokenizer(options.tokenizer, words)
    GenerationConfig.read(opened.origin).write(words)
    Tokenizer(words, config.vocab_size)
    checkpoint.write(fresh, config, read(listener), words)


def _read_all(opened: Opened, config: ModelConfig, listener: Listener) -> Tensors:
    total = sum(stored.shape[0] * stored.shape[1] for stored in opened.ternary.values())
    total += sum(int(np.prod(rows.shape)) for rows in opened.floats.values())
    tensors: Tensors = {}
    done = 0
    for name, rows in opened.floats.items():
        tensors |= _table(name, rows, config, listener) if _is_table(name) else {name: rows.read()}
        done += int(np.prod(rows.shape))
        listener.advance(done, total)
    for module, stored in opened.ternary.items():
        matrix = stored.read()
        _check_scale(opened.origin, module, matrix)
        tensors[f"{module}.weight"], tensors[f"{module}.scale"] = matrix.packed, matrix.scale
        done += stored.shape[0] * stored.shape[1]
        listener.advance(done, total)
    _compare_layers(opened.origin, tensors)
    return tensors


def _is_table(name: str) -> bool:
    return name.removesuffix(".weight") in TABLES


def _table(name: str, rows: Rows, config: ModelConfig, listener: Listener) -> Tensors:
    """A float embedding or head in fewer bits, and what the rounding costs it."""
    word = name.removesuffix(".weight")
    if layout := config.layout(word):
        rounded = round_rows(rows, layout.bits)
        listener.say(f"{word}: {rows.stored_as} -> {layout}; relative rounding error {rounded.error:.2g}")
        return rounded.matrix.tensors(word)
    shape = (config.vocab_size, config.hidden_size)
    kept: NDArray[Any] = np.empty(shape, np.float16 if config.embedding_bits == 16 else np.int8)
    steps = np.empty(config.vocab_size, np.float32)
    error = power = 0.0
    for piece in pieces(*shape):
        values = rows.read(piece.start, piece.stop)
        kept[piece], steps[piece], back = _round(values, config.embedding_bits)
        error += float(np.square(values - back, dtype=np.float64).sum())
        power += float(np.square(values, dtype=np.float64).sum())
    share = (error / power) ** 0.5 if power else 0.0
    listener.say(f"{word}: {rows.stored_as} kept in {config.embedding_bits} bits; relative rounding error {share:.2g}")
    return {name: kept} if config.embedding_bits == 16 else {name: kept, f"{word}.scale": steps}


def _round(values: Float32, bits: int) -> tuple[NDArray[Any], Any, Float32]:
    if bits == 16:
        with np.errstate(over="ignore"):  # what overflows is refused when the checkpoint is written
            halves = values.astype(np.float16)
        return halves, 0.0, halves.astype(np.float32)
    levels, step = quantise_rows(values)
    return levels, step[:, 0], levels * step


def _check_scale(origin: Path, module: str, matrix: Ternary) -> None:
    scale = matrix.scale
    used = scale[scale > 0]
    if not np.isfinite(scale).all() or (scale < 0).any() or not used.size:
        raise CheckpointError(f"{origin}: {module} has a scale that is negative or not a number, or only zeros")
    if used.max() > OUTLIER * np.median(used):
        raise CheckpointError(
            f"{origin}: {module} has a scale of {used.max():.3g} where most are about {np.median(used):.3g}; damaged?"
        )


def _compare_layers(origin: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """A matrix with a single scale has nothing to compare it with but the same matrix of other layers."""
    kinds: dict[str, dict[str, float]] = {}
    for name, scale in tensors.items():
        if name.startswith("layers.") and name.endswith(".scale"):
            kinds.setdefault(name.split(".", 2)[2], {})[name] = float(scale.max())
    for scales in kinds.values():
        middle = float(np.median(list(scales.values())))
        for name, largest in scales.items():
            if not middle / OUTLIER <= largest <= middle * OUTLIER:
                raise CheckpointError(
                    f"{origin}: {name} is {largest:.3g}, in most layers it is about {middle:.3g}; damaged?"
                )


def _replace(fresh: Path, target: Path) -> None:
    """Put the new folder in place; an old one is gone only when the new one stands."""
    old = fresh.with_name("old")
    if not target.exists():
        os.rename(fresh, target)
        return
    os.rename(target, old)
    try:
        os.rename(fresh, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)
