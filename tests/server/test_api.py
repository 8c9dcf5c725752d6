"""The HTTP API over a real socket: shapes, parameters, streams, errors."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA, any_backend, make_engine, random_checkpoint, tiny_config

from bitmtp.core.policies import POLICIES, make_policy
from bitmtp.engine import Request
from bitmtp.sampling import Sampling
from bitmtp.server.vocabulary import Offsets, Vocabulary

from .conftest import MODEL, Running, running

HELLO = [{"role": "user", "content": "Say hello to the three otters."}]


def events(server: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, which must end as the API says."""
    lines: list[str] = []
    with server.client.stream("POST", server.url + path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def texts_of(stream: list[dict[str, Any]], field: str = "text") -> dict[int, str]:
    """The text of each choice."""
    found: dict[int, str] = {}
    for event in stream:
        for choice in event["choices"]:
            text = choice["text"] if field == "text" else choice["delta"].get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found


def test_a_completion_is_the_engines_text(served: Running) -> None:
    answer = served.complete("Three otters", max_tokens=24, temperature=0, seed=5)
    alone = served.engine.generate(Request("Three otters", 24, seed=5))
    choice = answer["choices"][0]
    assert choice["text"] == alone.text
    assert choice["finish_reason"] == "length"
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    usage = answer["usage"]
    assert usage["completion_tokens"] == alone.num_tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    chosen = {"temperature": 0, "temperature_from": "request"}
    assert answer["decoding"] == {"policy": "auto", "block_size": 16, "lossless": True, "seed": 5, **chosen}


def test_a_chat_answer_is_the_engines_text(served: Running) -> None:
    response = served.post("/v1/chat/completions", messages=HELLO, max_completion_tokens=20, temperature=0)
    answer = response.json()
    alone = served.engine.generate(Request(HELLO, 20))
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": alone.text}
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")


def test_figures_of_drafting_come_with_usage(served: Running) -> None:
    drafting = {"policy": "speculative", "block_size": 8}
    usage = served.complete("Otters", max_tokens=60, temperature=0, decoding=drafting)["usage"]
    alone = served.engine.generate(Request("Otters", 60, make_policy("speculative", 16, block_size=8)))
    assert usage["mean_acceptance_length"] == pytest.approx(alone.mean_acceptance_length)
    assert usage["draft_acceptance_rate"] == pytest.approx(alone.draft_acceptance_rate)
    assert usage["num_spec_steps"] == alone.num_spec_steps > 0
    assert usage["passes"] == alone.passes


@pytest.mark.parametrize(
    ("body", "sampling"),
    [
        ({"temperature": 0}, Sampling()),
        ({}, Sampling(temperature=1)),
        ({"top_p": 0.5}, Sampling(temperature=1, top_p=0.5)),
        ({"top_k": 3}, Sampling(temperature=1, top_k=3)),
        ({"min_p": 0.2}, Sampling(temperature=1, min_p=0.2)),
        ({"presence_penalty": 1.5}, Sampling(temperature=1, presence_penalty=1.5)),
        ({"frequency_penalty": 1.5}, Sampling(temperature=1, frequency_penalty=1.5)),
        ({"repetition_penalty": 1.5}, Sampling(temperature=1, repetition_penalty=1.5)),
        ({"logit_bias": {"70": 100}}, Sampling(temperature=1, logit_bias=((70, 100.0),))),
    ],
)
def test_every_sampling_parameter_acts(served: Running, body: dict[str, Any], sampling: Sampling) -> None:
    answer = served.complete("otter", max_tokens=16, seed=11, **body)
    assert answer["choices"][0]["text"] == served.engine.generate(Request("otter", 16, None, sampling, 11)).text


def test_choices_are_those_of_the_seed(served: Running) -> None:
    answer = served.complete(["one", "two"], max_tokens=8, n=2, seed=3)
    found = [choice["text"] for choice in answer["choices"]]
    expected = [
        served.engine.generate(Request(prompt, 8, None, Sampling(temperature=1, choice=choice), 3)).text
        for prompt in ("one", "two")
        for choice in (0, 1)
    ]
    assert found == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len(set(found)) == 4


def test_a_random_seed_is_reported_and_repeats(served: Running) -> None:
    first = served.complete("otter", max_tokens=12)
    again = served.complete("otter", max_tokens=12, seed=first["decoding"]["seed"])
    assert again["choices"] == first["choices"]
    assert served.complete("otter", max_tokens=12)["choices"] != first["choices"]


def test_prompts_of_token_ids(served: Running) -> None:
    ids = served.engine.tokenizer.encode("three otters")
    whole = served.complete("three otters", max_tokens=8, temperature=0)["choices"][0]["text"]
    assert served.complete(ids, max_tokens=8, temperature=0)["choices"][0]["text"] == whole
    both = served.complete([ids, ids[:1]], max_tokens=8, temperature=0)["choices"]
    assert both[0]["text"] == whole
    assert len(both) == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_streams_say_what_whole_answers_say(served: Running, policy: str) -> None:
    body = {"max_tokens": 40, "seed": 4, "n": 2, "decoding": {"policy": policy}}
    for prompt in (DATA / "prompts.txt").read_text(encoding="utf-8").splitlines()[:3]:
        whole = served.complete(prompt, **body)
        stream = events(served, "/v1/completions", prompt=prompt, **body)
        assert texts_of(stream) == {choice["index"]: choice["text"] for choice in whole["choices"]}
        chat = {"messages": [{"role": "user", "content": prompt}], **body}
        answer = served.post("/v1/chat/completions", **chat).json()
        stream = events(served, "/v1/chat/completions", **chat)
        assert texts_of(stream, "chat") == {c["index"]: c["message"]["content"] for c in answer["choices"]}


def test_a_stream_begins_and_ends_as_clients_expect(served: Running) -> None:
    body = {"messages": HELLO, "max_tokens": 10, "temperature": 0}
    stream = events(served, "/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert stream[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert stream[0]["decoding"]["policy"] == "auto"
    reasons = [event["choices"][0]["finish_reason"] for event in stream[:-1]]
    assert reasons == [None] * (len(stream) - 2) + ["length"]
    assert stream[-2]["choices"][0]["delta"] == {}
    assert stream[-1]["choices"] == []
    usage = served.post("/v1/chat/completions", **body).json()["usage"]
    assert {**stream[-1]["usage"], "prompt_tokens_details": None} == {**usage, "prompt_tokens_details": None}
    assert len({event["id"] for event in stream}) == 1
    assert all("usage" not in event for event in events(served, "/v1/chat/completions", **body))


def test_a_trace_shows_every_token(served: Running) -> None:
    body: dict[str, Any] = {"prompt": "otter", "max_tokens": 40, "temperature": 0}
    body["decoding"] = {"policy": "speculative", "trace": True}
    tokens = served.complete(**body)["choices"][0]["tokens"]
    alone = served.engine.generate(Request("otter", 40))
    assert [token["id"] for token in tokens] == alone.token_ids
    assert "".join(token["text"] for token in tokens) == alone.text
    assert {token["source"] for token in tokens} <= {"exact", "accepted"}
    streamed = [event["choices"][0].get("tokens") or [] for event in events(served, "/v1/completions", **body)]
    assert [token for part in streamed for token in part] == tokens
    assert max(map(len, streamed)) > 1, "one event for all that a pass commits"


@pytest.mark.parametrize("policy", ["speculative", "auto", "autoregressive", "confidence"])
def test_a_streamed_trace_shows_what_was_proposed_and_when(served: Running, policy: str) -> None:
    body = {"prompt": "otter", "max_tokens": 40, "temperature": 0, "decoding": {"policy": policy, "trace": True}}
    choices = [event["choices"][0] for event in events(served, "/v1/completions", **body)]
    told = [choice for choice in choices if choice.get("tokens")]
    times = [choice["ms"] for choice in told]
    assert times[0] == 0
    assert times == sorted(times)
    for choice in told:
        after = -1
        for token in choice["tokens"]:
            found = [
                n for n, one in enumerate(choice["proposals"]) if (one["after"], one["id"]) == (after, token["id"])
            ]
            assert found or token["source"] != "accepted"
            after = found[0] if found else len(choice["proposals"])
    checked = sum(len(choice["proposals"]) for choice in told)
    assert (checked > 0) == (policy in ("speculative", "auto"))


def test_stop_strings_across_token_borders(served: Running) -> None:
    whole = served.complete("otter", max_tokens=60, temperature=0)["choices"][0]["text"]
    for place in range(1, len(whole) - 4, 3):
        stop = whole[place : place + 4]
        body = {"max_tokens": 60, "temperature": 0, "stop": ["never there", stop]}
        choice = served.complete("otter", **body)["choices"][0]
        assert choice["text"] == whole[: whole.find(stop)]
        assert choice["finish_reason"] == "stop"
        stream = events(served, "/v1/completions", prompt="otter", **body)
        assert texts_of(stream)[0] == choice["text"]


def test_logprobs_are_the_exact_heads(served: Running) -> None:
    body = {"max_tokens": 24, "temperature": 0}
    speculative = served.complete("otter", **body, logprobs=3, decoding={"policy": "speculative"})
    autoregressive = served.complete("otter", **body, logprobs=3, decoding={"policy": "autoregressive"})
    found = speculative["choices"][0]["logprobs"]
    assert found == autoregressive["choices"][0]["logprobs"]
    assert len(found["tokens"]) == 24
    for token, chosen, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert chosen <= 0
        assert chosen == max(top.values()) == top[token]
    text = speculative["choices"][0]["text"]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)
        assert offset < len(text)
    parts = [
        event["choices"][0]["logprobs"]
        for event in events(served, "/v1/completions", prompt="otter", **body, logprobs=3)
    ]
    for field, value in found.items():
        assert [entry for part in parts for entry in part[field]] == value


def test_chat_logprobs(served: Running) -> None:
    body = {"messages": HELLO, "max_tokens": 12, "seed": 3, "logprobs": True}
    content = served.post("/v1/chat/completions", **body, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    for entry in content:
        raw, name = bytes(entry["bytes"]), "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry["bytes"])
        assert entry["token"] == (name if "\ufffd" in raw.decode(errors="replace") else raw.decode())
    plain = served.post("/v1/chat/completions", **body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in plain] == [entry["logprob"] for entry in content]
    assert plain[0]["top_logprobs"] == []


def test_a_character_split_over_tokens(served: Running) -> None:
    """Every token of the tiny model's alphabet is a byte; a bias makes it write those of one character."""
    tokenizer = served.engine.tokenizer
    ids = tokenizer.encode("🦦")
    assert len(ids) == 4
    body: dict[str, Any] = {"logprobs": 20, "temperature": 0, "max_tokens": 9}
    found = served.complete("otter", **body, logit_bias={str(token): 100 for token in ids})["choices"][0]["logprobs"]
    bytes_of = Vocabulary(served.engine).bytes_of
    assert all(len(top) == 20 for top in found["top_logprobs"]), "no entry is lost to another with the same text"
    assert set(found["tokens"]) <= {f"bytes:\\x{bytes_of(token)[0]:02x}" for token in ids}


def test_offsets_and_names_go_by_bytes(served: Running) -> None:
    vocabulary = Vocabulary(served.engine)
    ids = [*served.engine.tokenizer.encode("a🦦b"), 1, *served.engine.tokenizer.encode("é")]
    offsets = Offsets(vocabulary)
    assert [offsets.push(token) for token in ids] == [0, 1, 1, 1, 1, 2, 3, 3, 3]
    names = vocabulary.names(ids)
    assert [names[token] for token in ids[:3]] == ["a", "bytes:\\xf0", "bytes:\\x9f"]
    assert names[1] == "<|start|>"
    assert len(set(vocabulary.names(range(served.engine.config.vocab_size)).values())) == 320


@pytest.fixture(scope="module")
def futile(tokenizer_folder: Path) -> Iterator[Running]:
    """A server whose model drafts what it never writes."""
    made = random_checkpoint(tiny_config())
    for name in ("mask_embedding.weight", "chain.output.weight"):
        if name in made.tensors:
            made.tensors[name][:] *= -3
    backend = any_backend()
    with running(make_engine(backend, made, tokenizer_folder)) as server:
        yield server


def test_drafts_that_are_useless_are_reported(futile: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bitmtp.server")
    body = {"prompt": "otter", "max_tokens": 60, "temperature": 0, "decoding": {"policy": "speculative"}}
    answer = futile.complete(**body)
    rate = answer["usage"]["draft_acceptance_rate"]
    assert rate < 0.02
    warning = f"only {rate:.2%} of the drafts were accepted; drafting costs time here and saves none"
    assert answer["decoding"]["warning"] == warning
    stream = events(futile, "/v1/completions", **body)
    assert [event["decoding"].get("warning") for event in stream if "decoding" in event] == [None, warning]
    assert futile.metric("bitmtp_texts_drafted_in_vain_total") == 2
    lines = [vars(record)["fields"] for record in caplog.records if record.getMessage() == "texts"]
    assert [line["warning"] for line in lines] == [warning] * 2
    plain = futile.complete(**(body | {"decoding": {"policy": "autoregressive"}}))
    assert "warning" not in plain["decoding"]
    assert futile.metric("bitmtp_texts_drafted_in_vain_total") == 2


def test_a_second_turn_reuses_the_first(served: Running) -> None:
    first = served.post("/v1/chat/completions", messages=HELLO, max_tokens=30, temperature=0).json()
    text = first["choices"][0]["message"]["content"]
    turns = [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": "Again."}]
    second = served.post("/v1/chat/completions", messages=turns, max_tokens=10, temperature=0).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    assert second["choices"][0]["message"]["content"] == served.engine.generate(Request(turns, 10)).text


def test_content_in_parts_and_a_developer(served: Running) -> None:
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello otters"}]
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "otters"}]},
    ]
    ids = [served.post("/tokenize", messages=messages).json() for messages in (plain, parts)]
    assert ids[0] == ids[1]
    assert ids[0]["count"] == len(ids[0]["tokens"])


