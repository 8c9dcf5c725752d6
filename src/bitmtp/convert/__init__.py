"""Models from elsewhere (Hugging Face folders, GGUF files): ternary ones become checkpoints, others start training."""

from bitmtp.convert.source import SourceModel, read_source

__all__ = ["SourceModel", "read_source"]
