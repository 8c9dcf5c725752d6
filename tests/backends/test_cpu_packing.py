"""Every packing of weights gives the reference's bits: sizes that leave tiles, blocks and groups unfilled."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import make_backend, random_checkpoint, random_tokens, tiny_config, why_unavailable
from hypothesis import given, settings
from hypothesis import strategies as st

from bitmtp.backends.base import Head, causal_rows
from bitmtp.backends.reference import ReferenceBackend
from bitmtp.checkpoint import Checkpoint
from bitmtp.errors import BackendError
from bitmtp.layout import PRODUCTS, Layout
from bitmtp.sampling import GREEDY

pytestmark = pytest.mark.skipif(bool(why_unavailable("cpu")), reason=why_unavailable("cpu") or "")


@pytest.mark.parametrize("isa", ["avx512vbmi", "avx512", "avx2", "neon", "portable"])
@given(data=st.data())
@settings(max_examples=10)
def test_ternary_products_and_rows(isa: str, data: st.DataObject) -> None:
    """The embedding is ternary and tied, so that rows are unpacked and multiplied alike."""
    group = data.draw(st.sampled_from([16, 32, 64]), "group size")
    scale = data.draw(st.sampled_from(["tensor", "row", "group"]), "scales")
    unit = group if scale == "group" else 4
    width = data.draw(st.integers(1, 20), "width")
    config = tiny_config(
        vocab_size=data.draw(st.integers(20, 1700), "vocabulary"),
        hidden_size=unit * data.draw(st.integers(1, 160 // unit), "hidden"),
        intermediate_size=unit * data.draw(st.integers(1, 200 // unit), "inner"),
        num_heads=2, num_kv_heads=1, head_dim=2 * group if scale == "group" else 18, num_layers=1,
        embedding_bits=2, tie_embeddings=True, ternary_scale=scale, group_size=group,
    )  # fmt: skip
    check_packing(isa, random_checkpoint(config, data.draw(st.integers(0, 99), "seed")), width)


LAYOUTS = st.builds(Layout, st.sampled_from([2, 4, 8]), st.sampled_from([0, 16, 32, 64, 128]), st.booleans())


@pytest.mark.parametrize("isa", ["avx512vbmi", "avx512", "avx2", "neon", "portable"])
@given(data=st.data())
@settings(max_examples=25)
def test_low_bit_products_and_rows(isa: str, data: st.DataObject) -> None:
    """Any layout of any matrix, with steps of the activations by row or by group."""
    step = data.draw(st.sampled_from([0, 16, 32, 64, 128]), "inputs of a step")
    head, product, other = (data.draw(LAYOUTS, name) for name in ("head", "products", "values"))
    unit = max(16, step, *(layout.group_size for layout in (head, product, other)))
    width = data.draw(st.integers(1, 20), "width")
    products = dict.fromkeys(PRODUCTS, product) | {"attention.v": other, "mlp.down": other}
    config = tiny_config(
        vocab_size=data.draw(st.integers(20, 600), "vocabulary"),
        hidden_size=unit * data.draw(st.integers(1, 160 // unit), "hidden"),
        intermediate_size=unit * data.draw(st.integers(1, 3), "inner"),
        num_heads=2, num_kv_heads=1, head_dim=unit // 2, num_layers=1, sub_norm=False, block_size=1,
        tie_embeddings=True, group_size=step or 32, activation_scale="group" if step else "row",
        layouts=(("embedding", head), *products.items()),
    )  # fmt: skip
    check_packing(isa, random_checkpoint(config, data.draw(st.integers(0, 99), "seed")), width)


def check_packing(isa: str, made: Checkpoint, width: int) -> None:
    """The CPU backend's logits are the reference's, to the bit."""
    config = made.config
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BITMTP_ISA", isa)
        try:
            subject = make_backend("cpu", made)
        except BackendError as error:
            pytest.skip(str(error))
    oracle = ReferenceBackend(made)
    tokens = random_tokens(np.random.default_rng(0), width, config)
    found, expected = (
        backend.step(causal_rows(backend.open(), tokens, 0, [Head.EXACT] * width, GREEDY), logits=True)
        for backend in (subject, oracle)
    )
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        assert np.array_equal(one.logits, other.logits)  # type: ignore[arg-type]