@pytest.mark.parametrize("size", [1, 3])
def test_a_text_cut_within_a_character_does_not_show_it(served: Running, size: int) -> None:
    beginning = served.engine.tokenizer.encode("\U0001f6a2")[0]
    body: dict[str, Any] = {"prompt": "otter", "max_tokens": size, "logit_bias": {str(beginning): 100}}
    choice = served.complete(**body)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("\ufffd" * (size - 1), "length")
    events = served.post("/v1/completions", **body, stream=True).text.splitlines()
    shown = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in shown) == choice["text"]


def test_tokenize_models_and_health(served: Running) -> None:
    answer = served.post("/tokenize", prompt="three otters").json()
    assert served.engine.tokenizer.decode(answer["tokens"]) == "three otters"
    assert answer["max_model_len"] == served.engine.context
    models = served.client.get(served.url + "/v1/models").json()
    assert [model["id"] for model in models["data"]] == [MODEL]
    assert served.client.get(f"{served.url}/v1/models/{MODEL}").json() == models["data"][0]
    assert served.client.get(served.url + "/health").json() == {"status": "ok"}


@pytest.mark.parametrize("path", ["/health", "/v1/models", f"/v1/models/{MODEL}", "/metrics", "/openapi.json", "/"])
def test_head_is_get_without_a_body(served: Running, path: str) -> None:
    head, get = served.client.head(served.url + path), served.client.get(served.url + path)
    assert (head.status_code, head.content) == (get.status_code, b"") == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert served.client.head(served.url + "/nothing").status_code == 404


