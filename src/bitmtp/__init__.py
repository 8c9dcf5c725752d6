"""BitMTP: fast generation from ternary language models by multi-token prediction."""

__version__ = "0.1.0"
