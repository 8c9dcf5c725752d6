"""Generation end to end on tiny real models: speculative text is the autoregressive text, whatever the settings."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DATA, END, make_backend, make_engine, random_checkpoint, tiny_config, why_unavailable
from numpy.typing import NDArray

from bitmtp.backends.base import Workload
from bitmtp.backends.reference import ReferenceBackend
from bitmtp.core.policies import make_policy
from bitmtp.core.text import Finish, Source
from bitmtp.engine import Engine, Generation, Request, Result
from bitmtp.errors import BackendError, CheckpointError, RequestError
from bitmtp.models import shipped_model
from bitmtp.sampling import Sampling
from bitmtp.tokenizer import Tokenizer

PROMPTS = (DATA / "prompts.txt").read_text(encoding="utf-8").splitlines()
NO_END = ((END, -1e9),)  # keeps a random model from ending its text early
AUTOREGRESSIVE = make_policy("autoregressive", 1)
BOUNDS = (0.0, 0.1, 0.5)
SAMPLINGS = {
    "greedy": Sampling(logit_bias=NO_END),
    "temperature 1": Sampling(1.0, logit_bias=NO_END),
    "hot, may end": Sampling(3.0),
    "top-p": Sampling(1.0, top_p=0.8, logit_bias=NO_END),
    "top-k": Sampling(1.5, top_k=7, logit_bias=NO_END),
    "min-p": Sampling(2.0, min_p=0.05, logit_bias=NO_END),
    "penalties, greedy": Sampling(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, logit_bias=NO_END
    ),
    "penalties, bias, top-p": Sampling(
        1.0, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.2, logit_bias=(*NO_END, (40, 3.0), (41, -2.0))
    ),
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chain": {"chain_rank": 4},
    "float head": {"embedding_bits": 16, "head_activation_bits": 16, "kv_type": "float32", "qk_norm": True},
    "groups": {"ternary_scale": "group", "embedding_bits": 2, "activation": "relu2"},
}
MakeEngine = Callable[[str], Engine]


@pytest.fixture
def engine_of(backend_name: str, tokenizer_folder: Path) -> MakeEngine:
    """An engine over one of :data:`MODELS`."""
    return lambda model: make_engine(backend_name, random_checkpoint(tiny_config(**MODELS[model])), tokenizer_folder)


@pytest.fixture
def engine(engine_of: MakeEngine) -> Engine:
    return engine_of("plain")


def speculative(block_size: int = 8, bound: float = 0.1) -> Any:
    return make_policy("speculative", 16, block_size=block_size, verify_bound=bound)


def request_of(prompt: Any = PROMPTS[0], sampling: str | Sampling = "temperature 1", **changes: Any) -> Request:
    chosen = SAMPLINGS[sampling] if isinstance(sampling, str) else sampling
    return replace(Request(prompt, 18, AUTOREGRESSIVE, chosen, seed=5), **changes)


def check_same_text(found: Result, baseline: Result) -> None:
    assert found.token_ids == baseline.token_ids
    assert (found.text, found.finish) == (baseline.text, baseline.finish)


def check_figures(result: Result) -> None:
    iterations = sum(result.acceptance_histogram)
    later = sum(length * count for length, count in enumerate(result.acceptance_histogram, start=1))
    assert later == result.num_tokens - 1
    assert result.mean_acceptance_length == pytest.approx(later / iterations if iterations else 0)
    assert result.tokens_per_pass == pytest.approx(later / result.passes if result.passes else 0)
    assert 0 <= result.draft_acceptance_rate <= 1
    assert result.num_spec_steps <= iterations <= result.passes


# Exactness


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_speculative_text_is_the_autoregressive_text(engine: Engine, sampling: str) -> None:
    request = request_of(sampling=sampling)
    baseline = engine.generate(request)
    for index, block_size in enumerate((2, 4, 8, 16)):
        bound = BOUNDS[(index + len(sampling)) % 3]
        found = engine.generate(replace(request, policy=speculative(block_size, bound)))
        check_same_text(found, baseline)
        check_figures(found)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("model", MODELS)
def test_on_every_kind_of_model(engine_of: MakeEngine, model: str, bound: float) -> None:
    engine = engine_of(model)
    for sampling in ("temperature 1", "penalties, greedy"):
        request = request_of(PROMPTS[1], sampling)
        check_same_text(engine.generate(replace(request, policy=speculative(16, bound))), engine.generate(request))


def test_drafts_are_accepted_and_rejected(engine: Engine) -> None:
    """Otherwise the tests above would prove little."""
    request = request_of(sampling="hot, may end", policy=speculative(8, 0), max_tokens=60)
    result = engine.generate(replace(request, sampling=replace(request.sampling, logit_bias=NO_END)))
    assert 0.02 < result.draft_acceptance_rate < 0.98
    assert sum(count > 0 for count in result.acceptance_histogram) >= 3
    assert len(set(result.token_ids)) > 5


@pytest.mark.parametrize("stop_at", [3, 9])
def test_stop_strings_end_both_at_the_same_place(engine: Engine, stop_at: int) -> None:
    request = request_of()
    whole = engine.generate(request).text
    stop = whole[stop_at : stop_at + 3]
    request = replace(request, stop=(stop, "never"))
    results = [engine.generate(replace(request, policy=policy)) for policy in (AUTOREGRESSIVE, speculative(16, 0))]
    check_same_text(results[1], results[0])
    assert results[0].text == whole.split(stop)[0]
    assert results[0].finish is Finish.STOP
    for result in results:
        check_figures(result)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_text_cut_within_a_character_does_not_show_it(engine: Engine, size: int) -> None:
    beginning = engine.tokenizer.encode("\U0001f6a2")[0]
    request = Request("otter", size, sampling=Sampling(logit_bias=((beginning, 1e9),)))
    assert engine.generate(request).text == "\ufffd" * (size - 1), "one begins where another was not finished"
    assert "".join(chunk.text for chunk in engine.stream(request)) == "\ufffd" * (size - 1)


@pytest.mark.parametrize("name", ["confidence", "hybrid"])
def test_lossy_policies_are_deterministic(engine: Engine, name: str) -> None:
    for tau in (0.0, 0.05, 0.9):
        request = request_of(policy=make_policy(name, 16, tau=tau))
        first, second = engine.generate(request), engine.generate(request)
        check_same_text(second, first)
        assert second.acceptance_histogram == first.acceptance_histogram
        check_figures(first)


def test_a_confident_policy_that_never_dares_is_autoregressive(engine: Engine) -> None:
    request = request_of()
    timid = engine.generate(replace(request, policy=make_policy("confidence", 16, tau=1.0)))
    check_same_text(timid, engine.generate(request))


class EvenAfterOdd:
    """A grammar: the id behind an odd number of tokens is even, and the other way round."""

    def __init__(self, prompt: int) -> None:
        self.text = [index % 2 ^ 1 for index in range(prompt)]

    def allowed(self, path: Sequence[int]) -> NDArray[np.uint32] | None:
        text = [*self.text, *path]
        if any(token % 2 == index % 2 for index, token in enumerate(text)):
            return None
        return np.full(10, 0x55555555 if len(text) % 2 else 0xAAAAAAAA, np.uint32)

    def accepts(self, path: Sequence[int]) -> int:
        fits = [token % 2 != index % 2 for index, token in enumerate(path, start=len(self.text))]
        return [*fits, False].index(False)

    def commit(self, tokens: Sequence[int]) -> None:
        self.text += tokens


@pytest.mark.parametrize("sampling", ["greedy", "hot, may end", "penalties, bias, top-p"])
def test_under_a_grammar_too(engine: Engine, sampling: str) -> None:
    texts = []
    for policy in (AUTOREGRESSIVE, speculative(8, 0), speculative(16, 0.1)):
        prompt = engine.tokenizer.encode(PROMPTS[2])
        grammar, request = EvenAfterOdd(len(prompt)), request_of(prompt, sampling, policy=policy)
        generation = Generation(engine, engine.backend.open(), request, prompt, 0, grammar)
        texts.append([chunk.token.id for chunk in generation])
        assert grammar.text[len(prompt) :] == texts[-1]
        assert all(token % 2 != (len(prompt) + i) % 2 for i, token in enumerate(texts[-1]))
    assert texts[0] == texts[1] == texts[2]


# Batches and sessions


def mixed_requests() -> list[Request]:
    return [
        request_of(PROMPTS[0], policy=speculative(16, 0)),
        request_of(PROMPTS[1], "penalties, bias, top-p", policy=speculative(4)),
        request_of(PROMPTS[2], "greedy"),
        request_of(PROMPTS[3], policy=make_policy("hybrid", 16, tau=0.05), max_tokens=9),
        request_of(PROMPTS[0], "hot, may end", policy=make_policy("confidence", 16, tau=0.05), seed=8),
        request_of("The", "top-k", policy=speculative(16, 0), max_tokens=1),
        request_of("The harbour", "top-k", policy=speculative(16, 0), stop=("e", "t")),
    ]


@pytest.mark.parametrize("model", ["plain", "chain"])
def test_a_batch_is_its_texts(engine_of: MakeEngine, model: str) -> None:
    engine = engine_of(model)
    alone = [engine.generate(request) for request in mixed_requests()]
    for found, single in zip(engine.generate_batch(mixed_requests()), alone, strict=True):
        check_same_text(found, single)
        assert found.acceptance_histogram == single.acceptance_histogram
        assert (found.passes, found.num_spec_steps) == (single.passes, single.num_spec_steps)
        check_figures(found)


def test_an_empty_batch(engine: Engine) -> None:
    assert engine.generate_batch([]) == []


def test_a_session_gives_what_a_fresh_sequence_gives(engine: Engine) -> None:
    first = engine.tokenizer.encode(PROMPTS[0])
    with engine.session() as session:
        prompts = [first]
        answer = list(session.generate(request_of(first, policy=speculative())))
        prompts.append([*first, *(chunk.token.id for chunk in answer), 50, 51])
        prompts += [prompts[1][:20], prompts[1], [60, 61], [60, 61], [60]]
        for index, prompt in enumerate(prompts[1:]):
            policy = (speculative(16, 0), AUTOREGRESSIVE, make_policy("confidence", 16, tau=0.05))[index % 3]
            generation = session.generate(request_of(prompt, policy=policy))
            for _ in generation:
                pass
            check_same_text(generation.result, engine.generate(request_of(prompt, policy=policy)))


def test_a_prefix_is_not_run_again(engine: Engine) -> None:
    prompt = engine.tokenizer.encode(PROMPTS[0])
    with engine.session() as session:
        reused = []
        for ids in (prompt, [*prompt, 300, 301], prompt):
            generation = session.generate(request_of(ids))
            reused.append(generation.text.materialized)
            list(generation)
    assert reused[0] == 0
    assert reused[1] in (len(prompt), len(prompt) + 1)  # the answer may have begun with 300
    assert reused[2] == len(prompt) - 1


def test_an_interrupted_text_leaves_a_usable_session(engine: Engine) -> None:
    with engine.session() as session:
        for count in (0, 1, 4):
            generation = session.generate(request_of(policy=speculative(8, 0)))
            chunks = [chunk for _, chunk in zip(range(count), generation, strict=False)]
            assert generation.result.finish is Finish.INTERRUPTED
            assert generation.result.token_ids[: len(chunks)] == [chunk.token.id for chunk in chunks]
            request = request_of(PROMPTS[0][:20] + " Now!", policy=speculative(8, 0))
            again = session.generate(request)
            for _ in again:
                pass
            check_same_text(again.result, engine.generate(request))


def test_sequences_are_given_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    closed: list[int] = []
    open_, fork, close = engine.backend.open, engine.backend.fork, engine.backend.close
    monkeypatch.setattr(engine.backend, "open", lambda: opened.append(open_()) or opened[-1])
    monkeypatch.setattr(engine.backend, "fork", lambda *given: opened.append(fork(*given)) or opened[-1])
    monkeypatch.setattr(engine.backend, "close", lambda sequence: closed.append(sequence) or close(sequence))
    engine.generate(request_of(max_tokens=3))
    engine.generate_batch([request_of(max_tokens=3), request_of(max_tokens=2)])
    next(engine.stream(request_of(max_tokens=3)))
    with pytest.raises(RequestError):
        engine.generate_batch([request_of(), request_of("")])
    assert opened
    assert sorted(opened) == sorted(closed)


# Requests and results


def test_chunks_make_the_text(engine: Engine) -> None:
    request = request_of(policy=speculative(8, 0), max_tokens=40)
    chunks = list(engine.stream(request))
    result = engine.generate(request)
    assert [chunk.token.id for chunk in chunks] == result.token_ids
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert result.text == engine.tokenizer.decode(result.token_ids)
    assert chunks[0].token.source is Source.EXACT


@pytest.mark.parametrize("policy", [AUTOREGRESSIVE, speculative(16, 0), make_policy("confidence", 16, tau=0.0)])
@pytest.mark.parametrize("max_tokens", [1, 2, 17])
def test_max_tokens(engine: Engine, policy: Any, max_tokens: int) -> None:
    result = engine.generate(request_of(policy=policy, max_tokens=max_tokens))
    assert result.num_tokens == len(result.token_ids) == max_tokens
    assert result.finish is Finish.LENGTH
    check_figures(result)


@pytest.mark.parametrize("policy", [AUTOREGRESSIVE, speculative(16, 0), make_policy("confidence", 16, tau=0.0)])
def test_the_context_ends_a_text(backend_name: str, tokenizer_folder: Path, policy: Any) -> None:
    backend = make_backend(backend_name, random_checkpoint(tiny_config()), context=20)
    engine = Engine(backend, Tokenizer(tokenizer_folder), 20)
    for length in (1, 5, 18, 19):
        result = engine.generate(request_of([50] * length, policy=policy, max_tokens=99))
        assert result.num_tokens == 20 - length
        assert result.finish is Finish.LENGTH
    with pytest.raises(RequestError, match="the prompt has 20 tokens, the context 20"):
        engine.generate(request_of([50] * 20))


@pytest.mark.parametrize("policy", [AUTOREGRESSIVE, speculative(16, 0)])
def test_an_end_token_ends_a_text(engine: Engine, policy: Any) -> None:
    result = engine.generate(request_of(policy=policy, sampling=Sampling(logit_bias=((END, 1e9),))))
    assert (result.token_ids, result.text, result.finish) == ([END], "", Finish.STOP)
    check_figures(result)


def test_seeds(engine: Engine) -> None:
    request = request_of(sampling="hot, may end")
    texts = {tuple(engine.generate(replace(request, seed=seed)).token_ids) for seed in range(4)}
    assert len(texts) == 4
    drawn = [engine.generate(replace(request, seed=None)) for _ in range(2)]
    assert drawn[0].seed != drawn[1].seed
    check_same_text(engine.generate(replace(request, seed=drawn[0].seed)), drawn[0])


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_a_seed_may_be_named_with_the_sampling(engine: Engine, seed: int) -> None:
    request = Request(PROMPTS[0], 8, AUTOREGRESSIVE, Sampling(1.0, seed=seed))
    assert engine.generate(request).seed == seed
    assert engine.generate(replace(request, sampling=replace(request.sampling, choice=1))).seed == seed
    assert engine.generate(replace(request, seed=0)).seed == 0


def test_choices_of_one_seed_differ(engine: Engine) -> None:
    request = request_of(sampling="hot, may end")
    texts = {
        tuple(engine.generate(replace(request, sampling=replace(request.sampling, choice=choice))).token_ids)
        for choice in range(4)
    }
    assert len(texts) == 4


def test_prompts_as_text_ids_or_messages(tiny_engine: Engine) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    text = tiny_engine.tokenizer.chat(messages)
    forms = [messages, text, tiny_engine.tokenizer.encode(text)]
    first, *others = [tiny_engine.generate(request_of(form)) for form in forms]
    for other in others:
        check_same_text(other, first)


def test_the_default_policy(engine: Engine, backend_name: str, tokenizer_folder: Path) -> None:
    result = engine.generate(request_of(policy=None))
    assert (result.policy.name, result.policy.block_size, result.backend) == ("auto", 16, backend_name)
    untaught = make_engine(backend_name, random_checkpoint(tiny_config(block_size=1)), tokenizer_folder)
    assert untaught.generate(request_of(policy=None)).policy.name == "auto"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [50] * 512}, "the prompt has 512 tokens, the context 512"),
        ({"prompt": [50, 320]}, "token id 320 is outside the vocabulary of 320"),
        ({"prompt": [-1]}, "token id -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"sampling": Sampling(logit_bias=((320, 1.0),))}, "token id 320"),
        ({"stop": ("a", "")}, "a stop string is empty"),
        ({"policy": make_policy("speculative", 32, block_size=17)}, "block size 17 is above the model's 16"),
        ({"seed": -1}, "seed is -1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_requests_refused(engine: Engine, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        engine.generate(request_of(**changes))
    assert "\n" not in str(caught.value)


def test_a_refused_request_leaves_the_session_as_it_was(engine: Engine) -> None:
    with engine.session() as session:
        list(session.generate(request_of()))
        with pytest.raises(RequestError):
            session.generate(request_of(policy=make_policy("speculative", 32, block_size=17)))
        again = session.generate(request_of())
        for _ in again:
            pass
        check_same_text(again.result, engine.generate(request_of()))


# Loading


def test_load(tiny_model: Path, backend_name: str) -> None:
    engine = Engine.load(tiny_model, backend=backend_name, threads=1, context=50)
    assert (engine.context, engine.backend.name, engine.config) == (50, backend_name, tiny_config())


@pytest.mark.parametrize("context", [0, 1, 513])
def test_a_context_out_of_range(tiny_model: Path, context: int) -> None:
    with pytest.raises(RequestError, match=f"context is {context}; this model allows 2 to 512"):
        Engine.load(tiny_model, backend="reference", context=context)


def test_an_unknown_backend_or_folder(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="unknown backend 'tpu'; choose one of auto, cpu, cuda, reference"):
        Engine.load(tiny_model, backend="tpu")
    with pytest.raises(CheckpointError, match="no such model folder"):
        Engine.load(tmp_path / "nothing", backend="reference")


def test_inference_imports_no_torch() -> None:
    code = "import sys, bitmtp.engine, bitmtp.backends.reference; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# A real model


def real_model() -> Path | None:
    try:
        return shipped_model()
    except CheckpointError:
        beside = Path(__file__).resolve().parents[2] / "shared" / "probe-model"
        return beside if beside.is_dir() else None


@pytest.mark.skipif(real_model() is None, reason="no trained model is here")
@pytest.mark.skipif(why_unavailable("cpu") is not None, reason=str(why_unavailable("cpu")))
def test_a_trained_model_writes_the_same_text_faster() -> None:
    engine = Engine.load(real_model(), backend="cpu", threads=2, context=512)
    requests = [
        Request([{"role": "user", "content": prompt}], 48, AUTOREGRESSIVE, Sampling(temperature), seed=1)
        for prompt in PROMPTS[:3]
        for temperature in (0.0, 1.0)
    ]
    baseline = [engine.generate(request) for request in requests]
    drafting = make_policy("speculative", engine.config.block_size)
    drafted = [engine.generate(replace(request, policy=drafting)) for request in requests]
    for found, expected in zip(drafted, baseline, strict=True):
        check_same_text(found, expected)
    assert sum(result.num_tokens for result in drafted) > 1.5 * sum(sum(r.acceptance_histogram) for r in drafted)


def test_the_backend_makes_ready_before_a_text_begins(tokenizer_folder: Path) -> None:
    calls: list[Any] = []

    class Noting(ReferenceBackend):
        def prepare(self, workload: Workload) -> None:
            calls.append(workload)

        def step(self, *arguments: Any, **options: Any) -> Any:
            calls.append("pass")
            return super().step(*arguments, **options)

    made = random_checkpoint(tiny_config())
    engine = Engine(Noting(made), Tokenizer(tokenizer_folder, made.config.vocab_size), made.config.max_position)
    engine.generate(Request(PROMPTS[0], 3, make_policy("auto", 8), Sampling(1.0, top_k=5)))
    first = calls.index(Workload(filtered=True))
    assert calls[first + 1 :] == ["pass"] * (len(calls) - first - 1)
    calls.clear()
    engine.generate_batch([Request(PROMPTS[0], 3), Request(PROMPTS[1], 3, sampling=Sampling(presence_penalty=0.5))])
    assert calls[:2] == [Workload(several=True), Workload(several=True, filtered=True)]
    assert set(calls[2:]) == {"pass"}
