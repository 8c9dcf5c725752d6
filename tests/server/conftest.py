"""Servers around the tiny model: real sockets, on a thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import any_backend, make_engine, random_checkpoint, tiny_config

from bitmtp.core.costs import CostTable, Tuning
from bitmtp.engine import Engine
from bitmtp.server.app import create_app
from bitmtp.server.host import Server, listen, make_server
from bitmtp.server.options import ServerOptions
from bitmtp.server.scheduler import Scheduler

MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class Running:
    """A server that listens."""

    url: str
    port: int
    engine: Engine
    server: Server
    scheduler: Scheduler
    client: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Send a JSON body."""
        return self.client.post(self.url + path, json=body)

    def post_as(self, key: str, path: str, **body: Any) -> httpx.Response:
        """Send a JSON body with an API key."""
        return self.client.post(self.url + path, json=body, headers={"authorization": f"Bearer {key}"})

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """A plain completion that must succeed."""
        response = self.post("/v1/completions", prompt=prompt, **body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def metric(self, name: str, key: str = "") -> float:
        """The value of a line of ``/metrics``."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        lines = self.client.get(self.url + "/metrics", headers=headers).text.splitlines()
        return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))


@contextmanager
def running(engine: Engine, **options: Any) -> Iterator[Running]:
    """Serve an engine on a free port of loopback."""
    chosen = ServerOptions(**{"model_name": MODEL, "policy": engine.default_policy(), **options})
    app = create_app(engine, chosen)
    sockets = listen("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    server = make_server(app, chosen, lambda: app.state.scheduler.stop(chosen.grace))
    thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        with httpx.Client(verify=False, timeout=60) as client:
            yield Running(f"http://127.0.0.1:{port}", port, engine, server, app.state.scheduler, client)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Until a condition holds; fails if it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


# Given, so that `auto` decides the same in every run; rows cost little, so that it drafts.
COSTS = Tuning(CostTable((1, 8, 64), (3.0, 4.0, 30.0)))


def make(tokenizer_folder: Path) -> Engine:
    """A tiny model with room for long prompts, on the backend that tests run on."""
    made = make_engine(any_backend(), random_checkpoint(tiny_config(max_position=2048)), tokenizer_folder)
    return Engine(made.backend, made.tokenizer, made.context, COSTS)


@pytest.fixture(scope="session")
def engine(tokenizer_folder: Path) -> Engine:
    """Shared by tests whose servers and schedulers are idle when they end: one thread at a time may use a backend."""
    return make(tokenizer_folder)


@pytest.fixture
def own_engine(tokenizer_folder: Path) -> Engine:
    """For a server that may still be at work when its test ends."""
    return make(tokenizer_folder)


@pytest.fixture(scope="session")
def served(engine: Engine) -> Iterator[Running]:
    """A server with the default options, shared by tests that leave it as it is."""
    with running(engine) as server:
        yield server
