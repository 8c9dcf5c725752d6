"""The shape of a model: a frozen dataclass, checked on construction, that round-trips through ``config.json``."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from bitmtp.errors import ConfigError
from bitmtp.layout import TABLES, Layout, Layouts, check_names, read_layouts

FORMAT_NAME = "bitmtp"
FORMAT_VERSIONS = (1, 2)  # 2: with layouts

Activation = Literal["silu", "relu2"]
ScaleLayout = Literal["tensor", "row", "group"]
ActivationScale = Literal["row", "group"]
KVType = Literal["float16", "float32"]
Drafter = Literal["masks", "medusa"]

_CHOICES: dict[str, tuple[Any, ...]] = {
    "architecture": ("llama",),
    "activation": ("silu", "relu2"),
    "ternary_scale": ("tensor", "row", "group"),
    "activation_scale": ("row", "group"),
    "activation_bits": (8,),
    "embedding_bits": (2, 4, 8, 16),
    "head_activation_bits": (8, 16),
    "kv_type": ("float16", "float32"),
    "drafter": ("masks", "medusa"),
}
# What a field may hold, by its annotation (a tuple: each of its values).
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "str": (str,),
    "int | None": (int, type(None)),
    "tuple[int, ...]": (int,),
    "Activation": (str,),
    "ScaleLayout": (str,),
    "ActivationScale": (str,),
    "KVType": (str,),
    "Drafter": (str,),
    "Layouts": (tuple,),
}
ROPE_SCALINGS = ("linear", "yarn", "llama3")
_MOST = {"num_layers": 1000, "max_position": 1 << 24}
_POSITIVE = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How a model's rotary frequencies were stretched to a longer context (``docs/numerics.md``).

    Attributes:
        kind: ``linear`` (arXiv:2306.15595), ``yarn`` (arXiv:2309.00071) or ``llama3`` (Llama 3.1's).
        factor: what the slow frequencies are divided by.
        original_max_position: the context before stretching; a frequency makes so many turns in it.
        low, high: below ``low`` turns a frequency is divided, above ``high`` it stays, between them it is blended.
        attention_factor: multiplies cosines and sines.

    Raises:
        ConfigError: a value is unknown or out of range.
    """

    kind: str
    factor: float
    original_max_position: int
    low: float = 1.0
    high: float = 32.0
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ROPE_SCALINGS:
            raise ConfigError(f"rope_scaling is {self.kind!r}; supported: {', '.join(map(repr, ROPE_SCALINGS))}")
        for item in fields(self)[1:]:
            value = getattr(self, item.name)
            if type(value) not in _TYPES[str(item.type)] or not 0 < value < float("inf"):
                raise ConfigError(f"rope_scaling {item.name} is {value!r}; expected {item.type} above 0")
        if self.factor < 1:
            raise ConfigError(f"rope_scaling factor is {self.factor!r}; it must be at least 1")
        if self.low >= self.high:
            raise ConfigError(f"rope_scaling low is {self.low!r}; it must be below high {self.high!r}")


