"""What ``fuzz.py`` puts its inputs to: each target makes an input of a random generator, and has it read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from fuzz_inputs import LEAVES, damaged, dumped, pieces, raw_json, schema
from pydantic import ValidationError

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from conftest import DATA, make_engine, random_checkpoint, tiny_config, write_model, write_tokenizer
from convert.files import encode_blocks, gguf_fields, gguf_name, random_floats, random_ternary, write_gguf, write_hf
from convert.files import f32 as stored_f32
from convert.test_bitnet import BITNET, packed, quantised, ternary_tensors

from bitmtp import checkpoint
from bitmtp.config import ModelConfig
from bitmtp.convert.source import open_model
from bitmtp.server.errors import explained
from bitmtp.server.grammar import Grammars
from bitmtp.server.intake import Intake
from bitmtp.server.json_body import parse
from bitmtp.server.options import ServerOptions
from bitmtp.server.schemas import ChatRequest, CompletionRequest, TokenizeRequest
from bitmtp.server.tools import ToolCall, ToolParser
from bitmtp.server.vocabulary import Vocabulary
from bitmtp.tokenizer import Tokenizer

CONFIG = tiny_config(num_layers=1)
GGUF = ModelConfig(
    vocab_size=32, hidden_size=128, intermediate_size=128, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32,
    max_position=128, eos_token_ids=(2,), embedding_bits=16, head_activation_bits=16,
)  # fmt: skip
TURNS = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi <|end|>"}]
OWN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [[1, 2], [3]], "n": 2, "seed": 4, "logprobs": 2, "timeout": 1.5, "min_p": 0.1}),
    ("/v1/completions", {"prompt": "Hello", "decoding": {"policy": "hybrid", "tau": 0.5, "trace": True}, "top_k": 3}),
    ("/tokenize", {"prompt": "Hello"}),
    ("/tokenize", {"messages": TURNS}),
]
FORMS: dict[str, Any] = {
    "/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest, "/tokenize": TokenizeRequest,
}  # fmt: skip


def recorded() -> list[tuple[str, dict[str, Any]]]:
    """What clients send: path and body."""
    files = sorted((DATA / "requests").glob("*.json"))
    return [(one["path"], one["body"]) for file in files for one in json.loads(file.read_text(encoding="utf-8"))]


class Targets:
    """Sound files in a scratch folder, and a server's intake."""

    def __init__(self, scratch: Path) -> None:
        self.words = _folder(scratch / "words")
        write_tokenizer(self.words)
        self.model = write_model(scratch / "model", random_checkpoint(CONFIG), self.words)
        self.sound = _contents(self.model)
        self.fields, self.tensors = _gguf_fields(), _gguf_tensors()
        self.gguf = write_gguf(scratch / "m.gguf", self.fields, self.tensors)
        self.gguf_bytes = self.gguf.read_bytes()
        data = BITNET | quantised("autobitlinear") | {"num_hidden_layers": 1}
        tensors = packed(ternary_tensors(data, sub_norm=True, inverse=False))
        self.hf = write_hf(scratch / "hf", data, tensors, shards=2)
        self.hf_sound = _contents(self.hf)
        self.tokenizer_sound, self.target = _contents(self.words), _folder(scratch / "target")
        engine = make_engine("reference", random_checkpoint(CONFIG), self.words)
        self.grammars = Grammars(Vocabulary(engine))
        self.intake = Intake(engine, ServerOptions("m", engine.default_policy()), self.grammars)
        self.bodies = [*recorded(), *OWN]

    # Files

    def read_checkpoint(self, rng: Random) -> None:
        """A checkpoint folder, one of its files damaged."""
        with _damage(rng, self.sound):
            checkpoint.read(self.model)

    def read_tokenizer(self, rng: Random) -> None:
        """Tokenizer files with other values, and what they are for."""
        with _damage(rng, self.tokenizer_sound):
            tokenizer = Tokenizer(self.words, 400)
            ids = tokenizer.encode(rng.choice(("", "Hello <|end|> \u00e9\U0001f6a2", "x" * 300)))
            tokenizer.decode_whole(ids)
            tokenizer.chat(TURNS, tools=rng.choice((None, [{"name": "f"}])))

    def read_hugging_face(self, rng: Random) -> None:
        """A folder of Hugging Face's layout, one of its files damaged."""
        with _damage(rng, self.hf_sound):
            self._open(self.hf)

    def read_gguf(self, rng: Random) -> None:
        """A GGUF file: bytes damaged, or metadata with other values."""
        if rng.random() < 0.3:
            try:
                write_gguf(self.gguf, _other_fields(rng, self.fields), self.tensors)
            except Exception:  # the format cannot say this
                self.gguf.write_bytes(damaged(rng, self.gguf_bytes, 2000))
        else:
            self.gguf.write_bytes(damaged(rng, self.gguf_bytes, rng.choice((2000, 20_000, len(self.gguf_bytes)))))
        self._open(self.gguf)

    def _open(self, source: Path) -> None:
        opened = open_model(source)
        opened.write_tokenizer(self.target)
        Tokenizer(self.target, opened.config.vocab_size)
        for rows in opened.floats.values():
            rows.read(0, 1)
        for stored in opened.ternary.values():
            stored.read()

    # Requests

    def understand_request(self, rng: Random) -> None:
        """A body, from its bytes to the plan."""
        path, body = rng.choice(self.bodies)
        raw = raw_json(rng, body)
        try:
            parsed = parse(raw)
        except ValueError:
            return
        plan = {ChatRequest: self.intake.chat, CompletionRequest: self.intake.completion}.get(FORMS[path])
        try:
            (plan or self.intake.tokenize)(FORMS[path].model_validate(parsed))
        except ValidationError as error:
            about = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
            explained(about, parsed)

    def follow_schema(self, rng: Random) -> None:
        """A schema, and some tokens of a text that keeps to it."""
        try:
            made = parse(dumped(schema(rng)))
        except ValueError:
            return
        if not isinstance(made, dict):
            return
        grammar = self.grammars.json(made) if rng.random() < 0.5 else self.grammars.tool_calls([("f", made)])
        for _ in range(3):
            mask = grammar.allowed([])
            assert mask is not None
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed.tolist()))
            if grammar.accepts([token]) != 1:
                raise AssertionError(f"{made}: token {token} is allowed, and not accepted")
            if token == 2:
                return
            grammar.commit([token])

    def parse_calls(self, rng: Random) -> None:
        """A text with calls and what looks like some: the same however it is cut, and nothing lost that is no call."""
        parts = pieces(rng)
        whole, cut = parsed_calls(["".join(parts)]), parsed_calls(parts)
        if whole != cut:
            raise AssertionError(f"{parts}: {whole} whole, {cut} in pieces")
        if not any(isinstance(part, tuple) for part in whole) and "".join(map(str, whole)) != "".join(parts):
            raise AssertionError(f"{parts}: lost to {whole}")


