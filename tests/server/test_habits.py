"""What clients send out of habit, what they ask for in vain, and what the server does where nobody says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer.main
from conftest import make_engine, random_checkpoint, tiny_config, write_model

from bitmtp.cli.app import app
from bitmtp.engine import Engine
from bitmtp.generation_config import GenerationConfig

from .conftest import Running, running

HELLO = [{"role": "user", "content": "Say hello to the three otters."}]
HABITS: dict[str, Any] = {
    "metadata": {"chat": "7"},
    "store": True,
    "service_tier": "flex",
    "safety_identifier": "somebody",
    "prompt_cache_key": "otters",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "verbosity": "medium",
    "prediction": {"type": "content", "content": "Hello"},
    "chat_template_kwargs": {"enable_thinking": False},
    "user": "somebody",
    "max_tokens": None,
}
FIXED = {"max_completion_tokens": 6, "seed": 3}


@pytest.mark.parametrize("name", HABITS)
def test_habits_change_nothing(served: Running, name: str) -> None:
    plain, habit = (
        served.post("/v1/chat/completions", messages=HELLO, **FIXED, **more).json()["choices"]
        for more in ({}, {name: HABITS[name]})
    )
    assert plain == habit


def test_a_lenient_server_ignores_what_it_does_not_know(engine: Engine) -> None:
    part = {"type": "text", "text": HELLO[0]["content"], "cache_control": {"type": "ephemeral"}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": [part], "mood": "good"}], "mirostat": 2, **FIXED}
    with running(engine, lenient=True) as server:
        answer = server.post("/v1/chat/completions", **body)
        assert answer.status_code == 200, answer.text
        assert (
            answer.json()["choices"] == server.post("/v1/chat/completions", messages=HELLO, **FIXED).json()["choices"]
        )
        assert server.post("/v1/chat/completions", **body, temperature="warm").json()["error"]["param"] == "temperature"
        assert server.post("/v1/completions", prompt="x", best_of=2).json()["error"]["param"] == "best_of"


def test_a_strict_server_does_not(served: Running) -> None:
    for body in ({"mirostat": 2}, {"messages": [{**HELLO[0], "mood": "good"}]}):
        error = served.post("/v1/chat/completions", **{"messages": HELLO, **body}).json()["error"]
        assert error["message"].endswith("unknown or unsupported parameter")


@pytest.mark.parametrize(("arguments", "lenient"), [([], False), (["--lenient"], True), (["--strict"], False)])
def test_the_switch(arguments: list[str], lenient: bool) -> None:
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert serve.make_context("serve", arguments).params["lenient"] == lenient


def test_embeddings_are_refused_with_a_sentence(served: Running) -> None:
    answer = served.post("/v1/embeddings", model="tiny", input="otter")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "no embeddings" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("kind", "word"), [("image_url", "images"), ("input_audio", "sound"), ("file", "files")])
def test_what_is_no_text_is_refused_with_a_sentence(served: Running, kind: str, word: str) -> None:
    content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:,x"}}]
    answer = served.post("/v1/chat/completions", messages=[{"role": "user", "content": content}])
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message == (
        f"messages.0.content.1.type: this model reads text, no {word}; send the message without its {kind} part"
    )


def test_max_tokens_0_needs_an_echo(served: Running) -> None:
    assert "echo" in served.post("/v1/completions", prompt="otter", max_tokens=0).json()["error"]["message"]
    assert served.post("/v1/chat/completions", messages=HELLO, max_tokens=0).status_code == 400


def test_usage_counts_proposals(served: Running) -> None:
    asked = {"max_tokens": 60, "temperature": 0, "decoding": {"policy": "speculative"}}
    usage = served.complete("otter otter otter otter", **asked)["usage"]
    details = usage["completion_tokens_details"]
    proposed = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    assert proposed > 0
    assert details["accepted_prediction_tokens"] == pytest.approx(usage["draft_acceptance_rate"] * proposed)
    alone = served.complete("otter", max_tokens=9, decoding={"policy": "autoregressive"})["usage"]
    assert set(alone["completion_tokens_details"].values()) == {0}


def test_the_temperature_of_who_names_none(served: Running) -> None:
    for body, expected in (({}, (1, "api")), ({"temperature": 0.5}, (0.5, "request"))):
        told = served.complete("otter", max_tokens=1, **body)["decoding"]
        assert (told["temperature"], told["temperature_from"]) == expected


def test_the_checkpoint_names_one(tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = write_model(tmp_path / "model", random_checkpoint(tiny_config()), tokenizer_folder)
    said = {"do_sample": True, "temperature": 0.25, "top_k": 3, "top_p": 0.75, "max_length": 7}
    (folder / "generation_config.json").write_text(json.dumps(said))
    own = Engine.load(folder, backend="reference")
    plain = make_engine("reference", random_checkpoint(tiny_config()), tokenizer_folder)
    assert own.defaults == GenerationConfig(temperature=0.25, top_k=3, top_p=0.75)
    with running(own) as first, running(plain) as second:
        silent = first.complete("otter", max_tokens=12, seed=4)
        named = second.complete("otter", max_tokens=12, seed=4, temperature=0.25, top_k=3, top_p=0.75)
        assert silent["choices"] == named["choices"]
        assert (silent["decoding"]["temperature"], silent["decoding"]["temperature_from"]) == (0.25, "checkpoint")
        asked = first.complete("otter", max_tokens=12, seed=4, temperature=2, top_k=0, top_p=1)
        assert asked["choices"] == second.complete("otter", max_tokens=12, seed=4, temperature=2)["choices"]
