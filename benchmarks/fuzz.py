"""Damaged files, odd requests and odd texts: whatever comes in, what comes out is an answer or one line.

    python benchmarks/fuzz.py --inputs 1000000

Sound files and recorded requests are damaged at random places; texts are put together from what tool calls are made of.
Prints one JSON object (inputs, seconds, tracebacks, memory) and exits with 1 if anything but an error of this project
came out, or an input took longer than ``--limit`` seconds.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pydantic import ValidationError

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from conftest import make_engine, random_checkpoint, tiny_config, write_model, write_tokenizer
from convert.files import f32 as stored_f32
from convert.files import gguf_fields, gguf_name, hf_name, random_floats, write_gguf, write_hf

from bitmtp import checkpoint
from bitmtp.convert.source import open_model
from bitmtp.errors import BitMTPError
from bitmtp.server.errors import explained
from bitmtp.server.grammar import Grammars
from bitmtp.server.intake import Intake
from bitmtp.server.json_body import parse
from bitmtp.server.options import ServerOptions
from bitmtp.server.schemas import ChatRequest, CompletionRequest, TokenizeRequest
from bitmtp.server.tools import ToolCall, ToolParser
from bitmtp.server.vocabulary import Vocabulary
from bitmtp.tokenizer import Tokenizer

SETTINGS = settings(
    database=None, deadline=None, derandomize=False, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
ROUND = 500  # inputs that one run of hypothesis makes up
CONFIG = tiny_config(num_layers=1)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS, "strict": True}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS, "strict": True}}
HELLO = {"role": "user", "content": "Hello"}
CHATS: list[dict[str, Any]] = [
    {"messages": [HELLO], "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}},
    {"messages": [HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": [TOOL], "n": 2},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "response_format": SCHEMA},
    {"messages": [HELLO], "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"messages": [HELLO], "logprobs": True, "top_logprobs": 3, "decoding": {"policy": "hybrid", "tau": 0.5}},
]
TEXTS: list[dict[str, Any]] = [
    {"prompt": "Hello", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "stop": ["\n"], "logit_bias": {"5": 1}},
    {"prompt": [[1, 2], [3]], "n": 2, "seed": 4, "logprobs": 2, "echo": False, "timeout": 1.5},
]
PIECES = ("<tool_call>", "</tool_call>", "\n", '{"name": "f", "arguments": {', "}", '"', "\\", "x", "<", '"a": 1', "é")

Edit = tuple[float, int, bytes]
EDITS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 16), st.binary(max_size=8)), min_size=1, max_size=4)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("a" * 5000)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner))


@dataclass
class Found:
    """What came out of the inputs."""

    inputs: Counter[str] = field(default_factory=Counter)
    tracebacks: Counter[str] = field(default_factory=Counter)


def damaged(data: bytes, edits: list[Edit], head: int) -> bytes:
    """Some bytes replaced, cut out or put in; most of them in the first ``head``, where a file says what it holds."""
    for place, cut, new in edits:
        start = int(place * min(head, len(data)))
        data = data[:start] + new + data[start + cut :]
    return data


def changed(value: Any, path: list[int], new: Any) -> Any:
    """A JSON value with another one somewhere within it."""
    if not path or not isinstance(value, dict | list) or not value:
        return new
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[path[0] % len(keys)]
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = changed(value[key], path[1:], new)
    return copy


class Targets:
    """What is fuzzed; each takes an input as hypothesis draws it."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        words = write_tokenizer(_folder(scratch / "words"))
        self.model = write_model(scratch / "model", random_checkpoint(CONFIG), words)
        self.sound = {file: file.read_bytes() for file in sorted(self.model.iterdir())}
        floats = random_floats(tiny_config(num_layers=1, sub_norm=False, tie_embeddings=True))
        self.gguf = write_gguf(
            scratch / "m.gguf", _metadata(words), {gguf_name(k): stored_f32(v) for k, v in floats.items()}
        )
        self.gguf_bytes = self.gguf.read_bytes()
        self.hf = write_hf(scratch / "hf", _hugging_face(), {hf_name(k): v for k, v in floats.items()})
        self.hf_sound = {file: file.read_bytes() for file in sorted(self.hf.iterdir())}
        engine = make_engine("reference", random_checkpoint(CONFIG), words)
        self.intake = Intake(engine, ServerOptions("tiny", engine.default_policy()), Grammars(Vocabulary(engine)))

    def read_checkpoint(self, data: st.DataObject) -> None:
        """A checkpoint folder, one of its files damaged."""
        self._folder_with_damage(data, self.sound, lambda: (checkpoint.read(self.model), Tokenizer(self.model, 320)))

    def read_hugging_face(self, data: st.DataObject) -> None:
        """A folder of Hugging Face's layout, one of its files damaged."""
        self._folder_with_damage(data, self.hf_sound, lambda: self._convert(self.hf))

    def read_gguf(self, data: st.DataObject) -> None:
        """A GGUF file, damaged."""
        head = len(self.gguf_bytes) if data.draw(st.booleans()) else 2000
        self.gguf.write_bytes(damaged(self.gguf_bytes, data.draw(EDITS), head))
        self._convert(self.gguf)

    def _convert(self, source: Path) -> None:
        opened = open_model(source)
        opened.write_tokenizer(self.scratch / "words")
        Tokenizer(self.scratch / "words", opened.config.vocab_size)
        for rows in opened.floats.values():
            rows.read(0, 1)

    def _folder_with_damage(self, data: st.DataObject, sound: dict[Path, bytes], read: Callable[[], Any]) -> None:
        file = data.draw(st.sampled_from(sorted(sound)))
        file.write_bytes(damaged(sound[file], data.draw(EDITS), 4000))
        try:
            read()
        finally:
            file.write_bytes(sound[file])

    def understand_request(self, data: st.DataObject) -> None:
        """A body, from its bytes to the plan."""
        chat = data.draw(st.booleans())
        body = data.draw(st.sampled_from(CHATS if chat else TEXTS))
        for _ in range(data.draw(st.integers(0, 3))):
            body = changed(body, data.draw(st.lists(st.integers(0, 9), max_size=5)), data.draw(VALUES))
        raw = json.dumps(body).encode()
        self._plan(damaged(raw, data.draw(EDITS), len(raw)) if data.draw(st.booleans()) else raw, chat)

    def _plan(self, raw: bytes, chat: bool) -> None:
        kinds = [(ChatRequest, self.intake.chat)] if chat else [(CompletionRequest, self.intake.completion)]
        for form, plan in [*kinds, (TokenizeRequest, self.intake.tokenize)]:
            try:
                body = parse(raw)
            except ValueError:
                return
            try:
                plan(form.model_validate(body))  # type: ignore[arg-type]
            except ValidationError as error:
                about = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
                explained(about, body)
            except BitMTPError:
                pass

    def parse_calls(self, data: st.DataObject) -> None:
        """A text with calls and what looks like some: the same however it is cut, and nothing lost that is no call."""
        pieces = data.draw(st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=30))
        whole, cut = _parsed(["".join(pieces)]), _parsed(pieces)
        if whole != cut:
            raise AssertionError(f"{pieces}: {whole} whole, {cut} in pieces")
        if not any(isinstance(part, tuple) for part in whole) and "".join(map(str, whole)) != "".join(pieces):
            raise AssertionError(f"{pieces}: lost to {whole}")


