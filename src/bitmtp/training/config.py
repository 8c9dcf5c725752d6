"""What a training run is: one frozen dataclass, read from TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from bitmtp.errors import ConfigError

T = TypeVar("T")
Method = Literal["joint", "autoregressive", "masks", "medusa"]


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """Text that the original model writes before training starts (``[generate]`` in the file)."""

    seconds: float = 0.0  # 0: none
    repeats: int = 3
    batch_size: int = 1024
    max_prompt: int = 256
    max_new: int = 256
    temperature: float = 0.8  # of every second row; the others are greedy
    prompt_files: tuple[str, ...] = ()  # with "problem", "question" or "prompt" fields; chat data files always count


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One run. Fractions are of the whole run's progress, 0 to 1.

    Exactly one of ``steps`` and ``time_budget_seconds`` drives the schedule. The time budget counts seconds inside the
    training loop (evaluation and snapshots too), summed over resumed runs; start-up and final evaluation come on top.

    Raises:
        ConfigError: a value is out of range, or contradicts another.
    """

    source: str  # Hugging Face folder or .gguf file: the start, and the teacher; methods that freeze it: a checkpoint
    tokenizer: str  # folder with tokenizer.json and tokenizer_config.json
    output: str
    data: Mapping[str, int]  # file -> how often an epoch repeats it
    method: Method = "joint"
    steps: int = 0
    time_budget_seconds: float = 0.0
    seed: int = 1
    batch_size: int = 64
    seq_len: int = 512
    block_size: int = 16
    short_blocks: int = 24  # with 7 masks; 24 and 8 make 288 rows, a multiple of 16 as attention kernels like it
    short_masks: int = 7
    long_blocks: int = 8  # with block_size - 1 masks
    depth_decay: float = 6.0
    chain_rank: int = 256
    ce_weight: float = 0.25
    self_target_start: float = 0.2
    learning_rate: float = 1.2e-3
    slow_factor: float = 0.4  # of the learning rate, for embedding and norms
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.05
    clip: float = 1.0
    warmup: float = 0.02
    final_rate: float = 0.02
    blend: float = 0.08
    head_chunk: int = 8192  # rows whose logits exist at a time
    calibration_rows: int = 64
    log_seconds: float = 10.0
    evaluate_seconds: float = 120.0
    checkpoint_seconds: float = 300.0
    snapshot_seconds: float = 300.0
    generate: GenerateConfig = field(default_factory=GenerateConfig)

    def __post_init__(self) -> None:
        if (self.steps > 0) == (self.time_budget_seconds > 0):
            raise ConfigError("give either steps or time_budget_seconds, above 0")
        if not 2 <= self.block_size <= 32:
            raise ConfigError(f"block_size is {self.block_size}; it must lie between 2 and 32")
        if not 1 <= self.short_masks < self.block_size < self.seq_len:
            raise ConfigError("short_masks must be at least 1, below block_size, and that below seq_len")
        if self.short_blocks < 0 or self.long_blocks < 1:
            raise ConfigError("long_blocks must be at least 1 (all depths need training), short_blocks at least 0")
        for name in ("batch_size", "chain_rank", "head_chunk", "calibration_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.method not in get_args(Method):
            raise ConfigError(f"method is {self.method!r}; choose one of {', '.join(get_args(Method))}")
        if not self.data or min(self.data.values()) < 1:
            raise ConfigError("data must name at least one file, each with a repeat count of at least 1")
        if not 0 <= self.ce_weight <= 1:
            raise ConfigError(f"ce_weight is {self.ce_weight}; it must lie between 0 and 1")

    @property
    def frozen(self) -> bool:
        """Whether the method bolts something on to a finished checkpoint, which stays as it is."""
        return self.method in ("masks", "medusa")


def read_config(file: str | Path, **overrides: Any) -> TrainConfig:
    """Read a TOML recipe; ``overrides`` replace its keys.

    Raises:
        ConfigError: no such file, not TOML, an unknown or missing key, or a bad value.
    """
    try:
        data = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML ({error})") from None
    try:
        generate = _build(GenerateConfig, data.pop("generate", {}), "generate.")
        return _build(TrainConfig, {**data, **overrides, "generate": generate}, "")
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _build(cls: type[T], data: dict[str, Any], prefix: str) -> T:
    hints = get_type_hints(cls)
    known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
    if unknown := sorted(set(data) - set(known)):
        raise ConfigError(f"unknown key {prefix}{unknown[0]}")
    values: dict[str, Any] = {}
    for name, value in data.items():
        values[name] = _coerce(prefix + name, value, hints[name])
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(str(error).replace(f"{cls.__name__}.__init__() ", "")) from None


def _coerce(name: str, value: Any, hint: Any) -> Any:
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint == tuple[str, ...] and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if hint == Mapping[str, int]:
        if isinstance(value, dict) and all(type(count) is int for count in value.values()):
            return value
    elif type(value) is (str if get_origin(hint) is Literal else hint):
        return value
    raise ConfigError(f"{name} is {value!r}; expected {getattr(hint, '__name__', hint)}")
