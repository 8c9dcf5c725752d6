"""The student (ternary, with mask rows and chain, or Medusa heads) and the teacher (float), one PyTorch class.

``docs/numerics.md`` says what is computed. In training every quantised value passes its gradient straight through
(Bengio et al., arXiv:1308.3432), and ``blend`` fades quantisation in: 0 is float, 1 exact.

Shapes: B batch, S real rows, M mask rows, R = S + M, H hidden, N heads, K key/value heads, D head size, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from bitmtp.config import ModelConfig
from bitmtp.rope import rope_frequencies
from bitmtp.training.layout import Layout

Blend = Tensor | None  # None: not quantised at all
FLOOR = 1e-5


def _straight_through(exact: Tensor, rounded: Tensor, blend: Tensor) -> Tensor:
    # At blend 1 the sum gives `rounded` exactly: the two differ by less than a factor of two, or `rounded` is 0.
    return exact + blend * (rounded - exact).detach()


def ternary(weight: Tensor, blend: Tensor) -> tuple[Tensor, Tensor]:
    """Absmean per row (BitNet b1.58, arXiv:2402.17764): ``[out, in]`` → values in {-1, 0, 1} and scale ``[out]``."""
    scale = weight.detach().abs().mean(dim=-1, keepdim=True).clamp_min(FLOOR)
    units = weight / scale
    return _straight_through(units, units.round().clamp(-1, 1), blend), scale.squeeze(-1)


def int8(rows: Tensor, blend: Tensor) -> tuple[Tensor, Tensor]:
    """Absmax per row, half to even: ``[..., n]`` float32 → values in [-127, 127] and step ``[..., 1]``."""
    absmax = rows.detach().abs().amax(dim=-1, keepdim=True).clamp_min(FLOOR)
    units = rows * (127.0 / absmax)
    return _straight_through(units, units.round().clamp(-127, 127), blend), absmax / 127.0


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """``x / rms(x)`` over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary position embedding by halves (arXiv:2104.09864): ``x [B, R, heads, D]``, ``rope [2, R, 1, D / 2]``."""
    cos, sin = rope
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Linear(nn.Module):
    """Weight ``[out, in]`` and optional bias of one product; :func:`product` multiplies."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None


def product(x: Tensor, linears: Sequence[Linear], blend: Blend, dtype: torch.dtype) -> Tensor:
    """Outputs of several products of one input, side by side: ``x [..., in]`` float32 → ``[..., sum of out]``.

    The integers are multiplied as ``dtype`` (bfloat16 holds them exactly) and scaled afterwards.
    """
    if blend is None:
        y = F.linear(x.to(dtype), torch.cat([linear.weight.to(dtype) for linear in linears]))
    else:
        values, step = int8(x, blend)
        pairs = [ternary(linear.weight, blend) for linear in linears]
        weights = torch.cat([pair[0].to(dtype) for pair in pairs])
        y = F.linear(values.to(dtype), weights) * torch.cat([pair[1] for pair in pairs]) * step
    if linears[0].bias is not None:
        y = y + torch.cat([linear.bias for linear in linears if linear.bias is not None])
    return y.to(dtype)


class Norm(nn.Module):
    """RMSNorm with a gain; float32 out."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.eps) * self.weight.float()


class Attention(nn.Module):
    """Parameters of a layer's attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        self.q = Linear(hidden, config.attention_size, bias=bias)
        self.k = Linear(hidden, config.kv_size, bias=bias)
        self.v = Linear(hidden, config.kv_size, bias=bias)
        self.o = Linear(config.attention_size, hidden)
        self.q_norm = Norm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = Norm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.sub_norm = Norm(config.attention_size, config.norm_eps) if config.sub_norm else None


