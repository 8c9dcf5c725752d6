"""Every field of every request is used, or takes one value only, or is listed as having no effect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from conftest import make_engine, random_checkpoint, tiny_config, write_tokenizer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bitmtp.engine import Engine
from bitmtp.server.errors import ApiError
from bitmtp.server.grammar import Grammars
from bitmtp.server.intake import Intake
from bitmtp.server.options import ServerOptions
from bitmtp.server.schemas import NO_EFFECT, ChatRequest, CompletionRequest, TokenizeRequest
from bitmtp.server.vocabulary import Vocabulary

Body = dict[str, Any]
SERVING = Path(__file__).parents[2] / "docs" / "serving.md"
OBJECT = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}


def tool(**function: Any) -> Body:
    """A request with a function."""
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": OBJECT, **function}}]}


def form(**more: Any) -> Body:
    """A request for JSON by a schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": OBJECT} | more}}


def turn(**message: Any) -> Body:
    """A conversation with such a message."""
    return {"messages": [{"role": "user", "content": "hello", **message}]}


def called(name: str = "f", arguments: str = "{}", **more: Any) -> Body:
    """A conversation with a call."""
    return turn(tool_calls=[{"id": "1", "function": {"name": name, "arguments": arguments}, **more}])


CONFIDENT, HYBRID = {"policy": "confidence"}, {"policy": "hybrid"}
# Field → two requests whose plans, or refusals, must differ.
COMMON: dict[str, tuple[Body, Body]] = {
    "model": ({}, {"model": "another"}),
    "max_tokens": ({}, {"max_tokens": 3}),
    "temperature": ({}, {"temperature": 0.5}),
    "top_p": ({}, {"top_p": 0.5}),
    "top_k": ({}, {"top_k": 5}),
    "min_p": ({}, {"min_p": 0.5}),
    "n": ({}, {"n": 2}),
    "seed": ({}, {"seed": 6}),
    "stop": ({}, {"stop": "x"}),
    "presence_penalty": ({}, {"presence_penalty": 1}),
    "frequency_penalty": ({}, {"frequency_penalty": 1}),
    "repetition_penalty": ({}, {"repetition_penalty": 2}),
    "logit_bias": ({}, {"logit_bias": {"5": 1}}),
    "stream": ({}, {"stream": True}),
    "stream_options": ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
    "StreamOptions.include_usage": ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
    "user": ({}, {"user": "somebody"}),
    "timeout": ({}, {"timeout": 1}),
    "decoding": ({}, {"decoding": {"policy": "autoregressive"}}),
    "Decoding.policy": ({}, {"decoding": {"policy": "autoregressive"}}),
    "Decoding.block_size": ({}, {"decoding": {"block_size": 3}}),
    "Decoding.tau": ({"decoding": CONFIDENT}, {"decoding": {**CONFIDENT, "tau": 0.123}}),
    "Decoding.min_prefix": ({"decoding": HYBRID}, {"decoding": {**HYBRID, "min_prefix": 4}}),
    "Decoding.verify_bound": ({"decoding": HYBRID}, {"decoding": {**HYBRID, "verify_bound": 0.123}}),
    "Decoding.trace": ({}, {"decoding": {"trace": True}}),
}
MESSAGES: dict[str, tuple[Body, Body]] = {
    "messages": ({}, turn(content="other")),
    "ChatMessage.role": ({}, turn(role="system")),
    "ChatMessage.content": ({}, turn(content="other")),
    "ChatMessage.name": ({}, turn(name="Ann")),
    "ChatMessage.tool_call_id": ({}, turn(tool_call_id="7")),
    "ChatMessage.tool_calls": ({}, called()),
    "TextPart.text": (turn(content=[{"type": "text", "text": "a"}]), turn(content=[{"type": "text", "text": "b"}])),
    "ToolCallEntry.id": (called(), called(id="2")),
    "ToolCallEntry.function": (called(), called("g")),
    "FunctionCall.name": (called(), called("g")),
    "FunctionCall.arguments": (called(), called(arguments='{"a": 1}')),
}
CHAT: dict[str, tuple[Body, Body]] = {
    "max_completion_tokens": ({}, {"max_completion_tokens": 3}),
    "logprobs": ({}, {"logprobs": True}),
    "top_logprobs": ({"logprobs": True}, {"logprobs": True, "top_logprobs": 2}),
    "response_format": ({}, {"response_format": {"type": "json_object"}}),
    "JsonSchemaFormat.json_schema": (form(), form(schema={"type": "array"})),
    "JsonSchema.schema_": (form(), form(schema={"type": "array"})),
    "tools": ({}, tool()),
    "Tool.function": (tool(), tool(name="g")),
    "Function.name": (tool(), tool(name="g")),
    "Function.description": (tool(), tool(description="does it")),
    "Function.parameters": (tool(), tool(parameters={})),
    "Function.strict": (tool(), tool(strict=True)),
    "tool_choice": (tool(), tool() | {"tool_choice": "required"}),
    "NamedTool.function": (tool(), tool() | {"tool_choice": {"type": "function", "function": {"name": "g"}}}),
    "NamedFunction.name": (tool(), tool() | {"tool_choice": {"type": "function", "function": {"name": "g"}}}),
    "parallel_tool_calls": (tool(), tool() | {"parallel_tool_calls": False}),
}
COMPLETION: dict[str, tuple[Body, Body]] = {
    "prompt": ({}, {"prompt": "other"}),
    "logprobs": ({}, {"logprobs": 2}),
    "echo": ({}, {"echo": True}),
}
TOKENIZE: dict[str, tuple[Body, Body]] = {
    "model": ({}, {"model": "another"}),
    "prompt": ({}, {"prompt": "other"}),
}
REQUESTS: list[tuple[type[BaseModel], str, Body, dict[str, tuple[Body, Body]]]] = [
    (ChatRequest, "chat", {"messages": [{"role": "user", "content": "hello"}], "seed": 5}, COMMON | MESSAGES | CHAT),
    (CompletionRequest, "completion", {"prompt": "hello", "seed": 5}, COMMON | COMPLETION),
    (TokenizeRequest, "tokenize", {"prompt": "hello"}, TOKENIZE),
    (TokenizeRequest, "tokenize", {"messages": [{"role": "user", "content": "hello"}]}, MESSAGES),
]


