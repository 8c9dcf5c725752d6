"""Tiny random models, their tokenizer, and the backends that run here."""

from __future__ import annotations

import json
import logging
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bitmtp import checkpoint
from bitmtp.backends import load_backend
from bitmtp.backends.base import Backend
from bitmtp.checkpoint import Checkpoint, TensorSpec, tensor_specs
from bitmtp.config import ModelConfig
from bitmtp.engine import Engine
from bitmtp.errors import BackendError
from bitmtp.layout import Layout
from bitmtp.ternary import pack
from bitmtp.tokenizer import Tokenizer as BitMTPTokenizer

DATA = Path(__file__).parent / "data"
SCRIPTS = Path(__file__).parents[1] / "benchmarks"
# Folders whose tests need an extra: folder → module, and what installs it.
NEEDS = {
    "backends/cuda": ("cuda", "pip install 'bitmtp[cuda]'"),
    "training": ("torch", "pip install 'bitmtp[train]'"),
    "server": ("fastapi", "pip install 'bitmtp[serve]'"),
    "server_page": ("playwright", "pip install 'bitmtp[dev]'"),
}
MISSING = {folder: need for folder, need in NEEDS.items() if find_spec(need[0]) is None}
collect_ignore = list(MISSING)
# The one backend to run tests on that depend on none; unset: those about backends run on each that runs here, others on
# the fastest.
CHOSEN = os.environ.get("BITMTP_TEST_BACKEND")
SPECIAL = ("<|pad|>", "<|start|>", "<|end|>")
END = 2
LEVELS = {2: 1, 4: 4, 8: 60}  # integer that stands for a vocabulary weight of 1
TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)

# No deadlines: a shared machine is slow at times, and no test here is about time.
settings.register_profile("bitmtp", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("bitmtp")


def pytest_report_header() -> list[str]:
    """Say what is left out, and how to have it."""
    return [f"left out: tests/{folder} ({module} is missing: {how})" for folder, (module, how) in MISSING.items()]


@pytest.fixture(autouse=True)
def no_logs_behind_a_test() -> Iterator[None]:
    """`bitmtp serve` sends logs to a test's stderr, which is gone when the test is over; other servers go on."""
    yield
    for name in ("bitmtp.server", "uvicorn.error"):
        logging.getLogger(name).handlers, logging.getLogger(name).propagate = [], True


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Costs that texts teach here are not the user's; compiled kernels, which hang on their sources alone, are."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitmtp" / "kernels"
    usual.mkdir(parents=True, exist_ok=True)
    own = tmp_path_factory.mktemp("cache")
    (own / "bitmtp").mkdir()
    (own / "bitmtp" / "kernels").symlink_to(usual)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own))
        yield


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run a script of ``benchmarks/`` with arguments; its exit code."""

    def run(name: str, *arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.syspath_prepend(SCRIPTS)
        try:
            runpy.run_path(str(SCRIPTS / name), run_name="__main__")
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else 2
        return 0

    return run


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers, 320 tokens, blocks of up to 16; any field can be changed."""
    base = ModelConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=512,
        eos_token_ids=(END,),
        bos_token_id=1,
        pad_token_id=0,
        sub_norm=True,
        tie_embeddings=False,
        group_size=16,
        block_size=16,
    )
    return replace(base, **changes)


# Every layout, mixed within a layer and between layers, in sizes that suit groups of 32.
LOW_BIT: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 24,
    "attention_bias": True,
    "layouts": (
        ("attention.q", Layout(8, 32)),
        ("attention.k", Layout(8, 32)),
        ("attention.v", Layout(8, 16)),
        ("attention.o", Layout(2, 32, minimum=True)),
        ("layers.0.mlp.gate", Layout(4, 32)),
        ("layers.0.mlp.up", Layout(4, 32)),
        ("mlp.gate", Layout(8)),
        ("mlp.up", Layout(8)),
        ("mlp.down", Layout(4, 32, minimum=True)),
        ("layers.0.mlp.down", Layout(8, 32, minimum=True)),
        ("embedding", Layout(4, 32)),
        ("head", Layout(4, minimum=True)),
    ),
}


def _vocabulary(
    random: np.random.Generator, spec: TensorSpec, common: NDArray[Any], spread: float, bits: int
) -> NDArray[Any]:
    """Rows that share a common direction: it acts as a bias on the logits, so that a draft's guess is often right."""
    rows = common + random.normal(0, spread, (spec.shape[0], len(common)))
    if bits == 16:
        return rows.astype(np.float16)
    level = np.rint(rows * LEVELS[bits])
    bound = {2: 1, 4: 7, 8: 127}[bits]
    return pack(np.clip(level, -bound, bound).astype(np.int8), bits).view(spec.dtype)


def _layer_tensor(random: np.random.Generator, name: str, spec: TensorSpec) -> NDArray[Any]:
    if spec.dtype == "uint8":
        return pack(random.integers(-1, 2, (spec.shape[0], spec.shape[1] * 4), dtype=np.int8), 2)
    if name.endswith((".o.scale", ".down.scale")):
        return random.uniform(0.03, 0.08, spec.shape).astype(np.float32)
    if name.endswith(".scale"):
        return random.uniform(0.12, 0.4, spec.shape).astype(np.float32)
    if name.startswith(("chain.", "medusa.")) or name.endswith(".bias"):
        return random.normal(0, 0.2, spec.shape).astype(spec.dtype)
    return random.uniform(0.6, 1.4, spec.shape).astype(np.float32)


