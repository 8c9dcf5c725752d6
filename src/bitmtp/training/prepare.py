"""What a run needs before its first step, kept in ``<output>/data`` so that a resumed run starts at once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bitmtp.config import ModelConfig
from bitmtp.convert import SourceModel, read_source
from bitmtp.errors import ConfigError
from bitmtp.tokenizer import Tokenizer
from bitmtp.training.calibrate import calibrate
from bitmtp.training.config import TrainConfig
from bitmtp.training.data import Corpus, Tokens, cut_rows, read_corpus
from bitmtp.training.export import student_config
from bitmtp.training.generate import generate, read_prompts
from bitmtp.training.model import Model, load
from bitmtp.training.report import Report


@dataclass(frozen=True, slots=True)
class Prepared:
    """Models on the device, the training corpus, and held-out rows ``[n, seq_len + 1]``."""

    student: Model
    teacher: Model
    corpus: Corpus
    heldout: Tokens


def prepare(config: TrainConfig, device: torch.device, report: Report) -> Prepared:
    """Read the source, the tokenizer and the text; let the original model write; calibrate the student."""
    torch.manual_seed(config.seed)
    source = read_source(config.source)
    if source.ternary and config.blend:
        raise ConfigError(f"{config.source}: a ternary start is quantised from the first step on; set blend = 0")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    teacher = Model(source.config, dtype)
    load(teacher, source.tensors)
    teacher = teacher.to(device, dtype).requires_grad_(False)
    student = Model(student_config(source.config, block_size=config.block_size, chain_rank=config.chain_rank), dtype)
    load(student, start_tensors(source))
    student = student.to(device)
    corpus, heldout = _corpora(config, source.config, teacher, report)
    rows = cut_rows(heldout.stream(np.arange(len(heldout.lengths))), config.seq_len)
    if not len(rows):
        raise ConfigError(f"no held-out row: {len(heldout.tokens)} held-out tokens do not fill {config.seq_len + 1}")
    if not source.config.sub_norm:
        calibrate(student, teacher, torch.from_numpy(rows[: config.calibration_rows, :-1]).long().to(device))
    return Prepared(student, teacher, corpus, rows)


def start_tensors(source: SourceModel) -> dict[str, NDArray[np.float32]]:
    """The student's first weights: the source's, ternary rows so stretched that absmean finds their scale again.

    Absmean of a row of -s, 0 and s is s times its share of non-zeros; divided by that share, the row quantises to the
    very weights and the very scale that it came with.
    """
    tensors = dict(source.tensors)
    for module in source.ternary:
        weight = tensors[f"{module}.weight"]
        share = np.mean(weight != 0, axis=1, keepdims=True, dtype=np.float32)
        tensors[f"{module}.weight"] = weight / np.maximum(share, 1 / weight.shape[1])
    return tensors


def _corpora(config: TrainConfig, source: ModelConfig, teacher: Model, report: Report) -> tuple[Corpus, Corpus]:
    folder = Path(config.output) / "data"
    files = (folder / "train.npz", folder / "heldout.npz")
    if not files[1].exists():
        folder.mkdir(parents=True, exist_ok=True)
        if not source.eos_token_ids:
            raise ConfigError(f"{config.source}: names no end-of-text token")
        tokenizer, eos = Tokenizer(config.tokenizer, source.vocab_size), source.eos_token_ids[0]
        corpus, heldout = read_corpus(config.data, tokenizer, eos)
        report.say(f"data: {len(corpus.lengths)} records, {len(corpus.tokens)} tokens; held out {len(heldout.tokens)}")
        if config.generate.seconds > 0:
            written = _self_written(config, tokenizer, teacher, eos)
            report.say(f"written by the original model: {len(written.lengths)} records, {len(written.tokens)} tokens")
            corpus = corpus.plus(written)
        corpus.save(files[0])
        partial = folder / "partial.npz"
        heldout.save(partial)
        os.replace(partial, files[1])  # the last to appear: it says that both are whole
        if teacher.embedding.weight.is_cuda:
            torch.cuda.empty_cache()
    return Corpus.load(files[0]), Corpus.load(files[1])


def _self_written(config: TrainConfig, tokenizer: Tokenizer, teacher: Model, eos: int) -> Corpus:
    prompts = read_prompts(config.data, config.generate.prompt_files, tokenizer)
    rows = [np.array(ids, np.int32) for ids in tokenizer.encode_batch(prompts)]
    end = np.array(tokenizer.encode("\n"), np.int32)
    return generate(teacher, rows, config.generate, eos=eos, end=end, seed=config.seed)
