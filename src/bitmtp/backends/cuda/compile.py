"""CUDA C++ to machine code by NVRTC: specialised by constants, kept on disk between runs. Needs no GPU."""

from __future__ import annotations

import hashlib
import io
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bitmtp.errors import BackendError

KERNELS = Path(__file__).parent / "kernels"
INCLUDES = KERNELS, Path(__file__).parents[2] / "core"
ARCHITECTURES = ("sm_80", "sm_86", "sm_87", "sm_90", "sm_100", "sm_120")

Constants = Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True)
class Usage:
    """What one kernel takes of a multiprocessor, as the assembler reports it."""

    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code for one architecture; :attr:`usage` has an entry for every kernel in it."""

    code: bytes
    log: str

    @property
    def usage(self) -> list[Usage]:
        """Registers, spills and static shared memory of each kernel."""
        found = []
        for part in re.split(r"Compiling entry function ", self.log)[1:]:
            name = re.match(r"'(\w+)'", part)
            spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
            registers = re.search(r"Used (\d+) registers", part)
            shared = re.search(r"(\d+) bytes smem", part)
            if name and spills and registers:
                spilled = int(spills[1]) + int(spills[2])
                found.append(Usage(name[1], int(registers[1]), spilled, int(shared[1]) if shared else 0))
        return found


def compile_kernels(file: str, constants: Constants, architecture: str) -> Compiled:
    """Compile ``kernels/<file>`` for ``architecture`` (``sm_90``, say), or take it from the cache.

    Raises:
        BackendError: NVRTC is not installed, does not know the architecture, or refuses the source.
    """
    definitions = [(name, str(value)) for name, value in sorted(constants.items())]
    key = _key(file, definitions, architecture)
    code, log = _cache() / f"{key}.cubin", _cache() / f"{key}.log"
    if code.exists() and log.exists():
        return Compiled(code.read_bytes(), log.read_text())
    compiled = _compile(file, definitions, architecture)
    _write(log, compiled.log.encode())
    _write(code, compiled.code)
    return compiled


def _compile(file: str, definitions: list[tuple[str, str]], architecture: str) -> Compiled:
    core, log = _core(), io.StringIO()
    options = core.ProgramOptions(
        arch=architecture,
        std="c++17",
        define_macro=definitions or None,  # the option refuses an empty list
        include_path=[str(folder) for folder in INCLUDES],
        fma=False,  # fma is written out where it is wanted: instances of a template contract differently
        ptxas_options=["-v"],
        no_cache=True,  # NVRTC's own cache gives code without the assembler's report
    )
    try:
        code = core.Program((KERNELS / file).read_text(), "c++", options).compile("cubin", logs=log)
    except Exception as error:
        raise BackendError(f"NVRTC cannot compile {file} for {architecture}: {error}\n{log.getvalue()}") from None
    return Compiled(bytes(code.code), log.getvalue())


def check_compiler(architecture: str, driver: int) -> None:
    """See that NVRTC is there, knows an architecture, and writes what the driver can read; costs milliseconds.

    Args:
        driver: the CUDA version it knows, as the driver numbers them: 13000 is 13.0.

    Raises:
        BackendError: it is not installed, or card, compiler and driver do not go together.
    """
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
        known = nvrtc.nvrtcGetSupportedArchs()[1]
    except Exception as error:  # the bindings raise types of their own where the library is missing
        raise BackendError(f"NVRTC cannot be loaded ({error}); run `pip install 'bitmtp[cuda]'`") from None
    if int(architecture.removeprefix("sm_")) not in known:
        raise BackendError(
            f"NVRTC {major}.{minor} does not know {architecture}; run `pip install --upgrade 'bitmtp[cuda]'`"
        )
    if driver // 1000 < major:
        raise BackendError(
            f"the NVIDIA driver knows CUDA {driver // 1000}.{driver % 1000 // 10}, NVRTC {major}.{minor} needs "
            f"{major}.0; update the driver or run `pip install 'cuda-core[cu{driver // 1000}]'`"
        )


def _core() -> Any:
    try:
        import cuda.core
    except ImportError as error:
        raise BackendError(f"the cuda backend needs cuda-core ({error}); run `pip install 'bitmtp[cuda]'`") from None
    return cuda.core


@cache
def _sources() -> bytes:
    """Every source, hashed: a header that changes invalidates what includes it."""
    digest = hashlib.sha256()
    for folder in INCLUDES:
        for path in sorted(folder.glob("*.cu*")) + sorted(folder.glob("*.hpp")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.digest()


def _key(file: str, definitions: list[tuple[str, str]], architecture: str) -> str:
    from cuda.bindings import nvrtc

    text = repr((file, definitions, architecture, nvrtc.nvrtcVersion()[1:]))
    return hashlib.sha256(_sources() + text.encode()).hexdigest()[:32]


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(root) / "bitmtp" / "kernels"
    path.mkdir(parents=True, exist_ok=True)
    return path


def _write(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)
