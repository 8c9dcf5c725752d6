"""Whole runs on a CPU: they learn, resume exactly, and export what they trained."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bitmtp import checkpoint
from bitmtp.backends.base import Head, Row, mask
from bitmtp.backends.reference import ReferenceBackend
from bitmtp.errors import BitMTPError
from bitmtp.training.config import GenerateConfig, TrainConfig
from bitmtp.training.export import packed_tensors
from bitmtp.training.layout import Blocks
from bitmtp.training.model import Model
from bitmtp.training.train import Trainer, clip_and_step, run


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "train"]


def test_the_loss_falls_and_the_run_exports(make_config) -> None:
    config = make_config(steps=60, evaluate_seconds=0.5, snapshot_seconds=0.0)
    assert run(config)
    output = Path(config.output)
    history = losses(output)
    assert len(history) == 60
    assert np.mean(history[-5:]) < 0.8 * np.mean(history[:5])
    read = checkpoint.read(output / "model")
    assert (read.config.block_size, read.config.chain_rank, read.config.sub_norm) == (5, 8, True)
    assert checkpoint.read(output / "snapshot").config == read.config
    evaluation = json.loads((output / "evaluation.json").read_text())
    assert evaluation["steps"] == 60
    assert evaluation["next_ce"] < 5.5 < evaluation["teacher_ce"]  # the teacher is random, log(260) = 5.56 at best
    assert {"plain_1", "chain_4"} <= set(evaluation)


def test_resume_equals_an_uninterrupted_run(make_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_config(steps=12, output=str(tmp_path / "whole"))
    assert run(whole)
    parts = make_config(steps=12, output=str(tmp_path / "parts"))
    step = Trainer.train_step

    def stopped_every_fifth(trainer: Trainer) -> torch.Tensor:
        metrics = step(trainer)
        if trainer.step % 5 == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return metrics

    monkeypatch.setattr(Trainer, "train_step", stopped_every_fifth)
    assert [run(parts), run(parts), run(parts)] == [False, False, True]
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_time_budget_ends_the_run_fully_annealed(make_config) -> None:
    config = make_config(steps=0, time_budget_seconds=1.5)
    assert run(config)
    records = [json.loads(line) for line in (Path(config.output) / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if record["kind"] == "train"][-1]
    assert last["progress"] == 1.0
    assert run(config)  # a complete run has nothing left to train


def test_stop_after_saves_and_goes_on(make_config) -> None:
    config = make_config(steps=6)
    assert not run(config, stop_after=0)
    assert (Path(config.output) / "state.pt").exists()
    assert run(config)
    assert len(losses(Path(config.output))) == 6


def test_self_written_text_joins_the_data(make_config, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tiny / "prompts.jsonl").write_text('{"problem": "What is 1+1?"}\n{"question": "What is 2+5?"}\n')
    generate = GenerateConfig(
        seconds=1.0, batch_size=3, max_prompt=64, max_new=5, prompt_files=(str(tiny / "prompts.jsonl"),)
    )
    config = make_config(steps=2, generate=generate)
    assert run(config)
    assert "written by the original model:" in capsys.readouterr().out
    with np.load(Path(config.output) / "data" / "train.npz") as arrays:
        assert arrays["repeats"][-1] == 3
        assert arrays["repeats"][0] == 1


def test_a_step_that_is_not_finite_is_skipped() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimiser = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    for gradient, moves in ((float("nan"), False), (float("inf"), False), (1.0, True)):
        before = parameter.detach().clone()
        parameter.grad = torch.full((3,), gradient)
        clip_and_step(optimiser, 1.0)
        assert torch.equal(parameter, before) != moves
        assert parameter.isfinite().all()


def test_a_loss_that_is_not_finite_stops_the_run(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", lambda trainer: step(trainer) * float("nan"))
    config = make_config(steps=3)
    with pytest.raises(BitMTPError, match="the loss is nan"):
        run(config)
    assert not (Path(config.output) / "state.pt").exists()


@pytest.fixture(scope="module")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Path]:
    output = tmp_path_factory.mktemp("trained")
    config = TrainConfig(
        source=str(tiny / "source"), tokenizer=str(tiny / "source"), output=str(output),
        data={str(tiny / "text.jsonl"): 1}, steps=40, batch_size=4, seq_len=24, block_size=5, short_blocks=3,
        short_masks=2, long_blocks=2, chain_rank=8, calibration_rows=4, learning_rate=5e-3,
    )  # fmt: skip
    assert run(config)
    return config, output


def test_exported_logits_are_the_training_logits(trained) -> None:
    """The NumPy reference reads the packed model and gives, for real and mask rows, what training computed."""
    _, output = trained
    read = checkpoint.read(output / "model")
    shape = replace(read.config, kv_type="float32")  # training rounds no keys and values
    state = torch.load(output / "state.pt", weights_only=True)
    student = Model(read.config, torch.float32)
    student.load_state_dict(state["model"])
    packed = packed_tensors(student)
    assert all(np.array_equal(packed[name], tensor) for name, tensor in read.tensors.items())

    text = [1, 40, 90, 17, 60, 61, 33, 5]
    blend = torch.tensor(1.0)
    with torch.no_grad():
        matrix = student.embedding_matrix(blend)
        layout = Blocks([4], len(text), torch.float32, matrix.device).at(torch.tensor([len(text) - 1]))
        normed = student(torch.tensor([text]), matrix, layout, blend)
        expected = (student.head_rows(normed, blend) @ matrix.T)[0].numpy()

    backend = ReferenceBackend(checkpoint.Checkpoint(read.path, shape, read.tensors))
    sequence = backend.open()
    inputs = [*text, *map(mask, range(1, 5))]
    rows = [Row(sequence, token, at, (2 << at) - 1, Head.EXACT) for at, token in enumerate(inputs)]
    outputs = backend.step(rows, logits=True)
    found = np.stack([output.logits for output in outputs if output is not None and output.logits is not None])
    # a value at a rounding border may fall on the other side in another order of sums
    assert np.median(np.abs(found - expected)) < 1e-5 * np.abs(expected).max()
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