def _parsed(pieces: list[str]) -> list[Any]:
    parser = ToolParser(("f",))
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    joined: list[Any] = []
    for part in parts:
        if isinstance(part, ToolCall):
            joined.append((part.name, part.arguments))
        elif joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def _metadata(words: Path) -> dict[str, Any]:
    data = json.loads((words / "tokenizer.json").read_text(encoding="utf-8"))
    ids = data["model"]["vocab"] | {each["content"]: each["id"] for each in data["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]]
    return gguf_fields("llama", CONFIG) | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": sorted(ids, key=lambda token: ids[token]),
        "tokenizer.ggml.token_type": [1] * len(ids),
        "tokenizer.ggml.merges": merges,
    }


def _hugging_face() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "head_dim": CONFIG.head_dim,
        "max_position_embeddings": CONFIG.max_position,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }


def fuzz(target: Callable[[st.DataObject], None], count: int, start: int, limit: int, found: Found) -> None:
    """Run a target with ``count`` inputs."""

    @seed(start)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        found.inputs[target.__name__] += 1
        signal.alarm(limit)
        try:
            target(data)
        except BitMTPError:
            pass
        except Exception as error:
            if type(error).__module__.startswith("hypothesis"):
                raise
            found.tracebacks[f"{target.__name__}: {traceback.format_exc()}"] += 1
        finally:
            signal.alarm(0)

    run()


def _too_long(*_: object) -> None:
    raise TimeoutError("this input took too long")


def main(arguments: argparse.Namespace) -> int:
    """Run, print, judge."""
    signal.signal(signal.SIGALRM, _too_long)
    found, begun, round_ = Found(), time.monotonic(), 0
    with tempfile.TemporaryDirectory() as scratch:
        made = Targets(Path(scratch))
        targets = (
            made.read_checkpoint,
            made.read_hugging_face,
            made.read_gguf,
            made.understand_request,
            made.parse_calls,
        )
        share = -(-arguments.inputs // len(targets))
        for target in targets:
            while (left := share - found.inputs[target.__name__]) > 0:
                fuzz(target, min(left, ROUND), arguments.seed + round_, arguments.limit, found)
                round_ += 1
    report = {
        "inputs": dict(found.inputs),
        "seconds": round(time.monotonic() - begun, 1),
        "tracebacks": found.tracebacks.total(),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }
    print(json.dumps(report))
    for text, times in found.tracebacks.most_common(10):
        print(f"{times} times {text}", file=sys.stderr)
    return 1 if found.tracebacks else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=20, help="seconds that an input may take")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(parse_arguments()))
