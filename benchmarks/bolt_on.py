"""Drafting bolted on to a backbone that stays as it is: trained mask embeddings alone, and Medusa-style heads.

    python benchmarks/bolt_on.py train --data FILE.jsonl --seconds 60 --output FOLDER
    python benchmarks/bolt_on.py acceptance --questions FOLDER --output FOLDER

`train` freezes the model's ternary weights, embedding and norms. It teaches new mask embeddings (written as a
checkpoint without chain, `FOLDER/masks`: every command decodes with it) and, beside them, heads that guess further
tokens from the last hidden row (Medusa, arXiv:2401.10774: a residual layer each, the output head shared;
`FOLDER/heads.npz`). Both learn the model's own next-token distributions. `acceptance` says how many tokens a pass the
heads would commit on greedy texts of the model; their candidates are a chain, each head's first choice.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from bitmtp import checkpoint
from bitmtp.checkpoint import Checkpoint
from bitmtp.decoding.policies import make_policy
from bitmtp.engine import Engine, Request
from bitmtp.errors import BitMTPError
from bitmtp.models import shipped_model
from bitmtp.study.record import interleave
from bitmtp.study.workloads import WORKLOADS, build
from bitmtp.ternary import unpack
from bitmtp.tokenizer import Tokenizer
from bitmtp.training.config import TrainConfig
from bitmtp.training.data import Batches, read_corpus
from bitmtp.training.layout import Blocks, block_sizes, draw_anchors
from bitmtp.training.model import Model
from bitmtp.training.objective import fused_head

HEADS = 7  # with the model's own next token a block of 8
SAMPLED = 64  # rows of a sequence that the heads learn from in a step
RATES = {"masks": 4e-3, "heads": 1e-3}


class Heads(nn.Module):
    """Head k guesses the token k places behind the next one."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(HEADS))
        for layer in self.layers:
            nn.init.zeros_(layer.weight)  # starts as the next token's head
            nn.init.zeros_(layer.bias)

    def forward(self, normed: Tensor, k: int) -> Tensor:
        """Final-normed rows ``[..., H]`` float32 → rows for the output head."""
        return normed + F.silu(self.layers[k - 1](normed))


def frozen(loaded: Checkpoint, dtype: torch.dtype) -> Model:
    """A checkpoint as a model of the trainer that computes the same: ternary rows are stretched so that their absmean
    is their scale; masks and chain are left out."""
    config = replace(loaded.config, chain_rank=0)
    model, state = Model(config, dtype), {}
    for name, values in loaded.tensors.items():
        module, kind = name.rsplit(".", 1)
        if kind == "scale" or name.startswith(("chain.", "mask_embedding.")):
            continue
        if f"{module}.scale" in loaded.tensors:
            values = _floats(values, loaded.tensors[f"{module}.scale"], loaded.config.embedding_bits)
        state[name] = torch.from_numpy(np.ascontiguousarray(values))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["mask_embedding.weight"], missing
    assert not unexpected, unexpected
    return model.requires_grad_(False)


