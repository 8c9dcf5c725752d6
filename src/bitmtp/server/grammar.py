"""Structured output: what a JSON schema or grammar allows next, by llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from bitmtp.server.errors import invalid
from bitmtp.server.tools import END, OPEN
from bitmtp.server.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# One spelling of white space: a small model that may choose it freely likes to write nothing else.
_JSON: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Integers that round to the smallest of 64 bits: llguidance 1.9 overflows the stack on them, which ends the process.
_OVERFLOWING = re.compile(r"-9223372036854775\d{3}")


class TokenGrammar:
    """A text's place in a grammar; see :class:`bitmtp.core.text.Grammar`.

    What follows an end-of-sequence token is never text, so a path with one in it is not looked at.
    """

    def __init__(self, matcher: LLMatcher, eos_ids: Iterable[int], param: str) -> None:
        self._matcher = matcher
        self._param = param  # the request's field that asks for it
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
        return TokenGrammar(self._matcher.deep_copy(), self._eos, self._param)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise invalid(f"this schema is too much to follow: {_first_line(self._matcher)}", self._param)


class Grammars:
    """Compiles grammars for one model's tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def json(self, schema: dict[str, Any]) -> TokenGrammar:
        """Text that is JSON and matches ``schema``.

        Raises:
            ApiError: 400, the schema is broken or uses what is not supported.
        """
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_JSON)
        except ValueError as error:  # it holds an integer of more than 64 bits
            raise invalid(f"this schema cannot be used: {error}", "response_format") from None
        return self._compile(grammar, "response_format")

    def lark(self, grammar: str) -> TokenGrammar:
        """Text of a grammar in llguidance's dialect of Lark.

        Raises:
            ApiError: 400, it is none.
        """
        return self._compile(LLMatcher.grammar_from_lark(grammar), "grammar", "grammar")

    def tool_call(self, tools: Sequence[tuple[str, dict[str, Any]]]) -> TokenGrammar:
        """One call of one of the tools, given by name and schema of arguments, as the template writes it.

        Raises:
            ApiError: 400, as :meth:`json`.
        """
        return self._compile(LLMatcher.grammar_from_lark("\n".join([f'start: "{OPEN}" call', *_calls(tools)])), "tools")

    def tool_calls(self, tools: Sequence[tuple[str, dict[str, Any]]]) -> TokenGrammar:
        """Any text, in which every call is one of the tools.

        Raises:
            ApiError: 400, as :meth:`json`.
        """
        rules = ["start: (opened call)* TEXT", "TEXT: /(?s:.*)/", f'opened[lazy]: TEXT "{OPEN}"', *_calls(tools)]
        return self._compile(LLMatcher.grammar_from_lark("\n".join(rules)), "tools")

    def _compile(self, grammar: str, param: str, what: str = "schema") -> TokenGrammar:
        if found := _OVERFLOWING.search(grammar):
            raise invalid(f"this {what} cannot be used: {found[0]} is out of range", param)
        matcher = LLMatcher(self._vocabulary.compiled, grammar, log_level=0)
        if matcher.is_error():
            raise invalid(f"this {what} cannot be used: {_first_line(matcher)}", param)
        return TokenGrammar(matcher, self._vocabulary.eos, param)


def _calls(tools: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Rules for what follows the opening tag. Each schema is a document of its own, so that its references hold."""
    choice = " | ".join(f"call{index}" for index in range(len(tools)))
    rules = [f'call: "\\n" ({choice}) {json.dumps(END)}']
    for index, (name, schema) in enumerate(tools):
        rules += [
            rf'call{index}: "{{\"name\": " name{index} ", \"arguments\": " arguments{index} "}}"',
            f"name{index}: %json {json.dumps({'const': name})}",
            f"arguments{index}: %json {json.dumps(schema | {'x-guidance': _JSON})}",
        ]
    return rules


def _first_line(matcher: LLMatcher) -> str:
    return str(matcher.get_error()).splitlines()[0]
