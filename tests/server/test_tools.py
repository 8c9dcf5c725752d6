"""Tool calls in text: parsed whole or in pieces, rendered for templates that know none, forced by grammar."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitmtp.server.tools import ToolCall, ToolParser, explain

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
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'


def parsed(text: str, cuts: list[int]) -> list[str | tuple[str, str]]:
    """Content (joined) and calls of a text that arrives in pieces."""
    parser, places = ToolParser(), sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
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
    parser = ToolParser()
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


def test_tools_are_forgotten_with_tool_choice_none(served: Running) -> None:
    messages = [{"role": "user", "content": "Rain?"}]
    plain = served.post("/v1/chat/completions", messages=messages, max_tokens=5, seed=1).json()
    none = served.post(
        "/v1/chat/completions", messages=messages, max_tokens=5, seed=1, tools=[WEATHER], tool_choice="none"
    ).json()
    assert plain["choices"] == none["choices"]
    assert plain["usage"]["prompt_tokens"] == none["usage"]["prompt_tokens"]
