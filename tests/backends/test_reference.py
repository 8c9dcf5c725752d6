"""The oracle itself, against a forward pass written in float64 with nothing but matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import random_checkpoint, random_tokens, tiny_config

from bitmtp.backends.base import Head, Row, Window, causal_rows, mask
from bitmtp.backends.reference import ReferenceBackend
from bitmtp.checkpoint import Checkpoint
from bitmtp.config import RopeScaling
from bitmtp.numerics import exp, fma, lane_sum
from bitmtp.sampling import GREEDY
from bitmtp.ternary import unpack

VARIANTS: list[dict[str, Any]] = [
    {},
    {"sub_norm": False, "qk_norm": True, "tie_embeddings": True, "ternary_scale": "tensor", "embedding_bits": 2},
    {"activation": "relu2", "attention_bias": True, "ternary_scale": "group", "embedding_bits": 4},
    {"embedding_bits": 16, "head_activation_bits": 16, "kv_type": "float32", "num_kv_heads": 4},
    {"ternary_scale": "group", "embedding_bits": 2, "rope_theta": 500.0, "hidden_size": 48},
    {"activation_scale": "group", "ternary_scale": "group", "embedding_bits": 2, "tie_embeddings": True},
    {"activation_scale": "group", "ternary_scale": "row"},
    {"rope_scaling": RopeScaling("linear", 3.0, 64, attention_factor=1.3)},
]


class Plain:
    """A causal forward pass over ``[length]`` inputs, in float64: no store, no pieces, no order of sums."""

    def __init__(self, made: Checkpoint) -> None:
        self.config, self.tensors = made.config, made.tensors

    def matrix(self, name: str, bits: int) -> np.ndarray:
        weight = self.tensors[f"{name}.weight"]
        if bits == 16:
            return weight.astype(np.float64)
        integers = unpack(weight.view(np.uint8), bits).astype(np.float64)
        scale = self.tensors[f"{name}.scale"].astype(np.float64)
        if scale.ndim == 2:
            return integers * np.repeat(scale, integers.shape[1] // scale.shape[1], axis=1)
        return integers * scale.reshape(-1, 1)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.config.norm_eps)
        return x / scale * self.tensors[f"{name}.weight"]

    def product(self, x: np.ndarray, name: str, bits: int = 2, activation_bits: int = 8) -> np.ndarray:
        if activation_bits == 8:
            group = self.config.group_size if self.config.activation_scale == "group" else x.shape[-1]
            cells = x.reshape(-1, group)
            step = np.maximum(np.abs(cells).max(-1, keepdims=True), 1e-5) / 127
            x = (np.rint(cells / step) * step).reshape(x.shape)
        return x @ self.matrix(name, bits).T + self.tensors.get(f"{name}.bias", 0)

    def rope(self, x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        angle = np.arange(len(x))[:, None, None] * self.config.rope_theta ** (-np.arange(half) / half)
        longer = self.config.rope_scaling
        angle, size = (angle / longer.factor, longer.attention_factor) if longer else (angle, 1.0)
        turned = (x[..., :half] + 1j * x[..., half:]) * size * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag], -1)

    def attention(self, x: np.ndarray, prefix: str) -> np.ndarray:
        config = self.config
        h = self.norm(x, f"{prefix}attention_norm")
        q, k, v = (self.product(h, f"{prefix}attention.{name}").reshape(len(x), -1, config.head_dim) for name in "qkv")
        if config.qk_norm:
            q, k = self.norm(q, f"{prefix}attention.q_norm"), self.norm(k, f"{prefix}attention.k_norm")
        share = config.num_heads // config.num_kv_heads
        k, v = (np.repeat(t.astype(config.kv_type).astype(np.float64), share, axis=1) for t in (self.rope(k), v))
        scores = np.einsum("qhd,khd->hqk", self.rope(q), k) / np.sqrt(config.head_dim)
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
        if config.sub_norm:
            out = self.norm(out, f"{prefix}attention.sub_norm")
        return self.product(out, f"{prefix}attention.o")

    def feed_forward(self, x: np.ndarray, prefix: str) -> np.ndarray:
        h = self.norm(x, f"{prefix}mlp_norm")
        gate, up = self.product(h, f"{prefix}mlp.gate"), self.product(h, f"{prefix}mlp.up")
        inner = up * (gate / (1 + np.exp(-gate)) if self.config.activation == "silu" else np.maximum(gate, 0) ** 2)
        if self.config.sub_norm:
            inner = self.norm(inner, f"{prefix}mlp.sub_norm")
        return self.product(inner, f"{prefix}mlp.down")

    def logits(self, tokens: list[int]) -> np.ndarray:
        embedding = self.matrix("embedding", self.config.embedding_bits)
        x = np.stack(
            [embedding[t] if t >= 0 else self.tensors["mask_embedding.weight"][-t - 1].astype(float) for t in tokens]
        )
        for layer in range(self.config.num_layers):
            x = x + self.attention(x, f"layers.{layer}.")
            x = x + self.feed_forward(x, f"layers.{layer}.")
        head = "embedding" if self.config.tie_embeddings else "head"
        bits = self.config.embedding_bits
        return self.product(self.norm(x, "norm"), head, bits, self.config.head_activation_bits)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_against_float64(changes: dict[str, Any], seed: int) -> None:
    made = random_checkpoint(tiny_config(**changes), seed)
    backend = ReferenceBackend(made)
    tokens = [*random_tokens(np.random.default_rng(seed), 20, made.config), mask(1), mask(2)]
    outputs = backend.step(causal_rows(backend.open(), tokens, 0, [Head.EXACT] * 22, GREEDY), logits=True)
    want = Plain(made).logits(tokens)
    error = np.array([np.abs(output.logits - row).max() for output, row in zip(outputs, want, strict=True) if output])
    # A value near the middle of two int8 levels may fall on the other side in float64: rare, and small.
    assert np.median(error) < 1e-3 * want.std()
    assert error.max() < 0.3 * want.std()


def test_pieces_of_256_are_one_softmax() -> None:
    made = random_checkpoint(tiny_config(max_position=600))
    backend, plain = ReferenceBackend(made), Plain(made)
    tokens = random_tokens(np.random.default_rng(0), 530, made.config)
    sequence = backend.open()
    backend.prefill(sequence, tokens[:-1])
    (output,) = backend.step([Row(sequence, tokens[-1], 529, 1)], logits=True)
    assert output is not None
    want = plain.logits(tokens)[-1]
    assert np.abs(output.logits - want).max() < 0.3 * want.std()
    assert output.token == want.argmax()


def attention_by_the_page(q: np.ndarray, keys: np.ndarray, values: np.ndarray, places: list[int]) -> np.ndarray:
    """One head of the section "Attention" of ``docs/numerics.md``, one float32 operation at a time."""
    scores = {}
    for place in places:
        score = np.float32(0)
        for d in range(len(q)):
            score = fma(q[d : d + 1], keys[place, d : d + 1], np.atleast_1d(score))[0]
        scores[place] = score
    total, weight, largest = None, np.float32(0), np.float32(0)
    for piece in range(0, max(places) + 1, 256):
        inside = [place for place in places if piece <= place < piece + 256]
        if not inside:
            continue
        top = max(scores[place] for place in inside)
        e = np.zeros(256, np.float32)
        out = np.zeros(len(q), np.float32)
        for place in inside:
            e[place - piece] = exp(np.array([scores[place] - top]))[0]
            out = fma(np.full_like(out, e[place - piece]), values[place], out)
        if total is None:
            total, weight, largest = out, lane_sum(e), top
            continue
        merged = np.maximum(largest, top)
        a, b = exp(np.array([largest - merged, top - merged], np.float32))
        total, weight, largest = total * a + out * b, weight * a + lane_sum(e) * b, merged
    return np.asarray(total / weight)


@pytest.mark.parametrize("window", [None, Window(7, 101), Window(0, 270), Window(261, 38), Window(290, 99)], ids=str)
def test_attention_is_taken_in_the_order_of_the_page(window: Window | None) -> None:
    config = tiny_config(num_layers=1)
    backend = ReferenceBackend(random_checkpoint(config))
    sequence = backend.open()
    backend.prefill(sequence, random_tokens(np.random.default_rng(0), 530, config)[: config.max_position - 1])
    position = backend.length(sequence)
    row = Row(sequence, 40, position, 1, window=window)
    backend.step([row])
    q = np.random.default_rng(1).normal(0, 0.2, (4, 8)).astype(np.float32)
    places = [p for p in range(position) if window is None or p < window.sinks or p > position - window.recent]
    store = backend._stores[sequence]
    want = [
        attention_by_the_page(q[head], store.keys[0, head // 2], store.values[0, head // 2], [*places, position])
        for head in range(4)
    ]
    assert np.array_equal(backend._attention([row], q[None], 0)[0], np.stack(want))


def test_the_chain_moves_only_the_candidates() -> None:
    made = random_checkpoint(tiny_config(chain_rank=4))
    backend = ReferenceBackend(made)
    rows = causal_rows(backend.open(), [50, mask(1), mask(2)], 0, [Head.EXACT] * 3, GREEDY)
    for output in backend.step(rows, top=40, logits=True)[1:]:
        assert output is not None
        raw = output.logits
        assert raw is not None
        order = np.lexsort((np.arange(len(raw)), -raw))
        listed = [token for token, _ in output.top]
        assert set(listed[:16]) == set(order[:16].tolist())
        assert listed[16:] == order[16:40].tolist()
        assert output.token == listed[0]
        values = [value for _, value in output.top]
        assert values[:16] == sorted(values[:16], reverse=True)
        assert any(value != raw[token] for token, value in output.top[:16])
        assert all(value == raw[token] for token, value in output.top[16:])


def test_the_chain_keeps_the_candidates_share() -> None:
    """What the 16 candidates weigh together is what they weigh in the row's own distribution."""
    made = random_checkpoint(tiny_config(chain_rank=4))
    backend = ReferenceBackend(made)
    rows = causal_rows(backend.open(), [50, mask(1)], 0, [Head.EXACT] * 2, GREEDY)
    output = backend.step(rows, top=16, logits=True)[1]
    assert output is not None
    raw = np.asarray(output.logits, np.float64)
    weights = np.exp(raw - raw.max())
    share = np.sort(weights)[-16:].sum() / weights.sum()
    scored = np.exp(np.array([value for _, value in output.top]))
    assert output.probability == pytest.approx(scored[0] / scored.sum() * share, rel=1e-4)