class Mlp(nn.Module):
    """Parameters of a layer's gated MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Linear(config.hidden_size, config.intermediate_size)
        self.up = Linear(config.hidden_size, config.intermediate_size)
        self.down = Linear(config.intermediate_size, config.hidden_size)
        self.sub_norm = Norm(config.intermediate_size, config.norm_eps) if config.sub_norm else None


class Layer(nn.Module):
    """One block. Its four stages are separate so that calibration and generation can stand between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_norm = Norm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = Norm(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(config)

    def qkv(self, x: Tensor, rope: Tensor, blend: Blend) -> tuple[Tensor, Tensor, Tensor]:
        """``x [B, R, H]`` → queries ``[B, N, R, D]``, keys and values ``[B, K, R, D]``, rotated."""
        config, part = self.config, self.attention
        y = product(self.attention_norm(x), (part.q, part.k, part.v), blend, x.dtype)
        heads = y.view(*y.shape[:-1], -1, config.head_dim)
        q, k, v = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=2)
        if part.q_norm is not None and part.k_norm is not None:
            q, k = part.q_norm(q).to(x.dtype), part.k_norm(k).to(x.dtype)
        return rotate(q, rope).transpose(1, 2), rotate(k, rope).transpose(1, 2), v.transpose(1, 2)

    def add_attention(self, x: Tensor, attended: Tensor, blend: Blend) -> Tensor:
        """Residual stream after the output product of ``attended [B, N, R, D]``."""
        rows = attended.transpose(1, 2).flatten(2)
        inner = rows.float() if self.attention.sub_norm is None else self.attention.sub_norm(rows)
        return x + product(inner, (self.attention.o,), blend, x.dtype)

    def gated(self, x: Tensor, blend: Blend) -> Tensor:
        """Inner activations of the MLP, ``[B, R, inner]`` float32, before any sub-norm."""
        both = product(self.mlp_norm(x), (self.mlp.gate, self.mlp.up), blend, x.dtype)
        gate, up = both.float().chunk(2, dim=-1)
        active = F.silu(gate) if self.config.activation == "silu" else F.relu(gate).square()
        return active * up

    def add_mlp(self, x: Tensor, inner: Tensor, blend: Blend) -> Tensor:
        """Residual stream after the down product of :meth:`gated`'s activations."""
        inner = inner if self.mlp.sub_norm is None else self.mlp.sub_norm(inner)
        return x + product(inner, (self.mlp.down,), blend, x.dtype)

    def forward(self, x: Tensor, rope: Tensor, bias: Tensor | None, blend: Blend) -> Tensor:
        """``x [B, R, H]`` → the same; ``bias [M, R]`` says what the last M rows see, the others are causal."""
        q, k, v = self.qkv(x, rope, blend)
        x = self.add_attention(x, attend(q, k, v, bias), blend)
        return self.add_mlp(x, self.gated(x, blend), blend)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Attention of real rows (causal among themselves) and of mask rows (by ``bias``): ``[B, N, R, D]``."""
    masks = 0 if bias is None else bias.shape[0]
    real = q.shape[2] - masks
    out = F.scaled_dot_product_attention(
        q[:, :, :real], k[:, :, :real], v[:, :, :real], is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out if bias is None else torch.cat([out, attend_grouped(q[:, :, real:], k, v, bias)], dim=2)


def attend_grouped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention under an explicit bias ``[Q, keys]`` or ``[B, 1, Q, keys]``; ``q [B, N, Q, D]`` → the same shape.

    The query heads of a key/value head become further rows: fused kernels that take a bias take no grouped heads.
    """
    batch, heads, queries, size = q.shape
    group = heads // k.shape[1]
    bias = bias.repeat(*(1,) * (bias.dim() - 2), group, 1)
    out = F.scaled_dot_product_attention(q.reshape(batch, k.shape[1], group * queries, size), k, v, attn_mask=bias)
    return out.reshape(batch, heads, queries, size)


class Chain(nn.Module):
    """The low-rank head that corrects a mask row by the token before it (after Hydra, arXiv:2402.05109)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.hidden = Linear(2 * config.hidden_size, config.chain_rank)
        self.output = Linear(config.chain_rank, config.hidden_size)
        nn.init.normal_(self.hidden.weight, std=(2 * config.hidden_size) ** -0.5)
        nn.init.zeros_(self.output.weight)  # starts as no correction

    def forward(self, normed: Tensor, before: Tensor) -> Tensor:
        """Final-normed rows and embeddings of the tokens before, both ``[..., H]`` → what to add to the rows."""
        u = F.linear(torch.cat([normed, before], dim=-1), self.hidden.weight)
        return F.linear(F.silu(u), self.output.weight)


class Medusa(nn.ModuleList):
    """Heads on the anchor's last row, one a depth (Medusa, arXiv:2401.10774); the output head is shared."""

    def __init__(self, config: ModelConfig) -> None:
        hidden = config.hidden_size
        super().__init__(Linear(hidden, hidden, bias=True) for _ in range(config.block_size - 1))
        for head in self.heads:
            nn.init.zeros_(head.weight)  # starts as the next token's head

    @property
    def heads(self) -> list[Linear]:
        """By depth, typed."""
        return cast(list[Linear], list(self))

    def forward(self, normed: Tensor, layout: Layout) -> Tensor:
        """Final-normed real rows ``[B, S, H]`` → mask rows ``[B, M, H]``."""
        rows = normed[:, layout.position - layout.depth]
        for head, places in zip(self.heads, layout.of_depth, strict=True):
            anchors = rows[:, places]
            rows = rows.index_copy(1, places, anchors + F.silu(F.linear(anchors, head.weight, head.bias)))
        return rows


