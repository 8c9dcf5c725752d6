"""Load a model, open sequences, generate and stream: what the CLI, benchmarks and the server call."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bitmtp import checkpoint
from bitmtp.backends import load_backend
from bitmtp.backends.base import Backend, PreparedBackend, TimedBackend, Workload, prefill_by_steps
from bitmtp.config import ModelConfig
from bitmtp.core.costs import Tuning, measure_costs
from bitmtp.core.learned import LearnedCosts
from bitmtp.core.policies import make_policy
from bitmtp.core.policy import Policy
from bitmtp.core.text import Finish, Grammar, Text, Token
from bitmtp.errors import RequestError
from bitmtp.generation_config import GenerationConfig
from bitmtp.loop import Loop
from bitmtp.models import shipped_model
from bitmtp.sampling import GREEDY, Sampling
from bitmtp.text import TextStream
from bitmtp.tokenizer import Message, Tokenizer


@dataclass(frozen=True, slots=True)
class Request:
    """What to generate from a prompt.

    Attributes:
        prompt: token ids, text (encoded as it is), or chat messages (rendered by the chat template).
        policy: None: ``auto``.
        seed: key of the sampling noise, instead of ``sampling.seed``; if neither is given a random one is drawn, which
            the result reports.
        stop: strings that end the text.
    """

    prompt: str | Sequence[int] | Sequence[Message]
    max_tokens: int = 256
    policy: Policy | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """One committed token and the text it settled (possibly none)."""

    token: Token
    text: str


@dataclass(frozen=True, slots=True)
class Result:
    """A finished (or interrupted) text and the figures that explain it. Times in milliseconds."""

    text: str
    token_ids: list[int]
    policy: Policy
    backend: str
    seed: int
    finish: Finish
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    passes: int
    graph_replays: int
    tokens_per_pass: float
    ttft_ms: float
    tpot_ms: float
    tokens_per_second: float

    @property
    def num_tokens(self) -> int:
        """Tokens written, an end-of-sequence token included."""
        return len(self.token_ids)

    @property
    def drafts_rejected(self) -> bool:
        """Drafting was tried in earnest and next to nothing was accepted."""
        return self.num_spec_steps >= 8 and self.draft_acceptance_rate < 0.02


_FRAME = 16.0  # milliseconds within which nobody sees tokens come one by one: a screen shows them together


def _workload(policy: Policy, sampling: Sampling, several: bool = False) -> Workload:
    return Workload(several, sampling.filtered, policy.shaped)


class Generation:
    """A text being written; iterate for its chunks. :attr:`result` is right at any moment, after Ctrl-C too.

    Args:
        reused: tokens of the prompt whose K/V the sequence holds.
        grammar, top, scored: as of :class:`bitmtp.core.text.Text`.
    """

    def __init__(
        self, engine: Engine, sequence: int, request: Request, ids: list[int], reused: int,
        grammar: Grammar | None = None, top: int | None = None, scored: int | None = None,
    ) -> None:  # fmt: skip
        self._engine = engine
        named = request.sampling.seed if request.sampling.seeded else secrets.randbits(63)
        seed = named if request.seed is None else request.seed
        policy = request.policy or engine.default_policy()
        if policy.block_size > engine.config.block_size and not policy.adaptive:
            raise RequestError(f"block size {policy.block_size} is above the model's {engine.config.block_size}")
        self.text = Text(
            sequence, ids, reused, policy, replace(request.sampling, seed=seed),
            min(len(ids) + request.max_tokens, engine.context), frozenset(engine.config.eos_token_ids), engine.costs,
            tuning=engine.calibrations, grammar=grammar, top=top, scored=scored, ends=self._see,
        )  # fmt: skip
        # Where the card runs chains by itself, trees are not worth the host's time, and windows only behind long texts.
        chains = policy.adaptive and isinstance(engine.backend, TimedBackend)
        self.text.core.linear = chains and not self.text.core.wants_windows
        self._stream = TextStream(engine.tokenizer, request.stop)
        self._chunks: list[Chunk] = []
        self._begun = time.perf_counter()
        self._first = self._last = 0.0

    def _see(self, token: Token) -> bool:
        self._chunks.append(Chunk(token, self._stream.push(token.id)))
        return self._stream.stopped

    def take(self) -> list[Chunk]:
        """The chunks of the next iteration that nobody has taken yet; none if there is none."""
        if self.text.take():
            self._last = time.perf_counter()
            self._first = self._first or self._last
        chunks, self._chunks = self._chunks, []
        if self.text.finish is not None and chunks:
            chunks[-1] = replace(chunks[-1], text=chunks[-1].text + self._stream.finish())
            self._engine.learned.save()
        return chunks

    def __iter__(self) -> Iterator[Chunk]:
        text = self.text
        self._engine.prepare(_workload(text.policy, text.sampling))
        try:
            while text.finish is None:
                self._engine.loop.run([text], _FRAME if text.begun else 0.0)
                while chunks := self.take():
                    yield from chunks
        finally:
            self.leave()

    def leave(self) -> None:
        """Nobody goes on with it; its sequence can be used for something else."""
        self._engine.loop.leave(self.text)

    @property
    def result(self) -> Result:
        """The text so far with its figures."""
        text, stats = self.text, self.text.stats
        seconds, later = self._last - self._first, max(len(text.written) - 1, 0)
        return Result(
            text=self._stream.text,
            token_ids=list(text.written),
            policy=text.policy,
            backend=self._engine.backend.name,
            seed=text.sampling.seed,
            finish=text.finish or Finish.INTERRUPTED,
            mean_acceptance_length=stats.mean_acceptance_length,
            draft_acceptance_rate=stats.draft_acceptance_rate,
            acceptance_histogram=stats.acceptance_histogram(text.policy.block_size),
            num_spec_steps=stats.num_spec_steps,
            passes=stats.passes,
            graph_replays=stats.graph_replays,
            tokens_per_pass=stats.tokens_per_pass,
            ttft_ms=max(self._first - self._begun, 0.0) * 1e3,
            tpot_ms=seconds / later * 1e3 if later else 0.0,
            tokens_per_second=later / seconds if seconds > 0 else 0.0,
        )


class Session:
    """A sequence that lives on between texts: what a prompt shares with what is materialized is not run again."""

    def __init__(self, engine: Engine, sequence: int | None = None, known: Sequence[int] = ()) -> None:
        self._engine = engine
        self._sequence = engine.backend.open() if sequence is None else sequence
        self._inherited = list(known)
        self._last: Generation | None = None

    def generate(self, request: Request, grammar: Grammar | None = None) -> Generation:
        """Begin a text; nothing runs before it is iterated.

        Raises:
            RequestError: the prompt is empty or too long, or an option has no meaning here.
        """
        ids = self._engine.encode(request)
        self._leave()
        known = self._known()
        reused = next((i for i, pair in enumerate(zip(ids, known, strict=False)) if pair[0] != pair[1]), len(known))
        reused = min(reused, len(ids) - 1)
        generation = Generation(self._engine, self._sequence, request, ids, reused, grammar)
        self._engine.backend.truncate(self._sequence, reused)
        self._last = generation
        return generation

    def _known(self) -> list[int]:
        """The tokens whose K/V the sequence holds."""
        if self._last is None:
            return self._inherited
        text = self._last.text
        return text.committed[: text.materialized]

    def _leave(self) -> None:
        if self._last is not None:
            self._last.leave()

    def read(self, ids: Sequence[int]) -> None:
        """Bring tokens into the sequence that texts of forks begin with."""
        if ids:
            prefill_by_steps(self._engine.backend, self._sequence, ids, GREEDY)
        self._inherited = list(ids)

    def fork(self, length: int) -> Session:
        """A session of its own that shares the first ``length`` tokens held here, or as many as there are."""
        known = self._known()[:length]
        return Session(self._engine, self._engine.backend.fork(self._sequence, len(known)), known)

    def close(self) -> None:
        """Give the sequence's memory back."""
        self._leave()
        self._engine.backend.close(self._sequence)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Engine:
    """A loaded model: tokenizer, backend, context.

    Args:
        tuning: costs and calibration for adaptive policies; None: the costs are learned from the passes of texts, and
            kept for the next process.
        defaults: how the checkpoint wants to be sampled. The server asks; :class:`Request` has defaults of its own.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        context: int,
        tuning: Tuning | None = None,
        defaults: GenerationConfig | None = None,
    ) -> None:
        self.backend = backend
        self.defaults = defaults or GenerationConfig()
        self.tokenizer = tokenizer
        self.context = context
        self._tuning = tuning
        self.learned = LearnedCosts.of(backend)
        self._make_loop()

    def _make_loop(self) -> None:
        self.costs = self.learned.costs if self._tuning is None else self._tuning.costs.core()
        self.loop = Loop(self.backend, self.costs)

    @property
    def calibrations(self) -> Tuning:
        """What proposals' probabilities mean."""
        return self._tuning or Tuning.usual()

    @property
    def tuning(self) -> Tuning:
        """What adaptive policies know of this machine and model; costs are measured if nobody gave them."""
        if self._tuning is None:
            self.tuning = Tuning(measure_costs(self.backend, self.context))
        assert self._tuning is not None
        return self._tuning

    @tuning.setter
    def tuning(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._make_loop()

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        *,
        backend: str = "auto",
        threads: int | None = None,
        context: int | None = None,
        draft_head: str = "exact",
        tuning: Tuning | None = None,
    ) -> Engine:
        """Load a checkpoint folder (None: the model that ships with the package).

        Args:
            backend: ``auto``, ``cpu``, ``cuda`` or ``reference``.
            threads: None: one per core.
            context: longest prompt and text together; None: what the model was made for.
            draft_head: what provisional drafts multiply with: ``exact``, ``int8``, ``int4`` or ``ternary``
                (:class:`bitmtp.backends.weights.DraftHead`).
            tuning: as of :class:`Engine`.

        Raises:
            CheckpointError: the folder is not a sound checkpoint.
            BackendError: the backend cannot run here.
            RequestError: the context is out of range.
        """
        loaded = checkpoint.read(path if path is not None else shipped_model())
        longest = loaded.config.max_position
        if context is not None and not 2 <= context <= longest:
            raise RequestError(f"context is {context}; this model allows 2 to {longest}")
        tokenizer = Tokenizer(loaded.path, loaded.config.vocab_size)
        length = context or longest
        loaded_backend = load_backend(backend, loaded, threads=threads, context=length, draft_head=draft_head)
        return cls(loaded_backend, tokenizer, length, tuning, GenerationConfig.read(loaded.path))

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self.backend.config

    def prepare(self, workload: Workload) -> None:
        """Let the backend make ready for texts that have not begun, so that none of them waits for it."""
        if isinstance(self.backend, PreparedBackend):
            self.backend.prepare(workload)

    def default_policy(self) -> Policy:
        """``auto``: lossless, and it drafts only where that pays."""
        return make_policy("auto", self.config.block_size)

    def encode(self, request: Request, *, least: int = 1) -> list[int]:
        """Token ids of a request's prompt, checked against context and vocabulary.

        Args:
            least: smallest ``max_tokens`` that will do.

        Raises:
            RequestError: what is wrong and what to do.
        """
        ids = self._prompt_ids(request.prompt)
        if not ids:
            raise RequestError("the prompt is empty; give at least one token of text")
        if len(ids) >= self.context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, the context {self.context}; shorten it or raise --context"
            )
        if request.max_tokens < least:
            raise RequestError(f"max_tokens is {request.max_tokens}; it must be at least {least}")
        biased = [token for token, _ in request.sampling.logit_bias]
        for token in (*ids, *biased):
            if not 0 <= token < self.config.vocab_size:
                raise RequestError(f"token id {token} is outside the vocabulary of {self.config.vocab_size}")
        if any(not stop for stop in request.stop):
            raise RequestError("a stop string is empty; leave it out")
        return ids

    def _prompt_ids(self, prompt: str | Sequence[int] | Sequence[Message]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if prompt and not isinstance(prompt[0], int):
            return self.tokenizer.encode(self.tokenizer.chat(prompt))  # type: ignore[arg-type]
        return list(prompt)  # type: ignore[arg-type]

    def session(self) -> Session:
        """A sequence that can be used for several texts, such as the turns of a chat."""
        return Session(self)

    def stream(self, request: Request) -> Iterator[Chunk]:
        """Generate, yielding tokens as they are committed."""
        with self.session() as session:
            yield from session.generate(request)

    def generate(self, request: Request) -> Result:
        """Generate to the end."""
        with self.session() as session:
            generation = session.generate(request)
            for _ in generation:
                pass
            return generation.result

    def generate_batch(self, requests: Sequence[Request]) -> list[Result]:
        """Generate several texts whose rows share passes; each is the text it would be alone.

        Requests with the same prompt share its K/V.
        """
        for request in requests:
            policy = request.policy or self.default_policy()
            self.prepare(_workload(policy, request.sampling, several=len(requests) > 1))
        prompts = [tuple(self.encode(request)) for request in requests]
        sources: dict[tuple[int, ...], Session] = {}
        sessions: list[Session] = []
        try:
            for ids in dict.fromkeys(prompts):  # what several begin with is run once
                sessions.append(self.session())
                sources[ids] = sessions[-1]
                if prompts.count(ids) > 1:
                    sessions[-1].read(ids[:-1])
            running = []
            for request, ids in zip(requests, prompts, strict=True):
                own = sources.pop(ids) if prompts.count(ids) == 1 else sources[ids].fork(len(ids))
                sessions += [own] if own not in sessions else []
                running.append(own.generate(replace(request, prompt=ids)))
            self._write(running)
            return [generation.result for generation in running]
        finally:
            for session in sessions:
                session.close()

    def _write(self, running: Sequence[Generation]) -> None:
        texts = [generation.text for generation in running]
        while any(text.finish is None for text in texts):
            texts = self.loop.run(texts, _FRAME)
            for generation in running:
                while generation.take():
                    pass
