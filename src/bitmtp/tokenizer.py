"""Text to token ids and back: the ``tokenizers`` library plus the checkpoint's chat template."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as _Tokenizer

from bitmtp.errors import CheckpointError, RequestError

Message = Mapping[str, Any]
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte that is a token of its own
_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
# The characters by which byte-level tokenizers write bytes: most as they print, the others from U+0100 on.
_BYTES = {chr(byte): byte for byte in _PRINTED} | {
    chr(0x100 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(_PRINTED)))
}


class Tokenizer:
    """The tokenizer of one checkpoint folder.

    Raises:
        CheckpointError: a file is missing or unreadable, or has more tokens than the model.
    """

    def __init__(self, folder: str | Path, vocab_size: int | None = None) -> None:
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.exists():
            raise CheckpointError(f"{file}: missing; a checkpoint folder must hold it")
        try:
            self._tokenizer = _Tokenizer.from_file(str(file))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises plain Exception, and what Rust calls a panic
            raise CheckpointError(f"{file}: not a tokenizer ({error})") from None
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        if vocab_size is not None and size > vocab_size:
            raise CheckpointError(f"{file}: has {size} tokens, the model {vocab_size}: not the tokenizer of this model")
        self._settings = _read_settings(folder / "tokenizer_config.json")

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint brings a chat template."""
        return bool(self._settings.get("chat_template"))

    @property
    def template_knows_tools(self) -> bool:
        """Whether the chat template renders tool definitions by itself."""
        return "tools" in (self._settings.get("chat_template") or "")

    @property
    def definition(self) -> str:
        """The text of ``tokenizer.json``, for libraries that read it themselves."""
        return str(self._tokenizer.to_str())

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; special tokens written in it are recognised, none is added."""
        return self.encode_batch([text])[0]  # unlike the library's `encode` it lets other threads run

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, on all cores."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids; an incomplete character at the end shows as U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def decode_whole(self, ids: Sequence[int]) -> str:
        """The same without a last character of which bytes are missing."""
        text = self.decode(ids)
        if not text.endswith("\ufffd"):
            return text
        raw = [self._bytes(token) for token in ids]
        missing = _unfinished(b"".join(raw))
        while missing and missing >= len(raw[-1]):
            missing -= len(raw.pop())
        text = self.decode(ids[: len(raw)])
        return text[:-1] if missing else text

    def _bytes(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None or not self._tokenizer.decode([token]):  # special tokens are no text
            return b""
        if byte := _BYTE.fullmatch(name):
            return bytes.fromhex(byte[1])
        return bytes(_BYTES[each] for each in name) if _BYTES.keys() >= set(name) else name.encode()

    def token_id(self, token: str) -> int | None:
        """Id of a token by its exact text, or None."""
        return self._tokenizer.token_to_id(token)

    def chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, tools: Sequence[Message] | None = None
    ) -> str:
        """Render messages (and tool definitions, if the template knows them) by the chat template.

        Raises:
            RequestError: there is no template, or it rejects the messages.
        """
        names = {key: self._settings.get(key) or "" for key in ("bos_token", "eos_token")}
        try:
            return str(
                self._template.render(
                    messages=list(messages), add_generation_prompt=add_generation_prompt, tools=tools, **names
                )
            )
        except RequestError:
            raise
        except Exception as error:  # a template is a program that somebody else wrote
            raise RequestError(f"the chat template rejects these messages: {error}") from None

    @cached_property
    def _template(self) -> Template:
        source = self._settings.get("chat_template")
        if not source:
            raise RequestError("this model has no chat template; use --no-chat-template")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        # Published templates count on these two.
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _reject
        return environment.from_string(source)


def _unfinished(raw: bytes) -> int:
    """How many of the last bytes are the beginning of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(raw)
    return len(decoder.getstate()[0])


def _reject(reason: str) -> NoReturn:
    raise TemplateError(reason)


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing; a checkpoint folder must hold it") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file}: expected a JSON object")
    return settings
