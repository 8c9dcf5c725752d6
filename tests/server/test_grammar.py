"""Structured output: masks against a matcher that starts afresh, validity, and text that no policy changes."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitmtp.core.policies import POLICIES
from bitmtp.engine import Engine
from bitmtp.server.errors import ApiError
from bitmtp.server.grammar import Grammars, TokenGrammar
from bitmtp.server.vocabulary import Vocabulary

from .conftest import Running

SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "home": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Rome", "Oslo", "Lima"]},
                    "number": {"type": "integer", "maximum": 99, "minimum": 0},
                },
                "required": ["city", "number"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "home"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "pattern": {
        "type": "object",
        "properties": {"code": {"type": "string", "pattern": "^[A-C]{2}-[0-9]{3}$"}, "ok": {"const": True}},
        "required": ["code", "ok"],
        "additionalProperties": False,
    },
    "choice": {"anyOf": [{"type": "null"}, {"enum": ["yes", "no"]}]},
}


@pytest.fixture(scope="module")
def grammars(engine: Engine) -> Grammars:
    return Grammars(Vocabulary(engine))


def members(mask: np.ndarray[Any, Any], size: int) -> list[int]:
    """Ids of a bit set."""
    return [token for token in range(size) if mask[token // 32] >> (token % 32) & 1]


def walk(grammar: TokenGrammar, engine: Engine, picks: list[int]) -> list[int]:
    """Some text that the grammar allows."""
    text: list[int] = []
    for pick in picks:
        mask = grammar.allowed(text)
        if mask is None:
            break
        allowed = members(mask, engine.config.vocab_size)
        text.append(allowed[pick % len(allowed)])
    return text


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(SCHEMAS)),
    st.lists(st.integers(0, 1000), min_size=1, max_size=40),
    st.integers(0, 40),
    st.lists(st.integers(0, 319), max_size=3),
)
def test_masks_follow_the_path(
    engine: Engine, grammars: Grammars, name: str, picks: list[int], committed: int, wild: list[int]
) -> None:
    text = walk(grammars.json(SCHEMAS[name]), engine, picks)
    grammar, fresh = grammars.json(SCHEMAS[name]), grammars.json(SCHEMAS[name])
    committed = min(committed, len(text))
    grammar.commit(text[:committed])
    for end in range(committed, len(text) + 1):
        grammar.allowed([*text[committed:end], *wild])  # looking at any path leaves no trace
        expected, found = fresh.allowed(text[:end]), grammar.allowed(text[committed:end])
        assert (expected is None) == (found is None)
        if found is not None and expected is not None:
            np.testing.assert_array_equal(found, expected)


def test_a_path_that_leaves_the_grammar_has_no_mask(engine: Engine, grammars: Grammars) -> None:
    grammar = grammars.json(SCHEMAS["array"])
    first = grammar.allowed([])
    assert first is not None
    outside = next(
        token for token in range(engine.config.vocab_size) if token not in members(first, engine.config.vocab_size)
    )
    assert grammar.allowed([outside]) is None
    assert grammar.accepts([outside]) == 0
    with pytest.raises(ApiError):
        grammar.copy().commit([outside])
    np.testing.assert_array_equal(grammar.allowed([]), first)


def test_a_broken_schema_is_refused(grammars: Grammars) -> None:
    for schema in ({"type": "riddle"}, {"type": "string", "pattern": "("}, {"$ref": "#/nowhere"}):
        with pytest.raises(ApiError) as error:
            grammars.json(schema)
        assert error.value.status == 400
        assert "\n" not in str(error.value)


def test_a_schema_that_turns_out_too_complex_is_the_clients_error(served: Running) -> None:
    members = {f"k{number}": {"type": "string", "maxLength": 10_000} for number in range(3000)}
    schema = {"type": "object", "properties": members}
    response = served.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "JSON, please."}],
        response_format={"type": "json_schema", "json_schema": {"schema": schema}},
        max_tokens=40,
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_answers_are_valid_under_every_policy(served: Running, name: str) -> None:
    for seed in range(3):
        texts = {}
        for policy in POLICIES:
            answer = served.post(
                "/v1/chat/completions",
                messages=[{"role": "user", "content": "Tell me as JSON."}],
                response_format={"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMAS[name]}},
                max_tokens=200,
                seed=seed,
                decoding={"policy": policy, **({"tau": 0.2} if policy in ("confidence", "hybrid") else {})},
            ).json()["choices"][0]
            texts[policy] = answer["message"]["content"]
            assert answer["finish_reason"] == "stop", answer
            jsonschema.validate(json.loads(texts[policy]), SCHEMAS[name])
        assert texts["speculative"] == texts["auto"] == texts["autoregressive"]


def test_any_json_object(served: Running) -> None:
    body = {"messages": [{"role": "user", "content": "JSON, please."}], "response_format": {"type": "json_object"}}
    ended = 0
    for seed in range(8):
        answer = served.post("/v1/chat/completions", **body, max_tokens=60, seed=seed).json()["choices"][0]
        assert answer["message"]["content"].startswith("{")
        if answer["finish_reason"] == "stop":
            ended += 1
            assert isinstance(json.loads(answer["message"]["content"]), dict)
    assert ended


@pytest.mark.parametrize("number", [-(1 << 63), 1 - (1 << 63), -(1 << 64), 1 << 64])
@pytest.mark.parametrize("place", ["response_format", "tools"])
def test_integers_at_the_edge_of_64_bits_are_no_fault(served: Running, place: str, number: int) -> None:
    """Some would end the process within the library."""
    schema = {"type": "object", "properties": {"a": {"enum": [number]}}}
    asked: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    if place == "tools":
        asked = {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}
        asked["tool_choice"] = "required"
    response = served.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=2, **asked)
    assert response.status_code in (200, 400), response.text
    assert served.client.get(served.url + "/health").status_code == 200


@pytest.mark.parametrize("policy", ["autoregressive", "speculative", "auto"])
@pytest.mark.parametrize("text", ["<|end|>", "a<|pad|>", "<|start|>b"])
def test_the_names_of_special_tokens_are_text_in_a_schema(served: Running, text: str, policy: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": text}}}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 40, "decoding": {"policy": policy}}
    response = served.post("/v1/chat/completions", **body, response_format=form, timeout=10)
    assert response.status_code == 200, response.text
    assert json.loads(response.json()["choices"][0]["message"]["content"]) == text
