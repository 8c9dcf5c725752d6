"""Draft heads: what the copies are, and that rows with the draft head, and no others, are multiplied with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import random_checkpoint, random_tokens, tiny_config, why_unavailable

from bitmtp.backends import load_backend
from bitmtp.backends.base import Head, Row, Window
from bitmtp.backends.weights import DraftHead, dequantise_rows, head_copy, head_name, quantise_head
from bitmtp.core.policies import make_policy
from bitmtp.engine import Engine, Request
from bitmtp.errors import BackendError
from bitmtp.numerics import norm
from bitmtp.sampling import Sampling
from bitmtp.ternary import quantise_rows, unpack
from bitmtp.tokenizer import Tokenizer

SIXTEEN = {"embedding_bits": 16, "head_activation_bits": 16}
CASES = [("int4", {}), ("ternary", {}), ("int8", SIXTEEN), ("int4", SIXTEEN), ("ternary", {"embedding_bits": 4})]


@pytest.mark.parametrize(("bits", "largest"), [(8, 1e-4), (4, 0.02), (2, 0.2)])
def test_the_error_of_a_copy_is_near_the_least(bits, largest):
    """Of normally distributed rows, as a share of their variance; the best quantisers have 0.0115 and 0.19."""
    rows = np.random.default_rng().normal(0, 3, (64, 512)).astype(np.float32)
    levels, scale = quantise_head(rows, bits)
    assert abs(levels).max() == {8: 127, 4: 7, 2: 1}[bits]
    error = ((levels * scale[:, None] - rows) ** 2).mean() / (rows**2).mean()
    assert error < largest


def test_a_row_of_zeros_stays_one():
    for bits in (2, 4, 8):
        levels, scale = quantise_head(np.zeros((1, 32), np.float32), bits)
        assert not levels.any()
        assert np.isfinite(scale).all()


def test_a_copy_must_be_smaller():
    made = random_checkpoint(tiny_config(embedding_bits=4))
    assert head_copy(made, DraftHead.EXACT) is None
    for kind in ("int8", "int4"):
        with pytest.raises(BackendError, match="saves nothing: this model's head has 4"):
            load_backend("reference", made, threads=1, context=64, draft_head=kind)
    with pytest.raises(BackendError, match="unknown draft head 'int3'"):
        load_backend("reference", made, threads=1, context=64, draft_head="int3")


def outputs(backend, tokens, heads):
    sequence = backend.open()
    rows = [
        Row(sequence, token, i, (2 << i) - 1, head) for i, (token, head) in enumerate(zip(tokens, heads, strict=True))
    ]
    return [output and (output.token, output.probability, output.logits) for output in backend.step(rows, logits=True)]


def same(one, other):
    return one[:2] == other[:2] and np.array_equal(one[2], other[2])


@pytest.mark.parametrize("name", ["reference", "cuda"])
@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_only_rows_with_the_draft_head_use_the_copy(name, kind, changes):
    if reason := why_unavailable(name):
        pytest.skip(reason)
    made = random_checkpoint(tiny_config(**changes), seed=5)
    plain = load_backend(name, made, threads=1, context=64)
    cheap = load_backend(name, made, threads=1, context=64, draft_head=kind)
    random = np.random.default_rng()
    tokens = random_tokens(random, 9, made.config)
    exact = outputs(plain, tokens, [Head.EXACT] * 9)
    draft = outputs(cheap, tokens, [Head.DRAFT] * 9)
    heads = [Head(int(each)) for each in random.integers(0, 3, 9)]
    for place, (head, output) in enumerate(zip(heads, outputs(cheap, tokens, heads), strict=True)):
        if head is Head.NONE:
            assert output is None
        else:
            assert same(output, exact[place] if head is Head.EXACT else draft[place]), "whatever the other rows are"
    copy = head_copy(made, DraftHead(kind))
    whole = unpack(copy.weight, copy.bits) * copy.scale[:, None].astype(np.float64)
    original = dequantise_rows(made, head_name(made.config), np.arange(made.config.vocab_size, dtype=np.int32))
    for (*_, ours), (*_, theirs) in zip(draft, exact, strict=True):
        assert not np.array_equal(ours, theirs)
        # The hidden state is not known here; both logits come from the same, so their difference is the matrices'.
        hidden = np.linalg.lstsq(original.astype(np.float64), theirs.astype(np.float64), rcond=None)[0]
        assert np.abs(whole @ hidden - ours).max() < 0.03 * np.abs(ours).max()


def test_a_copy_s_product_is_exact_in_the_reference():
    made = random_checkpoint(tiny_config(), seed=6)
    backend = load_backend("reference", made, threads=1, context=64, draft_head="int4")
    copy = head_copy(made, DraftHead.INT4)
    hidden = norm(np.random.default_rng().normal(0, 1, (1, 32)).astype(np.float32), np.ones(32, np.float32), 1e-5)
    levels, step = quantise_rows(hidden)
    sums = levels.astype(np.int64) @ unpack(copy.weight, copy.bits).T.astype(np.int64)
    wanted = sums.astype(np.float32) * copy.scale * step
    np.testing.assert_array_equal(backend._logits(hidden[0], Head.DRAFT), wanted[0])


@pytest.mark.parametrize("name", ["reference", "cuda"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=str)
def test_provisional_drafts_with_a_cheap_head_write_the_same_text(name, sampling, tokenizer_folder):
    if reason := why_unavailable(name):
        pytest.skip(reason)
    made = random_checkpoint(tiny_config(), seed=8)
    backend = load_backend(name, made, threads=1, context=256, draft_head="int4")
    engine = Engine(backend, Tokenizer(tokenizer_folder, made.config.vocab_size), 256)
    prompt = random_tokens(np.random.default_rng(), 60, made.config)
    windowed = replace(make_policy("speculative", 4), window=Window(4, 16))
    ours, plain = (
        engine.generate(Request(prompt, 80, policy, sampling, seed=9))
        for policy in (windowed, make_policy("autoregressive", 16))
    )
    assert ours.token_ids == plain.token_ids
    assert ours.draft_acceptance_rate > 0
