"""The core's own exp and log beside the C library's."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import bitmtp.core

HEADERS = Path(bitmtp.core.__file__).parent
SOURCE = """
#include "numbers.hpp"
extern "C" double exponential(double x) { return core::exponential(x); }
extern "C" double logarithm(double x) { return core::logarithm(x); }
"""
FLAGS = ("-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source = tmp_path_factory.mktemp("numbers") / "numbers.cpp"
    source.write_text(SOURCE)
    built = source.with_suffix(".so")
    subprocess.run([compiler, *FLAGS, f"-I{HEADERS}", str(source), "-o", str(built)], check=True)
    loaded = ctypes.CDLL(str(built))
    for function in (loaded.exponential, loaded.logarithm):
        function.argtypes, function.restype = [ctypes.c_double], ctypes.c_double
    return loaded


def test_exp(library: ctypes.CDLL) -> None:
    for x in np.random.default_rng(1).uniform(-60, 60, 2000).tolist():
        assert library.exponential(x) == pytest.approx(math.exp(x), rel=4e-16)
    assert library.exponential(0.0) == 1.0
    assert 0 < library.exponential(-1e9) < 1e-300 < 1e300 < library.exponential(1e9) < math.inf


def test_log(library: ctypes.CDLL) -> None:
    for x in np.exp(np.random.default_rng(2).uniform(-60, 60, 2000)).tolist():
        assert library.logarithm(x) == pytest.approx(math.log(x), rel=1e-15, abs=1e-15)
    assert library.logarithm(1.0) == 0.0
