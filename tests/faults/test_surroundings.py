"""Files that change under a model in use, and clocks that jump."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import httpx
import pytest

from bitmtp.engine import Engine, Request
from bitmtp.errors import CheckpointError
from bitmtp.server.scheduler import Scheduler

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("change", ["truncated", "overwritten", "gone"])
def test_a_model_in_use_does_not_look_at_its_files_again(tiny_model: Path, tmp_path: Path, change: str) -> None:
    """It is read whole when it is loaded: nothing that happens to the files changes a text, or ends the process."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    engine = Engine.load(folder, backend="reference")
    before = engine.generate(Request("otter", 12)).token_ids
    weights = folder / WEIGHTS
    if change == "truncated":
        with weights.open("r+b") as file:
            file.truncate(1000)
    elif change == "overwritten":
        with weights.open("r+b") as file:
            file.write(bytes(weights.stat().st_size))
    else:
        shutil.rmtree(folder)
    assert engine.generate(Request("otter", 12)).token_ids == before
    with pytest.raises(CheckpointError):
        Engine.load(folder, backend="reference")


def test_a_clock_that_jumps_ends_no_text(monkeypatch: pytest.MonkeyPatch, tokenizer_folder: Path) -> None:
    from server.conftest import make, running

    hours = iter(range(10**9))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600 * (-1) ** next(hours) * 24 * 365)
    with running(make(tokenizer_folder), timeout=60.0) as server:
        for _ in range(5):
            assert server.complete("otter", max_tokens=20)["usage"]["completion_tokens"]
        assert server.metric("bitmtp_time_to_first_token_seconds_sum") < 60
        assert isinstance(server.scheduler, Scheduler)
        assert isinstance(server.client.get(server.url + "/health"), httpx.Response)
