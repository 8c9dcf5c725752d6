"""The baselines: the next token alone, and masks or Medusa heads bolted on to a checkpoint that stays as it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bitmtp import checkpoint
from bitmtp.backends.base import Head, Row, mask
from bitmtp.backends.reference import ReferenceBackend
from bitmtp.errors import ConfigError
from bitmtp.training.config import GenerateConfig, TrainConfig, read_config
from bitmtp.training.frozen import frozen_model
from bitmtp.training.layout import Blocks
from bitmtp.training.model import Model
from bitmtp.training.objective import fused_head
from bitmtp.training.train import run

METHODS = ("masks", "medusa")


def history(config: TrainConfig) -> list[dict[str, float]]:
    lines = (Path(config.output) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


@pytest.fixture(scope="module")
def backbone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint trained on the next token alone."""
    output = tmp_path_factory.mktemp("backbone")
    assert run(
        TrainConfig(
            source=str(tiny / "source"), tokenizer=str(tiny / "source"), output=str(output), method="autoregressive",
            data={str(tiny / "text.jsonl"): 1}, steps=60, batch_size=4, seq_len=24, block_size=5, short_masks=2,
            calibration_rows=4, learning_rate=5e-3,
        )
    )  # fmt: skip
    return output


@pytest.fixture
def bolt_on(make_config, backbone: Path):
    """A function: config of a run that freezes the backbone."""
    return lambda method, **more: make_config(**{"source": str(backbone / "model"), "method": method} | more)


def test_the_next_token_alone(backbone: Path) -> None:
    read = checkpoint.read(backbone / "model")
    assert (read.config.block_size, read.config.chain_rank) == (1, 0)
    evaluation = json.loads((backbone / "evaluation.json").read_text())
    assert evaluation["next_ce"] < 5.0 < evaluation["teacher_ce"]
    assert not [name for name in evaluation if name.startswith(("plain", "chain"))]


@pytest.mark.parametrize("method", METHODS)
def test_only_what_is_bolted_on_learns(bolt_on, backbone: Path, method: str) -> None:
    config = bolt_on(method, steps=60, snapshot_seconds=0.0)
    assert run(config)
    output = Path(config.output)
    before, after = checkpoint.read(backbone / "model"), checkpoint.read(output / "model")
    assert after.config == replace(before.config, block_size=5, drafter=method)
    assert all(np.array_equal(after.tensors[name], tensor) for name, tensor in before.tensors.items())
    added = set(after.tensors) - set(before.tensors)
    assert added
    assert all(name.startswith(("mask_embedding.", "medusa.")) for name in added)
    assert checkpoint.read(output / "snapshot").config == after.config
    losses = [record["loss"] for record in history(config)]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    evaluation = json.loads((output / "evaluation.json").read_text())
    assert {"loss", "plain_4", "teacher_ce"} <= set(evaluation)
    assert not {"next_ce", "chain_1"} & set(evaluation)
    own = json.loads((backbone / "evaluation.json").read_text())["next_ce"]
    assert evaluation["teacher_ce"] == pytest.approx(own, rel=1e-3)  # the frozen model computes what it computed


def test_a_drafting_checkpoint_gets_new_masks_of_another_depth(bolt_on, tmp_path: Path) -> None:
    first = bolt_on("medusa", steps=1, output=str(tmp_path / "first"))
    assert run(first)
    second = bolt_on("masks", steps=1, block_size=4, source=str(tmp_path / "first" / "model"))
    assert run(second)
    read = checkpoint.read(Path(second.output) / "model")
    assert (read.config.block_size, read.config.drafter) == (4, "masks")
    assert read.tensors["mask_embedding.weight"].shape == (3, 32)


