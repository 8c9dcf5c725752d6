"""Any task of lm-evaluation-harness: an ``LM`` for it, registered as ``bitmtp``, and its tasks run through it.

What was computed is kept in a log, so that an interrupted run goes on, and log-likelihoods, in which no policy takes
part, are computed once for all policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitmtp.benchmark.records import Record, ResultLog
from bitmtp.core.policies import make_policy
from bitmtp.core.policy import Policy
from bitmtp.engine import Engine, Request
from bitmtp.errors import RequestError
from bitmtp.evaluation.likelihood import log_likelihood
from bitmtp.evaluation.plan import digest
from bitmtp.evaluation.writer import write_texts
from bitmtp.sampling import Sampling

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
    from tqdm import tqdm
except ImportError:
    raise RequestError("a task that is not ours needs lm-evaluation-harness; pip install 'bitmtp[harness]'") from None

_LONGEST = 256  # tokens, where a task does not say


@dataclass(frozen=True, slots=True)
class Score:
    """One metric of one task: its value and standard error (None: the harness has none)."""

    task: str
    metric: str
    value: float
    error: float | None
    questions: int


@register_model("bitmtp")
class HarnessModel(LM):  # type: ignore[misc]
    """An engine and a policy, as the harness wants a model.

    Args:
        log: where answers are kept; None: nowhere.
        name: of the model's content, in the log.
        batch: texts written at a time.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        *,
        log: ResultLog | None = None,
        name: str = "",
        batch: int = 8,
    ) -> None:
        super().__init__()
        self.engine, self.policy, self.batch = engine, policy, batch
        self._log, self._place = log, f"{name} {engine.backend.name}"

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> HarnessModel:
        """From the harness's model arguments: ``model``, ``backend``, ``threads``, ``context``, ``policy``,
        ``block_size``."""
        given, extra = dict(arg_dict), additional_config or {}
        options = {key: given.pop(key) for key in ("backend", "threads", "context") if key in given}
        engine = Engine.load(given.pop("model", None), **options)
        name = given.pop("policy", engine.default_policy().name)
        policy = make_policy(name, engine.config.block_size, **given)
        return cls(engine, policy, batch=int(extra.get("batch_size") or 8))

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> HarnessModel:
        """As :meth:`create_from_arg_obj`, from ``key=value,…``."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Log probability of each continuation, and whether it is the greedy one."""
        return [self._likelihood(*self._split(*each.args)) for each in tqdm(requests, desc="likelihood")]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log probability of each whole text, in windows of the context."""
        texts = [self._windows(*each.args) for each in requests]
        return [sum(self._likelihood(*window)[0] for window in text) for text in tqdm(texts, desc="likelihood")]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The text that each prompt is continued with."""
        asked = [self._request(*request.args) for request in requests]
        keys = [f"{self._place} text {self.policy} {digest(repr(each))}" for each in asked]
        known = {index: record["value"] for index, key in enumerate(keys) if (record := self._known(key)) is not None}
        left = [index for index in range(len(asked)) if index not in known]
        written = write_texts(self.engine, [asked[index] for index in left], self.batch)
        for place, generation in tqdm(written, desc=self.policy.name, total=len(left)):
            known[left[place]] = generation.result.text
            self._keep(keys[left[place]], generation.result.text)
        return [known[index] for index in range(len(asked))]

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's own caches."""
        return self._place

    def chat_template(self, chat_template: bool | str = False) -> str:
        """A name of the template; the engine has the only one."""
        return "bitmtp" if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages as the model was taught to see them."""
        return self.engine.tokenizer.chat(chat_history, add_generation_prompt=add_generation_prompt)

    def _known(self, key: str) -> Record | None:
        return None if self._log is None else self._log.get(key)

    def _keep(self, key: str, value: Any) -> None:
        if self._log is not None:
            self._log.add(key, value=value)

    def _likelihood(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        key = f"{self._place} likelihood {digest(repr((context, continuation)))}"
        if (record := self._known(key)) is not None:
            total, greedy = record["value"]
            return total, greedy
        found = log_likelihood(self.engine, context, continuation)
        self._keep(key, found)
        return found

    @property
    def _start(self) -> int:
        config = self.engine.config
        starts = (config.bos_token_id, *config.eos_token_ids, 0)
        return next(token for token in starts if token is not None)

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both, the text tokenised as one; the oldest are left out where it is too long."""
        bare = context.rstrip()
        known, whole = self.engine.tokenizer.encode_batch([bare, context + continuation])
        known, rest = known or [self._start], whole[len(known) :]
        room = self.engine.context - len(rest)
        if room < 1:
            raise RequestError(f"a continuation has {len(rest)} tokens, the context is {self.engine.context}")
        return known[-room:], rest

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        windows = get_rolling_token_windows(
            self.engine.tokenizer.encode(text), self._start, self.engine.context - 1, context_len=1
        )
        return [make_disjoint_window(window) for window in windows]

    def _request(self, prompt: str, options: dict[str, Any]) -> Request:
        until = options.get("until") or []
        stop = [until] if isinstance(until, str) else until
        length = int(options.get("max_gen_toks") or _LONGEST)
        ids = self.engine.tokenizer.encode(prompt)[-max(self.engine.context - length, 1) :] or [self._start]
        temperature = float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0
        return Request(ids, length, self.policy, Sampling(temperature=temperature), 0, tuple(filter(None, stop)))


def run_tasks(
    model: HarnessModel, names: Sequence[str], *, folder: str | Path | None = None, limit: int | None = None
) -> list[Score]:
    """Run tasks of the harness, by name; those of task files (YAML) in ``folder`` too.

    Raises:
        RequestError: a task is unknown, or its data cannot be had.
    """
    try:
        manager = _manager(names, folder)
        # The harness, datasets and the hub raise whatever they like, plain Exception among it.
        found = simple_evaluate(
            model, tasks=list(names), limit=limit, task_manager=manager, log_samples=False, bootstrap_iters=1000
        )
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(f"lm-evaluation-harness cannot run {', '.join(names)}: {error!r}") from error
    return [
        Score(task, metric, value, _number(values.get(f"{metric.split(',')[0]}_stderr,{metric.split(',')[1]}")), asked)
        for task, values in found["results"].items()
        for metric, value in values.items()
        if "," in metric and "_stderr," not in metric and isinstance(value, int | float)
        for asked in [found["n-samples"][task]["effective"]]
    ]


def _manager(names: Sequence[str], folder: str | Path | None) -> Any:
    """What knows the tasks; the harness's own, whose index takes seconds, only if the folder lacks one."""
    if folder is not None:
        local = TaskManager(include_path=str(folder), include_defaults=False)
        if set(names) <= set(local.all_tasks):
            return local
    return TaskManager(include_path=None if folder is None else str(folder))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
