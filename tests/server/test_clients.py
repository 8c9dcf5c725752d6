"""Clients that others wrote, unchanged."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA, END

from bitmtp.core.policies import make_policy
from bitmtp.engine import Request
from bitmtp.evaluation.likelihood import log_likelihood

from .conftest import MODEL, Running

HELLO = [{"role": "user", "content": "Say hello to the three otters."}]


@pytest.fixture(scope="module")
def openai_client(served: Running) -> Iterator[Any]:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    with openai.OpenAI(base_url=served.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_openai_chat(served: Running, openai_client: Any) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_completion_tokens": 20, "temperature": 0}
    answer = openai_client.chat.completions.create(**body, extra_body={"decoding": {"policy": "speculative"}})
    alone = served.engine.generate(Request(HELLO, 20, make_policy("speculative", 16)))
    assert answer.choices[0].message.content == alone.text
    assert answer.usage.completion_tokens == 20
    assert answer.usage.mean_acceptance_length == pytest.approx(alone.mean_acceptance_length)
    stream = list(openai_client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == alone.text
    assert stream[-1].usage.total_tokens == answer.usage.total_tokens


def test_openai_completions_and_models(openai_client: Any) -> None:
    answer = openai_client.completions.create(model=MODEL, prompt="otter", max_tokens=8, seed=3, n=2, logprobs=2)
    stream = openai_client.completions.create(model=MODEL, prompt="otter", max_tokens=8, seed=3, n=2, stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]
    assert len(answer.choices[0].logprobs.token_logprobs) == 8
    assert [model.id for model in openai_client.models.list()] == [MODEL]


def test_openai_tools_and_schemas(openai_client: Any) -> None:
    parameters = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    parameters["additionalProperties"] = False
    tool = {"type": "function", "function": {"name": "light", "parameters": parameters}}
    body: dict[str, Any] = {"model": MODEL, "messages": HELLO, "seed": 1, "max_tokens": 120}
    answer = openai_client.chat.completions.create(**body, tools=[tool], tool_choice="required").choices[0]
    (call,) = answer.message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"on"}
    followed = [*HELLO, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    again = openai_client.chat.completions.create(**{**body, "messages": followed}, tools=[tool])
    assert again.choices[0].finish_reason in ("stop", "length", "tool_calls")
    schema = {"type": "json_schema", "json_schema": {"name": "light", "schema": parameters, "strict": True}}
    answer = openai_client.chat.completions.create(**body, response_format=schema).choices[0]
    assert set(json.loads(answer.message.content)) == {"on"}


def test_openai_helpers_can_send_back_what_they_give(openai_client: Any) -> None:
    """A streamed, a parsed and a plain answer, each as its own helper returns it."""
    parameters = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    parameters["additionalProperties"] = False
    tool = {"type": "function", "function": {"name": "light", "parameters": parameters, "strict": True}}
    form = {"type": "json_schema", "json_schema": {"name": "light", "schema": parameters, "strict": True}}
    completions = openai_client.chat.completions
    for asked in (
        {"tools": [tool], "tool_choice": "required"},
        {"response_format": form},
        {"logit_bias": {str(END): 8}},
    ):
        body: dict[str, Any] = {"model": MODEL, "messages": HELLO, "seed": 1, "max_tokens": 120, **asked}
        with completions.stream(**body) as stream:
            streamed = stream.get_final_completion()
        for answer in (streamed, completions.parse(**body), completions.create(**body)):
            message = answer.choices[0].message
            for form_of_it in (message, message.model_dump(), message.model_dump(exclude_none=True)):
                turns = [*HELLO, form_of_it, {"role": "user", "content": "Again."}]
                again = completions.create(model=MODEL, messages=turns, max_tokens=2)
                assert again.usage.completion_tokens


def test_openai_parameters_may_be_null(openai_client: Any) -> None:
    """Every parameter of the API, supported here or not."""
    for call, begin in (
        (openai_client.chat.completions.create, {"messages": HELLO}),
        (openai_client.completions.create, {"prompt": "otter"}),
    ):
        names = set(inspect.signature(call).parameters) - {*begin, "model", "timeout"}
        nulls = {name: None for name in names if not name.startswith("extra_")}
        answer = call(model=MODEL, **begin, extra_body=nulls | {"max_tokens": 2})
        assert answer.usage.completion_tokens == 2


def test_openai_errors(openai_client: Any) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="unheard_of"):
        openai_client.completions.create(model=MODEL, prompt="x", extra_body={"unheard_of": 1})
    with pytest.raises(openai.NotFoundError):
        openai_client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.APIError, match="time limit"):
        list(openai_client.completions.create(model=MODEL, prompt="x", stream=True, extra_body={"timeout": 1e-6}))


@pytest.mark.parametrize("client", sorted(file.stem for file in (DATA / "requests").glob("*.json")))
def test_what_clients_send_is_taken(served: Running, client: str) -> None:
    for asked in json.loads((DATA / "requests" / f"{client}.json").read_text(encoding="utf-8")):
        body = {**asked["body"], "model": MODEL, "max_completion_tokens": None, "max_tokens": 8}
        response = served.post(asked["path"], **body)
        assert response.status_code == 200, f"{asked}: {response.text}"


@pytest.mark.filterwarnings("ignore")
def test_litellm(served: Running) -> None:
    litellm = pytest.importorskip("litellm", reason="the litellm package is not installed")
    body: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "messages": HELLO,
        "api_base": served.url + "/v1",
        "api_key": "unused",
        "max_tokens": 20,
        "temperature": 0,
    }
    alone = served.engine.generate(Request(HELLO, 20)).text
    assert litellm.completion(**body).choices[0].message.content == alone
    message = litellm.completion(**body).choices[0].message.model_dump()
    again = litellm.completion(**{**body, "messages": [*HELLO, message, *HELLO]})
    assert again.choices[0].finish_reason in ("stop", "length")
    parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**body, stream=True)]
    assert "".join(parts) == alone


TASK = """task: repeat
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["|||"], max_gen_toks: 12, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def test_lm_eval(served: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-evaluation-harness over HTTP finds the answers that the engine writes alone, and one wrong key."""
    for module in ("lm_eval", "tenacity"):
        pytest.importorskip(module, reason="pip install 'lm-eval[api]'")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lines = []
    for number in range(4):
        question = f"Say {number} otters."
        text = served.engine.generate(Request([{"role": "user", "content": question}], 12, stop=("|||",))).text
        lines.append({"question": question, "answer": text if number else text + "!"})
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (tmp_path / "repeat.yaml").write_text(TASK.format(file=tmp_path / "questions.jsonl"), encoding="utf-8")
    where = f"model={MODEL},base_url={served.url}/v1/chat/completions,num_concurrent=2,max_retries=1"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-chat-completions", "--model_args", where]
    command += ["--tasks", "repeat", "--include_path", str(tmp_path), "--apply_chat_template"]
    command += ["--output_path", str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["repeat"]["exact_match,none"] == 0.75


CHOICES = """task: pick
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def test_lm_eval_likelihoods(
    served: Running, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each likelihood that lm-evaluation-harness finds over HTTP is the one found in this process, to the last bit."""
    for module in ("lm_eval", "tenacity", "transformers"):
        pytest.importorskip(module, reason="pip install 'lm-eval[api]' transformers")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lines = [
        {"question": f"Otter {number} said:", "choices": ["red", "blue", "green and yellow"], "answer": number % 3}
        for number in range(4)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (tmp_path / "pick.yaml").write_text(CHOICES.format(file=tmp_path / "questions.jsonl"), encoding="utf-8")
    words = tmp_path / "words"
    words.mkdir()
    settings = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (words / "tokenizer_config.json").write_text(json.dumps(settings))
    (words / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    where = f"model={MODEL},base_url={served.url}/v1/completions,tokenizer={words},num_concurrent=2,max_retries=1"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", where]
    command += ["--tasks", "pick", "--include_path", str(tmp_path), "--batch_size", "2"]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(found) == len(lines)
    encode = served.engine.tokenizer.encode
    for sample in found:
        context = encode(sample["doc"]["question"])
        for choice, (told, greedy) in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            whole = encode(f"{sample['doc']['question']} {choice}")
            expected = log_likelihood(served.engine, context, whole[len(context) :])
            assert (float(told), str(greedy) == "True") == expected
