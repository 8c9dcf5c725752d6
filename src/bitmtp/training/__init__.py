"""Training (PyTorch): from a float Llama-family model to a ternary model that drafts blocks; ``docs/training.md``."""
