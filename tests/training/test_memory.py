"""A run that cannot fit is refused in one line, before it begins."""

from __future__ import annotations

import pytest
import torch

from bitmtp.errors import ConfigError
from bitmtp.training import memory
from bitmtp.training.train import run


def test_a_run_that_cannot_fit_says_what_it_needs_and_what_there_is(make_config, monkeypatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _: 1 << 10)
    with pytest.raises(ConfigError, match=r"takes at least 0\.0 GiB more and cpu has 0\.0 GiB free; lower batch_size"):
        run(make_config(steps=1))


def test_a_batch_beyond_any_machine_is_refused(make_config) -> None:
    with pytest.raises(ConfigError, match=r"takes at least \d{4,}\.\d GiB more"):
        run(make_config(steps=1, batch_size=10**9))


def test_the_machine_says_what_is_free() -> None:
    assert memory.free_bytes(torch.device("cpu")) > 1 << 20
