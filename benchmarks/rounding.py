"""What 8-bit activations and an 8-bit embedding cost a model that was made for 16 bits: perplexity of a text.

    python benchmarks/rounding.py --model SmolLM2.gguf --tokenizer FOLDER --text text.txt

The model (any start for training that `bitmtp train` reads) runs in transformers' float32 Llama or Qwen, every row of
512 tokens by itself; before each linear layer the inputs are rounded as this runtime rounds them. Needs torch and
transformers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bitmtp.config import ModelConfig
from bitmtp.convert import read_source
from bitmtp.convert.huggingface import _GLOBAL_NAMES, _LAYER_NAMES
from bitmtp.tokenizer import Tokenizer

ROW = 512
Round = Callable[[torch.Tensor], torch.Tensor]


def rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    """``x`` through int8, one step for each ``group`` entries of its last axis."""
    cells = x.reshape(-1, group)
    step = cells.abs().amax(dim=1, keepdim=True).clamp(min=1e-5) / 127
    return ((cells / step).round() * step).reshape(x.shape)


def their_model(config: ModelConfig, tensors: Mapping[str, Any]) -> Any:
    """The model in transformers."""
    kind = "qwen3" if config.qk_norm else "qwen2" if config.attention_bias else "llama"
    made = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            kind,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
    )
    theirs = {ours: name for name, ours in (_GLOBAL_NAMES | _LAYER_NAMES).items()}
    state = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        layer = f"model.layers.{parts[1]}.{theirs['.'.join(parts[2:-1])]}.{parts[-1]}" if parts[0] == "layers" else ""
        state[layer or theirs[name]] = torch.from_numpy(np.array(tensor))
    assert not made.load_state_dict(state, strict=False).unexpected_keys
    made.tie_weights()
    return made.float().eval()


@torch.no_grad()
def perplexity(model: Any, rows: torch.Tensor, inputs: Round | None, head_inputs: Round | None) -> float:
    """e to the mean loss, with the inputs of the layers' products and of the head rounded."""
    hooks = []
    for name, layer in model.named_modules():
        change = head_inputs if name == "lm_head" else inputs
        if isinstance(layer, torch.nn.Linear) and change is not None:
            hooks.append(layer.register_forward_pre_hook(lambda _, given, change=change: (change(given[0]),)))
    losses = [float(model(row[None], labels=row[None]).loss) for row in rows]
    for hook in hooks:
        hook.remove()
    return float(np.exp(np.mean(losses)))


def main() -> None:
    """Print one line of JSON for each way of rounding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--text", type=Path, required=True, help="a UTF-8 text")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    source = read_source(options.model)
    ids = Tokenizer(options.tokenizer, source.config.vocab_size).encode(options.text.read_text(encoding="utf-8"))
    rows = torch.tensor(ids[: options.rows * ROW]).reshape(-1, ROW)
    model = their_model(source.config, source.tensors)

    def row(x: torch.Tensor) -> torch.Tensor:
        return rounded(x, x.shape[-1])

    def group(x: torch.Tensor) -> torch.Tensor:
        return rounded(x, options.group)

    def show(what: str, inputs: Round | None, head_inputs: Round | None) -> None:
        print(
            json.dumps({"rounding": what, "perplexity": round(perplexity(model, rows, inputs, head_inputs), 4)}),
            flush=True,
        )

    show("none", None, None)
    show("activations by row", row, None)
    show(f"activations by {options.group}", group, None)
    show("activations and head inputs by row", row, row)
    embedding = model.get_input_embeddings().weight
    exact = embedding.detach().clone()
    embedding.data = exact.half().float()
    show("embedding in float16", None, None)
    embedding.data = rounded(exact, exact.shape[1])
    show("embedding and head in 8 bits, head inputs by row", None, row)


if __name__ == "__main__":
    main()