def test_metrics_count(served: Running) -> None:
    before = served.metric("bitmtp_generated_tokens_total")
    served.complete("otter", max_tokens=9, temperature=0)
    assert served.metric("bitmtp_generated_tokens_total") == before + 9
    assert served.metric("bitmtp_running") == 0


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"unheard_of": 1}, 400, "unheard_of"),
        ({"echo": "yes, please"}, 400, "echo"),
        ({"suffix": "x"}, 400, "suffix"),
        ({"best_of": 2}, 400, "best_of"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "warm"}, 400, "temperature"),
        ({"temperature": True}, 400, "temperature"),
        ({"best_of": True}, 400, "best_of"),
        ({"decoding": {"verify_bound": False}}, 400, "decoding.verify_bound"),
        ({"logit_bias": {"70": True}}, 400, "logit_bias"),
        ({"top_p": 1.5}, 400, "top_p"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"n": 17}, 400, "n"),
        ({"stop": ["x"] * 17}, 400, "stop"),
        ({"stop": ""}, 400, "stop"),
        ({"logit_bias": {"otter": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"504": 1, "0504": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"+70": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"7_0": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, 400, "logit_bias"),
        ({"stream_options": {}}, 400, "stream_options"),
        ({"model": "another"}, 404, "model"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": 5}, 400, "prompt"),
        ({"prompt": [1, "x"]}, 400, "prompt.0"),
        ({"prompt": None}, 400, "prompt"),
        ({"stop": [1]}, 400, "stop.0"),
        ({"stop": ["x", ""]}, 400, "stop.1"),
        ({"temperature": 0.0005}, 400, "temperature"),
        ({"prompt": [1, 99999]}, 400, "prompt"),
        ({"prompt": "otter " * 2000}, 400, "prompt"),
        ({"decoding": {"policy": "prophecy"}}, 400, "decoding.policy"),
        ({"decoding": {"policy": "autoregressive", "tau": 0.5}}, 400, "decoding"),
        ({"decoding": {"block_size": 17}}, 400, "decoding"),
        ({"decoding": {"policy": "hybrid", "block_size": 4, "min_prefix": 5}}, 400, "decoding"),
        ({"decoding": {"policy": "confidence"}, "logprobs": 1}, 400, "logprobs"),
    ],
)
def test_what_cannot_be_done_is_refused(served: Running, body: dict[str, Any], status: int, param: str | None) -> None:
    response = served.post("/v1/completions", **{"prompt": "otter", **body})
    assert response.status_code == status
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "\n" not in error["message"]


IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "riddle"}}}
FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "otter"}, "messages"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": "otter " * 2000}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 4, "max_completion_tokens": 4}, "max_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [FUNCTION], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        ({"response_format": SCHEMA}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities.0"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            "messages",
        ),
    ],
)
def test_chat_refuses_likewise(served: Running, body: dict[str, Any], param: str) -> None:
    response = served.post("/v1/chat/completions", **{"messages": HELLO, "max_tokens": 4, **body})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert "\n" not in error["message"]


