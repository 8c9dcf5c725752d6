"""Responses as OpenAI's API has them, and what this server adds: figures in ``usage``, ``decoding``, ``tokens``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class TokenizeResponse(BaseModel):
    """Token ids, and how many fit the context."""

    tokens: list[int]
    count: int
    max_model_len: int


class PromptDetails(BaseModel):
    """Prompt tokens that were not run because another text began alike."""

    cached_tokens: int


class CompletionDetails(BaseModel):
    """Proposals of drafts that were taken, and those that were not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens, and how drafting went, over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    mean_acceptance_length: float
    draft_acceptance_rate: float
    num_spec_steps: int
    passes: int
    graph_replays: int


class DecodingReport(BaseModel):
    """How the text was decoded; with ``seed`` it can be had again.

    ``temperature_from``: whether the request named the temperature, or else the checkpoint, or it is the API's default.
    ``warning``: drafting did not pay.
    """

    policy: str
    block_size: int
    lossless: bool
    seed: int
    temperature: float
    temperature_from: Literal["request", "checkpoint", "api"]
    warning: str | None = None


class TraceToken(BaseModel):
    """A token with the text it settled and how it was committed."""

    id: int
    text: str
    source: Literal["exact", "accepted", "confident"]


class TraceProposal(BaseModel):
    """A token that was checked, behind the proposal with the number ``after`` or (-1) behind the text."""

    id: int
    text: str
    after: int


class TopLogprob(BaseModel):
    """An alternative; ``bytes`` may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of a chat answer with its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat answer."""

    content: list[TokenLogprob]


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a plain completion; null for the first token of a prompt, which follows nothing."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionDelta(BaseModel):
    """Name and arguments of a call."""

    name: str
    arguments: str


class AnswerToolCall(BaseModel):
    """A call in an answer."""

    index: int | None = None
    id: str
    type: Literal["function"] = "function"
    function: FunctionDelta


class AnswerMessage(BaseModel):
    """The message of an answer, or in a stream what is new of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[AnswerToolCall] | None = None
    refusal: None = None


class _Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    tokens: list[TraceToken] | None = None
    proposals: list[TraceProposal] | None = None
    ms: float | None = None


class CompletionChoice(_Choice):
    """A text, or in a stream what is new of it."""

    text: str
    logprobs: CompletionLogprobs | None


class ChatChoice(_Choice):
    """An answer."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatDelta(_Choice):
    """What is new of an answer."""

    delta: AnswerMessage
    logprobs: ChatLogprobs | None


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None
    decoding: DecodingReport | None = None


class Completion(_Answer):
    """Answer of ``/v1/completions``, and each event of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ChatCompletion(_Answer):
    """Answer of ``/v1/chat/completions``."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatChunk(_Answer):
    """An event of a streamed chat answer."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatDelta]


class Model(BaseModel):
    """A model and what it can do."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "bitmtp"
    max_model_len: int
    block_size: int
    policies: list[str]


class ModelList(BaseModel):
    """The models served: one."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    """Whether texts can be written."""

    status: Literal["ok"]


class ErrorDetail(BaseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """Every error."""

    error: ErrorDetail
