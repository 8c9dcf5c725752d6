"""Ask for memory before a run begins: the system ends a process that takes too much without a word."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from bitmtp.errors import ConfigError
from bitmtp.training.config import TrainConfig
from bitmtp.training.model import Model

MEMORY = Path("/proc/meminfo")


def check_memory(student: Model, config: TrainConfig) -> None:
    """Compare the least that training will take besides the models with what is free.

    Raises:
        ConfigError: it cannot be enough.
    """
    device = student.embedding.weight.device
    need, have = least_bytes(student, config), free_bytes(device)
    if need > have:
        raise ConfigError(
            f"training takes at least {need / 2**30:.1f} GiB more and {device.type} has {have / 2**30:.1f} GiB free; "
            "lower batch_size, seq_len or head_chunk"
        )


def least_bytes(student: Model, config: TrainConfig) -> int:
    """Gradients, the optimiser's moments, the inputs of products that learn, and the logits of one piece of rows."""
    learnt = sum(weight.numel() * weight.element_size() for weight in student.parameters() if weight.requires_grad)
    shape = student.config
    inputs = (
        0
        if config.frozen
        else shape.num_layers * (2 * shape.hidden_size + shape.attention_size + shape.intermediate_size)
    )
    rows = config.batch_size * config.seq_len
    size = torch.finfo(student.dtype).bits // 8
    return 3 * learnt + rows * inputs * size + min(rows, config.head_chunk) * shape.vocab_size * 4


def free_bytes(device: torch.device) -> int:
    """Memory that can be had now; as much as you like where the system does not say."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if not MEMORY.exists():
        return sys.maxsize
    lines = dict(line.split(":") for line in MEMORY.read_text(encoding="ascii").splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10
