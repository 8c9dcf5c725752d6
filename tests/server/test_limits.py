"""Keys, limits, and clients that misbehave while others are served."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bitmtp.engine import Engine
from bitmtp.errors import ConfigError
from bitmtp.server import logs
from bitmtp.server.options import ServerOptions

from .conftest import Running, make, running, wait_for

KEYS = ("sk-first", "sk-second-ü")


@pytest.fixture(scope="module")
def strict(tokenizer_folder: Path) -> Iterator[Running]:
    """A server with low limits."""
    limits = {"max_body_bytes": 20_000, "receive_timeout": 0.5, "stall_timeout": 0.5, "max_connections": 20}
    with running(make(tokenizer_folder), api_keys=KEYS, slots=2, queue=1, **limits) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json"])
def test_a_key_is_required(strict: Running, path: str) -> None:
    client = strict.client
    for sent in (None, "Bearer sk-third", "Bearer", "Basic sk-first", "sk-first"):
        headers = {} if sent is None else {"authorization": sent}
        response = client.get(strict.url + path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert client.get(strict.url + path, headers=bearer("sk-first")).status_code == 200
    assert client.get(strict.url + path, headers={b"authorization": b"Bearer sk-second-\xc3\xbc"}).status_code == 200
    assert client.get(strict.url + "/health").status_code == 200


def test_keys_are_never_shown() -> None:
    from bitmtp.core.policies import make_policy

    assert "sk-" not in repr(ServerOptions("m", make_policy("autoregressive", 1), api_keys=KEYS))


def test_large_bodies_are_refused(strict: Running) -> None:
    url, headers = strict.url + "/v1/completions", {**bearer("sk-first"), "content-type": "application/json"}
    response = strict.client.post(url, content=b"x" * 20_001, headers=headers)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    chunks = (b"x" * 1000 for _ in range(30))
    assert strict.client.post(url, content=chunks, headers=headers).status_code == 413


def connect(server: Running, data: bytes = b"") -> socket.socket:
    """A raw connection that has sent ``data``."""
    client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    client.sendall(data)
    return client


def everything(client: socket.socket) -> bytes:
    """What the server sends until it closes; empty too if it resets the connection."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize("data", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: "])
def test_a_request_that_does_not_arrive_is_cut_off(strict: Running, data: bytes) -> None:
    with connect(strict, data) as client:
        assert everything(client) == b""


def test_a_body_that_does_not_arrive_is_answered(strict: Running) -> None:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS[0]}\r\ncontent-length: 100\r\n\r\n{{"
    )
    with connect(strict, head.encode()) as client:
        assert everything(client).startswith(b"HTTP/1.1 408")


def test_an_idle_connection_is_closed(strict: Running) -> None:
    with connect(strict, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n") as client:
        assert everything(client).startswith(b"HTTP/1.1 200")


def test_connections_beyond_the_limit_cost_the_idle_ones(strict: Running) -> None:
    clients = [connect(strict) for _ in range(60)]
    wait_for(lambda: len(strict.server.server_state.connections) <= 20)
    assert strict.client.get(strict.url + "/health").status_code == 200
    for client in clients:
        client.close()


def post_head(length: int) -> bytes:
    """The head of a request with a body of this length."""
    fields = [
        "host: x",
        f"authorization: Bearer {KEYS[0]}",
        "content-type: application/json",
        f"content-length: {length}",
    ]
    return "\r\n".join(["POST /v1/completions HTTP/1.1", *fields, "", ""]).encode()


def long_request(*, stream: bool = True) -> bytes:
    """A completion that takes a while, with as many bytes an event as the API allows."""
    asked = {"prompt": [9, 9, 9], "max_tokens": 2000, "stream": stream, "logprobs": 20, "logit_bias": {"2": -100}}
    body = json.dumps(asked).encode()
    return post_head(len(body)) + body


def test_a_client_that_stops_reading_is_cut_off(strict: Running) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", strict.port))
        client.sendall(long_request())
        address = client.getsockname()
        wait_for(lambda: address in [connection.client for connection in strict.server.server_state.connections])
        answer = strict.post_as(KEYS[0], "/v1/completions", prompt="otter", max_tokens=4)
        assert answer.status_code == 200, "others are served meanwhile"
        wait_for(lambda: address not in [connection.client for connection in strict.server.server_state.connections])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot(strict: Running, stream: bool) -> None:
    clients = [connect(strict, long_request(stream=stream)) for _ in range(2)]
    wait_for(lambda: strict.metric("bitmtp_running", KEYS[0]) == 2)
    for client in clients:
        client.close()
    wait_for(lambda: strict.metric("bitmtp_running", KEYS[0]) == 0)
    assert strict.post_as(KEYS[0], "/v1/completions", prompt="otter", max_tokens=4).status_code == 200


def test_a_full_queue_is_429(strict: Running) -> None:
    clients = [connect(strict, long_request()) for _ in range(3)]
    wait_for(lambda: strict.metric("bitmtp_running", KEYS[0]) + strict.metric("bitmtp_waiting", KEYS[0]) == 3)
    response = strict.post_as(KEYS[0], "/v1/completions", prompt="otter", max_tokens=4)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "rate_limit_error"
    for client in clients:
        client.close()


def test_no_origin_may_call_unless_named(served: Running, own_engine: Engine) -> None:
    headers = {"origin": "https://example.org", "access-control-request-method": "POST"}
    response = served.client.options(served.url + "/v1/completions", headers=headers)
    assert "access-control-allow-origin" not in response.headers
    with running(own_engine, cors_origins=("https://example.org",)) as server:
        response = server.client.options(server.url + "/v1/completions", headers=headers)
        assert response.headers["access-control-allow-origin"] == "https://example.org"


@pytest.mark.parametrize("shown", [False, True])
def test_logs_hold_no_prompt_unless_asked(own_engine: Engine, shown: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bitmtp.server")
    with running(own_engine, log_prompts=shown) as server:
        server.complete("the secret otter", max_tokens=3, user="somebody")
    lines = [json.loads(logs.JsonLines().format(record)) for record in caplog.records]
    (line,) = [line for line in lines if line["event"] == "texts"]
    assert (line["completion_tokens"], line["user"], line["end"]) == (3, "somebody", ["length"])
    assert ("secret" in json.dumps(lines)) == shown
    assert any(line["event"] == "request" and line["status"] == 200 for line in lines)


def test_stopping_reports_a_stream_that_does_not_end(own_engine: Engine) -> None:
    with running(own_engine, grace=0) as server:
        client = connect(server, long_request())
        wait_for(lambda: server.metric("bitmtp_running") == 1)
        server.server.should_exit = True
        assert b'"code": "shutting_down"' in everything(client)


@pytest.mark.parametrize("change", [{"slots": 0}, {"queue": -1}, {"timeout": 0.0}, {"api_keys": (" ",)}])
def test_options_out_of_range(engine: Engine, change: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        ServerOptions(**{"model_name": "m", "policy": engine.default_policy(), **change})


def test_a_huge_prompt_is_refused_while_others_are_served(served: Running) -> None:
    request = ("POST", served.url + "/v1/completions")
    with ThreadPoolExecutor(1) as threads:
        huge = threads.submit(served.client.request, *request, json={"prompt": "otter " * 600_000})
        answers = 0
        while not huge.done():
            assert served.client.get(served.url + "/health").status_code == 200
            answers += 1
    assert huge.result().status_code == 400
    assert "context" in huge.result().json()["error"]["message"]
    assert answers > 20
