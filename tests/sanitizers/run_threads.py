"""Runs ``threads.cpp`` on a tiny model: ``python run_threads.py PROGRAM``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import random_checkpoint, random_tokens, tiny_config
from model_file import write_model_file


def main() -> int:
    """Write the model, run the program."""
    made = random_checkpoint(tiny_config(vocab_size=4_500, num_layers=2))
    tokens = random_tokens(np.random.default_rng(4), 60, made.config)
    # The thread sanitizer of older compilers knows no memory layout that is as random as newer kernels make it.
    setarch = ["setarch", "--addr-no-randomize"] if shutil.which("setarch") else []
    with tempfile.TemporaryDirectory() as folder:
        write_model_file(Path(folder) / "model.bin", made, tokens)
        command = [*setarch, sys.argv[1], str(Path(folder) / "model.bin")]
        return subprocess.run(command, check=False, env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
