"""What a run needs before its first step, kept in ``<output>/data`` so that a resumed run starts at once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bitmtp import checkpoint
from bitmtp.checkpoint import Checkpoint
from bitmtp.convert import SourceModel, read_source
from bitmtp.errors import ConfigError
from bitmtp.tokenizer import Tokenizer
from bitmtp.training.calibrate import calibrate
from bitmtp.training.config import TrainConfig
from bitmtp.training.data import Corpus, Tokens, cut_rows, read_corpus
from bitmtp.training.export import student_config
from bitmtp.training.frozen import Bolted, frozen_model
from bitmtp.training.generate import generate, read_prompts
from bitmtp.training.model import Blend, Model, load, stretch
from bitmtp.training.objective import Joint, Objective
from bitmtp.training.report import Report


@dataclass(frozen=True, slots=True)
class Prepared:
    """The student on the device, its objective, the training corpus, and held-out rows ``[n, seq_len + 1]``.

    ``start`` is the checkpoint whose tensors the student has, where the method freezes them.
    """

    student: Model
    objective: Objective
    corpus: Corpus
    heldout: Tokens
    start: Checkpoint | None = None


def prepare(config: TrainConfig, device: torch.device, report: Report) -> Prepared:
    """Read the source, the tokenizer and the text; let the original model write; calibrate the student."""
    torch.manual_seed(config.seed)
    return _frozen(config, device, report) if config.frozen else _taught(config, device, report)


def _frozen(config: TrainConfig, device: torch.device, report: Report) -> Prepared:
    start = checkpoint.read(config.source)
    model = frozen_model(start, config, _dtype(device)).to(device)
    corpus, heldout = _corpora(config, model, torch.ones((), device=device), report)
    return Prepared(model, Bolted(model, config), corpus, heldout, start)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _taught(config: TrainConfig, device: torch.device, report: Report) -> Prepared:
    source = read_source(config.source)
    if source.ternary and config.blend:
        raise ConfigError(f"{config.source}: a ternary start is quantised from the first step on; set blend = 0")
    dtype = _dtype(device)
    teacher = Model(source.config, dtype)
    load(teacher, source.tensors)
    teacher = teacher.to(device, dtype).requires_grad_(False)
    block_size, chain_rank = (1, 0) if config.method == "autoregressive" else (config.block_size, config.chain_rank)
    student = Model(student_config(source.config, block_size=block_size, chain_rank=chain_rank), dtype)
    load(student, start_tensors(source))
    student = student.to(device)
    corpus, rows = _corpora(config, teacher, None, report)
    if not source.config.sub_norm:
        calibrate(student, teacher, torch.from_numpy(rows[: config.calibration_rows, :-1]).long().to(device))
    return Prepared(student, Joint(student, teacher, config), corpus, rows)


def start_tensors(source: SourceModel) -> dict[str, NDArray[np.float32]]:
    """The student's first weights: the source's, ternary rows so stretched that absmean finds their scale again."""
    ternary = {f"{module}.weight" for module in source.ternary}
    return {name: stretch(weight) if name in ternary else weight for name, weight in source.tensors.items()}


def _corpora(config: TrainConfig, original: Model, blend: Blend, report: Report) -> tuple[Corpus, Tokens]:
    """What is trained on, and held-out rows; the ``original`` model, which may write, computes at ``blend``."""
    folder, source = Path(config.output) / "data", original.config
    files = (folder / "train.npz", folder / "heldout.npz")
    if not files[1].exists():
        folder.mkdir(parents=True, exist_ok=True)
        if not source.eos_token_ids:
            raise ConfigError(f"{config.source}: names no end-of-text token")
        tokenizer, eos = Tokenizer(config.tokenizer, source.vocab_size), source.eos_token_ids[0]
        corpus, heldout = read_corpus(config.data, tokenizer, eos)
        report.say(f"data: {len(corpus.lengths)} records, {len(corpus.tokens)} tokens; held out {len(heldout.tokens)}")
        if config.generate.seconds > 0:
            written = _self_written(config, tokenizer, original, blend, eos)
            report.say(f"written by the original model: {len(written.lengths)} records, {len(written.tokens)} tokens")
            corpus = corpus.plus(written)
        corpus.save(files[0])
        partial = folder / "partial.npz"
        heldout.save(partial)
        os.replace(partial, files[1])  # the last to appear: it says that both are whole
        if original.embedding.weight.is_cuda:
            torch.cuda.empty_cache()
    heldout = Corpus.load(files[1])
    rows = cut_rows(heldout.stream(np.arange(len(heldout.lengths))), config.seq_len)
    if not len(rows):
        raise ConfigError(f"no held-out row: {len(heldout.tokens)} held-out tokens do not fill {config.seq_len + 1}")
    return Corpus.load(files[0]), rows


def _self_written(config: TrainConfig, tokenizer: Tokenizer, original: Model, blend: Blend, eos: int) -> Corpus:
    prompts = read_prompts(config.data, config.generate.prompt_files, tokenizer)
    rows = [np.array(ids, np.int32) for ids in tokenizer.encode_batch(prompts)]
    end = np.array(tokenizer.encode("\n"), np.int32)
    return generate(original, blend, rows, config.generate, eos=eos, end=end, seed=config.seed)