@pytest.mark.parametrize("method", ["autoregressive", *METHODS])
def test_resume_equals_an_uninterrupted_run(bolt_on, tiny: Path, tmp_path: Path, method: str) -> None:
    source = {"source": str(tiny / "source")} if method == "autoregressive" else {}
    whole = bolt_on(method, steps=4, output=str(tmp_path / "whole"), **source)
    parts = replace(whole, output=str(tmp_path / "parts"))
    assert run(whole)
    assert not run(parts, stop_after=0)
    assert run(parts)
    assert [record["loss"] for record in history(parts)] == [record["loss"] for record in history(whole)]
    other = replace(parts, method="joint", source=str(tiny / "source"))
    with pytest.raises(ConfigError, match=f"state.pt: of a run with method {method}"):
        run(other)


def test_the_frozen_model_writes_for_itself(bolt_on, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bolt_on("medusa", steps=1, generate=GenerateConfig(seconds=0.5, batch_size=3, max_prompt=64, max_new=5)))
    assert "written by the original model:" in capsys.readouterr().out


def test_medusa_logits_are_the_training_logits(bolt_on) -> None:
    config = bolt_on("medusa", steps=20)
    assert run(config)
    output = Path(config.output)
    read = checkpoint.read(output / "model")
    model = Model(read.config, torch.float32)
    model.load_state_dict(torch.load(output / "state.pt", weights_only=True)["model"])
    text, blend = [1, 40, 90, 17, 60, 61, 33, 5], torch.tensor(1.0)
    with torch.no_grad():
        matrix = model.embedding_matrix(blend)
        layout = Blocks([4], len(text), torch.float32, matrix.device).at(torch.tensor([len(text) - 1]))
        expected = (model.head_rows(model(torch.tensor([text]), matrix, layout, blend), blend) @ matrix.T)[0].numpy()
    backend = ReferenceBackend(checkpoint.Checkpoint(read.path, replace(read.config, kv_type="float32"), read.tensors))
    sequence = backend.open()
    inputs = [*text, *map(mask, range(1, 5))]
    rows = [Row(sequence, token, at, (2 << at) - 1, Head.EXACT) for at, token in enumerate(inputs)]
    found = np.stack([output.logits for output in backend.step(rows, logits=True) if output is not None])
    # heads are stored as float16; and a value at a rounding border may fall on the other side
    assert np.median(np.abs(found - expected)) < 1e-3 * np.abs(expected).max()
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def test_a_frozen_head_has_no_gradient() -> None:
    hidden, matrix = torch.randn(5, 8, requires_grad=True), torch.randn(9, 8)
    weight = torch.rand(5)
    labels = torch.zeros(5, dtype=torch.int64)
    loss, _, _ = fused_head(hidden, matrix, torch.randn(5, 8), matrix, labels, weight, weight, 3)
    loss.backward()
    assert hidden.grad is not None
    assert matrix.grad is None


def test_what_cannot_be_frozen(bolt_on, backbone: Path) -> None:
    read = checkpoint.read(backbone / "model")
    config = bolt_on("masks")
    for change in ({"ternary_scale": "group", "group_size": 16}, {"embedding_bits": 4}, {"activation_scale": "group"}):
        shape = replace(read.config, **{"group_size": 16, **change})
        with pytest.raises(ConfigError, match=f"{next(iter(change))} is"):
            frozen_model(replace(read, config=shape), config, torch.float32)


def test_the_command_line_names_the_method(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('source = "a"\ntokenizer = "a"\noutput = "b"\nsteps = 1\n[data]\n"c.jsonl" = 1\n')
    assert read_config(recipe).method == "joint"
    assert read_config(recipe, method="masks").frozen
    with pytest.raises(ConfigError, match="method is 'other'; choose one of joint, autoregressive, masks, medusa"):
        read_config(recipe, method="other")


def test_a_layout_that_cannot_be_frozen_is_refused_with_those_that_can(bolt_on, backbone: Path) -> None:
    found = checkpoint.read(backbone / "model")
    grouped = replace(found, config=replace(found.config, ternary_scale="group", group_size=4))
    with pytest.raises(ConfigError, match=r"ternary_scale is 'group'; method masks freezes 'row' or 'tensor' only"):
        frozen_model(grouped, bolt_on("masks"), torch.float32)
