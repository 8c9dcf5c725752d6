"""The NEON kernels give the reference's bits: cross-compiled and run under emulation.

Needs ``aarch64-linux-gnu-g++`` and ``qemu-aarch64`` (Debian: ``g++-aarch64-linux-gnu`` and ``qemu-user``); skipped
without them. On an arm64 machine ``test_cpu.py`` covers the same kernels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import LOW_BIT, random_checkpoint, random_tokens, tiny_config
from model_file import write_model_file

from bitmtp.backends.base import Head, Output, causal_rows
from bitmtp.backends.reference import ReferenceBackend
from bitmtp.checkpoint import Checkpoint
from bitmtp.sampling import GREEDY, Choice, Sampling

NATIVE = Path(__file__).parents[2] / "src/bitmtp/backends/cpu/native"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
INCLUDES = (f"-I{NATIVE}", f"-I{NATIVE.parents[2] / 'core'}")
FLAGS = ("-std=c++20", "-O1", "-ffp-contract=off", "-fno-math-errno", "-static", *INCLUDES)
ISAS = {"neon": ("-march=armv8.2-a+dotprod",), "portable": ()}

pytestmark = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"needs {COMPILER} and {EMULATOR}"
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in C++ for arm64, with a main of its own."""
    folder = tmp_path_factory.mktemp("neon")
    objects = []
    for isa, flags in ISAS.items():
        objects.append(str(folder / f"{isa}.o"))
        source = str(NATIVE / "kernels.cpp")
        subprocess.run([COMPILER, *FLAGS, *flags, f"-DBITMTP_ISA={isa}", "-c", source, "-o", objects[-1]], check=True)
    sources = [file for file in sorted(NATIVE.glob("*.cpp")) if file.name not in ("kernels.cpp", "bindings.cpp")]
    main = Path(__file__).with_name("neon_main.cpp")
    command = [COMPILER, *FLAGS, *map(str, [*sources, main, *objects]), "-o", str(folder / "model")]
    subprocess.run(command, check=True)
    return folder / "model"


def _expected(made: Checkpoint, tokens: list[int]) -> Iterator[Output]:
    backend = ReferenceBackend(made)
    heads = [Head.EXACT] * len(tokens)
    for output in backend.step(causal_rows(backend.open(), tokens, 0, heads, GREEDY)):
        assert output is not None
        yield output
    choice = Choice(Sampling(temperature=0.8, top_p=0.9, seed=7))
    second = backend.open()
    for token in tokens:
        yield backend.prefill(second, [token], choice)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"embedding_bits": 4, "ternary_scale": "group"},
        {"embedding_bits": 16, "head_activation_bits": 16},
        LOW_BIT | {"activation_scale": "group", "group_size": 32},
    ],
    ids=["8-bit head", "4-bit head, groups", "float head", "low bits, steps by group"],
)
def test_arm64_gives_the_same_bits(program: Path, tmp_path: Path, isa: str, changes: dict[str, object]) -> None:
    made = random_checkpoint(tiny_config(vocab_size=4_500, num_layers=1, **changes))
    tokens = random_tokens(np.random.default_rng(4), 40, made.config)
    write_model_file(tmp_path / "model.bin", made, tokens)
    environment = {**os.environ, "BITMTP_ISA": isa}
    command = [EMULATOR, str(program), str(tmp_path / "model.bin")]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert run.stderr.strip() == isa
    found = [(int(t), float.fromhex(p), float.fromhex(e)) for t, p, e in map(str.split, run.stdout.splitlines())]
    assert found == [(out.token, out.probability, out.entropy) for out in _expected(made, tokens)]
