"""What the tokens of a model stand for, byte by byte: text alone does not tell them apart."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable

from llguidance import LLTokenizer

from bitmtp.engine import Engine


class Vocabulary:
    """The tokens of one model.

    Attributes:
        compiled: the same for grammars.
    """

    def __init__(self, engine: Engine) -> None:
        tokenizer, config = engine.tokenizer, engine.config
        self.eos = frozenset(config.eos_token_ids)
        spelled, self._special = _without_names(tokenizer.definition)
        self.compiled = LLTokenizer(spelled, n_vocab=config.vocab_size, eos_token=list(config.eos_token_ids))
        self._tokenizer = tokenizer

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token, special or not."""
        return self._special.get(token) or bytes(self.compiled.decode_bytes([token]))

    def names(self, tokens: Iterable[int]) -> dict[int, str]:
        """A name for each token, no two alike: its text; its bytes, if that is no whole characters; its id, if another
        has that name."""
        names: dict[int, str] = {}
        for token in dict.fromkeys(tokens):
            name = _name(self.bytes_of(token))
            names[token] = f"token_id:{token}" if name in names.values() else name
        return names

    def in_text(self, token: int) -> bytes:
        """The bytes that a token adds to a text: none if it is special."""
        return self.bytes_of(token) if self._tokenizer.decode([token]) else b""


def _without_names(definition: str) -> tuple[str, dict[int, bytes]]:
    """A tokenizer whose special tokens have names that stand in no text, and the names they had.

    A schema may hold such a name: it is spelled then, in tokens that are text.
    """
    data = json.loads(definition)
    words, names = data["model"]["vocab"], dict[int, bytes]()
    for token in data["added_tokens"]:
        if token["special"]:
            name, other = token["content"], f"\ufdd0{token['id']}"
            names[token["id"]], token["content"] = name.encode(), other
            if isinstance(words, list) and token["id"] < len(words):
                words[token["id"]][0] = other
            elif isinstance(words, dict) and name in words:
                words[other] = words.pop(name)
    data["post_processor"] = None  # it would look for the names
    return json.dumps(data), names


def _name(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Offsets:
    """Where each token of a growing text begins, in characters; within a character: where that character begins."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def push(self, token: int, *, special: bool = False) -> int:
        """The place of the next token; ``special``: special tokens are text too, as they are in a prompt."""
        begin, vocabulary = self._characters, self._vocabulary
        self._characters += len(self._decoder.decode((vocabulary.bytes_of if special else vocabulary.in_text)(token)))
        return begin