def _floats(packed: NDArray[np.generic], scale: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    if packed.dtype == np.int8 or bits == 16:
        return packed.astype(np.float32) * scale[:, None]
    weights = unpack(packed.astype(np.uint8), 2).astype(np.float32)
    share = np.maximum((weights != 0).mean(axis=1, keepdims=True), 1 / weights.shape[1])
    return (weights * scale[:, None] / share).astype(np.float32)


def train(options: argparse.Namespace) -> None:
    """Teach masks and heads until the time is over; write both."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = checkpoint.read(options.model)
    model = frozen(loaded, torch.bfloat16 if device.type == "cuda" else torch.float32).to(device)
    masks, heads = _fresh_masks(model), Heads(loaded.config.hidden_size).to(device)
    config = _config(options, loaded.config.block_size)
    tokenizer = Tokenizer(options.model, loaded.config.vocab_size)
    corpus, _ = read_corpus(config.data, tokenizer, loaded.config.eos_token_ids[0])
    batches = Batches(corpus, seed=1, batch_size=options.batch_size, seq_len=config.seq_len)
    blocks = Blocks(block_sizes(config), config.seq_len, model.dtype, device)
    groups = [{"params": [masks], "rate": RATES["masks"]}, {"params": heads.parameters(), "rate": RATES["heads"]}]
    optimiser, begun, step = torch.optim.AdamW(groups, weight_decay=0.0), time.monotonic(), 0
    while (progress := (time.monotonic() - begun) / options.seconds) < 1:
        for group in optimiser.param_groups:
            group["lr"] = group["rate"] * min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * progress))
        tokens = torch.from_numpy(batches.next()).long().to(device)
        layout = blocks.at(torch.from_numpy(draw_anchors(config, step)).to(device))
        losses = _losses(model, heads, tokens, layout)
        sum(losses).backward()  # type: ignore[union-attr]
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step += 1
        if step % 20 == 1:
            print(f"step {step}, masks {losses[0]:.3f}, heads {losses[1]:.3f} nats", flush=True)
    print(f"{step} steps of {options.batch_size} × {config.seq_len} tokens in {options.seconds:g} s")
    _write(options, loaded, masks, heads)


def _fresh_masks(model: Model) -> nn.Parameter:
    assert model.mask_embedding is not None
    embedding = model.embedding.weight
    noise = torch.randn_like(model.mask_embedding.weight) * (0.1 * embedding.std())
    model.mask_embedding.weight = nn.Parameter(embedding.mean(dim=0) + noise)
    return model.mask_embedding.weight


def _losses(model: Model, heads: Heads, tokens: Tensor, layout: object) -> tuple[Tensor, Tensor]:
    """Mean KL to the model's own next-token distributions: of the mask rows, and of the heads."""
    blend = torch.ones((), device=tokens.device)
    with torch.no_grad():
        embedding = model.embedding_matrix(blend)
        matrix = model.head_matrix(blend, embedding)
    normed = model(tokens[:, :-1], embedding, layout, blend)  # type: ignore[arg-type]
    real = tokens.shape[1] - 1
    own = model.head_rows(normed[:, :real], blend).detach()
    masks = _divergence(model.head_rows(normed[:, real:], blend), own[:, layout.position], matrix)  # type: ignore[attr-defined]
    places = torch.randperm(real - HEADS, device=tokens.device)[:SAMPLED]
    guesses = [model.head_rows(heads(normed[:, places].detach(), k), blend) for k in range(1, HEADS + 1)]
    targets = [own[:, places + k] for k in range(1, HEADS + 1)]
    return masks, _divergence(torch.cat(guesses, dim=1), torch.cat(targets, dim=1), matrix)


def _divergence(rows: Tensor, targets: Tensor, matrix: Tensor) -> Tensor:
    rows, targets = rows.flatten(0, 1), targets.flatten(0, 1)
    weight = torch.full((len(rows),), 1 / len(rows), device=rows.device)
    labels = torch.zeros(len(rows), dtype=torch.long, device=rows.device)
    return fused_head(rows, matrix, targets, matrix, labels, torch.zeros_like(weight), weight, 8192)[0]


def _config(options: argparse.Namespace, block_size: int) -> TrainConfig:
    return TrainConfig(
        source="", tokenizer="", output="", data=dict.fromkeys(options.data, 1), steps=1, seq_len=options.seq_len,
        block_size=block_size, short_masks=min(7, block_size - 1),
    )  # fmt: skip


def _write(options: argparse.Namespace, loaded: Checkpoint, masks: Tensor, heads: Heads) -> None:
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: values for name, values in loaded.tensors.items() if not name.startswith("chain.")}
    tensors["mask_embedding.weight"] = masks.detach().float().cpu().numpy()
    checkpoint.write(folder / "masks", replace(loaded.config, chain_rank=0), tensors, Path(options.model))
    state = {name: values.half().cpu().numpy() for name, values in heads.state_dict().items()}
    np.savez_compressed(folder / "heads.npz", **state)


def acceptance(options: argparse.Namespace) -> None:
    """Tokens a pass of the heads on greedy texts, for each workload."""
    engine = Engine.load(options.model, backend=options.backend, threads=options.threads)
    model, heads = frozen(checkpoint.read(options.model), torch.float32), Heads(engine.config.hidden_size)
    stored = np.load(Path(options.output) / "heads.npz")
    heads.load_state_dict({name: torch.from_numpy(stored[name]).float() for name in stored.files})
    plain, found = make_policy("autoregressive", engine.config.block_size), dict[str, list[int]]()
    for request in interleave([build(name, options.questions, options.limit) for name in options.workloads.split(",")]):
        prompt = engine.encode(Request(request.messages))
        text = engine.generate(Request(prompt, options.max_tokens, plain)).token_ids
        for name in (request.workload, "all"):
            found.setdefault(name, []).extend(
                _walk(guesses(model, heads, [*prompt, *text]), len(prompt), [*prompt, *text])
            )
    for name, commits in found.items():
        print(f"{name}: {len(commits)} passes, {np.mean(commits):.2f} tokens a pass")


@torch.no_grad()
def guesses(model: Model, heads: Heads, ids: list[int]) -> NDArray[np.int64]:
    """What each head says at each token: ``[len(ids), HEADS]``."""
    blend = torch.ones(())
    embedding = model.embedding_matrix(blend)
    normed = model(torch.tensor([ids]), embedding, None, blend)[0]
    matrix = model.head_matrix(blend, embedding).T
    rows = [model.head_rows(heads(normed, k), blend) @ matrix for k in range(1, HEADS + 1)]
    return torch.stack([row.argmax(dim=-1) for row in rows], dim=1).numpy()


def _walk(guessed: NDArray[np.int64], start: int, ids: list[int]) -> Iterator[int]:
    """Tokens that each pass commits: the heads of the last row guess what follows the next token, one pass tries it."""
    last = start  # the first token of the text came with the prompt
    while last + 1 < len(ids):
        true = ids[last + 2 : last + 2 + HEADS]
        stand = next((n for n, token in enumerate(true) if guessed[last][n] != token), len(true))
        yield 1 + stand
        last += 1 + stand


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("train", "acceptance"))
    parser.add_argument("--output", required=True, help="folder of masks and heads")
    parser.add_argument("--model", default=str(shipped_model()), help="checkpoint folder; default: the shipped model")
    parser.add_argument("--data", nargs="+", default=[], help="train: text, as for bitmtp train")
    parser.add_argument("--seconds", type=float, default=60, help="train: in the loop")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--questions", help="acceptance: folder of the study's question files")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="acceptance: of the study's")
    parser.add_argument("--limit", type=int, default=8, help="acceptance: first requests of each workload")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        options = parse()
        (train if options.command == "train" else acceptance)(options)
    except BitMTPError as error:
        sys.exit(f"bolt_on: {error}")
