"""The attention kernels against float64, and their bits against themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from bitmtp.backends.cuda.attention import (
    FILE,
    AttentionShape,
    attention_kernels,
    most_parts,
    move_kernel,
    short_kernel,
)
from bitmtp.backends.cuda.compile import ARCHITECTURES, compile_kernels
from bitmtp.backends.cuda.layout import MAX_WIDTH, PASS, PIECE
from bitmtp.config import ModelConfig
from bitmtp.errors import BackendError

CONTEXT = 1 << 15
LAYERS, LAYER = 2, 1


def config(heads: int, kv_heads: int, head_dim: int, kv_type: str = "float16", **others) -> ModelConfig:
    return ModelConfig(
        vocab_size=8, hidden_size=64, intermediate_size=64, num_layers=LAYERS, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, max_position=CONTEXT, eos_token_ids=(0,), kv_type=kv_type, **others,
    )  # fmt: skip


CONFIGS = {
    "128": config(4, 2, 128, qk_norm=True),
    "64 by three": config(6, 2, 64),
    "256 by four": config(4, 1, 256),
    "tiny": config(4, 2, 8, qk_norm=True),
    "odd": config(6, 3, 22, "float32", qk_norm=True),
    "80": config(2, 1, 80),
    "128 float32": config(4, 2, 128, "float32"),
}


@dataclass(frozen=True)
class Seen:
    """A row: where it stands, which rows of its sequence it sees, and its window."""

    position: int
    visible: int
    sinks: int = 0
    recent: int = 0

    def positions(self, length: int) -> list[int]:
        return [p for p in range(length) if not self.recent or p < self.sinks or p > self.position - self.recent]


@dataclass(frozen=True)
class Text:
    """A sequence of a pass: its history's K/V, rounded as the store is, and its rows with their q, k and v."""

    history: np.ndarray  # [2, length, kv_heads, head_dim]
    rows: tuple[Seen, ...]
    qkv: np.ndarray  # [rows, (heads + 2 kv_heads) * head_dim]
    linear: bool = True

    @property
    def length(self) -> int:
        return self.history.shape[1]


@dataclass(frozen=True)
class Result:
    attended: np.ndarray
    stats: np.ndarray
    stores: list[np.ndarray]  # [2, slots, kv_heads, head_dim]


def causal(length: int, count: int, **window) -> tuple[Seen, ...]:
    return tuple(Seen(length + i, (2 << i) - 1, **window) for i in range(count))


def tree(rng, length: int, count: int, **window) -> tuple[Seen, ...]:
    rows: list[Seen] = []
    for i in range(count):
        parent = rows[rng.integers(len(rows))] if rows and rng.random() < 0.8 else None
        seen = (parent.visible if parent else 0) | 1 << i
        rows.append(Seen(parent.position + 1 if parent else length, seen, **window))
    return tuple(rows)


def number_type(config: ModelConfig) -> type:
    return np.float16 if config.kv_type == "float16" else np.float32


def text(rng, config: ModelConfig, length: int, rows: tuple[Seen, ...], linear: bool = True) -> Text:
    history = rng.normal(size=(2, length, config.num_kv_heads, config.head_dim)).astype(number_type(config))
    qkv = rng.normal(size=(len(rows), config.attention_size + 2 * config.kv_size)).astype(np.float32)
    return Text(history, rows, qkv, linear)


