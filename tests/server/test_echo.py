"""Prompts given back with their log-probabilities."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from conftest import random_tokens

from bitmtp.engine import Engine
from bitmtp.evaluation.likelihood import log_likelihood

from .conftest import Running, running
from .test_api import events

LONG = 200  # tokens, more than a pass has rows
FIELDS = ("tokens", "token_logprobs", "top_logprobs")


def words(engine: Engine, count: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    return random_tokens(np.random.default_rng(seed), count, engine.config)


def echoed(server: Running, prompt: Any, **body: Any) -> dict[str, Any]:
    """The only choice of an echo of which nothing else is wanted."""
    answer = server.complete(prompt, **{"echo": True, "logprobs": 3, "max_tokens": 0, **body})
    [choice] = answer["choices"]
    return dict(choice)


@pytest.mark.parametrize("policy", ["autoregressive", "speculative", "auto"])
def test_equal_to_those_of_the_same_tokens_when_generated(served: Running, policy: str) -> None:
    prompt = words(served.engine, LONG)
    asked = {"max_tokens": 70, "temperature": 0.7, "seed": 5, "logprobs": 3, "decoding": {"policy": policy}}
    trace = {"decoding": {"policy": policy, "trace": True}}
    [wrote] = served.complete(prompt, **{**asked, **trace})["choices"]
    ids = [token["id"] for token in wrote["tokens"]]
    read = echoed(served, prompt + ids)["logprobs"]
    for field in FIELDS:  # what ends a text has no entry where it was generated
        kept = wrote["logprobs"][field]
        assert read[field][len(prompt) :][: len(kept)] == kept


def test_with_what_follows(served: Running) -> None:
    prompt = words(served.engine, 90)
    asked = {"max_tokens": 20, "temperature": 0, "logprobs": 2}
    [alone] = served.complete(prompt, **asked)["choices"]
    [both] = served.complete(prompt, **asked, echo=True)["choices"]
    read = echoed(served, prompt, logprobs=2)
    assert both["text"] == read["text"] + alone["text"]
    for field in FIELDS:
        assert both["logprobs"][field][: len(prompt)] == read["logprobs"][field]
        assert both["logprobs"][field][len(prompt) :][: len(alone["logprobs"][field])] == alone["logprobs"][field]


def test_the_first_token_follows_nothing(served: Running) -> None:
    read = echoed(served, words(served.engine, 3))["logprobs"]
    assert (read["token_logprobs"][0], read["top_logprobs"][0]) == (None, None)
    assert [len(top) for top in read["top_logprobs"][1:]] == [3, 3]
    assert echoed(served, words(served.engine, 1))["logprobs"]["token_logprobs"] == [None]


def test_texts_lists_of_tokens_and_lists_of_lists(served: Running) -> None:
    text = "Three otters, one after the other."
    ids = served.engine.tokenizer.encode(text)
    once = echoed(served, text)
    assert once["text"] == text
    assert once["finish_reason"] == "length"
    assert echoed(served, ids) == once
    several = served.complete([ids, ids[:4]], echo=True, logprobs=3, max_tokens=0)["choices"]
    assert several == [once, {**echoed(served, ids[:4]), "index": 1}]
    offsets = once["logprobs"]["text_offset"]
    assert [text[a:b] for a, b in pairwise([*offsets, len(text)])] == once["logprobs"]["tokens"]


def test_special_tokens_are_text_of_a_prompt(served: Running) -> None:
    end = served.engine.config.eos_token_ids[0]
    read = echoed(served, [*served.engine.tokenizer.encode("otter"), end, *served.engine.tokenizer.encode("otter")])
    assert read["text"] == "".join(read["logprobs"]["tokens"])
    assert read["text"].startswith("otter")
    assert read["text"].endswith("otter")
    assert len(read["text"]) > len("otterotter")


def test_the_token_that_ends_a_text_has_an_entry_behind_an_echo(served: Running) -> None:
    end = served.engine.config.eos_token_ids[0]
    prompt = words(served.engine, 5)
    [choice] = served.complete(prompt, echo=True, logprobs=1, max_tokens=9, logit_bias={str(end): 100})["choices"]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == len(prompt) + 1


def test_nothing_is_written_where_nothing_is_wanted(served: Running) -> None:
    before = served.metric("bitmtp_generated_tokens_total")
    answer = served.complete("Three otters", echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == "Three otters"
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 0
    echoed(served, "Three otters")
    assert served.metric("bitmtp_generated_tokens_total") == before


@pytest.mark.parametrize("wanted", [0, 12])
def test_streamed(served: Running, wanted: int) -> None:
    body = {"prompt": words(served.engine, 80), "echo": True, "logprobs": 2, "max_tokens": wanted, "temperature": 0}
    whole = served.complete(**body)["choices"][0]
    parts = [choice for event in events(served, "/v1/completions", **body) for choice in event["choices"]]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for field in (*FIELDS, "text_offset"):
        assert [each for part in parts if part["logprobs"] for each in part["logprobs"][field]] == whole["logprobs"][
            field
        ]


def test_several_choices(served: Running) -> None:
    body: dict[str, Any] = {"max_tokens": 6, "echo": True, "logprobs": 1, "seed": 3}
    prompt = words(served.engine, 40)
    choices = served.complete(prompt, **body, n=3)["choices"]
    texts = [choice["text"] for choice in served.complete(prompt, max_tokens=6, seed=3, n=3)["choices"]]
    assert [choice["text"] for choice in choices] == [echoed(served, prompt)["text"] + text for text in texts]


def test_over_http_as_in_process(served: Running) -> None:
    for seed, (context, continuation) in enumerate([(1, 1), (5, 3), (100, 1), (64, 64), (3, 150)]):
        ids = words(served.engine, context + continuation, seed)
        read = echoed(served, ids, logprobs=1)["logprobs"]
        total, greedy = log_likelihood(served.engine, ids[:context], ids[context:])
        assert sum(read["token_logprobs"][context:]) == total
        tops = zip(read["token_logprobs"][context:], read["top_logprobs"][context:], strict=True)
        assert all(own == max(top.values()) for own, top in tops) == greedy


def test_beside_other_texts(own_engine: Engine) -> None:
    """The same numbers, and passes that hold no more rows of the prompt than of any other."""
    ids = words(own_engine, LONG)
    with running(own_engine, slots=4, prefill_rows=8) as server:
        alone = echoed(server, ids)
        texts = [{"prompt": f"{n} otters", "max_tokens": 120, "temperature": 0} for n in range(2)]
        fixed = [{**text, "decoding": {"policy": "autoregressive"}} for text in texts]
        expected = [server.complete(**text)["choices"] for text in fixed]
        with ThreadPoolExecutor(3) as pool:
            writing = [pool.submit(server.complete, **text) for text in fixed]
            together = pool.submit(echoed, server, ids)
            assert together.result() == alone
            assert [each.result()["choices"] for each in writing] == expected


def test_nothing_is_reused_for_it_and_its_own_is_reused(own_engine: Engine) -> None:
    ids = words(own_engine, 120)
    with running(own_engine) as server:
        body = {"echo": True, "logprobs": 0, "max_tokens": 1}
        for _ in range(2):
            assert server.complete(ids, **body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        again = server.complete(ids, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert again == len(ids) - 1
