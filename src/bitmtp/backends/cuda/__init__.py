"""The CUDA backend: kernels compiled at run time for the card at hand, graphs over one K/V store, no PyTorch."""
