"""Clients that read a byte a second or go away by the hundred, while others are served."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import write_tokenizer

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
from server.conftest import Running, make, running, wait_for

ABORTED = 300


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(make(write_tokenizer(tmp_path_factory.mktemp("words"))), slots=4, queue=ABORTED) as made:
        yield made


def asked(tokens: int) -> bytes:
    """A stream of so many tokens, as it goes over the wire."""
    body = json.dumps({"prompt": [9, 9, 9], "max_tokens": tokens, "stream": True, "logit_bias": {"2": -100}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


def test_a_client_that_reads_a_byte_at_a_time_gets_everything(server: Running) -> None:
    """And holds up nobody: its text is written at the pace of the others."""
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    slow.connect(("127.0.0.1", server.port))
    slow.sendall(asked(40))
    assert slow.recv(1) == b"H"
    for _ in range(5):
        assert server.complete("otter", max_tokens=4)["usage"]["completion_tokens"]
        assert slow.recv(1)
    wait_for(lambda: server.metric("bitmtp_running") == 0)
    slow.settimeout(20)
    rest = b""
    while b"[DONE]" not in rest:
        rest += slow.recv(64)
    slow.close()


def test_hundreds_of_aborted_streams_leave_nothing_behind(server: Running) -> None:
    def abort(number: int) -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            client.sendall(asked(1500))
            if number % 3:
                client.recv(200)

    threads = threading.active_count()
    before = server.complete("otter", max_tokens=8, temperature=0)["choices"]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(abort, range(ABORTED)))
    wait_for(lambda: server.metric("bitmtp_running") + server.metric("bitmtp_waiting") == 0, 60)
    wait_for(lambda: len(server.server.server_state.connections) <= 2)
    assert server.complete("otter", max_tokens=8, temperature=0)["choices"] == before
    assert threading.active_count() <= threads + 50
    ended = server.client.get(server.url + "/metrics").text
    assert 'bitmtp_texts_total{end="cancelled"}' in ended
    assert "internal_error" not in ended
