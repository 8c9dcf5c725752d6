"""Text by the original model itself: its answers to the prompts of the data, to be trained on with the rest.

A student learns most where the teacher's own text goes (sequence-level distillation, arXiv:1606.07947). Batches of like
prompt lengths share a static key/value cache, and one decode step is one CUDA graph.

Shapes: B batch, P prompt columns (padded on the left), T = P + new columns, V vocab.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bitmtp.tokenizer import Tokenizer
from bitmtp.training.config import GenerateConfig
from bitmtp.training.data import Corpus, Tokens, is_heldout, read_records, render
from bitmtp.training.model import Blend, Model

PROMPT_FIELDS = ("problem", "question", "prompt")
BUCKET = 64


def read_prompts(data: Mapping[str, int], prompt_files: Sequence[str], tokenizer: Tokenizer) -> list[str]:
    """First user turns, wrapped for an answer, each once; nothing of a held-out record."""
    prompts: dict[str, None] = {}
    for name in (*data, *prompt_files):
        for record in read_records(Path(name)):
            turns = _opening(record)
            if turns and not ("messages" in record and is_heldout(render(record, tokenizer))):
                prompts[tokenizer.chat(turns)] = None
    return [prompt for prompt in prompts if not is_heldout(prompt)]


def _opening(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Messages up to the first of the user; none where the record holds no prompt."""
    if isinstance(messages := record.get("messages"), list):
        users = [index for index, message in enumerate(messages) if message.get("role") == "user"]
        return messages[: users[0] + 1] if users else []
    text = next((record[name] for name in PROMPT_FIELDS if isinstance(record.get(name), str)), None)
    return [] if text is None or "text" in record else [{"role": "user", "content": text}]


class _Decoder:
    """The original model on a fixed batch and cache size."""

    def __init__(self, model: Model, blend: Blend, batch: int, columns: int, temperature: float) -> None:
        config, device = model.config, model.embedding.weight.device
        self.model, self.blend = model, blend
        self.embedding = model.embedding_matrix(blend)
        self.head = model.head_matrix(blend, self.embedding)
        shape = (batch, config.num_kv_heads, columns, config.head_dim)
        self.keys = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in model.blocks]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        self.tokens = torch.zeros((batch, columns), dtype=torch.int64, device=device)
        self.padding = torch.zeros(batch, dtype=torch.int64, device=device)
        self.column = torch.zeros(1, dtype=torch.int64, device=device)
        self.all_columns = torch.arange(columns, device=device)
        # rotary scores depend on distances only, so the column serves as the position
        self.rope = model.rope(self.all_columns)
        self.temperature = torch.zeros((batch, 1), device=device)
        self.temperature[1::2] = temperature
        self.step = _captured(self._decode) if device.type == "cuda" else self._decode

    def prefill(self, prompts: Sequence[Tokens], width: int) -> None:
        """Read prompts, padded to ``width`` columns, and choose the first token of each answer."""
        rows = np.zeros((len(prompts), width), np.int64)
        for row, prompt in zip(rows, prompts, strict=True):
            row[width - len(prompt) :] = prompt
        self.tokens[:, :width] = torch.from_numpy(rows)
        self.padding.copy_(torch.tensor([width - len(prompt) for prompt in prompts]))
        self.column.fill_(width)
        self._choose(self._run(self.all_columns[:width]))

    def _decode(self) -> None:
        logits = self._run(self.column)
        self.column += 1
        self._choose(logits)

    def _run(self, columns: Tensor) -> Tensor:
        """Logits ``[B, V]`` after the last of ``columns``, whose keys and values enter the cache."""
        x = F.embedding(self.tokens[:, columns], self.embedding)
        own = columns[:, None]
        # a padding row sees itself, so that no row sees nothing
        text = self.all_columns >= self.padding[:, None, None]
        sees = (self.all_columns <= own) & (text | (self.all_columns == own))
        for layer, keys, values in zip(self.model.blocks, self.keys, self.values, strict=True):
            q, k, v = layer.qkv(x, self.rope[:, columns], self.blend)
            keys.index_copy_(2, columns, k)
            values.index_copy_(2, columns, v)
            x = layer.add_attention(x, _attend(q, keys, values, sees), self.blend)
            x = layer.add_mlp(x, layer.gated(x, self.blend), self.blend)
        rows = self.model.head_rows(self.model.norm(x[:, -1]), self.blend)
        logits: Tensor = F.linear(rows, self.head)
        return logits

    def _choose(self, logits: Tensor) -> None:
        """Write the next token of each row at ``column``: the argmax of logits plus scaled Gumbel noise is a sample."""
        noise = -torch.log(-torch.log(torch.rand_like(logits, dtype=torch.float32).clamp_(1e-7, 1 - 1e-7)))
        chosen = (logits.float() + self.temperature * noise).argmax(dim=-1, keepdim=True)
        self.tokens.index_copy_(1, self.column, chosen)


def _attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """``q [B, N, Q, D]`` on ``k, v [B, K, T, D]`` under ``sees [B, Q, T]``; the heads of a group are further rows, so
    that one batched product reads each key once."""
    batch, heads, queries, size = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, size) * size**-0.5
    scores = (grouped @ k.transpose(-1, -2)).float().unflatten(2, (-1, queries))
    scores = scores.masked_fill(~sees[:, None, None], float("-inf"))
    out: Tensor = scores.softmax(dim=-1).to(q.dtype).flatten(2, 3) @ v
    return out.reshape(batch, heads, queries, size)


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """``step`` as a CUDA graph (it is run twice first, on whatever its buffers hold)."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _answers(
    decoder: _Decoder, prompts: Sequence[Tokens], width: int, new: int, eos: int, end: Tokens
) -> Iterator[Tokens]:
    decoder.prefill(prompts, width)
    for _ in range(new - 1):
        decoder.step()
    for prompt, row in zip(prompts, decoder.tokens[:, width : width + new].cpu().numpy(), strict=True):
        stops = np.flatnonzero(row == eos)
        answer = np.concatenate([row[: stops[0] + 1], end]) if len(stops) else row
        yield np.concatenate([prompt, answer]).astype(np.int32)


@torch.inference_mode()
def generate(
    model: Model, blend: Blend, prompts: Sequence[Tokens], config: GenerateConfig, *, eos: int, end: Tokens, seed: int
) -> Corpus:
    """Rows of prompt and answer (greedy for every second prompt), as many as ``config.seconds`` allow.

    Args: ``model`` computes at ``blend``, None for floats; ``eos`` ends an answer; ``end`` are the tokens the chat
    template writes after it.
    """
    size, started, slowest = config.batch_size, time.monotonic(), 0.0
    fitting = sorted((prompt for prompt in prompts if len(prompt) <= config.max_prompt), key=len)
    starts = np.random.default_rng(seed).permutation(range(0, len(fitting), size))
    decoders: dict[int, _Decoder] = {}
    rows: list[Tokens] = []
    for start in starts:
        began = time.monotonic()
        if began - started + slowest > config.seconds:
            break
        batch = fitting[start : start + size]
        width = -(-max(map(len, batch)) // BUCKET) * BUCKET
        if width not in decoders:
            decoders[width] = _Decoder(model, blend, size, width + config.max_new, config.temperature)
        padded = [*batch, *[batch[-1]] * (size - len(batch))]
        rows += list(_answers(decoders[width], padded, width, config.max_new, eos, end))[: len(batch)]
        slowest = max(slowest, time.monotonic() - began)
    return Corpus.of(rows, [config.repeats] * len(rows))
