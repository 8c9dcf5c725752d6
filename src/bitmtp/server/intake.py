"""From what a client asks to what the scheduler does."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from bitmtp.core.policies import make_policy
from bitmtp.core.policy import Policy
from bitmtp.engine import Engine, Request
from bitmtp.sampling import Sampling
from bitmtp.server.errors import ApiError, blamed_on, invalid
from bitmtp.server.grammar import Grammars, TokenGrammar
from bitmtp.server.json_body import parse
from bitmtp.server.options import ServerOptions
from bitmtp.server.schemas import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Decoding,
    Generating,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    TokenizeRequest,
    Tool,
    ToolCallEntry,
)
from bitmtp.server.tools import END, arguments_schema, explain

COMPLETION_TOKENS = 16  # what the API writes if a plain completion does not say
MAX_STOPS = 16
Origin = Literal["request", "checkpoint", "api"]
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Plan:
    """A request understood: which texts to write, and how to show them.

    Attributes:
        requests: one a choice; ``n`` choices of a prompt stand together.
        prompts: the token ids of each choice's prompt.
        grammar: copied for each choice.
        top: alternatives for log-probabilities; None: none are wanted.
        timeout: seconds.
        trace: show each token's id and how it was committed.
        tools: names of the functions that the text may call.
        single_call: the answer ends with its first call.
        user: whom the client says it asks for; it goes to the log.
        echoes: text of each choice's prompt, if that is to stand before what follows it.
        temperature_from: who chose the temperature.
    """

    requests: list[Request]
    prompts: list[list[int]]
    n: int
    policy: Policy
    seed: int
    temperature_from: Origin
    timeout: float
    stream: bool
    usage: bool
    trace: bool
    top: int | None = None
    grammar: TokenGrammar | None = None
    tools: frozenset[str] = frozenset()
    single_call: bool = False
    user: str | None = None
    echoes: tuple[str, ...] = ()

    @property
    def temperature(self) -> float:
        """Of all its texts."""
        return self.requests[0].sampling.temperature

    @property
    def scored(self) -> bool:
        """Whether the prompts' tokens get log-probabilities."""
        return bool(self.echoes) and self.top is not None


