"""Products, quantisation and embedding against NumPy, from fresh random inputs."""

from __future__ import annotations

import numpy as np
import pytest

from bitmtp.backends.cuda.layout import MAX_WIDTH, PASS
from bitmtp.backends.cuda.matrices import Part, Uploader, round_up
from bitmtp.backends.cuda.products import Product, Role
from bitmtp.checkpoint import Checkpoint
from bitmtp.config import ModelConfig
from bitmtp.ternary import pack, unpack

POISON = np.float32(np.nan)


def config(**changes):
    shape = {
        "vocab_size": 1000, "hidden_size": 576, "intermediate_size": 1536, "num_layers": 1, "num_heads": 9,
        "num_kv_heads": 3, "head_dim": 64, "max_position": 512, "eos_token_ids": (),
    }  # fmt: skip
    return ModelConfig(**(shape | changes))


def uploader(gpu, tmp_path, **changes):
    return Uploader(gpu, Checkpoint(tmp_path, config(**changes), {}))


def integers(random, rows, inputs, bits):
    low = {2: -1, 4: -8, 8: -127}[bits]
    return random.integers(low, -low + (bits != 4), (rows, inputs)).astype(np.int8)


def packed(weights, bits):
    return weights if bits == 8 else pack(weights, bits)


def stats_of(x, gain):
    """Sum of squares and largest |x * gain| of each 16 columns."""
    n, k = x.shape
    cells = np.zeros((n, round_up(k, 16)), np.float32)
    scaled = cells.copy()
    cells[:, :k], scaled[:, :k] = x, x * gain
    cells, scaled = cells.reshape(n, -1, 16), scaled.reshape(n, -1, 16)
    return np.stack([(cells.astype(np.float64) ** 2).sum(2), np.abs(scaled).max(2)], axis=2).astype(np.float32)


def levels(x, gain, norm, eps=1e-5):
    x = x.astype(np.float64)
    y = x * gain / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) if norm else x
    absmax = np.maximum(np.abs(y).max(axis=1, keepdims=True), 1e-5)
    return y * (127 / absmax), absmax / 127


def padded(array, columns):
    out = np.full((MAX_WIDTH, columns), POISON, np.float32)
    out[: array.shape[0], : array.shape[1]] = array
    return out


