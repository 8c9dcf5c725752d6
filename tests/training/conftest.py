"""A tiny float model, a byte-level tokenizer and some text: all that a run on a CPU needs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bitmtp.convert.huggingface import _GLOBAL_NAMES, _LAYER_NAMES
from bitmtp.training.config import TrainConfig

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG = {
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_tokenizer(folder: Path) -> None:
    """Every byte is a token; chat markers are special tokens 0 to 2."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}))


def write_source(folder: Path) -> None:
    """A random Llama of a Hugging Face folder."""
    rng = np.random.default_rng(0)
    hidden, inner, kv = 32, 48, 16
    shapes = {"q": (32, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, 32)}
    shapes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    tensors = {"model.embed_tokens.weight": rng.normal(0, 0.3, (260, hidden)), "model.norm.weight": np.ones(hidden)}
    for index in range(2):
        for theirs, ours in _LAYER_NAMES.items():
            short = ours.rsplit(".", 1)[-1]
            if short in shapes:
                tensors[f"model.layers.{index}.{theirs}.weight"] = rng.normal(0, hidden**-0.5, shapes[short])
            elif short in ("attention_norm", "mlp_norm"):
                tensors[f"model.layers.{index}.{theirs}.weight"] = rng.uniform(0.8, 1.2, hidden)
    assert set(_GLOBAL_NAMES) - set(tensors) == {"lm_head.weight"}
    save_file({name: values.astype(np.float32) for name, values in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))


def write_text(file: Path) -> None:
    """Sums as chat, and as text: something that two layers learn quickly."""
    lines = []
    for a in range(40):
        for b in range(20):
            if b % 2:
                lines.append({"text": f"{a} and {b} make {a + b}."})
            else:
                turns = [("user", f"What is {a}+{b}?"), ("assistant", f"It is {a + b}.")]
                lines.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``source/`` (model and tokenizer) and ``text.jsonl``."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "source").mkdir()
    write_source(folder / "source")
    write_tokenizer(folder / "source")
    write_text(folder / "text.jsonl")
    return folder


@pytest.fixture
def make_config(tiny: Path, tmp_path: Path):
    """A function: TrainConfig of a run of a few steps, with overrides."""

    def make(**overrides: object) -> TrainConfig:
        values = {
            "source": str(tiny / "source"),
            "tokenizer": str(tiny / "source"),
            "output": str(tmp_path / "run"),
            "data": {str(tiny / "text.jsonl"): 1},
            "steps": 30,
            "batch_size": 4,
            "seq_len": 24,
            "block_size": 5,
            "short_blocks": 3,
            "short_masks": 2,
            "long_blocks": 2,
            "chain_rank": 8,
            "head_chunk": 50,
            "calibration_rows": 4,
            "learning_rate": 5e-3,
            "log_seconds": 0.0,
        }
        return TrainConfig(**(values | overrides))  # type: ignore[arg-type]

    return make
