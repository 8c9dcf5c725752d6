"""The structures of ``kernels/pass.cuh`` as NumPy record types, read from the header itself."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

_HEADER = (Path(__file__).parent / "kernels" / "pass.cuh").read_text(encoding="utf-8")
_TYPES = {"int": "<i4", "float": "<f4", "unsigned long long": "<u8"}
_CONSTANT = re.compile(r"^constexpr int (\w+) = (\d+);", re.MULTILINE)
_STRUCTURE = re.compile(r"^struct (\w+) \{(.*?)^\};", re.MULTILINE | re.DOTALL)
_MEMBERS = re.compile(r"^ +(?:const )?(\w[\w ]*?)(\*?) (\w+(?:\[\w+\])?(?:, \w+)*);", re.MULTILINE)
_NAME = re.compile(r"(\w+)(?:\[(\w+)\])?")

_CONSTANTS = {name: int(value) for name, value in _CONSTANT.findall(_HEADER)}


def _structures() -> dict[str, np.dtype]:
    """Each structure by its name; one may hold those above it. Pointers are numbers."""
    found: dict[str, np.dtype] = {}
    for structure, body in _STRUCTURE.findall(_HEADER):
        members = []
        for kind, pointer, names in _MEMBERS.findall(body):
            of = np.dtype("<u8" if pointer else _TYPES.get(kind) or found[kind])
            for name, count in _NAME.findall(names):
                members.append((name, of, _CONSTANTS[count]) if count else (name, of))
        found[structure] = np.dtype(members, align=True)
    return found


_FOUND = _structures()
MAX_WIDTH, PIECE, TOP = (_CONSTANTS[name] for name in ("MAX_WIDTH", "PIECE", "TOP"))
ROW, SEQUENCE, CHOICE, OUTPUT, PASS = (_FOUND[name] for name in ("Row", "Sequence", "Choice", "Output", "Pass"))