def test_a_union_says_what_each_of_its_types_expects(served: Running) -> None:
    message = served.post("/v1/completions", prompt=5).json()["error"]["message"]
    assert message == "prompt: Input should be a valid string; or: Input should be a valid list"


@pytest.mark.parametrize("name", ["unheard_of", "prediction", "max_tokens", "logprobs", "decoding", "stream_options"])
def test_null_is_nothing(served: Running, name: str) -> None:
    answer = served.complete("otter", **{"max_tokens": 3, "seed": 1, "decoding": {"trace": None}, name: None})
    expected = served.complete("otter", **({} if name == "max_tokens" else {"max_tokens": 3}), seed=1)
    assert answer["choices"] == expected["choices"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "x", "temperature": NaN}',
        b"[" * 100_000,
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "\\udfff": 1}',
        b'{"prompt": "x", "stop": ["\\ud83d"]}',
    ],
)
def test_broken_bodies(served: Running, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = served.client.post(served.url + "/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


GENERATING = ["/v1/completions", "/v1/chat/completions", "/tokenize"]


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_a_body_of_another_type_is_told_apart(served: Running, path: str, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = served.client.post(served.url + path, content=b'{"prompt": "Hello"}', headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"
    assert "application/json" in response.json()["error"]["message"]


def test_a_content_type_may_have_parameters(served: Running) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    response = served.client.post(served.url + "/tokenize", content=b'{"prompt": "Hello"}', headers=headers)
    assert response.status_code == 200


def nested(depth: int) -> dict[str, Any]:
    """A JSON schema of objects within objects."""
    schema: dict[str, Any] = {"type": "boolean"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


@pytest.mark.parametrize("depth", [80, 95, 240, 400])
def test_depth_is_the_clients_error(served: Running, depth: int) -> None:
    """Wherever something nested may stand; above 200 levels it is no JSON to this server."""
    tool = {"type": "function", "function": {"name": "f", "parameters": nested(depth)}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": nested(depth)}}
    call = {"name": "f", "arguments": json.dumps(nested(depth))}
    turns = [*HELLO, {"role": "assistant", "tool_calls": [{"id": "1", "function": call}]}]
    bodies: list[dict[str, Any]] = [
        {"decoding": nested(depth)},
        {"logit_bias": nested(depth)},
        {"tools": [tool]},
        {"tools": [tool], "tool_choice": "required"},
        {"response_format": form},
        {"messages": turns},
    ]
    for body in bodies:
        response = served.post("/v1/chat/completions", **{"messages": HELLO, "max_tokens": 2, **body})
        assert response.status_code in ((200, 400) if depth < 100 else (400,)), body.keys()


def test_unknown_paths_and_methods(served: Running) -> None:
    for method, path in [("GET", "/v1/nothing"), ("POST", "/v1/responses"), ("DELETE", "/index.html")]:
        response = served.client.request(method, served.url + path)
        assert response.status_code == 404
        assert response.json()["error"]["message"] == f"{method} {path}: Not Found"
    assert "error" in served.client.get(served.url + "/v1/completions").json()


def test_a_deadline_is_an_error_in_either_form(served: Running) -> None:
    body = {"prompt": "otter", "max_tokens": 1500, "timeout": 1e-6}
    response = served.post("/v1/completions", **body)
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "timeout"
    assert events_of_error(served, body)["error"]["code"] == "timeout"


def events_of_error(server: Running, body: dict[str, Any]) -> dict[str, Any]:
    """The last event of a stream that fails."""
    with server.client.stream("POST", server.url + "/v1/completions", json={**body, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    return dict(json.loads(lines[-1].removeprefix("data: ")))


@pytest.fixture(scope="module")
def lossy(served: Running) -> Iterator[Running]:
    from bitmtp.core.policies import make_policy

    with running(served.engine, policy=make_policy("hybrid", 16, block_size=6, tau=0.3, min_prefix=2)) as server:
        yield server


def test_the_servers_policy_holds_where_a_request_is_silent(lossy: Running) -> None:
    report = lossy.complete("otter", max_tokens=4)["decoding"]
    assert (report["policy"], report["block_size"], report["lossless"]) == ("hybrid", 6, False)
    report = lossy.complete("otter", max_tokens=4, decoding={"block_size": 3})["decoding"]
    assert (report["policy"], report["block_size"]) == ("hybrid", 3)
    report = lossy.complete("otter", max_tokens=4, decoding={"policy": "speculative"})["decoding"]
    assert (report["policy"], report["block_size"], report["lossless"]) == ("speculative", 8, True)
