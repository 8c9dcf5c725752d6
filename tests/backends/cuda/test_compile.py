"""Every product kernel of the known shapes compiles for every architecture, without spilling; no GPU needed."""

from __future__ import annotations

import pytest

from bitmtp.backends.cuda.compile import ARCHITECTURES, compile_kernels
from bitmtp.backends.cuda.matrices import Matrix
from bitmtp.backends.cuda.products import Product, Role


class Card:
    """Stands in for a GPU: compiles, and notes what it was asked for."""

    multiprocessors = 132

    def __init__(self, architecture):
        self.architecture, self.usage = architecture, []

    def kernel(self, file, _name, constants, **_launch):
        self.usage += compile_kernels(file, constants, self.architecture).usage


def matrix(bits, inputs, outputs, groups):
    return Matrix(bits, inputs, outputs, groups, None, None, None)


PRODUCTS = {
    "smollm2 qkv": Product(matrix(2, 576, 960, 0), Role.STORE, True, 36, 576),
    "bonsai-1.7b gate-up": Product(matrix(2, 2048, 12288, 16), Role.SILU, True, 128, 2048),
    "bonsai-1.7b down": Product(matrix(2, 6144, 2048, 48), Role.RESIDUAL, False, 384, 6144),
    "bitnet-2b down": Product(matrix(2, 6912, 2560, 0), Role.RESIDUAL, True, 432, 6912),
    "bitnet-2b head": Product(matrix(8, 2560, 128_256, 0), Role.STORE, True, 160, 2560, streaming=True),
    "bonsai-1.7b head": Product(matrix(2, 2048, 151_680, 16), Role.STORE, True, 128, 2048, streaming=True),
    "a head of four bits": Product(matrix(4, 576, 49_152, 0), Role.STORE, True, 36, 576, streaming=True),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_products_compile_without_spills(name, architecture):
    card = Card(architecture)
    for width in (1, 8, 64):
        PRODUCTS[name].kernel(card, width)
    assert card.usage
    for usage in card.usage:
        assert usage.registers <= 255
        assert usage.spill_bytes == 0, usage
