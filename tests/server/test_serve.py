"""``bitmtp serve`` as a process: it starts, serves, and ends in order."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from conftest import any_backend

from .conftest import wait_for

BACKEND = any_backend()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "bitmtp", "serve", "--backend", BACKEND, *arguments]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


@contextmanager
def process(model: Path, *arguments: str, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server that answers, and its address."""
    port = free_port()
    line = command("--model", str(model), "--port", str(port), "--threads", "1", *arguments)
    server = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    url = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        assert server.poll() is None, server.stderr and server.stderr.read()
        try:
            return httpx.get(url + "/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for(healthy, 60)
        yield url, server
    finally:
        server.kill()
        server.wait()


def test_it_serves_and_stops(tiny_model: Path) -> None:
    with process(tiny_model, "--policy", "hybrid", "--tau", "0.5", BITMTP_API_KEYS="sk-secret") as (url, server):
        assert httpx.get(url + "/v1/models").status_code == 401
        headers = {"authorization": "Bearer sk-secret"}
        body = {"prompt": "the hidden otter", "max_tokens": 5}
        answer = httpx.post(url + "/v1/completions", json=body, headers=headers).json()
        assert answer["model"] == "tiny"
        assert answer["decoding"]["policy"] == "hybrid"
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=30)
    assert re.search(r"bitmtp: tiny at http://127\.0\.0\.1:\d+", log)
    assert "sk-secret" not in log
    assert "hidden" not in log
    assert "Traceback" not in log
    assert '"event": "texts"' in log


def test_a_client_that_goes_away_does_not_end_it(tiny_model: Path) -> None:
    with process(tiny_model) as (url, server):
        for _ in range(3):
            body = {"prompt": "otter", "max_tokens": 400, "stream": True}
            with httpx.stream("POST", url + "/v1/completions", json=body) as response:
                next(response.iter_lines())
        assert httpx.post(url + "/v1/completions", json={"prompt": "otter", "max_tokens": 2}).status_code == 200
        assert server.poll() is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--slots", "0"], "slots"),
        (["--policy", "prophecy"], "'--policy': 'prophecy' is not one of"),
        (["--policy", "autoregressive", "--tau", "0.5"], "tau has no meaning"),
        (["--block-size", "99"], "block size 99"),
        (["--api-key-file", "/nowhere/keys"], "/nowhere/keys"),
        (["--host", "203.0.113.1"], "cannot listen on 203.0.113.1"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_mistakes_are_one_line(tiny_model: Path, arguments: list[str], said: str) -> None:
    done = subprocess.run(command("--model", str(tiny_model), *arguments), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_port_in_use(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            command("--model", str(tiny_model), "--port", port), capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert len(done.stderr.splitlines()) == 1
