"""Two replicas on a local Ray: the texts of one engine, prefixes found again, and a replica killed under load."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import any_backend, random_checkpoint, tiny_config, write_model

pytest.importorskip("ray", reason="the extra `ray` is not installed")

from bitmtp.engine import Engine, Request
from bitmtp.sampling import Sampling
from bitmtp.server.host import listen, make_server
from bitmtp.server.middleware import LimitBody
from bitmtp.server.options import ServerOptions
from bitmtp.server.replicas import beginning, start_replicas

from .conftest import MODEL, wait_for


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Callable[[], Engine]:
    """What each replica loads: a tiny model that can write for seconds."""
    made = random_checkpoint(tiny_config(max_position=8192))
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny", made, tokenizer_folder)
    return partial(Engine.load, folder, backend=any_backend(), threads=1)


@pytest.fixture(scope="module")
def small_engine(load: Callable[[], Engine]) -> Engine:
    """The same, here."""
    return load()


@pytest.fixture(scope="module")
def url(load: Callable[[], Engine], small_engine: Engine) -> Iterator[str]:
    """A gateway before two replicas."""
    import ray
    from ray import serve

    options = ServerOptions(MODEL, small_engine.default_policy(), grace=1)
    gateway = start_replicas(load, options, 2)
    sockets = listen("127.0.0.1", 0)
    server = make_server(LimitBody(gateway, options.max_body_bytes, options.receive_timeout), options)
    thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    yield f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(30)
    serve.shutdown()
    ray.shutdown()


def replica_processes() -> set[int]:
    """Process ids of the replicas."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if command.startswith(b"ray::ServeReplica:bitmtp"):
            found.add(int(folder.name))
    return found


def complete(url: str, prompt: str, seed: int, tokens: int = 24, **body: Any) -> httpx.Response:
    asked = {"prompt": prompt, "max_tokens": tokens, "seed": seed, **body}
    return httpx.post(url + "/v1/completions", json=asked, timeout=120)


def alone(engine: Engine, prompt: str, seed: int, tokens: int = 24) -> str:
    return engine.generate(Request(prompt, tokens, None, Sampling(temperature=1), seed)).text


def test_texts_streams_and_errors_pass_through(url: str, small_engine: Engine) -> None:
    assert complete(url, "otter", 3).json()["choices"][0]["text"] == alone(small_engine, "otter", 3)
    stream = complete(url, "otter", 3, stream=True).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == alone(small_engine, "otter", 3)
    assert stream.rstrip().endswith("[DONE]")
    assert complete(url, "otter", 3, unheard_of=1).status_code == 400
    assert httpx.get(url + "/v1/models").json()["data"][0]["id"] == MODEL
    assert httpx.get(url + "/health").status_code == 200


def test_a_prefix_is_found_again(url: str) -> None:
    for seed in range(4):
        prompt = f"{seed} otters went to the river to look at the boats"
        cached = [
            complete(url, prompt, seed, 2).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(4)
        ]
        assert sum(count > 0 for count in cached[1:]) >= 2, cached


def test_a_client_that_goes_away_is_given_up_behind_the_gateway(url: str) -> None:
    body = {"prompt": "otter", "max_tokens": 8000, "stream": True, "logprobs": 20, "logit_bias": {"2": -100}}
    for _ in range(2):
        with httpx.stream("POST", url + "/v1/completions", json=body) as response:
            next(response.iter_lines())
    wait_for(lambda: 'bitmtp_texts_total{end="cancelled"}' in httpx.get(url + "/metrics").text)


def test_a_killed_replica_loses_no_text(url: str, small_engine: Engine) -> None:
    wait_for(lambda: len(replica_processes()) == 2, 60)
    before = replica_processes()
    asks = [(f"otter number {index % 7}", index) for index in range(60)]
    with ThreadPoolExecutor(6) as threads:
        answers = [threads.submit(complete, url, prompt, seed, 40) for prompt, seed in asks]
        wait_for(lambda: sum(answer.done() for answer in answers) >= 10)
        os.kill(min(before), signal.SIGKILL)
        done = [answer.result() for answer in answers]
    assert [answer.status_code for answer in done] == [200] * len(asks)
    assert [answer.json()["choices"][0]["text"] for answer in done] == [alone(small_engine, *ask, 40) for ask in asks]
    wait_for(lambda: len(replica_processes() - before) == 1, 60)


def test_beginnings() -> None:
    def key(**body: Any) -> str:
        return beginning(json.dumps(body).encode())

    first, other = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    system = {"role": "system", "content": "s"}
    assert key(messages=[first]) == key(messages=[first, other], seed=3) != key(messages=[other])
    assert key(messages=[system, first]) != key(messages=[system, other])
    assert key(prompt="x" * 2000 + "a") == key(prompt="x" * 2000 + "b") != key(prompt="y")
    assert key(prompt=[1, 2]) != key(prompt=[1, 3])
    assert {beginning(broken) for broken in (b"", b"[]", b"{", b"\xff", b'{"messages": [1]}', b"{}")} == {""}