_TYPES["RopeScaling | None"] = (RopeScaling, type(None))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything a backend must know besides the tensors; ``docs/format.md`` describes each field.

    Raises:
        ConfigError: a value is unknown, out of range, or inconsistent with another.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    architecture: str = "llama"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    activation: Activation = "silu"
    sub_norm: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    tie_embeddings: bool = True
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    ternary_scale: ScaleLayout = "row"
    group_size: int = 128
    activation_bits: int = 8
    activation_scale: ActivationScale = "row"
    embedding_bits: int = 8
    head_activation_bits: int = 8
    kv_type: KVType = "float16"
    block_size: int = 1
    drafter: Drafter = "masks"
    chain_rank: int = 0
    layouts: Layouts = ()

    def __post_init__(self) -> None:
        self._check_types()
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; supported: {', '.join(map(repr, allowed))}")
        for name in (*_POSITIVE, "max_position", "group_size", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be above 0")
        for name, most in _MOST.items():  # a damaged number would take all memory before a tensor is looked at
            if getattr(self, name) > most:
                raise ConfigError(f"{name} is {getattr(self, name)}; supported: up to {most}")
        if not 0 <= self.norm_eps < 1:
            raise ConfigError(f"norm_eps is {self.norm_eps!r}; it must lie between 0 and 1")
        if not 1 <= self.block_size <= 32:
            raise ConfigError(f"block_size is {self.block_size}; it must lie between 1 and 32")
        if not 0 <= self.chain_rank <= 4096:
            raise ConfigError(f"chain_rank is {self.chain_rank}; it must lie between 0 (no chain) and 4096")
        if self.chain_rank and self.drafter != "masks":
            raise ConfigError(f"chain_rank is {self.chain_rank}; drafter {self.drafter!r} has no chain")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary embedding needs an even number")
        if (self.embedding_bits == 16) != (self.head_activation_bits == 16):
            raise ConfigError("embedding_bits 16 and head_activation_bits 16 go together")
        for name in ("hidden_size", "intermediate_size", "attention_size"):
            value = getattr(self, name)
            if value % 4:
                raise ConfigError(f"{name} is {value}; packed weights need a multiple of 4")
            if "group" in (self.ternary_scale, self.activation_scale) and value % self.group_size:
                raise ConfigError(f"{name} is {value}, not a multiple of group_size {self.group_size}")
        self._check_layouts()
        for token in (*self.eos_token_ids, self.bos_token_id, self.pad_token_id):
            if token is not None and not 0 <= token < self.vocab_size:
                raise ConfigError(f"special token {token} is outside the vocabulary of {self.vocab_size}")

    def _check_layouts(self) -> None:
        check_names(self.layouts, self.num_layers)
        if self.embedding_bits == 16 and any(name in TABLES for name, _ in self.layouts):
            raise ConfigError("layouts: an embedding or head with embedding_bits 16 has none")
        for name, layout in self.layouts:
            inputs = self._inputs(name)
            if layout.group_size and inputs % layout.group_size:
                raise ConfigError(f"layouts: {name} has {inputs} inputs, not a multiple of {layout.group_size}")
            if layout.group_size and self.activation_scale == "group":
                larger, smaller = sorted((layout.group_size, self.group_size), reverse=True)
                if larger % smaller or (larger // smaller).bit_count() != 1:
                    raise ConfigError(
                        f"layouts: groups of {layout.group_size} in {name} and activations in groups of "
                        f"{self.group_size}: one must be the other times a power of two"
                    )
        for index in range(self.num_layers):
            if self.layout(f"layers.{index}.mlp.gate") != self.layout(f"layers.{index}.mlp.up"):
                raise ConfigError(f"layouts: layers.{index}.mlp.gate and .up differ; they are computed together")

    def _inputs(self, name: str) -> int:
        """Inputs of the matrix of a name in ``layouts``."""
        sizes = {"mlp.down": self.intermediate_size, "attention.o": self.attention_size}
        return next((size for product, size in sizes.items() if name.endswith(product)), self.hidden_size)

    def layout(self, module: str) -> Layout | None:
        """Of a matrix such as ``layers.3.mlp.down`` or ``head``; None: ternary, or as ``embedding_bits`` says."""
        layouts = dict(self.layouts)
        return layouts.get(module) or layouts.get(module.split(".", 2)[-1])

    def _check_types(self) -> None:
        for item in fields(self):
            value, expected = getattr(self, item.name), _TYPES[str(item.type)]
            values = value if isinstance(value, tuple) else (value,)
            shape_right = isinstance(value, tuple) == (item.name in ("eos_token_ids", "layouts"))
            if not shape_right or not all(type(entry) in expected for entry in values):
                raise ConfigError(f"{item.name} is {value!r}; expected {item.type}")

    @property
    def attention_size(self) -> int:
        """Inputs of the attention output product: ``num_heads * head_dim``."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Outputs of the key (or value) product: ``num_kv_heads * head_dim``."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        """Parse ``config.json``; a file without ``format`` is taken for this project's.

        Raises:
            ConfigError: not JSON, another format or version, unknown or missing fields, or bad values.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not valid JSON ({error})") from None
        if not isinstance(data, dict):
            raise ConfigError("expected a JSON object")
        name, version = data.pop("format", FORMAT_NAME), data.pop("format_version", 1)
        if name != FORMAT_NAME or version not in FORMAT_VERSIONS:
            raise ConfigError(f"format is {name!r} version {version!r}; this reader knows {FORMAT_NAME!r} 1 and 2")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ConfigError(f"unknown field {unknown[0]!r}")
        if isinstance(data.get("eos_token_ids"), list):
            data["eos_token_ids"] = tuple(data["eos_token_ids"])
        if "layouts" in data:
            data["layouts"] = read_layouts(data["layouts"])
        try:
            if isinstance(data.get("rope_scaling"), dict):
                data["rope_scaling"] = RopeScaling(**data["rope_scaling"])
            return cls(**data)
        except TypeError as error:
            raise ConfigError(re.sub(r"^\w+\.__init__\(\) ", "", str(error))) from None

    def to_json(self) -> str:
        """The text of ``config.json``, of the earliest version that has what the model needs."""
        data = {"format": FORMAT_NAME, "format_version": 2 if self.layouts else 1, **asdict(self)}
        data["layouts"] = {name: asdict(layout) for name, layout in self.layouts}
        if not self.layouts:
            del data["layouts"]
        return json.dumps(data, indent=1) + "\n"
