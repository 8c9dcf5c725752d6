"""Structured output: what a JSON schema or grammar allows next, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from bitmtp.engine import Engine
from bitmtp.server.errors import invalid

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# One spelling of white space: a small model that may choose it freely likes to write nothing else.
_JSON: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class TokenGrammar:
    """A text's place in a grammar; see :class:`bitmtp.decoding.state.Grammar`.

    What follows an end-of-sequence token is never text, so a path with one in it is not looked at.
    """

    def __init__(self, matcher: LLMatcher, eos_ids: Iterable[int]) -> None:
        self._matcher = matcher
        self._eos = frozenset(eos_ids)

    def allowed(self, path: Sequence[int]) -> NDArray[np.uint32] | None:
        """Bit set of the tokens allowed behind the text and ``path``; None if ``path`` itself is not."""
        if not self._eos.isdisjoint(path) or self.accepts(path) < len(path):
            return None
        self._matcher.consume_tokens(list(path))
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        self._check()
        self._matcher.rollback(len(path))
        return mask

    def accepts(self, path: Sequence[int]) -> int:
        """How many tokens of ``path``, from its beginning, may stand behind the text."""
        if self._matcher.is_stopped():  # the grammar is at its end: nothing but the end of the text fits
            self._check()
            return len(path[:1]) if self._eos.issuperset(path[:1]) else 0
        accepted = int(self._matcher.validate_tokens(list(path)))
        self._check()
        return accepted

    def commit(self, tokens: Sequence[int]) -> None:
        """These tokens are text now."""
        text = [token for token in tokens if token not in self._eos]
        self._matcher.consume_tokens(text)
        self._check()

    def copy(self) -> TokenGrammar:
        """An independent one at the same place."""
        return TokenGrammar(self._matcher.deep_copy(), self._eos)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise invalid(f"this schema is too much to follow: {_first_line(self._matcher)}", "response_format")


class Grammars:
    """Compiles grammars for one model's tokens."""

    def __init__(self, engine: Engine) -> None:
        self._eos = engine.config.eos_token_ids
        self._tokenizer = LLTokenizer(
            engine.tokenizer.definition, n_vocab=engine.config.vocab_size, eos_token=list(self._eos)
        )

    def json(self, schema: dict[str, Any]) -> TokenGrammar:
        """Text that is JSON and matches ``schema``.

        Raises:
            ApiError: 400, the schema is broken or uses what is not supported.
        """
        return self._compile(LLMatcher.grammar_from_json_schema(schema, overrides=_JSON), "response_format")

    def tool_call(self, tools: Sequence[tuple[str, dict[str, Any]]]) -> TokenGrammar:
        """One call of one of the tools, given by name and schema of arguments, as the template writes it."""
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": parameters},
                "required": ["name", "arguments"],
                "additionalProperties": False,
                "x-guidance": _JSON,
            }
            for name, parameters in tools
        ]
        rules = [f"call{index}: %json {json.dumps(call)}" for index, call in enumerate(calls)]
        choice = " | ".join(f"call{index}" for index in range(len(calls)))
        lark = "\n".join(['start: "<tool_call>\\n" (' + choice + ') "\\n</tool_call>"', *rules])
        return self._compile(LLMatcher.grammar_from_lark(lark), "tools")

    def _compile(self, grammar: str, param: str) -> TokenGrammar:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise invalid(f"this schema cannot be used: {_first_line(matcher)}", param)
        return TokenGrammar(matcher, self._eos)


def _first_line(matcher: LLMatcher) -> str:
    return str(matcher.get_error()).splitlines()[0]