class Run:
    """One product on the device, as the network runs it."""

    def __init__(self, gpu, product, width):
        self.gpu, self.product, self.width = gpu, product, width

    def __call__(self, x, gain, before, out_gain=None):
        gpu, product, matrix = self.gpu, self.product, self.product.matrix
        kernel = product.kernel(gpu, self.width)
        state = np.zeros(1, PASS)
        state["width"] = len(x)
        device_pass = gpu.upload(state)
        stats = np.zeros((MAX_WIDTH, product.parts, 2), np.float32)
        stats[: len(x)] = stats_of(x, gain if product.norm else 1)
        buffers = [gpu.upload(a) for a in (padded(x, product.stride), stats, np.pad(gain, (0, -len(gain) % 16)))]
        steps = gpu.zeros(MAX_WIDTH * 4 * max(matrix.step_groups, 1))
        cells = gpu.zeros(MAX_WIDTH * matrix.cells * 128)
        if not product.sharers(self.width, gpu):
            constants = {
                "INPUTS": matrix.inputs, "X_STRIDE": product.stride, "NORM": int(product.norm), "PARTS": product.parts,
                "STEP_INPUTS": matrix.step_inputs,
            }  # fmt: skip
            grid = (-(-matrix.cells * 128 // 1024), self.width)
            quantise = gpu.kernel("rows.cu", "quantise", constants, grid=grid, block=256)
            gpu.launch(gpu.stream, quantise, device_pass, *buffers, cells, steps, np.float32(1e-5))
        out = gpu.upload(before)
        out_stats = gpu.upload(np.full((MAX_WIDTH, product.out_stride // 16, 2), POISON, np.float32))
        nothing = np.uintp(0)
        gpu.launch(
            gpu.stream, kernel, device_pass, matrix.weights, matrix.scale, matrix.bias or nothing, *buffers, cells,
            steps, out, out_stats, nothing if out_gain is None else gpu.upload(out_gain), np.float32(1e-5),
        )  # fmt: skip
        shape = (MAX_WIDTH, product.out_stride)
        return gpu.read(out, np.float32, shape), gpu.read(out_stats, np.float32, (*shape[:1], shape[1] // 16, 2))


def expected(q, weights, scale):
    if scale.ndim == 1:
        return (q @ weights.T.astype(np.float64)) * scale
    groups = scale.shape[1]
    cells = weights.reshape(len(weights), groups, -1).astype(np.float64)
    return np.einsum("ngi,ogi,og->no", q.reshape(len(q), groups, -1), cells, scale.astype(np.float64))


CASES = [
    (2, 576, 960, "row", Role.STORE, True),
    (2, 2048, 4096, "group", Role.STORE, True),
    (2, 576, 3072, "row", Role.SILU, True),
    (2, 2048, 4128, "group", Role.RELU2, True),
    (2, 1536, 576, "tensor", Role.RESIDUAL, True),
    (2, 6144, 2048, "group", Role.RESIDUAL, False),
    (2, 260, 48, "row", Role.RESIDUAL, False),
    (2, 576, 960, "groups of 64", Role.STORE, True),
    (2, 2048, 4128, "groups of 64", Role.SILU, True),
    (2, 1536, 576, "groups of 32", Role.RESIDUAL, False),
    (2, 6144, 2048, "groups of 64", Role.RESIDUAL, False),
    (2, 2048, 2048, "groups of 256", Role.STORE, True),
    (2, 576, 1000, "groups of 64", Role.STORE, True),
    (4, 576, 1000, "row", Role.STORE, True),
    (8, 576, 1009, "row", Role.STORE, True),
]


def scales(random, layout, outputs, inputs):
    groups = int(layout.removeprefix("groups of ")) if layout.startswith("groups") else 128
    shape = {"tensor": (1,), "row": (outputs,)}.get(layout, (outputs, inputs // groups))
    return random.uniform(0.5, 2, shape).astype(np.float32)


@pytest.mark.parametrize("width", [1, 3, 8, 9, 16, 33, 64])
@pytest.mark.parametrize(("bits", "inputs", "outputs", "layout", "role", "norm"), CASES)
def test_product(gpu, tmp_path, bits, inputs, outputs, layout, role, norm, width):
    random = np.random.default_rng()
    weights = integers(random, outputs, inputs, bits)
    scale = scales(random, layout, outputs, inputs)
    load = uploader(gpu, tmp_path)
    if role.gated:
        half = outputs // 2
        parts = [Part(packed(w, bits), scale if len(scale) == 1 else s) for w, s in zip(
            (weights[:half], weights[half:]), (scale[:half], scale[half:]), strict=True)]  # fmt: skip
        matrix = load._stack(parts, bits, interleave=True)
    else:
        matrix = load._stack([Part(packed(weights, bits), scale)], bits)
    stride = round_up(inputs, 16)
    product = Product(matrix, role, norm, stride // 16, stride, streaming=outputs in (1000, 1009))
    x = (random.standard_normal((width, inputs)) * random.uniform(0.1, 10, (width, 1))).astype(np.float32)
    gain = random.uniform(0.5, 2, inputs).astype(np.float32)
    out_gain = random.uniform(0.5, 2, product.out_stride).astype(np.float32)
    before = np.full((MAX_WIDTH, product.out_stride), POISON, np.float32)
    before[:width] = random.standard_normal((width, product.out_stride))
    got, stats = Run(gpu, product, min(b for b in (1, 2, 4, 8, 16, 32, 64) if b >= width))(x, gain, before, out_gain)

    exact, step = levels(x, gain if norm else 1, norm)
    near = np.abs(exact - np.rint(exact))  # distance of a level from the next: half is a matter of last bits
    tolerance = np.abs(near - 0.5) < 1e-3
    y = expected(np.clip(np.rint(exact), -127, 127), weights, scale) * step
    slack = (tolerance.sum(axis=1, keepdims=True) + 0.01) * step * scale.max() * max(abs(weights).max(), 1)
    if role.gated:
        gate, up = y[:, : outputs // 2], y[:, outputs // 2 :]
        y = gate / (1 + np.exp(-gate)) * up if role is Role.SILU else np.maximum(gate, 0) ** 2 * up
        slack = slack * (np.abs(gate) * 2 + np.abs(up) + 1) * (np.abs(gate) + 1)
    columns = y.shape[1]
    if role is Role.RESIDUAL:
        y = y + before[:width, :columns]
    assert (np.abs(got[:width, :columns] - y) <= slack + 1e-5 * np.abs(y)).all()
    if role is not Role.STORE:
        wanted = stats_of(got[:width, :columns], out_gain[:columns])
        np.testing.assert_allclose(stats[:width, : wanted.shape[1]], wanted, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 5, 8, 16, 64])
@pytest.mark.parametrize(
    ("layout", "size"), [("row", 32), ("tensor", 64), ("row", 128), ("group", 128), ("groups of 64", 64)]
)
@pytest.mark.parametrize(("inputs", "norm"), [(576, True), (2048, False)])
def test_steps_of_groups(gpu, tmp_path, inputs, norm, layout, size, width):
    if inputs % size:
        pytest.skip("groups are whole")
    random, outputs = np.random.default_rng(), 272
    weights, scale = integers(random, outputs, inputs, 2), scales(random, layout, outputs, inputs)
    shape = {"hidden_size": 1024, "intermediate_size": 1024, "num_heads": 16, "num_kv_heads": 16}
    load = uploader(gpu, tmp_path, activation_scale="group", group_size=size, **shape)
    stride = round_up(inputs, 16)
    product = Product(load._stack([Part(packed(weights, 2), scale)]), Role.STORE, norm, stride // 16, stride)
    x = (random.standard_normal((width, inputs)) * random.uniform(0.1, 10, (width, inputs))).astype(np.float32)
    gain = random.uniform(0.5, 2, inputs).astype(np.float32)
    before = np.full((MAX_WIDTH, outputs), POISON, np.float32)
    got, _ = Run(gpu, product, min(b for b in (1, 2, 4, 8, 16, 32, 64) if b >= width))(x, gain, before)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * gain if norm else x
    exact, step = levels(normed.reshape(-1, size), 1, False)
    values = (np.rint(exact) * step).reshape(width, inputs)
    y = expected(values, weights, scale)
    unsure = (np.abs(np.abs(exact - np.rint(exact)) - 0.5) < 1e-3) * step  # half is a matter of last bits
    slack = unsure.reshape(width, -1).sum(axis=1, keepdims=True) + 1e-4 * np.abs(values).max()
    assert (np.abs(got[:width] - y) <= slack * scale.max() + 1e-5 * np.abs(y)).all()


@pytest.mark.parametrize("layout", ["row", "group", "groups of 64", "groups of 32"])
def test_a_row_does_not_depend_on_the_width(gpu, tmp_path, layout):
    random = np.random.default_rng()
    weights, inputs = integers(random, 512, 2048, 2), 2048
    scale = scales(random, layout, 512, inputs)
    matrix = uploader(gpu, tmp_path)._stack([Part(pack(weights, 2), scale)])
    product = Product(matrix, Role.STORE, True, inputs // 16, inputs)
    x = random.standard_normal((64, inputs)).astype(np.float32)
    gain = random.uniform(0.5, 2, inputs).astype(np.float32)
    before = np.full((MAX_WIDTH, 512), POISON, np.float32)
    whole = Run(gpu, product, 64)(x, gain, before)[0]
    for width, rows in ((1, [5]), (8, range(17, 25)), (4, [63, 0, 1]), (16, range(30, 46)), (32, range(3, 35))):
        part = Run(gpu, product, width)(x[list(rows)], gain, before)[0]
        np.testing.assert_array_equal(part[: len(rows)], whole[list(rows)])


@pytest.mark.parametrize(
    ("bits", "layout"),
    [(2, "row"), (2, "group"), (2, "groups of 64"), (2, "groups of 32"), (4, "row"), (8, "row"), (16, "row")],
)
def test_embedding(gpu, tmp_path, bits, layout):
    random = np.random.default_rng()
    vocab, hidden = 1009, 640
    load = uploader(
        gpu, tmp_path, vocab_size=vocab, hidden_size=hidden, embedding_bits=bits,
        head_activation_bits=16 if bits == 16 else 8,
    )  # fmt: skip
    scale = scales(random, layout, vocab, hidden)
    if bits == 16:
        weight = random.standard_normal((vocab, hidden)).astype(np.float16)
        values = weight.astype(np.float32)
    else:
        weight = packed(integers(random, vocab, hidden, bits), bits)
        whole = unpack(weight.view(np.uint8), bits).astype(np.float32)
        values = (
            whole * scale[:, None] if scale.ndim == 1 else whole * np.repeat(scale, hidden // scale.shape[1], axis=1)
        )
    load._tensors = {"embedding.weight": weight, "embedding.scale": scale}
    matrix = load.vocabulary("embedding")
    masks = random.standard_normal((3, hidden)).astype(np.float32)
    gain = random.uniform(0.5, 2, hidden).astype(np.float32)
    tokens = [0, 1, 15, 16, 17, vocab - 1, -1, -3]
    state = np.zeros(1, PASS)
    state["width"] = len(tokens)
    state["rows"]["token"][0, : len(tokens)] = tokens
    constants = {
        "INPUTS": hidden, "X_STRIDE": hidden, "EMBEDDING_BITS": bits, "SCALE_GROUPS": matrix.scale_groups,
    }  # fmt: skip
    kernel = gpu.kernel("rows.cu", "embed", constants, grid=(64,), block=256)
    x, stats = gpu.zeros(64 * hidden * 4), gpu.zeros(64 * hidden // 16 * 8)
    arguments = [gpu.upload(state), matrix.weights, matrix.scale, gpu.upload(masks), gpu.upload(gain), x, stats]
    gpu.launch(gpu.stream, kernel, *arguments)
    wanted = np.stack([values[t] if t >= 0 else masks[-t - 1] for t in tokens])
    np.testing.assert_array_equal(gpu.read(x, np.float32, (64, hidden))[: len(tokens)], wanted)
    got = gpu.read(stats, np.float32, (64, hidden // 16, 2))[: len(tokens)]
    np.testing.assert_allclose(got, stats_of(wanted, gain), rtol=1e-5)