class Model(nn.Module):
    """A student or, with ``blend`` None throughout, a teacher. Parameters bear the checkpoint's names."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embedding = Linear(config.hidden_size, config.vocab_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.norm_eps)
        self.head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size)
        masks, medusa = config.block_size - 1, config.drafter == "medusa"
        self.mask_embedding = Linear(config.hidden_size, masks) if masks and not medusa else None
        self.medusa = Medusa(config) if masks and medusa else None
        self.chain = Chain(config) if config.chain_rank else None

    @property
    def blocks(self) -> list[Layer]:
        """The layers, typed."""
        return cast(list[Layer], list(self.layers))

    def embedding_matrix(self, blend: Blend) -> Tensor:
        """``[V, H]`` as the input side reads it: 8 bits a row, straight through."""
        return _matrix(self.embedding.weight, blend, self.dtype)

    def head_matrix(self, blend: Blend, embedding: Tensor) -> Tensor:
        """``[V, H]`` of the output head: ``embedding`` itself where they are tied."""
        return embedding if self.head is None else _matrix(self.head.weight, blend, self.dtype)

    def forward(self, tokens: Tensor, embedding: Tensor, layout: Layout | None, blend: Blend) -> Tensor:
        """Final-normed rows ``[B, R, H]`` float32 of ``tokens [B, S]``, with a layout also of its mask rows."""
        x = F.embedding(tokens, embedding)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if layout is not None and self.mask_embedding is not None:
            masks = self.mask_embedding.weight[layout.depth - 1].to(self.dtype)
            x = torch.cat([x, masks.expand(tokens.shape[0], -1, -1)], dim=1)
            positions = torch.cat([positions, layout.position])
        rope = self.rope(positions)
        bias = None if layout is None or self.mask_embedding is None else layout.bias
        for layer in self.layers:
            x = layer(x, rope, bias, blend)
        normed: Tensor = self.norm(x)
        if layout is not None and self.medusa is not None:
            normed = torch.cat([normed, self.medusa(normed, layout)], dim=1)
        return normed

    def rope(self, positions: Tensor) -> Tensor:
        """Cosines and sines ``[2, R, 1, D / 2]`` float32 of ``positions [R]``."""
        frequency, factor = rope_frequencies(self.config)
        angles = positions.double()[:, None] * torch.from_numpy(frequency).to(positions.device)
        return (factor * torch.stack([angles.cos(), angles.sin()])).float().unsqueeze(2)

    def head_rows(self, normed: Tensor, blend: Blend) -> Tensor:
        """Rows as the head multiplies them: 8 bits, straight through."""
        if blend is None:
            return normed.to(self.dtype)
        values, step = int8(normed, blend)
        return (values * step).to(self.dtype)


def _matrix(weight: Tensor, blend: Blend, dtype: torch.dtype) -> Tensor:
    if blend is None:
        return weight.to(dtype)
    values, step = int8(weight, blend)
    return (values * step).to(dtype)


def stretch(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows ``[out, in]`` of -s, 0 and s, such that absmean finds their scale again.

    Absmean of such a row is s times its share of non-zeros; divided by that share, the row quantises to the very
    weights and the very scale that it came with.
    """
    share = np.mean(weight != 0, axis=1, keepdims=True, dtype=np.float32)
    result: NDArray[np.float32] = weight / np.maximum(share, 1 / weight.shape[1])
    return result


def load(model: Model, tensors: Mapping[str, NDArray[np.float32]]) -> None:
    """Copy a source's tensors in; mask embeddings start near the mean embedding, each a little different."""
    state = {name: torch.tensor(values) for name, values in tensors.items()}
    model.load_state_dict(state, strict=False)
    if model.mask_embedding is not None:
        embedding = model.embedding.weight.detach()
        noise = torch.randn_like(model.mask_embedding.weight) * (0.1 * embedding.std())
        model.mask_embedding.weight.data = embedding.mean(dim=0) + noise


def compile_layers(model: Model) -> None:
    """Compile block by block: all layers share the one compiled graph, the whole model would take minutes."""
    for layer in model.blocks:
        layer.compile(dynamic=False)
