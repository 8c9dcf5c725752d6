"""Damage for ``fuzz.py``: bytes, JSON values, texts and schemas, each decided by a random generator alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

LEAVES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), 0.5, -0.0, 1e-320, 1e308, "", "x", "5", "é",
    "\ud800", "a" * 5000, "<|end|>", "</tool_call>", "{{", "{% for x in y %}", [], {},
)  # fmt: skip
KEYS = ("type", "name", "content", "role", "x", "", "5", "__class__", "parameters", "properties", "$ref")
PIECES = ("<tool_call>", "</tool_call>", "\n", '{"name": "f", "arguments": {', "}", '"', "\\", "x", "<", '"a": 1', "é")
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null", "x")
PATTERNS = (
    "^a+$",
    "[0-9]{2,4}",
    "(a|b)*c",
    "\\d+(\\.\\d+)?",
    "(",
    "^(?=a)b",
    ".*",
    "[a-z]{1,999}",
    "(a*)*b",
    "\\p{L}+",
)
FORMATS = ("date-time", "date", "email", "uuid", "ipv4", "uri", "x")


def damaged(rng: Random, data: bytes, head: int) -> bytes:
    """Some bytes replaced, cut out or put in; all of them in the first ``head``."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(min(head, len(data)) + 1)
        new = rng.choice((b"", rng.randbytes(rng.randint(1, 8)), b"\xff" * 8, bytes(8), b'"', b"{" * 300))
        data = data[:start] + new + data[start + rng.choice((0, 1, len(new), 16, 1000)) :]
    return data


def value(rng: Random, depth: int = 0) -> Any:
    """A JSON value, more or less deep."""
    kind = rng.random()
    if kind < 0.02:
        return nested(rng.choice((50, 150, 250, 1200)), rng.random() < 0.5)
    if depth > 3 or kind < 0.7:
        return rng.choice(LEAVES)
    if kind < 0.85:
        return [value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(KEYS): value(rng, depth + 1) for _ in range(rng.randint(0, 3))}


def nested(depth: int, as_list: bool) -> Any:
    """A value so many levels deep."""
    made: Any = 1
    for _ in range(depth):
        made = [made] if as_list else {"x": made}
    return made


def changed(rng: Random, whole: Any) -> Any:
    """A JSON value with something within it replaced, left out, repeated or added."""
    if not isinstance(whole, dict | list) or not whole or rng.random() < 0.1:
        return value(rng)
    copy = dict(whole) if isinstance(whole, dict) else list(whole)
    key = rng.choice(list(whole) if isinstance(whole, dict) else range(len(whole)))
    what = rng.random()
    if what < 0.7:
        copy[key] = changed(rng, whole[key])  # type: ignore[index]
    elif what < 0.85:
        del copy[key]  # type: ignore[arg-type]
    elif isinstance(copy, dict):
        copy[rng.choice(KEYS)] = rng.choice((whole[key], value(rng)))  # type: ignore[index]
    else:
        copy += [whole[key]] * rng.choice((1, 2, 20))
    return copy


def raw_json(rng: Random, whole: Any, changes: int = 3) -> bytes:
    """A JSON document with some changes, now and then in its bytes too."""
    for _ in range(rng.randint(0, changes)):
        whole = changed(rng, whole)
    raw = dumped(whole)
    return damaged(rng, raw, len(raw)) if rng.random() < 0.3 else raw


def dumped(whole: Any) -> bytes:
    """JSON of a value, however deep."""
    try:
        return json.dumps(whole).encode()
    except RecursionError:  # as deep as Python's own writer can go
        return b"[" * 5000 + b"]" * 5000


def pieces(rng: Random) -> list[str]:
    """A text of what tool calls are made of, in pieces."""
    return [
        rng.choice(PIECES) if rng.random() < 0.9 else rng.choice("ab<{\u20ac\ufffd") for _ in range(rng.randint(0, 30))
    ]


def schema(rng: Random, depth: int = 0) -> Any:
    """A JSON schema, mostly sound."""
    if depth > 3 or rng.random() < 0.05:
        return rng.choice((True, False, {}, {"type": rng.choice(TYPES)}))
    made: dict[str, Any] = {"type": rng.choice(TYPES)} if rng.random() < 0.8 else {}
    for _ in range(rng.randint(0, 4)):
        word = rng.choice(list(_KEYWORDS))
        made[word] = value(rng) if rng.random() < 0.1 else _KEYWORDS[word](rng, depth + 1)
    return made


def _number(rng: Random, _: int) -> Any:
    return rng.choice((0, 1, 2, 5, -1, 0.5, 1e9, 1 << 40))


def _schemas(rng: Random, depth: int) -> list[Any]:
    return [schema(rng, depth) for _ in range(rng.randint(0, 3))]


def _named(rng: Random, depth: int) -> dict[str, Any]:
    return {name: schema(rng, depth) for name in rng.sample("abcd", rng.randint(0, 3))}


_KEYWORDS: dict[str, Callable[[Random, int], Any]] = {
    "properties": _named, "$defs": _named, "patternProperties": lambda r, d: {r.choice(PATTERNS): schema(r, d)},
    "required": lambda r, _: r.sample("abcd", r.randint(0, 3)), "additionalProperties": schema, "items": schema,
    "prefixItems": _schemas, "anyOf": _schemas, "oneOf": _schemas, "allOf": _schemas, "not": schema, "if": schema,
    "enum": lambda r, _: [r.choice(LEAVES) for _ in range(r.randint(0, 3))], "const": lambda r, _: r.choice(LEAVES),
    "pattern": lambda r, _: r.choice(PATTERNS), "format": lambda r, _: r.choice(FORMATS),
    "$ref": lambda r, _: r.choice(("#", "#/$defs/a", "#/$defs/b", "#/x", "http://x")),
    "minLength": _number, "maxLength": _number, "minItems": _number, "maxItems": _number, "minimum": _number,
    "maximum": _number, "exclusiveMinimum": _number, "multipleOf": _number,
    "uniqueItems": lambda r, _: r.random() < 0.5,
}  # fmt: skip