# Each with its share of the inputs: what costs most gets the fewest.
TARGETS = {
    "read_checkpoint": 3, "read_tokenizer": 2, "read_hugging_face": 2, "read_gguf": 1, "understand_request": 4,
    "follow_schema": 3, "parse_calls": 5,
}  # fmt: skip


def parsed_calls(parts: list[str]) -> list[Any]:
    """Content and calls of a text that comes in parts."""
    parser = ToolParser(("f",))
    found = [one for part in parts for one in parser.push(part)] + parser.finish()
    joined: list[Any] = []
    for one in found:
        if isinstance(one, ToolCall):
            joined.append((one.name, one.arguments))
        elif joined and isinstance(joined[-1], str):
            joined[-1] += one
        else:
            joined.append(one)
    return joined


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def _contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in sorted(folder.iterdir())}


@contextmanager
def _damage(rng: Random, sound: dict[Path, bytes]) -> Iterator[None]:
    """One of some files is damaged for a while, or gone."""
    file = rng.choice(list(sound))
    if file.suffix == ".json" and rng.random() < 0.6:
        file.write_bytes(raw_json(rng, json.loads(sound[file])))
    elif rng.random() < 0.01:
        file.unlink()
    else:
        file.write_bytes(damaged(rng, sound[file], rng.choice((300, 4000, len(sound[file])))))
    try:
        yield
    finally:
        file.write_bytes(sound[file])


def _other_fields(rng: Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Metadata with one entry changed, left out or of another type."""
    name = rng.choice(list(fields))
    held, other = fields[name], {key: held for key, held in fields.items() if key != name}
    if rng.random() < 0.2:
        return other
    if not isinstance(held, list) or rng.random() < 0.2:
        return other | {name: rng.choice((rng.choice(LEAVES), [rng.choice(LEAVES)] * rng.choice((1, 320)), [[1]]))}
    start = rng.randrange(len(held))
    new = rng.choice(([], [held[0]], [rng.choice(LEAVES)], held))
    return other | {name: held[:start] + new + held[start + rng.choice((0, 1)) :]}


def _gguf_fields() -> dict[str, Any]:
    return gguf_fields("qwen3", GGUF) | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<|pad|>", "<|start|>", "<|end|>", *"abcdefghijklmnopqrstuvwxyz", "ab", "abc", "de"],
        "tokenizer.ggml.token_type": [3] * 3 + [1] * 29,
        "tokenizer.ggml.merges": ["a b", "ab c", "d e"],
    }


def _gguf_tensors() -> dict[str, Any]:
    random, tensors = np.random.default_rng(5), {}
    for name, floats in random_floats(GGUF).items():
        if floats.ndim == 1 or name.startswith(("embedding", "head")):
            tensors[gguf_name(name)] = stored_f32(floats)
        else:
            weights, scales = random_ternary(random, *floats.shape, 128)
            tensors[gguf_name(name)] = 142, floats.shape, encode_blocks("PQ2_0", weights, scales)
    return tensors
