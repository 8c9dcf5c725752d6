"""The tokenizer inside a GGUF file → ``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from bitmtp.convert.gguf_metadata import Metadata
from bitmtp.errors import CheckpointError, ConfigError

_INSTEAD = "name a folder that holds tokenizer.json with --tokenizer"
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


def write_tokenizer(metadata: Metadata, vocab_size: int, target: Path) -> None:
    """Write both files into ``target``.

    Raises:
        ConfigError: the file holds another kind of tokenizer than byte-level BPE, or cuts text in a way not known here.
        CheckpointError: a part of it is missing, or does not fit the others.
    """
    kind, cut = metadata.find("tokenizer.ggml.model", str), metadata.find("tokenizer.ggml.pre", str)
    if kind != "gpt2" or cut is None or _pre_tokenizer(cut) is None:
        known = f"its tokenizer is {kind!r} with {cut!r}" if kind else "it holds no tokenizer"
        raise ConfigError(f"{metadata.file}: {known}; {_INSTEAD}")
    try:
        tokens = _tokens(metadata, vocab_size)
        tokenizer = _byte_level(metadata, cut, tokens)
        settings = _settings(metadata, tokens)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_INSTEAD}") from None
    tokenizer.save(str(target / "tokenizer.json"))
    text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
    (target / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _tokens(metadata: Metadata, vocab_size: int) -> list[str]:
    tokens = metadata.need_list("tokenizer.ggml.tokens", str)
    if len(tokens) != vocab_size:
        raise CheckpointError(f"{metadata.file}: has {len(tokens)} tokens, the model {vocab_size}")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{metadata.file}: a token stands twice in tokenizer.ggml.tokens")
    return tokens


def _byte_level(metadata: Metadata, cut: str, tokens: Sequence[str]) -> Tokenizer:
    types = metadata.need_list("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise CheckpointError(f"{metadata.file}: has {len(tokens)} tokens, and types of {len(types)}")
    merges = metadata.need_list("tokenizer.ggml.merges", str)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=cut == "llama-bpe"))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{metadata.file}: its merges do not fit its tokens ({error})") from None
    tokenizer.pre_tokenizer, tokenizer.decoder = _pre_tokenizer(cut), decoders.ByteLevel()
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        marked = [token for token, of in zip(tokens, types, strict=True) if of == kind]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in marked])
    return tokenizer


def _settings(metadata: Metadata, tokens: Sequence[str]) -> dict[str, str]:
    ids = {key: metadata.find(f"tokenizer.ggml.{key}_token_id", int) for key in ("bos", "eos")}
    settings = {f"{key}_token": tokens[index] for key, index in ids.items() if index is not None}
    if template := metadata.find("tokenizer.chat_template", str):
        settings["chat_template"] = template
    return settings
