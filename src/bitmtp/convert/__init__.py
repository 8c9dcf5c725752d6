"""Full-precision starts: Hugging Face folders and GGUF files, read under this project's tensor names."""

from bitmtp.convert.source import SourceModel, read_source

__all__ = ["SourceModel", "read_source"]
