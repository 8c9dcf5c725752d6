"""The tokenizer inside a GGUF file → ``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from bitmtp.errors import ConfigError

_CONTROL, _USER_DEFINED = 3, 4
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBER| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(number: str) -> Any:
    pattern = Regex(_WORDS.replace("NUMBER", number))
    split = pre_tokenizers.Split(pattern, "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _pre_tokenizer(name: str) -> Any:
    """How text is cut before merging, by the file's name for it; None if that is not known here."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in ("gpt-2", "default"):
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return {"qwen2": _split(r"\p{N}"), "llama-bpe": _split(r"\p{N}{1,3}")}.get(name)


def write_tokenizer(file: Path, reader: Any, target: Path) -> None:
    """Write both files into ``target``.

    Raises:
        ConfigError: the file holds another kind of tokenizer than byte-level BPE, or cuts text in a way not known here.
    """

    def field(name: str) -> Any:
        found = reader.fields.get(f"tokenizer.{name}")
        return None if found is None else found.contents()

    kind, name = field("ggml.model"), field("ggml.pre") or "default"
    cut = _pre_tokenizer(name)
    if kind != "gpt2" or cut is None:
        known = f"its tokenizer is {kind!r} with {name!r}" if kind else "it holds no tokenizer"
        raise ConfigError(f"{file}: {known}; name a folder that holds tokenizer.json with --tokenizer")
    tokens, types = field("ggml.tokens"), field("ggml.token_type") or []
    merges = [tuple(merge.split(" ", 1)) for merge in field("ggml.merges") or []]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name == "llama-bpe"))
    tokenizer.pre_tokenizer, tokenizer.decoder = cut, decoders.ByteLevel()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    for kinds, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        marked = [token for token, of in zip(tokens, types, strict=False) if of == kinds]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in marked])
    tokenizer.save(str(target / "tokenizer.json"))
    ids = {key: field(f"ggml.{key}_token_id") for key in ("bos", "eos")}
    settings = {f"{key}_token": tokens[index] for key, index in ids.items() if index is not None}
    if template := field("chat_template"):
        settings["chat_template"] = template
    text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
    (target / "tokenizer_config.json").write_text(text, encoding="utf-8")
