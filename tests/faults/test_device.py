"""A device without memory, or without life: its texts fail with a reason, and the process ends if nothing goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import write_tokenizer

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
from server.conftest import make, wait_for
from server.test_scheduler import Text, prompt, scheduling

from bitmtp.backends.base import Row
from bitmtp.engine import Engine, Request
from bitmtp.server.errors import ApiError


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return make(write_tokenizer(tmp_path))


def test_no_memory_for_one_text_is_the_end_of_that_one(engine: Engine) -> None:
    """Whoever asks for the position that there is no room for fails, and the others go on with what they wrote."""
    with scheduling(engine, slots=4) as (scheduler, recording):
        texts = [Text(engine, Request(prompt(seed, 5), 60)) for seed in range(4)]
        greedy: list[int] = []

        def full(rows: Sequence[Row]) -> None:
            greedy.extend(row.sequence for row in rows if row.position > 30 and not greedy)
            if any(row.sequence in greedy and row.position > 30 for row in rows):
                raise MemoryError("out of memory")

        recording.before = full
        scheduler.submit([text.job for text in texts])
        ends = [text.end() for text in texts]
    failed = [update.error for _, update in ends if update.error]
    assert [error.status for error in failed] == [500]
    for text, (tokens, update) in zip(texts, ends, strict=True):
        assert update.error or tokens == engine.generate(text.job.request).token_ids


def test_a_dead_device_ends_the_scheduler(engine: Engine) -> None:
    with scheduling(engine, slots=2) as (scheduler, recording):
        texts = [Text(engine, Request(prompt(seed, 5), 60)) for seed in range(4)]

        def dead(_: Sequence[Row]) -> None:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

        recording.before = dead
        scheduler.submit([text.job for text in texts])
        assert all(text.end()[1].error for text in texts), "those in the queue are told as well"
        wait_for(lambda: not scheduler.alive)
        assert "ILLEGAL_ADDRESS" in str(scheduler.fault)
        with pytest.raises(ApiError, match="shutting down"):
            scheduler.submit([Text(engine, Request([5], 1)).job])


SERVE = """
import sys
from bitmtp.backends.reference import ReferenceBackend
step = ReferenceBackend.step
def dead(self, rows, **options):
    if any(row.position > 40 for row in rows):
        ReferenceBackend.step = lambda *_, **__: 1 / 0
    return step(self, rows, **options) if ReferenceBackend.step is dead else 1 / 0
ReferenceBackend.step = dead
from bitmtp.cli.app import run
sys.exit(run(sys.argv[1:]))
"""


def test_a_dead_device_ends_the_server_with_a_word(tiny_model: Path, tmp_path: Path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words: list[Any] = ["serve", "--model", tiny_model, "--backend", "reference", "--port", port]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", SERVE, *map(str, words)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: answers(url), 60)
        body = {"prompt": [9, 9, 9], "max_tokens": 200, "logit_bias": {"2": -100}}
        response = httpx.post(url + "/v1/completions", json=body, timeout=60)
        assert response.status_code == 500
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "writes no text any more" in said.splitlines()[-1]


def answers(url: str) -> bool:
    """Whether a server is there."""
    try:
        return httpx.get(url + "/health").status_code == 200
    except httpx.TransportError:
        return False
