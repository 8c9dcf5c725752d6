"""The joint loss: next token and block prediction, summed and divided by the total weight; and its parts.

Next-token rows: ``ce_weight`` cross-entropy to the text, the rest KL divergence to the teacher (which sees the same
tokens). Mask rows: KL only, to the distribution at the real row that predicts the same token: first the teacher's,
later the student's own, because the student is the verifier of its drafts. Each mask row counts twice at half weight:
as it is, and corrected by the chain.

Shapes: B batch, S real rows, M mask rows, H hidden, V vocab, N rows of a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

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
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        learns = ctx.needs_input_grad[1]  # not where the head is frozen
        grad_matrix = torch.zeros(matrix.shape, dtype=torch.float32, device=matrix.device) if learns else None
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
            if grad_hidden is not None:
                torch.mm(gradient, matrix, out=grad_hidden[rows])
            if grad_matrix is not None:
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
        to_matrix = None if grad_matrix is None else (grad_matrix * upstream).to(grad_hidden.dtype)
        return (grad_hidden * upstream.to(grad_hidden.dtype), to_matrix, *nothing)


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
        values: ``[names]``, what the objective's ``names`` name.
    """

    loss: Tensor
    values: Tensor

    def stacked(self) -> Tensor:
        """The loss, then the values, in one float32 vector, for averaging and a single copy to the host."""
        return torch.cat([self.loss.detach()[None], self.values])


class Objective(Protocol):
    """The loss of one run.

    Attributes:
        names: of the values it measures; ``plain_k`` and ``chain_k`` are argmax agreements of mask rows of depth k with
            their target, as they are and corrected by the chain.
        models: that it runs.
    """

    names: list[str]
    models: list[Model]

    def __call__(self, tokens: Tensor, layout: Layout | None, blend: Tensor, *, self_target: bool) -> Metrics:
        """Loss of ``tokens [B, S + 1]``; call ``loss.backward()`` on what comes back."""
        ...

    def original(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``[B, S, H]`` of the model that the run started from on ``tokens [B, S]``, and its head ``[V, H]``."""
        ...


def depth_names(kind: str, config: TrainConfig) -> list[str]:
    """Names of the agreements of one kind."""
    return [f"{kind}_{depth}" for depth in range(1, config.block_size)]


def depth_weights(layout: Layout, config: TrainConfig) -> Tensor:
    """What the mask rows weigh, ``[M]``."""
    return torch.exp(-layout.depth.float() / config.depth_decay)


def mask_loss(
    versions: Sequence[Tensor],
    head: Tensor,
    target: Tensor,
    target_head: Tensor,
    weight: Tensor,
    layout: Layout,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Weighted KL of mask rows to the distributions at the real rows that predict the same tokens.

    Args: ``versions`` of the mask rows, ``[B, M, H]`` each; real rows ``target [B, S, H]``, whose head is
    ``target_head``; the ``weight [M]`` of a row, shared by its versions.
    Returns: the sum, and the argmax agreement of each version by depth, ``[versions * depths]``.
    """
    batch, count = versions[0].shape[0], len(versions)
    rows = torch.cat([version.flatten(0, 1) for version in versions])
    weight = (weight / count).repeat(count * batch)
    labels = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)  # no cross-entropy here
    targets = target[:, layout.position].flatten(0, 1).repeat(count, 1)
    loss, _, match = fused_head(rows, head, targets, target_head, labels, torch.zeros_like(weight), weight, chunk)
    agreement = match.view(count, batch, -1).float().mean(dim=1)
    return loss, torch.cat([agreement[:, places].mean(dim=1) for places in layout.of_depth]).view(-1, count).T.flatten()


class Joint:
    """Next token and, unless the student has no masks, block prediction; a teacher of floats."""

    def __init__(self, student: Model, teacher: Model, config: TrainConfig) -> None:
        self.student, self.teacher, self.config = student, teacher, config
        self.models = [student, teacher]
        self.names = ["next_ce", "next_match"]
        if student.mask_embedding is not None:
            self.names += depth_names("plain", config) + depth_names("chain", config)
        with torch.no_grad():
            self.teacher_embedding = teacher.embedding_matrix(None)
            self.teacher_head = teacher.head_matrix(None, self.teacher_embedding)

    @torch.no_grad()
    def original(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The teacher's rows and head."""
        return self.teacher(tokens, self.teacher_embedding, None, None).to(self.teacher.dtype), self.teacher_head

    def __call__(self, tokens: Tensor, layout: Layout | None, blend: Tensor, *, self_target: bool) -> Metrics:
        """The joint loss; without a layout that of the next token alone."""
        inputs, batch = tokens[:, :-1], tokens.shape[0]
        taught, _ = self.original(inputs)
        embedding = self.student.embedding_matrix(blend)
        head = self.student.head_matrix(blend, embedding)
        normed = self.student(inputs, embedding, layout, blend)
        rows = self.student.head_rows(normed, blend)
        real = inputs.shape[1]
        if layout is None:
            total = torch.full((), batch * real, dtype=torch.float32, device=rows.device)
            return Metrics(*self._next(rows, head, taught, tokens[:, 1:], total))

        next_rows, mask_rows = rows[:, :real], rows[:, real:]
        weight = depth_weights(layout, self.config)
        total = batch * (real + weight.sum())
        next_loss, values = self._next(next_rows, head, taught, tokens[:, 1:], total)
        corrected = mask_rows + self._correction(normed[:, real:], tokens, layout, embedding)
        source, matrix = (next_rows, head) if self_target else (taught, self.teacher_head)
        masked_loss, agreement = mask_loss(
            [mask_rows, corrected], head, source, matrix, weight / total, layout, self.config.head_chunk
        )
        return Metrics(next_loss + masked_loss, torch.cat([values, agreement]))

    def _next(self, rows: Tensor, head: Tensor, taught: Tensor, labels: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of the next-token rows ``[B, S, H]``, its cross-entropy, and its agreement with the teacher."""
        ce_weight = self.config.ce_weight
        weight = (1.0 / total).expand(labels.numel())
        loss, ce, match = fused_head(
            rows.flatten(0, 1), head, taught.flatten(0, 1), self.teacher_head, labels.flatten(),
            ce_weight * weight, (1 - ce_weight) * weight, self.config.head_chunk,
        )  # fmt: skip
        return loss, torch.stack([ce.mean(), match.float().mean()])

    def _correction(self, normed: Tensor, tokens: Tensor, layout: Layout, embedding: Tensor) -> Tensor:
        """What the chain adds to mask rows, given the real token before the predicted one."""
        assert self.student.chain is not None
        before = F.embedding(tokens[:, layout.position], embedding.detach())
        added: Tensor = self.student.chain(normed, rms_norm(before, self.student.config.norm_eps))
        return added.to(self.student.dtype)
