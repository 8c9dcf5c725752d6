"""Tool calls in text: parsed whole or in pieces, rendered for templates that know none, forced by grammar."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitmtp.engine import Engine
from bitmtp.server.grammar import Grammars
from bitmtp.server.tools import ToolCall, ToolParser, arguments_schema, explain
from bitmtp.server.vocabulary import Vocabulary

from .conftest import Running

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Rome", "Oslo"]}, "metric": {"type": "boolean"}},
            "required": ["place", "metric"],
            "additionalProperties": False,
        },
    },
}
NAMES = ("weather", "f")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'


def tagged(name: str, arguments: str) -> str:
    """A call with arguments of any kind."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def parsed(text: str, cuts: list[int]) -> list[str | tuple[str, str]]:
    """Content (joined) and calls of a text that arrives in pieces."""
    parser, places = ToolParser(NAMES), sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    parts = [part for a, b in pairwise(places) for part in parser.push(text[a:b])]
    found: list[str | tuple[str, str]] = []
    for part in parts + parser.finish():
        if isinstance(part, ToolCall):
            found.append((part.name, part.arguments))
        elif found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


ROME = ("weather", '{"place": "Rome"}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call", ["no call"]),
        (CALL, [ROME]),
        (f"Let me see.\n{CALL}", ["Let me see.\n", ROME]),
        (f"{CALL}\n{CALL}\n", [ROME, ROME]),
        (f"a{CALL}b{CALL}c", ["a", ROME, "b", ROME, "c"]),
        (CALL.removesuffix("</tool_call>"), [ROME]),
        ('<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
        ("<tool_call>{broken}</tool_call>", ["<tool_call>{broken}</tool_call>"]),
        ("<tool_call>[1]</tool_call>", ["<tool_call>[1]</tool_call>"]),
        ('<tool_call>{"name": 1}</tool_call>', ['<tool_call>{"name": 1}</tool_call>']),
        (tagged("f", '{"s": "a</tool_call>b"}'), [("f", '{"s": "a</tool_call>b"}')]),
        (tagged("f", '{"s": "<tool_call>{}</tool_call>"}'), [("f", '{"s": "<tool_call>{}</tool_call>"}')]),
        (tagged("f", '{"s": "\\"</tool_call>\\\\"}'), [("f", '{"s": "\\"</tool_call>\\\\"}')]),
        (tagged("f", '{"s": "a</tool_call>'), [tagged("f", '{"s": "a</tool_call>')]),
        (f'<tool_call>{{"s": "broken}}\n</tool_call>\n{CALL}', ['<tool_call>{"s": "broken}\n</tool_call>\n', ROME]),
        (f"<tool_call> is how one calls: {CALL}", ["<tool_call> is how one calls: ", ROME]),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', [("f", '{"a": 1}')]),
        (unsound := '<tool_call>{"name": "f", "parameters": {}, "arguments": {}}</tool_call>', [unsound]),
        (tagged("f", '{"a": NaN}'), [tagged("f", '{"a": NaN}')]),
        (tagged("f", '{"a": 1e999}'), [tagged("f", '{"a": 1e999}')]),
        (tagged("f", "[]"), [tagged("f", "[]")]),
        (tagged("unknown", "{}"), [tagged("unknown", "{}")]),
        (tagged("f", '{"a": ' * 300), [tagged("f", '{"a": ' * 300)]),
        ("1 < 2 and <tool", ["1 < 2 and <tool"]),
        ("<tool_call>{", ["<tool_call>{"]),
    ],
)
@given(cuts=st.lists(st.integers(0, 80), max_size=12))
def test_calls_are_found_however_the_text_arrives(text: str, expected: list[Any], cuts: list[int]) -> None:
    assert parsed(text, cuts) == expected


@given(st.text("<tol_ca>/ x", max_size=60), st.lists(st.integers(0, 60), max_size=8))
def test_text_without_calls_is_kept_to_the_letter(text: str, cuts: list[int]) -> None:
    assert "".join(part for part in parsed(text, cuts) if isinstance(part, str)) == text


def test_content_comes_as_early_as_it_can() -> None:
    parser = ToolParser(NAMES)
    assert parser.push("hello <") == ["hello "]
    assert parser.push("b> <tool_") == ["<b> "]
    assert parser.push("box>") == ["<tool_box>"]


