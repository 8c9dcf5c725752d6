"""Flags that commands share: dataclasses whose fields become options."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from typer import Option

from bitmtp.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from bitmtp.core.policy import Policy
    from bitmtp.engine import Engine, Request
    from bitmtp.sampling import Sampling
    from bitmtp.tokenizer import Message
    from bitmtp.tuning.profile import Profile


PolicyName = Literal["speculative", "auto", "autoregressive", "confidence", "hybrid"]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model runs, and on what."""

    model: Annotated[str | None, Option(metavar="FOLDER", help="Checkpoint folder; default: the shipped model.")] = None
    backend: Annotated[
        Literal["auto", "cpu", "cuda", "reference"], Option(help="What runs the model; auto: the fastest there is.")
    ] = "auto"
    threads: Annotated[int | None, Option(min=1, help="Threads; default: one per core.")] = None
    context: Annotated[int | None, Option(help="Longest prompt and text together; default: the model's.")] = None

    def load(self, profile: Profile | None = None) -> Engine:
        """Load the model; a profile spares it measuring what passes cost.

        Raises:
            BitMTPError: as :meth:`bitmtp.engine.Engine.load`.
        """
        from bitmtp.engine import Engine

        return Engine.load(
            self.model,
            backend=self.backend,
            threads=self.threads,
            context=self.context,
            tuning=None if profile is None else profile.tuning,
        )


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """How texts are decoded; the default is lossless."""

    policy: Annotated[PolicyName | None, Option(help="How to decode; confidence and hybrid are lossy.")] = None
    block_size: Annotated[int | None, Option(help="Proposals per draft, at most the model's block size.")] = None
    tau: Annotated[float | None, Option(help="Probability from which a proposal is confident (lossy policies).")] = None
    profile: Annotated[
        str | None,
        Option(metavar="FILE", help="Decode as `bitmtp tune` found best; default: what it wrote for this model."),
    ] = None

    def find_profile(self, model: ModelOptions) -> Profile | None:
        """What ``bitmtp tune`` wrote: into the file given, or, for the same ``--model`` and ``--backend``, where it
        writes by itself.

        Raises:
            ConfigError: the file given is none, or another model's.
        """
        from bitmtp.models import shipped_model
        from bitmtp.tuning.profile import usual_place

        folder = model.model or shipped_model()
        if self.profile is not None:
            return _read_profile(self.profile, folder)
        usual = usual_place(folder, model.backend)
        try:
            return _read_profile(usual, folder) if usual.exists() else None
        except ConfigError as error:
            print(f"bitmtp: note: {usual} is not used: {error}", file=sys.stderr)
            return None

    def make(self, model_block_size: int, profile: Profile | None) -> Policy:
        """The policy for a model: as these options say, else as the profile does, else ``auto``.

        Raises:
            RequestError: unknown, or an option has no meaning under it.
        """
        from bitmtp.core.policies import make_policy

        if self.profile is not None and self != PolicyOptions(profile=self.profile):
            raise RequestError("--profile says how to decode; leave --policy and its options out")
        if profile is not None and self == PolicyOptions(profile=self.profile):
            return profile.make_policy(model_block_size)
        policy = make_policy(self.policy or "auto", model_block_size, block_size=self.block_size, tau=self.tau)
        if model_block_size == 1 and policy.name not in ("autoregressive", "auto"):
            raise RequestError(
                f"the {policy.name} policy drafts, but this model was never taught to draft; `bitmtp train` teaches it"
            )
        return policy


def _read_profile(file: str | Path, model: str | Path) -> Profile:
    from bitmtp.benchmark.records import model_fingerprint
    from bitmtp.tuning.profile import Profile

    profile = Profile.read(file)
    profile.check(model_fingerprint(model))
    return profile


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a text is written; the default is greedy."""

    max_tokens: Annotated[int, Option(help="Most tokens to write.")] = 256
    temperature: Annotated[float, Option(help="0: always the likeliest token.")] = 0.0
    top_p: Annotated[float, Option(help="Sample from the likeliest tokens with this joint probability.")] = 1.0
    top_k: Annotated[int, Option(help="Sample from this many of the likeliest tokens; 0: all.")] = 0
    min_p: Annotated[float, Option(help="Drop tokens below this fraction of the likeliest one's probability.")] = 0.0
    seed: Annotated[int | None, Option(help="Same seed, same text; default: a random one, reported.")] = None
    repetition_penalty: Annotated[float, Option(help="Divide the logits of tokens seen so far; 1: off.")] = 1.0
    presence_penalty: Annotated[float, Option(help="Subtract from the logits of tokens written so far.")] = 0.0
    frequency_penalty: Annotated[float, Option(help="Subtract for each time a token was written.")] = 0.0
    logit_bias: Annotated[
        list[str] | None, Option(metavar="ID=VALUE", help="Add to a token's logit; may be repeated.")
    ] = None
    stop: Annotated[list[str] | None, Option(metavar="TEXT", help="End before this text; may be repeated.")] = None
    no_chat_template: Annotated[bool, Option("--no-chat-template", help="Continue the prompt as it is.")] = False
    system: Annotated[str | None, Option(help="System message of the chat template.")] = None
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per answer.")] = False

    def messages(self) -> list[Message]:
        """The conversation before its first turn."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def request(self, prompt: str | list[Message], policy: Policy) -> Request:
        """The request that these flags make of a prompt.

        Raises:
            RequestError: a value is out of range, or has no meaning together with another.
        """
        from bitmtp.engine import Request

        return Request(prompt, self.max_tokens, policy, self._sampling(), self.seed, tuple(self.stop or ()))

    def _sampling(self) -> Sampling:
        from bitmtp.sampling import Sampling

        if self.temperature == 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0):
            print("bitmtp: note: top-p, top-k and min-p change nothing at temperature 0", file=sys.stderr)
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(_bias(pair) for pair in self.logit_bias or ()),
        )


def _bias(pair: str) -> tuple[int, float]:
    token, _, value = pair.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise RequestError(f"logit bias {pair!r} is not ID=VALUE, such as 42=-5") from None


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer see the fields of a command's dataclass parameters as options of its own."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: each.annotation for name, each in signature.parameters.items() if is_dataclass(each.annotation)
    }
    parameters = [each for name, each in signature.parameters.items() if name not in groups]
    for group in groups.values():
        hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(field.name, kind, default=field.default, annotation=hints[field.name]))

    @wraps(command)
    def flat(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    flat.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return flat
