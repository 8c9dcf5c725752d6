"""Other people's implementations, on the same weights: transformers' BitNet, Qwen3, Qwen2 and Llama."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

HINT = "pip install transformers torch"
torch: Any = pytest.importorskip("torch", reason=f"PyTorch is not installed ({HINT})")
transformers: Any = pytest.importorskip("transformers", reason=f"transformers is not installed ({HINT})")

Array = NDArray[Any]


def model(data: Mapping[str, Any]) -> Any:
    """A float32 model of the class that ``config.json`` names, random as it comes."""
    config = transformers.AutoConfig.for_model(**{k: v for k, v in data.items() if k != "quantization_config"})
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return made.float().eval()


def bitnet(data: Mapping[str, Any], linear_class: str, mode: str = "offline") -> Any:
    """A model whose linear layers are transformers' own BitNet layers."""
    from transformers.integrations.bitnet import replace_with_bitnet_linear
    from transformers.utils.quantization_config import BitNetQuantConfig

    settings = BitNetQuantConfig(linear_class=linear_class, quantization_mode=mode)
    return replace_with_bitnet_linear(model(data), ["lm_head"], settings).eval()


def load(made: Any, tensors: Mapping[str, Array]) -> Any:
    """Put tensors (Hugging Face's names) into a model; each must find its place."""
    state = {name: torch.from_numpy(np.array(tensor)) for name, tensor in tensors.items()}
    missing, unexpected = made.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied
    made.tie_weights()
    return made


def logits(made: Any, ids: list[int]) -> Array:
    """``[len(ids), vocab]``."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        return np.asarray(made(torch.tensor([ids])).logits[0].float())


def _rounded(x: Any, group: int) -> Any:
    cells = x.reshape(-1, group)
    step = cells.abs().amax(dim=1, keepdim=True).clamp(min=1e-5) / 127
    return ((cells / step).round().clamp(-127, 127) * step).reshape(x.shape)


@contextmanager
def int8_inputs(made: Any, group: int | None) -> Iterator[None]:
    """Round the input of every linear layer to 8 bits, a step for each ``group`` of inputs (None: for all)."""

    def before(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_rounded(inputs[0], group or inputs[0].shape[-1]), *inputs[1:])

    layers = [module for module in made.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [layer.register_forward_pre_hook(before) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
