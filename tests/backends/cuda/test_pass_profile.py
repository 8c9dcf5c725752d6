"""A profile accounts for every launch of a pass."""

from __future__ import annotations

import pytest
from conftest import make_backend, random_checkpoint, tiny_config

from bitmtp.backends.cuda.profile import Part, history_bytes, profile_pass


@pytest.fixture(scope="module")
def backend(gpu):  # noqa: ARG001  (`gpu` skips where there is none)
    return make_backend("cuda", random_checkpoint(tiny_config(chain_rank=4, max_position=2048)))


@pytest.mark.parametrize(("width", "masks"), [(1, False), (8, False), (8, True)])
def test_a_profile_accounts_for_the_whole_pass(backend, width, masks):
    found = profile_pass(backend, width, 300, masks)
    products = {each.name: each for each in found.kernels if each.name.startswith("product")}
    assert set(products) == {"product qkv", "product o", "product gate_up", "product down", "product head"}
    assert products["product qkv"].launches == backend.config.num_layers
    assert products["product head"].part is Part.HEAD
    assert found.bytes == backend.network.weight_bytes + history_bytes(backend, 300)
    assert sum(found.parts().values()) == pytest.approx(found.total)
    assert found.parts()[Part.CHOICE] > 0
    assert all(each.microseconds > 0 for each in found.kernels)
    assert ("chain" in {each.name for each in found.kernels}) == masks
