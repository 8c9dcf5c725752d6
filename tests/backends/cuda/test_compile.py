"""Every product kernel of the known shapes compiles for every architecture, without spilling; no GPU needed."""

from __future__ import annotations

import pytest

from bitmtp.backends.cuda.compile import ARCHITECTURES, check_compiler, compile_kernels
from bitmtp.backends.cuda.heads import float_head
from bitmtp.backends.cuda.matrices import Matrix
from bitmtp.backends.cuda.products import Product, Role
from bitmtp.errors import BackendError


class Card:
    """Stands in for a GPU: compiles, and notes what it was asked for."""

    multiprocessors = 132

    def __init__(self, architecture):
        self.architecture, self.usage = architecture, []
        self.overlaps = int(architecture.removeprefix("sm_")) >= 90

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
    "groups of 64, qkv": Product(matrix(2, 2048, 4096, 32), Role.STORE, True, 128, 2048),
    "groups of 64, down": Product(matrix(2, 6144, 2048, 96), Role.RESIDUAL, False, 384, 6144),
    "groups of 64, head": Product(matrix(2, 2048, 151_680, 32), Role.STORE, True, 128, 2048, streaming=True),
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


def test_card_compiler_and_driver_go_together():
    check_compiler("sm_90", 13_010)
    with pytest.raises(BackendError, match="does not know sm_61"):
        check_compiler("sm_61", 13_010)
    with pytest.raises(BackendError, match=r"knows CUDA 11\.8.*update the driver"):
        check_compiler("sm_90", 11_080)


ROWS = {
    "embed 2": {"EMBEDDING_BITS": 2, "SCALE_GROUPS": 10},
    "embed 16": {"EMBEDDING_BITS": 16, "SCALE_GROUPS": 0},
    "quantise": {"NORM": 1, "PARTS": 36, "STEP_INPUTS": 0},
    "quantise, steps of 64": {"NORM": 1, "PARTS": 36, "STEP_INPUTS": 64},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("hidden", [576, 2560, 8192])
def test_float_heads_compile_without_spills(architecture, hidden):
    card = Card(architecture)
    for width in (1, 2, 4, 64):
        float_head(card, matrix(16, hidden, 49_152, 0), width, 49_152)
    assert [usage.spill_bytes for usage in card.usage] == [0] * 4


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_of_rows_compile_without_spills(name, architecture):
    usage = compile_kernels("rows.cu", {"INPUTS": 576, "X_STRIDE": 576, **ROWS[name]}, architecture).usage
    assert [each.spill_bytes for each in usage] == [0]


@pytest.mark.parametrize("adaptive", [0, 1])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_turns_of_a_loop_compile_without_spills(adaptive, architecture):
    usage = compile_kernels("loop.cu", {"ADAPTIVE": adaptive}, architecture).usage
    assert [(each.kernel, each.spill_bytes) for each in usage] == [("turn", 0)]
    assert usage[0].shared_bytes <= 48 << 10, "what a kernel may have without asking"
