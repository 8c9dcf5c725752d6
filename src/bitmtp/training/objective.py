"""The joint loss: next token and block prediction, summed and divided by the total weight.

Next-token rows: ``ce_weight`` cross-entropy to the text, the rest KL divergence to the teacher (which sees the same
tokens). Mask rows: KL only, to the distribution at the real row that predicts the same token: first the teacher's,
later the student's own, because the student is the verifier of its drafts. Each mask row counts twice at half weight:
as it is, and corrected by the chain.

Shapes: B batch, S real rows, M mask rows, H hidden, V vocab, N rows of a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bitmtp.training.config import TrainConfig
from bitmtp.training.layout import Layout
from bitmtp.training.model import Model, rms_norm

RowTerms = tuple[Tensor, Tensor, Tensor, Tensor]


def row_terms(logits: Tensor, target: Tensor, labels: Tensor, ce_weight: Tensor, kl_weight: Tensor) -> RowTerms:
    """Loss terms of some rows and the gradient of their weighted sum.

    Args: ``logits`` and ``target`` (logits of the target distribution) ``[n, V]``; the others ``[n]``.
    Returns: gradient ``[n, V]`` in the dtype of ``logits``, cross-entropy, KL, same argmax (bool), ``[n]``.
    """
    # bfloat16 logits are read, but every sum over the vocabulary is float32
    log_p = F.log_softmax(logits.float(), dim=-1)
    log_q = F.log_softmax(target.float(), dim=-1)
    q = log_q.exp()
    kl = (q * (log_q - log_p)).sum(dim=-1)
    # a masked sum instead of a gather: it joins the other reductions in one kernel
    is_label = torch.arange(logits.shape[1], device=logits.device)[None, :] == labels[:, None]
    ce = -torch.where(is_label, log_p, 0.0).sum(dim=-1)
    hard = torch.where(is_label, ce_weight[:, None], 0.0)
    gradient = (ce_weight + kl_weight)[:, None] * log_p.exp() - kl_weight[:, None] * q - hard
    return gradient.to(logits.dtype), ce, kl, logits.argmax(dim=-1) == target.argmax(dim=-1)


@cache
def _row_terms_on(device_type: str) -> Callable[..., RowTerms]:
    return torch.compile(row_terms, dynamic=False) if device_type == "cuda" else row_terms


class _FusedHead(torch.autograd.Function):
    """Head product, loss and gradients by chunks of rows, so that the logits of all rows never exist together.

    The gradients are made in the forward pass, as in Liger Kernel's fused linear cross-entropy (arXiv:2410.10989).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        matrix: Tensor,
        target_hidden: Tensor,
        target_matrix: Tensor,
        labels: Tensor,
        ce_weight: Tensor,
        kl_weight: Tensor,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        terms = _row_terms_on(hidden.device.type)
        wanted = ctx.needs_input_grad[0]
        grad_hidden = torch.empty_like(hidden) if wanted else None
        grad_matrix = torch.zeros(matrix.shape, dtype=torch.float32, device=matrix.device) if wanted else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        ces, matches = [], []
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = hidden[rows] @ matrix.T
            target = target_hidden[rows] @ target_matrix.T
            gradient, ce, kl, match = terms(logits, target, labels[rows], ce_weight[rows], kl_weight[rows])
            loss += (ce_weight[rows] * ce + kl_weight[rows] * kl).sum()
            ces.append(ce)
            matches.append(match)
            if grad_hidden is not None and grad_matrix is not None:
                torch.mm(gradient, matrix, out=grad_hidden[rows])
                grad_matrix += gradient.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_matrix)
        ce_all, match_all = torch.cat(ces), torch.cat(matches)
        ctx.mark_non_differentiable(ce_all, match_all)
        return loss, ce_all, match_all

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_matrix = ctx.saved_tensors
        upstream = outputs[0]
        nothing = (None,) * 6
        return (grad_hidden * upstream.to(grad_hidden.dtype), (grad_matrix * upstream).to(grad_hidden.dtype), *nothing)