class Model:
    """Everything of one layer that does not change between passes, and the oracle over it."""

    def __init__(self, gpu, config: ModelConfig, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.gpu, self.config = gpu, config
        angles = np.outer(np.arange(CONTEXT), 10_000.0 ** (-np.arange(config.head_dim // 2) / (config.head_dim // 2)))
        self.cosines, self.sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.q_norm, self.k_norm = rng.uniform(0.5, 2, (2, config.head_dim)).astype(np.float32)
        self.gain = rng.uniform(0.5, 2, config.attention_size).astype(np.float32)
        constants = (self.q_norm, self.k_norm, self.cosines, self.sines, self.gain)
        self.constants = [gpu.upload(array) for array in constants]

    # On the GPU

    def run(self, texts: list[Text], *, tile: int = 0, blocks: int = 0, short: bool = False) -> Result:
        config, gpu = self.config, self.gpu
        width = sum(len(text.rows) for text in texts)
        tile = tile or next(tile for tile in (8, 16, 32, 64) if tile >= width)
        shape = AttentionShape(config, tile, len(texts))
        stores = [self._store(text) for text in texts]
        state = self._pass(texts, stores)
        qkv = np.full((MAX_WIDTH, texts[0].qkv.shape[1]), np.nan, np.float32)
        qkv[:width] = np.concatenate([text.qkv for text in texts])
        attended = gpu.upload(np.full((MAX_WIDTH, config.attention_size), np.nan, np.float32))
        stats = gpu.upload(np.full((MAX_WIDTH, config.num_heads, 2), np.nan, np.float32))
        capacity = max(text.length + len(text.rows) for text in texts)
        kernels = attention_kernels(gpu, shape, capacity, blocks)
        workspace = gpu.upload(np.full(shape.workspace_bytes(kernels.blocks, capacity) // 4, np.nan, np.float32))
        arguments = (gpu.upload(state), np.int32(LAYER), gpu.upload(qkv), *self.constants, attended, stats)
        gpu.device.sync()  # copies from pageable memory may still be under way
        if not short:
            kernels.launch(gpu.stream, *arguments, workspace)
        elif kernel := short_kernel(gpu, shape, capacity):
            gpu.launch(gpu.stream, kernel, *arguments)
        else:
            pytest.skip("the card has no clusters")
        first = gpu.read(attended, np.float32, (MAX_WIDTH, config.attention_size))
        assert np.isnan(first[width:]).all(), "a row beyond the width was written"
        moments = gpu.read(stats, np.float32, (MAX_WIDTH, config.num_heads, 2))
        return Result(
            first[:width],
            moments[:width],
            [self.read_store(store, text) for store, text in zip(stores, texts, strict=True)],
        )

    def _blocks(self, text: Text) -> int:
        return -(-(text.length + len(text.rows)) // PIECE)

    def _store(self, text: Text):
        config = self.config
        shape = (self._blocks(text), LAYERS, 2, config.num_kv_heads, PIECE, config.head_dim)
        content = np.full(shape, np.nan, number_type(config))
        for value in range(2):
            for position in range(text.length):
                content[position // PIECE, LAYER, value, :, position % PIECE] = text.history[value, position]
        return self.gpu.upload(content)

    def read_store(self, store, text: Text) -> np.ndarray:
        config, blocks = self.config, self._blocks(text)
        shape = (blocks, LAYERS, 2, config.num_kv_heads, PIECE, config.head_dim)
        content = self.gpu.read(store, number_type(config), shape)
        assert np.isnan(content[:, 1 - LAYER]).all(), "another layer was written"
        slots = (
            content[:, LAYER].transpose(1, 0, 3, 2, 4).reshape(2, blocks * PIECE, config.num_kv_heads, config.head_dim)
        )
        written = text.length + len(text.rows)
        assert np.isnan(slots[:, written:]).all(), "a slot behind the pass was written"
        return slots[:, :written]

    def _pass(self, texts: list[Text], stores: list) -> np.ndarray:
        state = np.zeros((), PASS)
        state["rows"]["token"] = 1 << 30
        state["num_sequences"], first = len(texts), 0
        for number, (text, store) in enumerate(zip(texts, stores, strict=True)):
            state["sequences"][number] = (int(store.handle), text.length, first, len(text.rows), text.linear)
            for index, row in enumerate(text.rows):
                into = state["rows"][first + index]
                into["visible"], into["position"], into["sequence"], into["index"] = (
                    row.visible,
                    row.position,
                    number,
                    index,
                )
                into["sinks"], into["recent"] = row.sinks, row.recent
            first += len(text.rows)
        state["width"] = first
        return state

    # In float64

    def expect(self, texts: list[Text]) -> np.ndarray:
        return np.concatenate([self._expect(text) for text in texts])

    def vectors(self, text: Text) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k, v of the rows [rows, heads, head_dim]; k and v as the store rounds them."""
        config, count = self.config, len(text.rows)
        sizes = np.cumsum([config.attention_size, config.kv_size])
        q, k, v = (x.reshape(count, -1, config.head_dim).astype(np.float64) for x in np.split(text.qkv, sizes, axis=1))
        at = [row.position for row in text.rows]
        q, k = self._rotate(self._norm(q, self.q_norm), at), self._rotate(self._norm(k, self.k_norm), at)
        rounded = number_type(config)
        return q / np.sqrt(config.head_dim), k.astype(rounded).astype(np.float64), v.astype(rounded).astype(np.float64)

    def _norm(self, x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        if not self.config.qk_norm:
            return x
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config.norm_eps) * gain

    def _rotate(self, x: np.ndarray, positions: list[int]) -> np.ndarray:
        cosine, sine = (table[positions][:, None].astype(np.float64) for table in (self.cosines, self.sines))
        low, high = np.split(x, 2, axis=-1)
        return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)

    def _expect(self, text: Text) -> np.ndarray:
        q, k, v = self.vectors(text)
        ratio = self.config.num_heads // self.config.num_kv_heads
        keys, values = (np.concatenate([h, x]) for h, x in zip(text.history.astype(np.float64), (k, v), strict=True))
        results = []
        for index, row in enumerate(text.rows):
            slots = row.positions(text.length) + [
                text.length + j for j in range(len(text.rows)) if row.visible >> j & 1
            ]
            scores = np.einsum("hd,shd->hs", q[index], keys[slots].repeat(ratio, axis=1))
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            results.append(np.einsum("hs,shd->hd", weights, values[slots].repeat(ratio, axis=1)).ravel())
        return np.array(results)

    def check(self, texts: list[Text], **launch) -> Result:
        """Run, compare with the oracle: results, statistics, what was written to the stores."""
        result, expected = self.run(texts, **launch), self.expect(texts)
        tolerance = 2e-3 if self.config.kv_type == "float16" else 2e-6
        for row, (found, wanted) in enumerate(zip(result.attended, expected, strict=True)):
            error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
            assert error < tolerance, f"row {row}: {error}"
        heads = result.attended.reshape(len(expected), self.config.num_heads, -1)
        np.testing.assert_allclose(result.stats[..., 0], (heads.astype(np.float64) ** 2).sum(-1), rtol=1e-5)
        scaled = np.abs(heads * self.gain.reshape(heads.shape[1:]))
        np.testing.assert_array_equal(result.stats[..., 1], scaled.max(-1))
        for text, store in zip(texts, result.stores, strict=True):
            np.testing.assert_array_equal(store[:, : text.length], text.history)
            for value, rows in enumerate(self.vectors(text)[1:]):
                np.testing.assert_allclose(store[value, text.length :], rows, rtol=1e-3, atol=1e-5)
        return result

    def alone(self, text: Text, result: Result, index: int, store: int = 0) -> np.ndarray:
        """The row by itself, behind what it saw laid out in order."""
        row = text.rows[index]
        behind = sorted(
            (text.rows[j].position, j) for j in range(len(text.rows)) if row.visible >> j & 1 and j != index
        )
        slots = [*range(text.length), *(text.length + j for _, j in behind)]
        single = replace(row, visible=1)
        return self.run([Text(result.stores[store][:, slots], (single,), text.qkv[index : index + 1])]).attended[0]


@pytest.fixture(scope="module")
def models(gpu):
    return {name: Model(gpu, config) for name, config in CONFIGS.items()}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("length", "width"), [(0, 1), (0, 8), (1, 3), (63, 2), (64, 5), (65, 1), (500, 8), (300, 13)])
def test_result(models, name, length, width):
    rng = np.random.default_rng(length + width)
    models[name].check([text(rng, CONFIGS[name], length, causal(length, width))])


@pytest.mark.parametrize("name", ["128", "64 by three", "odd"])
@pytest.mark.parametrize(("length", "width"), [(1500, 32), (130, 64), (0, 64), (1, 33)])
def test_wide_result(models, name, length, width):
    rng = np.random.default_rng(length + width)
    models[name].check([text(rng, CONFIGS[name], length, causal(length, width))])


@pytest.mark.parametrize("blocks", [4, 32])
def test_long_history(models, blocks):
    rng = np.random.default_rng(blocks)
    models["128"].check([text(rng, CONFIGS["128"], 20_000, causal(20_000, 3))], blocks=blocks)


@pytest.mark.parametrize("name", ["128", "64 by three", "odd"])
def test_several_sequences(models, name):
    rng = np.random.default_rng(5)
    sizes = [(70, 1), (0, 12), (200, 3), (63, 2), (64, 1)]
    texts = [text(rng, CONFIGS[name], length, causal(length, count)) for length, count in sizes]
    together = models[name].check(texts)
    for number, single in enumerate(texts):
        first = sum(count for _, count in sizes[:number])
        found = models[name].run([single]).attended
        np.testing.assert_array_equal(together.attended[first : first + len(found)], found)


@pytest.mark.parametrize("name", ["128", "odd"])
@pytest.mark.parametrize(("sinks", "recent"), [(4, 100), (0, 64), (70, 1), (4, 4000)])
def test_window(models, name, sinks, recent):
    rng = np.random.default_rng(sinks + recent)
    rows = causal(700, 6, sinks=sinks, recent=recent)
    case = text(rng, CONFIGS[name], 700, rows)
    result = models[name].check([case])
    mixed = replace(case, rows=(*causal(700, 3), *rows[3:]))
    np.testing.assert_array_equal(models[name].check([mixed]).attended[3:], result.attended[3:])
    for blocks in (1, 4):
        np.testing.assert_array_equal(models[name].run([case], blocks=blocks).attended, result.attended)


@pytest.mark.parametrize("name", ["128", "64 by three", "odd"])
@pytest.mark.parametrize(("length", "width"), [(0, 7), (60, 8), (190, 16), (128, 24)])
def test_tree_row_equals_linear_row(models, name, length, width):
    rng = np.random.default_rng(length + width)
    case = text(rng, CONFIGS[name], length, tree(rng, length, width), linear=False)
    result = models[name].check([case])
    for index in range(width):
        np.testing.assert_array_equal(models[name].alone(case, result, index), result.attended[index])


def test_windowed_tree(models):
    rng = np.random.default_rng(3)
    models["128"].check([text(rng, CONFIGS["128"], 500, tree(rng, 500, 8, sinks=4, recent=130), linear=False)])


@pytest.mark.parametrize("name", CONFIGS)
def test_row_does_not_depend_on_the_pass(models, name):
    rng = np.random.default_rng(11)
    case = text(rng, CONFIGS[name], 250, causal(250, 11))
    result = models[name].check([case])
    for index in range(11):
        np.testing.assert_array_equal(models[name].alone(case, result, index), result.attended[index])
    for tile in (32, 64):
        np.testing.assert_array_equal(models[name].run([case], tile=tile).attended, result.attended)


@pytest.mark.parametrize(("length", "few"), [(700, (1, 2, 5)), (5000, (1, 4, 13))])
def test_row_does_not_depend_on_the_launch(models, length, few):
    rng = np.random.default_rng(13)
    case = text(rng, CONFIGS["128"], length, causal(length, 4))
    expected = models["128"].run([case], blocks=32).attended
    for blocks in few:
        np.testing.assert_array_equal(models["128"].run([case], blocks=blocks).attended, expected)


@pytest.mark.parametrize("name", ["128", "64 by three"])
@pytest.mark.parametrize(("length", "width"), [(0, 3), (511, 1), (700, 8), (1900, 16)])
def test_short_kernel_equals_this_one(models, name, length, width):
    rng = np.random.default_rng(length + width)
    case = text(rng, CONFIGS[name], length, causal(length, width))
    found, expected = models[name].run([case], short=True), models[name].run([case])
    np.testing.assert_array_equal(found.attended, expected.attended)
    np.testing.assert_array_equal(found.stats, expected.stats)
    np.testing.assert_array_equal(found.stores[0], expected.stores[0])


@pytest.mark.parametrize("name", ["128", "odd"])
def test_chunked_prefill_equals_steps(models, name):
    rng = np.random.default_rng(17)
    model, whole = models[name], text(rng, CONFIGS[name], 0, causal(0, 40))
    history, found = whole.history, []
    for size in (1, 7, 16, 1, 15):
        start = history.shape[1]
        case = Text(history, causal(start, size), whole.qkv[start : start + size])
        result = model.run([case])
        history, found = result.stores[0], [*found, *result.attended]
    expected = model.run([whole])
    np.testing.assert_array_equal(np.array(found), expected.attended)
    np.testing.assert_array_equal(history, expected.stores[0])


@pytest.mark.parametrize("name", ["128", "128 float32"])
def test_what_is_invisible_changes_nothing(models, name):
    """Neither small numbers beside the largest there are, nor an overflow in a row that is not seen."""
    rng = np.random.default_rng(19)
    case = text(rng, CONFIGS[name], 100, causal(100, 8, sinks=3, recent=40))
    case.qkv[:, CONFIGS[name].attention_size :] *= 1e-3
    case.history[1] *= 1e-3
    expected = models[name].run([case]).attended
    loud = replace(case, history=case.history.copy(), qkv=case.qkv.copy())
    loud.history[1, 3:60] = 60_000 * rng.choice([-1, 1], loud.history[1, 3:60].shape)
    loud.qkv[5:, CONFIGS[name].attention_size :] = np.inf
    np.testing.assert_array_equal(models[name].run([loud]).attended[:5], expected[:5])


@pytest.mark.parametrize("name", ["128", "tiny", "odd"])
@pytest.mark.parametrize("order", [[2, 0, 5, 1], [7], [0, 1, 2, 3], [1, 2, 3, 4, 5, 6, 7]])
def test_move_rows(models, name, order):
    model, rng = models[name], np.random.default_rng(23)
    case = text(rng, CONFIGS[name], 60, causal(60, 8))
    slots = model.run([case]).stores[0]
    store = model._store(Text(slots, (), case.qkv[:0]))
    kernel = move_kernel(model.gpu, AttentionShape(CONFIGS[name], 8))
    model.gpu.device.sync()
    model.gpu.launch(
        model.gpu.stream, kernel, store, np.int32(60), model.gpu.upload(np.array(order, np.int32)), np.int32(len(order))
    )
    moved = model.read_store(store, case)
    np.testing.assert_array_equal(moved[:, 60 : 60 + len(order)], slots[:, [60 + row for row in order]])
    np.testing.assert_array_equal(moved[:, :60], slots[:, :60])
    np.testing.assert_array_equal(moved[:, 60 + len(order) :], slots[:, 60 + len(order) :])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("shape", [(16, 8, 128), (32, 8, 128), (9, 3, 64)])
@pytest.mark.parametrize("tile", [8, 64])
def test_compiles_without_spilling(architecture, shape, tile):
    constants = AttentionShape(config(*shape, qk_norm=True), tile).constants(architecture)
    usage = {kernel.kernel: kernel for kernel in compile_kernels(FILE, constants, architecture).usage}
    assert set(usage) == {"attention", "attention_merge", "move_rows"}
    assert usage["attention"].registers <= 255
    assert all(kernel.spill_bytes == 0 for kernel in usage.values())


def test_what_does_not_fit_is_refused():
    wide = AttentionShape(config(8, 4, 128, "float32"), 64)
    assert wide.cut("sm_90") == (1, 4)
    with pytest.raises(BackendError, match="use narrower passes"):
        wide.cut("sm_86")
    with pytest.raises(BackendError, match="at most 32;"):
        AttentionShape(config(64, 1, 64), 8)


def test_room_for_the_parts_of_a_block():
    """A block's range is cut into the largest nodes in it: never more of them than the workspace has room for."""

    def parts(first: int, last: int) -> int:
        if first == last:
            return 0
        size = 1
        while first % (4 * size) == 0 and first + 4 * size <= last:
            size *= 4
        return 1 + parts(first + size, last)

    worst = [max(parts(first, first + length) for first in range(256)) for length in range(70)]
    for length in range(70):
        assert max(worst[part] + worst[length - part] for part in range(length + 1)) <= most_parts(length)
    assert most_parts(1) == 1
    assert most_parts(512) < 50
