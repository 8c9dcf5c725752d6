"""``bitmtp info``: the model, the machine, and what runs on it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from bitmtp.cli.options import ModelOptions, with_options
from bitmtp.cli.progress import progress
from bitmtp.cli.render import count, print_facts, print_table
from bitmtp.errors import BackendError, RequestError

if TYPE_CHECKING:
    from bitmtp.benchmark.expect import Expectation
    from bitmtp.checkpoint import Checkpoint
    from bitmtp.config import ModelConfig


@with_options
def info(
    name: Annotated[
        str | None, Argument(metavar="MODEL", help="Checkpoint folder, as --model; with --expect, one of its models.")
    ] = None,
    expect: Annotated[
        bool, Option("--expect", help="Memory and speed that models of known size would have here (some seconds).")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
    *,
    model: ModelOptions,
) -> None:
    """Show model, machine and kernels.

    With --expect: what larger models would take here, without having them.
    """
    if expect:
        _expect(name, model, as_json)
        return
    from bitmtp import checkpoint
    from bitmtp.models import shipped_model

    if name is not None and model.model is not None:
        raise RequestError("the model is named twice; leave --model out")
    loaded = checkpoint.read(name or model.model or shipped_model())
    facts = {"Model": _model_facts(loaded), "Machine": _machine_facts(), "Backends": _backend_facts(loaded, model)}
    if as_json:
        print(json.dumps({title.lower(): dict(own) for title, own in facts.items()}, ensure_ascii=False))
        return
    for place, (title, own) in enumerate(facts.items()):
        print(end="\n" if place else "")
        print_facts(title, own)


def _expect(name: str | None, model: ModelOptions, as_json: bool) -> None:
    from bitmtp.benchmark.expect import EXPECTED, expect

    if model.model is not None or not (name is None or name in EXPECTED):
        raise RequestError(
            f"--expect knows {', '.join(EXPECTED)}; of a model that is here, `bitmtp bench --model FOLDER` tells more"
        )
    names = EXPECTED if name is None else (name,)
    found = []
    with progress("models", len(names)) as tick:
        for each in names:
            found.append(expect(each, model.backend, model.threads))
            tick()
    if as_json:
        print(json.dumps([asdict(each) for each in found]))
    else:
        _print_expected(found)


def _print_expected(found: list[Expectation]) -> None:
    from bitmtp.benchmark.expect import CHECKED, CONTEXT

    rows = [
        [
            each.name,
            f"{each.weight_bytes / 1e9:.2f}",
            f"{each.kv_bytes / 1e9:.2f}",
            f"{each.tokens_per_second:.1f}",
            f"{each.prompt_tokens_per_second:.0f}",
            f"{each.checked_ratio:.1f}",
        ]
        for each in found
    ]
    columns = ["model", "weights, GB", "K/V, GB", "tok/s", "prompt tok/s", f"{CHECKED} tokens, ×"]
    print_table("Expected on this machine, from layers of the same shape with random weights", columns, rows)
    speed = max(each.bytes_per_second for each in found)
    print(f"\nK/V: of {CONTEXT:,} tokens. tok/s: one text, without drafts. {CHECKED} tokens, ×: a pass that")
    print(f"checks so many ÷ a pass of one. Layers were read from memory at {speed / 1e9:.1f} GB/s.")


def _model_facts(loaded: Checkpoint) -> list[tuple[str, str]]:
    config = loaded.config
    layers, vocabulary = _parameters(config)
    bytes_on_disk = sum(tensor.nbytes for tensor in loaded.tensors.values())
    kv_bytes = 2 * config.num_layers * config.kv_size * (2 if config.kv_type == "float16" else 4)
    drafts = f"blocks of up to {config.block_size}" if config.block_size > 1 else "none (never taught to draft)"
    chain = f", chain of rank {config.chain_rank}" if config.chain_rank else ""
    heads = ", Medusa heads" if config.drafter == "medusa" else ""
    return [
        ("folder", str(loaded.path)),
        ("shape", _shape(config)),
        ("parameters", f"{(layers + vocabulary) / 1e6:.1f} M, {layers / 1e6:.1f} M of them in the layers"),
        ("weights", _weights(config)),
        ("size", f"{bytes_on_disk / 1e6:.1f} MB of tensors"),
        ("context", f"up to {config.max_position} tokens; K/V in {config.kv_type}, {kv_bytes / 1e3:.1f} kB per token"),
        ("drafting", drafts + heads + chain),
    ]


def _shape(config: ModelConfig) -> str:
    extras = [name for name in ("sub_norm", "qk_norm", "attention_bias") if getattr(config, name)]
    words = [
        f"{config.architecture}, {config.num_layers} layers, hidden {config.hidden_size}",
        f"{config.activation} {config.intermediate_size}",
        f"{config.num_heads} query and {config.num_kv_heads} key/value heads of {config.head_dim}",
        count(config.vocab_size, "token"),
        *extras,
    ]
    return ", ".join(words)


def _weights(config: ModelConfig) -> str:
    if config.layout("layers.0.mlp.up"):
        words = sorted({str(layout) for _, layout in config.layouts})
        steps = "row" if config.activation_scale == "row" else f"{config.group_size} inputs"
        return f"{'; '.join(words)}; {config.activation_bits}-bit activations, a step per {steps}"
    scale = f"group of {config.group_size}" if config.ternary_scale == "group" else config.ternary_scale
    layout = config.layout("embedding")
    bits = layout.bits if layout else config.embedding_bits
    embedding = "ternary" if bits == 2 else f"{bits}-bit"
    head = "also the head" if config.tie_embeddings else "and head"
    return f"ternary, a scale per {scale}; {config.activation_bits}-bit activations; {embedding} embedding ({head})"


def _parameters(config: ModelConfig) -> tuple[int, int]:
    """Weights of the products, and of embedding and head."""
    from bitmtp.checkpoint import linear_shapes

    layer = sum(out * inputs for out, inputs in linear_shapes(config).values())
    tables = 1 if config.tie_embeddings else 2
    return config.num_layers * layer, tables * config.vocab_size * config.hidden_size


def _machine_facts() -> list[tuple[str, str]]:
    from bitmtp.benchmark.environment import environment

    where = environment()
    return [
        ("CPU", f"{where.cpu}, {count(where.cores, 'core')}"),
        ("instructions", where.isa),
        ("system", where.system),
        ("versions", f"bitmtp {where.bitmtp}, Python {where.python}, NumPy {where.numpy}"),
    ]


def _backend_facts(loaded: Checkpoint, model: ModelOptions) -> list[tuple[str, str]]:
    """The backend that would run, with its kernels, and whether the others could."""
    from bitmtp.backends import BACKENDS, load_backend

    context = model.context or loaded.config.max_position
    running = load_backend(model.backend, loaded, threads=model.threads, context=context)
    described = "; ".join(f"{name}: {value}" for name, value in running.describe().items())
    return [(name, f"runs; {described}" if name == running.name else _availability(name)) for name in BACKENDS]


def _availability(name: str) -> str:
    """Whether a backend runs here, found out without the model."""
    try:
        kernels = _cuda_kernels() if name == "cuda" else _toy_kernels(name)
    except BackendError as error:
        return f"not available: {error}"
    return f"available; kernels: {kernels}"


def _cuda_kernels() -> str:
    """Asks driver, card and compiler; a model's kernels, a toy's too, would have to be compiled."""
    from bitmtp.backends.cuda.device import Gpu

    return Gpu().architecture


def _toy_kernels(name: str) -> str:
    from bitmtp.backends import load_backend
    from bitmtp.benchmark.shapes import random_checkpoint
    from bitmtp.config import ModelConfig

    toy = ModelConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        max_position=8,
        eos_token_ids=(),
    )
    return load_backend(name, random_checkpoint(toy, "toy"), threads=1, context=8).describe()["kernels"]