def fused_head(
    hidden: Tensor,
    matrix: Tensor,
    target_hidden: Tensor,
    target_matrix: Tensor,
    labels: Tensor,
    ce_weight: Tensor,
    kl_weight: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum of cross-entropy to ``labels`` and KL(target ‖ rows), without ever holding all logits.

    Args: rows ``hidden [N, H]`` with ``matrix [V, H]``, the target's ``[N, H']`` with ``[V, H']`` (no gradient goes
    there), and ``[N]`` labels and weights.
    Returns: the sum (differentiable in ``hidden`` and ``matrix``), cross-entropy and argmax agreement (bool) ``[N]``.
    """
    target_hidden, target_matrix = target_hidden.detach(), target_matrix.detach()
    out: tuple[Tensor, Tensor, Tensor] = _FusedHead.apply(  # type: ignore[no-untyped-call]
        hidden, matrix, target_hidden, target_matrix, labels, ce_weight, kl_weight, chunk
    )
    return out


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a step measured, still on the device (reading a value waits for it).

    Attributes:
        loss: scalar, the objective.
        next_ce: scalar, mean cross-entropy of next-token rows, nats.
        next_match: scalar, their argmax agreement with the teacher.
        plain, chain: ``[block_size - 1]``, argmax agreement of mask rows with their target by depth.
    """

    loss: Tensor
    next_ce: Tensor
    next_match: Tensor
    plain: Tensor
    chain: Tensor

    def stacked(self) -> Tensor:
        """All values in one float32 vector, for averaging and a single copy to the host."""
        scalars = torch.stack([self.loss.detach(), self.next_ce, self.next_match])
        return torch.cat([scalars, self.plain, self.chain])


class Objective:
    """The joint loss of one student and teacher."""

    def __init__(self, student: Model, teacher: Model, config: TrainConfig) -> None:
        self.student, self.teacher, self.config = student, teacher, config
        with torch.no_grad():
            self.teacher_embedding = teacher.embedding_matrix(None)
            self.teacher_head = teacher.head_matrix(None, self.teacher_embedding)

    def __call__(self, tokens: Tensor, layout: Layout, blend: Tensor, *, self_target: bool) -> Metrics:
        """Loss of ``tokens [B, S + 1]``; call ``loss.backward()`` on what comes back."""
        inputs, batch = tokens[:, :-1], tokens.shape[0]
        with torch.no_grad():
            taught = self.teacher(inputs, self.teacher_embedding, None, None).to(self.teacher.dtype)
        embedding = self.student.embedding_matrix(blend)
        head = self.student.head_matrix(blend, embedding)
        normed = self.student(inputs, embedding, layout, blend)
        rows = self.student.head_rows(normed, blend)
        real = inputs.shape[1]
        next_rows, mask_rows = rows[:, :real], rows[:, real:]
        depth_weight = torch.exp(-layout.depth.float() / self.config.depth_decay)
        total = batch * (real + depth_weight.sum())

        ce_weight, n = self.config.ce_weight, batch * real
        weight = (1.0 / total).expand(n)
        next_loss, ce, next_match = fused_head(
            next_rows.flatten(0, 1), head, taught.flatten(0, 1), self.teacher_head, tokens[:, 1:].flatten(),
            ce_weight * weight, (1 - ce_weight) * weight, self.config.head_chunk,
        )  # fmt: skip

        corrected = mask_rows + self._correction(normed[:, real:], tokens, layout, embedding)
        source, matrix = (next_rows, head) if self_target else (taught, self.teacher_head)
        target = source[:, layout.position].flatten(0, 1)
        both = torch.cat([mask_rows.flatten(0, 1), corrected.flatten(0, 1)])
        weight = (depth_weight / (2 * total)).repeat(2 * batch)
        labels = tokens[:, layout.position + 1].flatten().repeat(2)
        mask_loss, _, match = fused_head(
            both, head, target.repeat(2, 1), matrix, labels, torch.zeros_like(weight), weight, self.config.head_chunk
        )
        plain, chain = match.view(2, batch, -1).float().mean(dim=1)
        return Metrics(
            next_loss + mask_loss, ce.mean(), next_match.float().mean(),
            self._by_depth(plain, layout), self._by_depth(chain, layout),
        )  # fmt: skip

    def _correction(self, normed: Tensor, tokens: Tensor, layout: Layout, embedding: Tensor) -> Tensor:
        """What the chain adds to mask rows, given the real token before the predicted one."""
        assert self.student.chain is not None
        before = F.embedding(tokens[:, layout.position], embedding.detach())
        added: Tensor = self.student.chain(normed, rms_norm(before, self.student.config.norm_eps))
        return added.to(self.student.dtype)

    def _by_depth(self, rows: Tensor, layout: Layout) -> Tensor:
        zeros = rows.new_zeros(self.config.block_size - 1)
        count = zeros.index_add(0, layout.depth - 1, torch.ones_like(rows))
        return zeros.index_add(0, layout.depth - 1, rows) / count
