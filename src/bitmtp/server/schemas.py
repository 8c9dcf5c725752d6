"""Requests as OpenAI's API has them, and the few fields this server adds.

A field that is not listed is refused, unless the server was told to ignore what it does not know (:data:`LENIENT`). A
field listed with one value only is understood, and refused with any other. Null is as good as nothing, for any field:
clients send it for what they leave out.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

PolicyName = Literal["autoregressive", "speculative", "auto", "confidence", "hybrid"]
Unit = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


NO_EFFECT = "Accepted, without effect."
Ignored = Annotated[Any, Field(description=NO_EFFECT)]
LENIENT: ContextVar[bool] = ContextVar("LENIENT", default=False)  # whether unknown fields are ignored
_KINDS = {"image_url": "images", "input_audio": "sound", "file": "files", "video_url": "videos"}


class _Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, data: Any) -> Any:
        """What is null, unless the field is required; of a lenient server also what is unknown."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name: field for name, field in cls.model_fields.items()}
        data = {name: value for name, value in data.items() if name in known or not LENIENT.get()}
        required = {name for name, field in known.items() if field.is_required()}
        return {name: value for name, value in data.items() if value is not None or name in required}


class _Numeric(_Strict):
    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """JSON's true and false are no numbers, though Python takes them for 1 and 0."""
        if _holds_bool(value) and not _takes_bool(cls.model_fields[info.field_name or ""].annotation):
            raise ValueError("neither true nor false is a value here")
        return value


def _holds_bool(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, bool) or any(map(_holds_bool, parts))


def _takes_bool(annotation: Any) -> bool:
    """Whether some value of this type may be, or hold, a bool; models look after themselves."""
    if isinstance(annotation, type):
        return annotation in (bool, Any) or issubclass(annotation, BaseModel)
    return isinstance(annotation, bool) or any(map(_takes_bool, get_args(annotation)))


class Decoding(_Numeric):
    """How to decode, if not as the server's default: see docs/decoding.md."""

    policy: PolicyName | None = None
    block_size: Annotated[int, Field(ge=1, le=32)] | None = None
    tau: Unit | None = None
    min_prefix: Annotated[int, Field(ge=1, le=32)] | None = None
    verify_bound: Unit | None = None
    trace: bool | None = None


class StreamOptions(_Strict):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Generating(_Numeric):
    """What chat and plain completions have in common."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 30)] | None = None
    min_p: Unit | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: Stop | list[Stop] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    reasoning_effort: Ignored = None
    verbosity: Ignored = None
    prediction: Ignored = None
    chat_template_kwargs: Ignored = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    decoding: Decoding | None = None


class CompletionRequest(Generating):
    """``POST /v1/completions``."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Literal[1] | None = None
    echo: bool | None = None
    suffix: None = None


class TextPart(_Strict):
    """A piece of a message; only text is understood."""

    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _is_text(cls, kind: Any) -> Any:
        if isinstance(kind, str) and kind in _KINDS:
            raise ValueError(f"this model reads text, no {_KINDS[kind]}; send the message without its {kind} part")
        return kind


class FunctionCall(_Strict):
    """A call: a name and arguments as JSON text."""

    name: str
    arguments: str
    parsed_arguments: Ignored = None


class ToolCallEntry(_Strict):
    """A call in a message of the assistant."""

    index: Ignored = None
    id: str
    type: Literal["function"] | None = None
    function: FunctionCall


class ChatMessage(_Strict):
    """A message of a conversation, or an answer as clients send it back. ``name`` goes to the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    type: Annotated[Literal["text", "message"] | None, Field(description=NO_EFFECT)] = None
    tool_calls: list[ToolCallEntry] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    parsed: Ignored = None


class Function(_Strict):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _describe_an_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        kinds = (schema or {}).get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise ValueError(f"arguments are an object; a schema of type {kinds!r} allows no call")
        return schema


class Tool(_Strict):
    """A tool; only functions are understood."""

    type: Literal["function"]
    function: Function


class NamedFunction(_Strict):
    """The name of a function."""

    name: str


class NamedTool(_Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(_Strict):
    """A schema for the answer. ``strict`` or not, it is kept to."""

    name: Annotated[str | None, Field(description=NO_EFFECT)] = None
    description: Annotated[str | None, Field(description=NO_EFFECT)] = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: Annotated[bool | None, Field(description=NO_EFFECT)] = None


class TextFormat(_Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(_Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(_Strict):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(Generating):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None


class TokenizeRequest(_Numeric):
    """``POST /tokenize``: a text as it is, or a conversation by the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
