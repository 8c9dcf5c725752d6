"""How the weights of one matrix are stored: bits, what a scale covers, and whether a minimum is added."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from bitmtp.errors import ConfigError

BITS = (2, 4, 8)
GROUP_SIZES = (0, 16, 32, 64, 128)
PRODUCTS = ("attention.q", "attention.k", "attention.v", "attention.o", "mlp.gate", "mlp.up", "mlp.down")
TABLES = ("embedding", "head")


@dataclass(frozen=True, slots=True)
class Layout:
    """A weight is ``integer * scale``, or ``integer * scale + minimum`` (``docs/numerics.md``).

    Attributes:
        bits: of an integer: 2, 4 or 8.
        group_size: inputs that share a scale (and a minimum): 16, 32, 64 or 128; 0: a whole row does.
        minimum: integers are 0 and up, and a minimum is added.

    Raises:
        ConfigError: a value is unknown.
    """

    bits: int
    group_size: int = 0
    minimum: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("bits", BITS), ("group_size", GROUP_SIZES), ("minimum", (False, True))):
            value = getattr(self, name)
            if value not in allowed or type(value) is not type(allowed[0]):
                raise ConfigError(f"a layout's {name} is {value!r}; supported: {', '.join(map(repr, allowed))}")

    def scale_shape(self, out: int, inputs: int) -> tuple[int, ...]:
        """Shape of the scales, and of the minimums, of an ``[out, in]`` matrix."""
        return (out, inputs // self.group_size) if self.group_size else (out,)

    def __str__(self) -> str:
        scale = f"{self.group_size} inputs" if self.group_size else "row"
        return f"{self.bits} bits, a scale{' and a minimum' if self.minimum else ''} per {scale}"


Layouts = tuple[tuple[str, Layout], ...]


def read_layouts(data: Any) -> Layouts:
    """The field ``layouts`` of ``config.json``: name → object.

    Raises:
        ConfigError: it is something else, or a value is unknown.
    """
    known = {field.name for field in fields(Layout)}
    if not isinstance(data, dict) or not all(isinstance(entry, dict) for entry in data.values()):
        raise ConfigError("layouts must be an object that gives each name an object")
    for name, entry in data.items():
        if not {"bits"} <= set(entry) <= known:
            raise ConfigError(f"layouts: {name} has {sorted(entry)}; expected bits, and maybe group_size and minimum")
    return tuple((name, Layout(**entry)) for name, entry in data.items())


def check_names(layouts: Layouts, num_layers: int) -> None:
    """Make sure that each layout is of a matrix there is.

    Raises:
        ConfigError: an unknown name.
    """
    for name, _ in layouts:
        first, _, rest = name.partition(".")
        number, _, product = rest.partition(".")
        single = first == "layers" and number.isdecimal() and int(number) < num_layers
        if name not in (*PRODUCTS, *TABLES) and not (single and product in PRODUCTS):
            raise ConfigError(f"layouts: {name!r} is no matrix of this model")