def parts(annotation: Any) -> Iterator[Any]:
    """The plain types that an annotation is made of."""
    if get_origin(annotation) is Annotated or get_origin(annotation) is Literal or not get_args(annotation):
        yield get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
        return
    for part in get_args(annotation):
        yield from parts(part)


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field of a model and of those within it; inner ones with the name of their model."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        for part in parts(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from fields(part, f"{part.__name__}.")


def has_one_value(field: FieldInfo) -> bool:
    """Besides null there is one value, or none: nothing to ignore."""
    values = [part for part in parts(field.annotation) if part is not NoneType]
    empty = "MaxLen(max_length=0)" in repr(field.annotation)
    return empty or all(get_origin(part) is Literal and len(get_args(part)) == 1 for part in values) or not values


@pytest.fixture(scope="module")
def intake(tmp_path_factory: pytest.TempPathFactory) -> Intake:
    """Of a model whose chat template shows all that it is given."""
    folder = write_tokenizer(tmp_path_factory.mktemp("shown"))
    shown = {"chat_template": "{{ messages | tojson }}{{ tools | tojson }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(shown), encoding="utf-8")
    engine: Engine = make_engine("reference", random_checkpoint(tiny_config(max_position=2048)), folder)
    return Intake(engine, ServerOptions("tiny", engine.default_policy()), Grammars(Vocabulary(engine)))


def seen(intake: Intake, method: str, model: type[BaseModel], body: Body) -> Any:
    """All that a request leads to, in a form that can be compared."""
    try:
        plan = getattr(intake, method)(model.model_validate(body))
    except ApiError as error:
        return str(error)
    if method == "tokenize":
        return plan
    grammar = plan.grammar
    opened = intake._engine.tokenizer.encode("<tool_call>\n{")
    masks = grammar and [None if mask is None else mask.tobytes() for mask in map(grammar.allowed, ([], opened))]
    return replace(plan, grammar=None), masks


@pytest.mark.parametrize(("model", "method", "base", "acting"), REQUESTS)
def test_what_acts_makes_a_difference(intake: Intake, model: Any, method: str, base: Body, acting: Any) -> None:
    for name, (first, second) in acting.items():
        found = [seen(intake, method, model, base | change) for change in (first, second)]
        assert found[0] != found[1], name
        assert seen(intake, method, model, base | first) == found[0], f"{name}: nothing else makes the difference"


def test_no_field_is_ignored_in_silence() -> None:
    for model in (ChatRequest, CompletionRequest, TokenizeRequest):
        acting = {name for each, _, _, names in REQUESTS for name in names if each is model}
        for name, field in fields(model):
            kinds = [name in acting, has_one_value(field) or name.endswith(".type"), field.description == NO_EFFECT]
            assert any(kinds), f"{model.__name__}: nothing is known of {name}"
            assert not (name in acting and field.description == NO_EFFECT), name


def test_what_has_no_effect_is_documented() -> None:
    text = SERVING.read_text(encoding="utf-8")
    listed = text[text.index("Without effect:") :].split("\n\n")[0]
    for model in (ChatRequest, CompletionRequest, TokenizeRequest):
        for name, field in fields(model):
            if field.description == NO_EFFECT:
                assert f"`{name.split('.')[-1]}`" in listed, name