def _low_bit_tensor(
    random: np.random.Generator, part: str, spec: TensorSpec, layout: Layout, inputs: int
) -> NDArray[Any]:
    """Integers of the whole range, scaled so that the matrix's outputs are about as large as its inputs."""
    if part == "weight":
        return random.integers(0, 256, spec.shape, dtype=np.uint8).view(spec.dtype)
    unit = 4 / (2**layout.bits * inputs**0.5)
    if part == "scale":
        return random.uniform(0.5 * unit, unit, spec.shape).astype(np.float32)
    return random.uniform(-3, -1, spec.shape).astype(np.float32) / np.float32(inputs**0.5)


def random_checkpoint(config: ModelConfig, seed: int = 0) -> Checkpoint:
    """An in-memory checkpoint of random weights whose text varies and whose drafts are accepted now and then."""
    random = np.random.default_rng(seed)
    common = random.normal(0, 0.7, config.hidden_size)
    tensors: dict[str, NDArray[Any]] = {}
    specs = tensor_specs(config)
    for name, spec in specs.items():
        module, _, part = name.rpartition(".")
        if (layout := config.layout(module)) and part != "bias":
            inputs = specs[f"{module}.weight"].shape[1] * 8 // layout.bits
            tensors[name] = _low_bit_tensor(random, part, spec, layout, inputs)
        elif name in ("embedding.weight", "head.weight"):
            spread = 0.6 if name == "head.weight" or config.tie_embeddings else 0.25
            tensors[name] = _vocabulary(random, spec, common, spread, config.embedding_bits)
        elif name in ("embedding.scale", "head.scale"):
            unit = 1 / LEVELS[config.embedding_bits]
            tensors[name] = random.uniform(0.9 * unit, 1.1 * unit, spec.shape).astype(np.float32)
        elif name == "mask_embedding.weight":
            tensors[name] = (common + random.normal(0, 0.2, spec.shape)).astype(np.float32)
        else:
            tensors[name] = _layer_tensor(random, name, spec)
    return Checkpoint(Path("in-memory"), config, tensors)


@cache
def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE of 320 tokens at most, learnt from ``data/corpus.txt``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(DATA / "corpus.txt")], trainer)
    return tokenizer


def write_tokenizer(folder: Path) -> Path:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into an existing folder."""
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    names = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
    text = json.dumps({**names, "chat_template": TEMPLATE})
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return folder


def write_model(folder: Path, made: Checkpoint, tokenizer_from: Path) -> Path:
    """Write a checkpoint with the tiny tokenizer; returns its folder."""
    checkpoint.write(folder, made.config, made.tensors, tokenizer_from)
    return folder


@cache
def why_unavailable(name: str) -> str | None:
    """Why a backend cannot run here; None if it can."""
    try:
        load_backend(name, random_checkpoint(tiny_config()), threads=1, context=8)
    except (ImportError, BackendError) as error:
        return f"the {name} backend does not run here: {error}"
    return None


def make_backend(name: str, made: Checkpoint, *, threads: int = 2, context: int | None = None) -> Backend:
    """A backend over an in-memory checkpoint."""
    return load_backend(name, made, threads=threads, context=context or made.config.max_position)


class HostDriven:
    """What every backend has, and nothing that it offers besides: so the host drives every pass."""

    def __init__(self, backend: Backend) -> None:
        self.name, self.config, self.describe = backend.name, backend.config, backend.describe
        self.open, self.close, self.length = backend.open, backend.close, backend.length
        self.truncate, self.fork, self.prefill = backend.truncate, backend.fork, backend.prefill
        self.step, self.materialize = backend.step, backend.materialize


def backend_or_skip(name: str, made: Checkpoint, *, threads: int = 2) -> Backend:
    """As :func:`make_backend`; some backends refuse some models, by name."""
    try:
        return make_backend(name, made, threads=threads)
    except BackendError as error:
        pytest.skip(str(error))


def make_engine(name: str, made: Checkpoint, tokenizer_from: Path) -> Engine:
    """An engine over an in-memory checkpoint."""
    backend = make_backend(name, made)
    return Engine(backend, BitMTPTokenizer(tokenizer_from, made.config.vocab_size), made.config.max_position)


def random_tokens(random: np.random.Generator, count: int, config: ModelConfig) -> list[int]:
    """Ordinary token ids, no special ones."""
    tokens: Sequence[int] = random.integers(len(SPECIAL), config.vocab_size, count).tolist()
    return list(tokens)


def any_backend() -> str:
    """The backend for tests to which it does not matter which."""
    return CHOSEN or ("reference" if why_unavailable("cpu") else "cpu")


@pytest.fixture(params=[CHOSEN] if CHOSEN else ["reference", "cpu", "cuda"])
def backend_name(request: pytest.FixtureRequest) -> str:
    """Every backend that runs here, or the chosen one."""
    name: str = request.param
    if reason := why_unavailable(name):
        (pytest.fail if CHOSEN else pytest.skip)(reason)
    return name


@pytest.fixture(scope="session")
def gpu() -> Any:
    """An NVIDIA GPU; tests of kernels are skipped where there is none."""
    from bitmtp.backends.cuda.device import Gpu

    try:
        return Gpu()
    except BackendError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two tokenizer files."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """A whole checkpoint folder on disk; do not change its files."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return write_model(folder, random_checkpoint(tiny_config()), tokenizer_folder)


@pytest.fixture
def tiny_engine(backend_name: str, tiny_model: Path) -> Engine:
    """The tiny model, loaded from disk, on each backend."""
    return Engine.load(tiny_model, backend=backend_name, threads=2)
