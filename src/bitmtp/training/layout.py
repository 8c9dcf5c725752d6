"""Where a step's mask rows stand and what they see: shared by the batch (fixed shapes, one mask).

Shapes: S real rows, M mask rows, R = S + M.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitmtp.training.config import TrainConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """The mask rows of one step.

    Attributes:
        depth: ``[M]`` int64, k of MASK(k), from 1.
        position: ``[M]`` int64, anchor + k; the row predicts the token at position + 1.
        bias: ``[M, S + M]``, 0 where the row sees a key (real rows, then mask rows), -inf elsewhere.
        of_depth: for each depth from 1 on, the mask rows of it, int64.
    """

    depth: Tensor
    position: Tensor
    bias: Tensor
    of_depth: tuple[Tensor, ...]


def block_sizes(config: TrainConfig) -> list[int]:
    """Number of masks of each block of a step, short blocks first."""
    return [config.short_masks] * config.short_blocks + [config.block_size - 1] * config.long_blocks


def draw_anchors(config: TrainConfig, step: int) -> NDArray[np.int64]:
    """Anchor positions of a step: uniform, leaving each block a target for its last row.

    Keyed by (seed, step), so that a resumed run draws what the uninterrupted one would have.
    """
    rng = np.random.default_rng([config.seed, step])
    limits = config.seq_len - np.array(block_sizes(config))
    return rng.integers(0, limits)


class Blocks:
    """The blocks of every step of a run; :meth:`at` places them.

    What does not change is put on the device once: a copy from the host in each step would wait for the device.
    """

    def __init__(self, sizes: list[int], seq_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self._block = torch.tensor(np.repeat(np.arange(len(sizes)), sizes), device=device)
        depth = np.concatenate([np.arange(1, size + 1) for size in sizes])
        self._depth = torch.tensor(depth, device=device)
        self._of_depth = tuple(
            torch.tensor(np.flatnonzero(depth == k), device=device) for k in range(1, max(sizes) + 1)
        )
        self._real = torch.arange(seq_len, device=device)
        same_block = self._block[:, None] == self._block[None, :]
        self._sees_mask = same_block & (self._depth[None, :] <= self._depth[:, None])
        self._dtype = dtype

    def at(self, anchors: Tensor) -> Layout:
        """The blocks at ``anchors [blocks]`` int64. A mask row sees the real rows up to its anchor, the masks before it
        in its block, and itself."""
        anchor = anchors[self._block]
        visible = torch.cat([self._real[None, :] <= anchor[:, None], self._sees_mask], dim=1)
        bias = torch.zeros(visible.shape, dtype=self._dtype, device=anchors.device)
        bias.masked_fill_(~visible, float("-inf"))
        return Layout(self._depth, anchor + self._depth, bias, self._of_depth)