class Intake:
    """Checks requests and makes plans of them. Takes time in proportion to a prompt: not for the event loop.

    Every method raises :class:`ApiError` or :class:`bitmtp.errors.RequestError` for what cannot be done.
    """

    def __init__(self, engine: Engine, options: ServerOptions, grammars: Grammars) -> None:
        self._engine = engine
        self._options = options
        self._grammars = grammars

    def completion(self, body: CompletionRequest) -> Plan:
        """The plan of a plain completion."""
        prompt = body.prompt
        prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
        limit = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        if limit == 0 and not body.echo:
            raise invalid("max_tokens is 0, so nothing would come back; echo gives the prompt back", "max_tokens")
        plan = self._plan(body, prompts, limit, top=body.logprobs)  # type: ignore[arg-type]
        return replace(plan, echoes=tuple(map(self._echo, plan.requests))) if body.echo else plan

    def chat(self, body: ChatRequest) -> Plan:
        """The plan of an answer in a conversation."""
        if body.max_tokens and body.max_completion_tokens:
            raise invalid("give max_completion_tokens or max_tokens, not both", "max_tokens")
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("top_logprobs needs logprobs", "top_logprobs")
        tools = _offered(body)
        prompt = self._render(body.messages, tools)
        limit = body.max_completion_tokens or body.max_tokens or self._engine.context
        plan = self._plan(body, [prompt], limit, top=(body.top_logprobs or 0) if body.logprobs else None)
        plan = replace(plan, grammar=self._grammar(body, tools), tools=frozenset(tool.function.name for tool in tools))
        if tools and body.parallel_tool_calls is False:
            requests = [replace(one, stop=(*one.stop, END)) for one in plan.requests]
            plan = replace(plan, requests=requests, single_call=True)
        return plan

    @property
    def context(self) -> int:
        """Longest prompt and text together."""
        return self._engine.context

    def _echo(self, request: Request) -> str:
        prompt: Any = request.prompt
        return prompt if isinstance(prompt, str) else self._engine.tokenizer.decode(prompt, skip_special=False)

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        """Token ids of a text or a conversation."""
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("give either prompt or messages", "prompt")
        return self._engine.tokenizer.encode(
            self._render(body.messages, []) if body.messages is not None else body.prompt or ""
        )

    def _plan(self, body: Generating, prompts: Sequence[str | list[int]], limit: int, top: int | None) -> Plan:
        self._check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise invalid("stream_options needs stream", "stream_options")
        n = body.n or 1
        if n * len(prompts) > self._options.max_choices:
            raise invalid(f"{n * len(prompts)} texts asked for; at most {self._options.max_choices} a request", "n")
        with blamed_on("decoding"):
            policy = self._policy(body.decoding or Decoding())
        if top is not None and not policy.lossless:
            raise invalid(f"logprobs are the exact head's; the {policy.name} policy does not always ask it", "logprobs")
        seed = secrets.randbits(63) if body.seed is None else body.seed % (1 << 64)
        with blamed_on("temperature"):  # the only one whose range has a gap
            sampling = self._sampling(body)
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        if len(stop) > MAX_STOPS:
            raise invalid(f"{len(stop)} stop strings; at most {MAX_STOPS}", "stop")
        requests = [
            Request(prompt, limit, policy, replace(sampling, choice=choice), seed, stop)
            for prompt in prompts
            for choice in range(n)
        ]
        with blamed_on("messages" if isinstance(body, ChatRequest) else "prompt"):
            encoded = [ids for first in requests[::n] for ids in [self._engine.encode(first, least=0)] * n]
        return Plan(
            requests,
            encoded,
            n,
            policy,
            seed,
            self._origin(body),
            timeout=min(body.timeout or self._options.timeout, self._options.timeout),
            stream=bool(body.stream),
            usage=bool(body.stream_options and body.stream_options.include_usage),
            trace=bool(body.decoding and body.decoding.trace),
            top=top,
            user=body.user,
        )

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._options.model_name):
            message = f"there is no model {name!r} here; this server has {self._options.model_name!r}"
            raise ApiError(404, message, "model_not_found", param="model")

    def _policy(self, asked: Decoding) -> Policy:
        default = self._options.policy
        options = asked.model_dump(exclude={"policy", "trace"}, exclude_none=True)
        name = asked.policy or default.name
        policy = make_policy(name, self._engine.config.block_size, **options)
        return replace(default, **options) if name == default.name else policy

    def _origin(self, body: Generating) -> Origin:
        if body.temperature is not None:
            return "request"
        return "api" if self._engine.defaults.temperature is None else "checkpoint"

    def _sampling(self, body: Generating) -> Sampling:
        """What the request says; else what the checkpoint says, else what the API does."""
        own = self._engine.defaults
        return Sampling(
            temperature=_first(body.temperature, own.temperature, 1.0),
            top_k=_first(body.top_k, own.top_k, 0),
            top_p=_first(body.top_p, own.top_p, 1.0),
            min_p=_first(body.min_p, own.min_p, 0.0),
            repetition_penalty=_first(body.repetition_penalty, own.repetition_penalty, 1.0),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=_bias(body.logit_bias or {}, self._engine.config.vocab_size),
        )

    def _render(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> str:
        tokenizer = self._engine.tokenizer
        plain = [_message(message) for message in messages]
        listed = [tool.model_dump(exclude_none=True) for tool in tools]
        with blamed_on("messages"):
            if tokenizer.template_knows_tools:
                return tokenizer.chat(plain, tools=listed or None)
            return tokenizer.chat(explain(plain, listed))

    def _grammar(self, body: ChatRequest, tools: Sequence[Tool]) -> TokenGrammar | None:
        form = body.response_format
        wanted = isinstance(form, JsonObjectFormat | JsonSchemaFormat)
        if wanted and tools:
            raise invalid("response_format and tools do not go together; set tool_choice to none", "response_format")
        if tools:
            return self._tool_grammar(body, tools)
        if isinstance(form, JsonSchemaFormat):
            return self._grammars.json(form.json_schema.schema_)
        return self._grammars.json({"type": "object"}) if wanted else None

    def _tool_grammar(self, body: ChatRequest, tools: Sequence[Tool]) -> TokenGrammar | None:
        """Forced calls keep to their schemas; where the model may choose, those of ``strict`` functions do."""
        schemas = [(tool.function.name, arguments_schema(tool.function.parameters)) for tool in tools]
        if body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool):
            return self._grammars.tool_call(schemas)
        kept = [
            (name, schema if tool.function.strict else {"type": "object"})
            for tool, (name, schema) in zip(tools, schemas, strict=True)
        ]
        return self._grammars.tool_calls(kept) if any(tool.function.strict for tool in tools) else None


def _first(said: Number | None, usual: Number | None, otherwise: Number) -> Number:
    return next(value for value in (said, usual, otherwise) if value is not None)


def _bias(asked: Mapping[str, float], vocabulary: int) -> tuple[tuple[int, float], ...]:
    for key in asked:
        if not re.fullmatch("0|[1-9][0-9]{0,9}", key):  # one spelling only, so that no token stands there twice
            raise invalid(f"logit_bias is keyed by token ids, which {key!r} is not", "logit_bias")
        if int(key) >= vocabulary:
            raise invalid(f"token id {key} is outside the vocabulary of {vocabulary}", "logit_bias")
    return tuple(sorted((int(token), value) for token, value in asked.items()))


def _offered(body: ChatRequest) -> list[Tool]:
    """The tools that the model is told of."""
    tools, choice = body.tools or [], body.tool_choice
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            raise invalid(f"tool_choice names {choice.function.name!r}, which is not among the tools", "tool_choice")
    elif choice not in (None, "none") and not tools:
        raise invalid("tool_choice without tools", "tool_choice")
    return [] if choice == "none" else tools


def _message(message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates expect it: content as one text, arguments of calls as objects."""
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content or ())
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [_call(entry) for entry in message.tool_calls]
    return plain


def _call(entry: ToolCallEntry) -> dict[str, Any]:
    name, arguments = entry.function.name, entry.function.arguments
    try:
        parsed = parse(arguments or "{}")
    except ValueError:
        raise invalid(f"the arguments of the call of {name!r} are not JSON", "messages") from None
    return {"id": entry.id, "type": "function", "function": {"name": name, "arguments": parsed}}