def test_a_template_without_tools_is_told_in_words() -> None:
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"place": "Rome"}}}],
        },
        {"role": "tool", "content": "sunny"},
    ]
    system, user, assistant, tool = explain(turns, [WEATHER])
    assert system["role"] == "system"
    assert json.dumps(WEATHER) in system["content"]
    assert user == turns[0]
    assert parsed(assistant["content"], []) == [ROME]
    assert tool == {"role": "user", "content": "<tool_response>\nsunny\n</tool_response>"}
    kept = explain([{"role": "system", "content": "Be brief."}, *turns], [WEATHER])
    assert kept[0]["content"].startswith("Be brief.\n\n")
    assert len(kept) == 4


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("policy", ["autoregressive", "speculative", "hybrid"])
def test_a_required_call_is_made_and_is_valid(served: Running, choice: Any, policy: str) -> None:
    other = {
        "type": "function",
        "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}},
    }
    body = {
        "messages": [{"role": "user", "content": "Rain?"}],
        "tools": [WEATHER, other],
        "tool_choice": choice,
        "max_tokens": 150,
        "seed": 2,
        "decoding": {"policy": policy},
    }
    answer = served.post("/v1/chat/completions", **body).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    (call,) = answer["message"]["tool_calls"]
    assert call["type"] == "function"
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "weather":
        assert arguments["place"] in ("Rome", "Oslo")
        assert isinstance(arguments["metric"], bool)
    else:
        assert call["function"]["name"] == "stop" != choice
    with served.client.stream("POST", served.url + "/v1/chat/completions", json={**body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line][:-1]
    deltas = [json.loads(line)["choices"][0] for line in lines]
    calls = [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]
    assert [(call["index"], call["function"]) for call in calls] == [(0, call["function"])]
    assert deltas[-1]["finish_reason"] == "tool_calls"


def call_of(server: Running, parameters: Any, **body: Any) -> Any:
    """The choice that answers with a call of ``f``."""
    tool = {"type": "function", "function": {"name": "f", **({} if parameters is None else {"parameters": parameters})}}
    body = {"tool_choice": "required", "max_tokens": 120, "seed": 3, "tools": [tool], **body}
    response = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "Rain?"}], **body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


INTEGER_BY_NAME = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/digit"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"digit": {"enum": [7]}},
}
CLOSED = {"required": ["s"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        (None, {}),
        ({}, {}),
        ({"type": "object", "properties": {}}, {}),
        ({"properties": {"s": {"const": "a</tool_call>b"}}, **CLOSED}, {"s": "a</tool_call>b"}),
        ({"properties": {"s": {"const": "\n</tool_call>"}}, **CLOSED}, {"s": "\n</tool_call>"}),
        ({"type": ["object", "null"], "properties": {"s": {"const": 1}}, **CLOSED}, {"s": 1}),
        (INTEGER_BY_NAME, {"a": 7}),
    ],
)
@pytest.mark.parametrize("parallel", [True, False])
def test_the_grammar_and_the_parser_agree(served: Running, parameters: Any, arguments: Any, parallel: bool) -> None:
    answer = call_of(served, parameters, parallel_tool_calls=parallel)
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"]) == arguments
    assert answer["message"]["content"] is None
    assert answer["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_parameters_that_allow_no_call_are_refused(served: Running, choice: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
    body = {"messages": [{"role": "user", "content": "Rain?"}], "tools": [tool], "tool_choice": choice}
    response = served.post("/v1/chat/completions", **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools.0.function.parameters"
    tool["function"]["parameters"] = {"anyOf": [{"type": "array"}]}
    response = served.post("/v1/chat/completions", **{**body, "tool_choice": "required"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


def test_an_answer_with_a_single_call_ends_with_it() -> None:
    parser = ToolParser(NAMES, single=True)
    parts = parser.push(f"a{CALL.replace(chr(10), '')}b{CALL}") + parser.push("c") + parser.finish()
    assert [part if isinstance(part, str) else part.name for part in parts] == ["a", "weather"]


def test_strict_functions_are_kept_to_where_the_model_may_choose(engine: Engine) -> None:
    grammar = Grammars(Vocabulary(engine)).tool_calls(
        [("f", arguments_schema(INTEGER_BY_NAME)), ("g", {"type": "object"})]
    )

    def accepted(text: str) -> bool:
        ids = engine.tokenizer.encode(text)
        return grammar.accepts(ids) == len(ids)

    sound = tagged("f", '{"a": 7}')
    for text in ("", "no call <tool", f"one {sound} two {tagged('g', '{}')}{sound}\nend", "a </tool_call> b"):
        assert accepted(text), text
    for text in (tagged("f", '{"a": 8}'), tagged("h", "{}"), "<tool_call>{", f"{sound}{tagged('f', '{}')}"):
        assert not accepted(text), text


def test_tools_are_forgotten_with_tool_choice_none(served: Running) -> None:
    messages = [{"role": "user", "content": "Rain?"}]
    plain = served.post("/v1/chat/completions", messages=messages, max_tokens=5, seed=1).json()
    none = served.post(
        "/v1/chat/completions", messages=messages, max_tokens=5, seed=1, tools=[WEATHER], tool_choice="none"
    ).json()
    assert plain["choices"] == none["choices"]
    assert plain["usage"]["prompt_tokens"] == none["usage"]["prompt_tokens"]


@pytest.mark.parametrize("follows", ["\n", "\n\nAnd a b.", " x \n y"])
def test_white_space_behind_a_call_is_dropped_however_the_text_is_cut(follows: str) -> None:
    """And only there: what follows keeps its own."""
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>' + follows
    for parts in ([text], list(text)):
        parser = ToolParser(("f",))
        found = [one for part in parts for one in parser.push(part)] + parser.finish()
        assert isinstance(found[0], ToolCall)
        assert "".join(map(str, found[1:])) == follows.lstrip()
