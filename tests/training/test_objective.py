"""The hand-written gradient against autograd of the plain formula, and the mask of the block rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bitmtp.convert import read_source
from bitmtp.training.config import TrainConfig
from bitmtp.training.export import student_config
from bitmtp.training.layout import Blocks, block_sizes, draw_anchors
from bitmtp.training.model import Model, int8, load, ternary
from bitmtp.training.objective import Joint, fused_head


def plain_loss(hidden, matrix, target_hidden, target_matrix, labels, ce_weight, kl_weight):
    log_p = F.log_softmax(hidden @ matrix.T, dim=-1)
    log_q = F.log_softmax(target_hidden @ target_matrix.T, dim=-1)
    kl = F.kl_div(log_p, log_q, log_target=True, reduction="none").sum(dim=-1)
    ce = F.nll_loss(log_p, labels, reduction="none")
    return (ce_weight * ce + kl_weight * kl).sum()


@pytest.mark.parametrize("chunk", [3, 7, 100])
def test_fused_head_is_the_plain_formula(chunk: int) -> None:
    torch.manual_seed(0)
    hidden, matrix = torch.randn(17, 8, requires_grad=True), torch.randn(29, 8, requires_grad=True)
    others = (
        torch.randn(17, 5), torch.randn(29, 5), torch.randint(0, 29, (17,)), torch.rand(17), torch.rand(17),
    )  # fmt: skip
    expected = plain_loss(hidden, matrix, *others)
    grads = torch.autograd.grad(3 * expected, (hidden, matrix))
    loss, ce, match = fused_head(hidden, matrix, *others, chunk)
    assert torch.allclose(loss, expected, rtol=1e-5)
    for found, wanted in zip(torch.autograd.grad(3 * loss, (hidden, matrix)), grads, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    logits = hidden @ matrix.T
    assert torch.allclose(ce, F.cross_entropy(logits, others[2], reduction="none"), rtol=1e-4, atol=1e-5)
    assert torch.equal(match, logits.argmax(-1) == (others[0] @ others[1].T).argmax(-1))


def test_quantisers_at_blend_one_give_exact_integers_and_pass_gradients_straight() -> None:
    weight = torch.randn(6, 16, requires_grad=True)
    one = torch.tensor(1.0)
    codes, scale = ternary(weight, one)
    assert set(codes.detach().unique().tolist()) <= {-1.0, 0.0, 1.0}
    upstream = torch.randn(6, 16)
    (grad,) = torch.autograd.grad((codes * scale[:, None] * upstream).sum(), weight)
    assert torch.allclose(grad, upstream, atol=1e-6)
    rows = torch.randn(5, 16) * 3
    values, step = int8(rows, one)
    assert torch.equal(values, values.round())
    assert values.abs().max() == 127
    assert ((values * step - rows).abs() <= step / 2 + 1e-6).all()
    exact, step = int8(rows, torch.tensor(0.0))
    assert torch.allclose(exact * step, rows, rtol=1e-6)


@pytest.fixture
def models(make_config) -> tuple[TrainConfig, Model, Model]:
    torch.manual_seed(1)
    config = make_config()
    source = read_source(config.source)
    teacher = Model(source.config, torch.float32).requires_grad_(False)
    load(teacher, source.tensors)
    shape = student_config(source.config, block_size=config.block_size, chain_rank=config.chain_rank)
    student = Model(shape, torch.float32)
    load(student, source.tensors)
    return config, student, teacher


def _forward(config: TrainConfig, student: Model, tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    blocks = Blocks(block_sizes(config), config.seq_len, torch.float32, tokens.device)
    blend = torch.tensor(1.0)
    with torch.no_grad():
        return student(tokens, student.embedding_matrix(blend), blocks.at(anchors), blend)[:, config.seq_len :]


def test_block_rows_see_their_anchor_and_nothing_after_it(models) -> None:
    config, student, _ = models
    anchors = torch.full((5,), 9)
    tokens = torch.randint(3, 260, (1, config.seq_len))
    before = _forward(config, student, tokens, anchors)
    after_anchor, at_anchor = tokens.clone(), tokens.clone()
    after_anchor[0, 10:] = torch.randint(3, 260, (config.seq_len - 10,))
    at_anchor[0, 9] = (tokens[0, 9] + 1) % 257 + 3
    assert torch.equal(before, _forward(config, student, after_anchor, anchors))
    assert (before != _forward(config, student, at_anchor, anchors)).any(dim=-1).all()


def test_blocks_are_causal_and_do_not_see_one_another() -> None:
    blocks = Blocks([2, 4], 6, torch.float32, torch.device("cpu"))
    layout = blocks.at(torch.tensor([1, 0]))
    assert layout.position.tolist() == [2, 3, 1, 2, 3, 4]
    visible = layout.bias == 0
    assert visible[:, :6].sum(dim=1).tolist() == [2, 2, 1, 1, 1, 1]
    assert visible[:2, 6:].int().tolist() == [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]
    assert visible[2:, 6:].int().tolist() == [[0, 0, *row] for row in np.tri(4, dtype=int).tolist()]


def test_a_mask_embedding_moves_only_its_depth_and_deeper_rows(models) -> None:
    config, student, _ = models
    anchors = torch.arange(5)
    tokens = torch.randint(3, 260, (1, config.seq_len))
    before = _forward(config, student, tokens, anchors)
    with torch.no_grad():
        student.mask_embedding.weight[1] += 1
    changed = (before != _forward(config, student, tokens, anchors)).any(dim=-1)[0]
    assert changed.tolist() == [False, True] * 3 + [False, True, True, True] * 2


def test_anchors_leave_a_target_for_every_row(make_config) -> None:
    config = make_config()
    sizes = np.array(block_sizes(config))
    drawn = np.stack([draw_anchors(config, step) for step in range(300)])
    assert (drawn + sizes).max() == config.seq_len - 1
    assert drawn.min() == 0
    assert np.array_equal(draw_anchors(config, 7), drawn[7])


@pytest.mark.parametrize("self_target", [False, True])
def test_objective_is_the_plain_sum_over_rows(models, self_target: bool) -> None:
    """Row by row in the plain formula, the chain corrected by hand."""
    config, student, teacher = models
    torch.nn.init.normal_(student.chain.output.weight, std=0.3)
    tokens = torch.randint(3, 260, (2, config.seq_len + 1))
    layout = Blocks(block_sizes(config), config.seq_len, torch.float32, tokens.device).at(
        torch.from_numpy(draw_anchors(config, 0))
    )
    blend = torch.tensor(1.0)
    objective = Joint(student, teacher, config)
    metrics = objective(tokens, layout, blend, self_target=self_target)
    with torch.no_grad():
        matrix = student.embedding_matrix(blend)
        normed = student(tokens[:, :-1], matrix, layout, blend)
        rows = student.head_rows(normed, blend)
        taught = teacher(tokens[:, :-1], teacher.embedding.weight, None, None)
        total = weights = 0.0
        zero, one = torch.zeros(1), torch.ones(1)
        teaching = teacher.embedding.weight
        for b in range(2):
            for s in range(config.seq_len):
                label = tokens[b, s + 1 : s + 2]
                common = (rows[b, s][None], matrix, taught[b, s][None], teaching, label)
                total += plain_loss(*common, 0.25 * one, 0.75 * one)
                weights += 1
            for m, (depth, position) in enumerate(zip(layout.depth.tolist(), layout.position.tolist(), strict=True)):
                target = (rows[b, position][None], matrix) if self_target else (taught[b, position][None], teaching)
                embedded = matrix[tokens[b, position]]
                before = embedded / (embedded.square().mean() + 1e-5).sqrt()
                hidden = student.chain.hidden.weight @ torch.cat([normed[b, config.seq_len + m], before])
                row = rows[b, config.seq_len + m]
                corrected = row + student.chain.output.weight @ F.silu(hidden)
                weight = float(np.exp(-depth / config.depth_decay))
                for version in (row, corrected):
                    total += weight / 2 * plain_loss(version[None], matrix, *target, label[:1], zero, one)
                weights += weight
    assert torch.allclose(metrics.loss, total / weights, rtol=1e-4)
    assert metrics.values.shape == (len(objective.names),) == (10,)
    metrics.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in student.parameters())
    assert all(p.grad is None for p in teacher.parameters())
