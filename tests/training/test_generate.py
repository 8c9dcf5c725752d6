"""Cached generation against the plain forward pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from bitmtp.convert import read_source
from bitmtp.training.config import GenerateConfig
from bitmtp.training.generate import generate
from bitmtp.training.model import Model, load


def greedy(model: Model, prompt: list[int], new: int, eos: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(new):
            matrix = model.embedding_matrix(None)
            tokens.append(int((model(torch.tensor([tokens]), matrix, None, None)[0, -1] @ matrix.T).argmax()))
            if tokens[-1] == eos:
                break
    return tokens[len(prompt) :]


def test_greedy_rows_are_the_models_own_continuations(tiny: Path) -> None:
    source = read_source(tiny / "source")
    model = Model(source.config, torch.float32).requires_grad_(False)
    load(model, source.tensors)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 260, size).astype(np.int32) for size in (3, 9, 5, 70, 80, 12, 4)]
    config = GenerateConfig(seconds=1e9, repeats=2, batch_size=4, max_prompt=75, max_new=6, temperature=0.0)
    eos = greedy(model, prompts[0].tolist(), 3, -1)[2]  # the third token of an answer ends it
    end = np.array([7], np.int32)
    corpus = generate(model, None, prompts, config, eos=eos, end=end, seed=0)
    assert set(corpus.repeats) == {2}
    rows = np.split(corpus.tokens, np.cumsum(corpus.lengths)[:-1])
    expected = set()
    for prompt in prompts:
        if len(prompt) <= 75:
            answer = greedy(model, prompt.tolist(), 6, eos)
            expected.add(tuple(prompt.tolist() + answer + ([7] if answer[-1] == eos else [])))
    assert {tuple(row.tolist()) for row in rows} == expected
    assert len(rows) == 6


def test_every_second_row_is_sampled_and_the_budget_stops_it(tiny: Path) -> None:
    source = read_source(tiny / "source")
    model = Model(source.config, torch.float32).requires_grad_(False)
    load(model, source.tensors)
    prompts = [np.array([9, 8, 7], np.int32)] * 8
    config = GenerateConfig(seconds=1e9, batch_size=8, max_new=12, temperature=5.0)
    corpus = generate(model, None, prompts, config, eos=-1, end=np.zeros(0, np.int32), seed=0)
    rows = corpus.tokens.reshape(8, 15)
    assert len({tuple(row) for row in rows[::2].tolist()}) == 1
    assert len({tuple(row) for row in rows[1::2].tolist()}) == 4
    stopped = generate(model, None, prompts * 4, GenerateConfig(seconds=1e-6, batch_size=8, max_new=2), eos=-1,
                       end=np.zeros(0, np.int32), seed=0)  # fmt: skip
    assert len(stopped.lengths) in (0, 8)
