"""The exactness contract on every backend: a row's outputs depend on nothing but the row and what it can see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import backend_or_skip, make_backend, random_checkpoint, random_tokens, tiny_config

from bitmtp.backends.base import Backend, Head, Output, Row, Window, causal_rows, mask, prefill_by_steps
from bitmtp.config import ModelConfig
from bitmtp.sampling import GREEDY, Choice, Sampling, choose

VARIANTS: list[dict[str, Any]] = [
    {},
    {"chain_rank": 4, "ternary_scale": "group", "qk_norm": True, "embedding_bits": 2},
    {"embedding_bits": 16, "head_activation_bits": 16, "kv_type": "float32", "tie_embeddings": True},
    {"activation": "relu2", "attention_bias": True, "embedding_bits": 4, "sub_norm": False},
    {"hidden_size": 256, "num_heads": 8, "head_dim": 16, "intermediate_size": 384, "chain_rank": 4, "embedding_bits": 2,
     "ternary_scale": "group", "group_size": 128},
    {"drafter": "medusa"},
    {"drafter": "medusa", "embedding_bits": 16, "head_activation_bits": 16, "hidden_size": 48, "sub_norm": False},
]  # fmt: skip
SAMPLED = Choice.with_counts(
    Sampling(0.9, top_p=0.95, seed=3, repetition_penalty=1.2, presence_penalty=0.3), {40: 2, 50: 0, 60: 1}
)


def text_of(config: ModelConfig, count: int, seed: int = 0) -> list[int]:
    return random_tokens(np.random.default_rng(seed), count, config)


def bits(output: Output | None) -> tuple[Any, ...] | None:
    """Everything an output says, comparable bit for bit."""
    if output is None:
        return None
    logits = None if output.logits is None else np.asarray(output.logits).tobytes()
    return (output.token, output.probability, output.entropy, output.top, logits)


def run(backend: Backend, rows: Sequence[Row]) -> list[tuple[Any, ...] | None]:
    return [bits(output) for output in backend.step(rows, top=20, logits=True)]


def feed(
    backend: Backend, sequence: int, tokens: Sequence[int], widths: Sequence[int], choice: Choice = GREEDY
) -> list[tuple[Any, ...] | None]:
    """Run and materialize tokens in passes of these widths; all outputs."""
    outputs: list[tuple[Any, ...] | None] = []
    for width in widths:
        piece = tokens[len(outputs) : len(outputs) + width]
        heads = [Head.EXACT] * len(piece)
        outputs += run(backend, causal_rows(sequence, piece, backend.length(sequence), heads, choice))
        backend.materialize(sequence, range(len(piece)))
    assert len(outputs) == len(tokens)
    return outputs


def random_widths(random: np.random.Generator, total: int, widest: int = 64) -> list[int]:
    widths: list[int] = []
    while (left := total - sum(widths)) > 0:
        widths.append(int(min(left, random.integers(1, widest + 1))))
    return widths


@pytest.fixture(params=VARIANTS, ids=str)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return tiny_config(**request.param)


@pytest.fixture
def backend(backend_name: str, config: ModelConfig) -> Backend:
    return backend_or_skip(backend_name, random_checkpoint(config))


@pytest.fixture
def plain(backend_name: str) -> Backend:
    """One configuration, for what does not depend on it."""
    return make_backend(backend_name, random_checkpoint(tiny_config()))


# Splits and widths


@pytest.mark.parametrize("choice", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_any_split_gives_the_same_bits(backend: Backend, choice: Choice) -> None:
    tokens = text_of(backend.config, 30)
    alone = feed(backend, backend.open(), tokens, [1] * 30, choice)
    assert len({output[0] for output in alone if output}) > 1
    for seed in range(2):
        widths = random_widths(np.random.default_rng(seed), 30, 20)
        assert feed(backend, backend.open(), tokens, widths, choice) == alone


def test_what_was_materialized_is_the_same(backend: Backend) -> None:
    """Later rows read every key and value, so they tell whether a split left other ones."""
    tokens, later = text_of(backend.config, 40), text_of(backend.config, 3, seed=9)
    ends = []
    for widths in ([1] * 40, [40], [7, 30, 3]):
        sequence = backend.open()
        feed(backend, sequence, tokens, widths)
        ends.append(feed(backend, sequence, later, [1, 1, 1]))
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.parametrize("choice", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_prefill_is_one_row_steps(backend: Backend, choice: Choice) -> None:
    tokens = text_of(backend.config, 66)
    stepped, prefilled, narrow = backend.open(), backend.open(), backend.open()
    last = feed(backend, stepped, tokens, [1] * 66, choice)[-1]
    output = backend.prefill(prefilled, tokens, choice)
    assert last is not None
    assert (output.token, output.probability, output.entropy) == last[:3]
    assert bits(prefill_by_steps(backend, narrow, tokens, choice, width=9)) == bits(output)
    rows = [Row(sequence, tokens[0], 66, 1) for sequence in (stepped, prefilled, narrow)]
    first, *others = [run(backend, [row]) for row in rows]
    assert all(other == first for other in others)
    assert [backend.length(sequence) for sequence in (stepped, prefilled, narrow)] == [66] * 3


def test_across_the_border_of_a_piece(plain: Backend) -> None:
    tokens = text_of(plain.config, 24)
    source = plain.open()
    plain.prefill(source, text_of(plain.config, 245, seed=1))
    alone = feed(plain, plain.fork(source, 245), tokens, [1] * 24)
    assert feed(plain, plain.fork(source, 245), tokens, [24]) == alone
    assert feed(plain, source, tokens, [10, 2, 12]) == alone


@pytest.mark.parametrize("width", [2, 3, 8, 9, 16, 17, 33, 64])
def test_any_width(plain: Backend, width: int) -> None:
    tokens = text_of(plain.config, width)
    alone = feed(plain, plain.open(), tokens, [1] * width)
    assert feed(plain, plain.open(), tokens, [width]) == alone


def test_threads_change_nothing(backend_name: str, config: ModelConfig) -> None:
    made = random_checkpoint(config)
    tokens = text_of(config, 30)
    one, two = (backend_or_skip(backend_name, made, threads=threads) for threads in (1, 2))
    assert feed(one, one.open(), tokens, [13, 17]) == feed(two, two.open(), tokens, [13, 17])


# Topologies


def draft(sequence: int, pending: Sequence[int], start: int, masks: int) -> list[Row]:
    tokens = [*pending, *(mask(depth) for depth in range(1, masks + 1))]
    heads = [Head.EXACT] * len(pending) + [Head.DRAFT] * masks
    return causal_rows(sequence, tokens, start, heads, GREEDY)


def test_masks_do_not_depend_on_those_behind(backend: Backend) -> None:
    sequence = backend.open()
    backend.prefill(sequence, text_of(backend.config, 12))
    wide = run(backend, draft(sequence, [44], 12, 15))
    for masks in (0, 1, 4):
        assert run(backend, draft(sequence, [44], 12, masks)) == wide[: 1 + masks]


def test_a_draft_after_pending_rows(backend: Backend) -> None:
    """Several pending rows in the draft pass, or run before: the masks see the same."""
    pending = text_of(backend.config, 5)
    together, apart = backend.open(), backend.open()
    backend.prefill(together, [30, 31])
    backend.prefill(apart, [30, 31, *pending[:-1]])
    assert run(backend, draft(together, pending, 2, 6))[4:] == run(backend, draft(apart, pending[-1:], 6, 6))


def random_tree(
    random: np.random.Generator, config: ModelConfig, sequence: int, start: int, size: int
) -> tuple[list[Row], list[list[int]]]:
    """Rows of a random tree, parents first, and each row's path (indices, itself last). Some hang masks on tokens."""
    rows: list[Row] = []
    paths: list[list[int]] = []
    for index in range(size):
        above = paths[int(random.integers(0, index))] if index and random.random() < 0.85 else []
        depth = next((k for k, i in enumerate(reversed(above)) if rows[i].token >= 0), len(above))
        masked = bool(above) and (depth > 0 or random.random() < 0.3) and depth + 1 < config.block_size
        token = mask(depth + 1) if masked else int(random.integers(3, config.vocab_size))
        if depth and not masked:
            above = above[: len(above) - depth]
        paths.append([*above, index])
        visible = sum(1 << i for i in paths[-1])
        rows.append(Row(sequence, token, start + len(above), visible, Head.EXACT if token >= 0 else Head.DRAFT))
    return rows, paths


def path_only(rows: Sequence[Row], path: Sequence[int], sequence: int) -> list[Row]:
    """A path of a tree as plain causal rows of another sequence."""
    return [replace(rows[index], sequence=sequence, visible=(2 << place) - 1) for place, index in enumerate(path)]


@pytest.mark.parametrize("seed", range(2))
def test_a_row_of_a_tree_sees_its_path(backend: Backend, seed: int) -> None:
    sequence, other = backend.open(), backend.open()
    history = text_of(backend.config, 10)
    backend.prefill(sequence, history)
    backend.prefill(other, history)
    rows, paths = random_tree(np.random.default_rng(seed), backend.config, sequence, 10, 18)
    outputs = run(backend, rows)
    for index, path in enumerate(paths):
        assert run(backend, path_only(rows, path, other))[-1] == outputs[index]


def shuffled(rows: Sequence[Row], order: Sequence[int]) -> list[Row]:
    """The same rows at other places: row ``order[i]`` becomes the i-th."""
    place = {index: new for new, index in enumerate(order)}
    moved = [rows[index] for index in order]
    seen = [[place[i] for i in range(len(rows)) if row.visible >> i & 1] for row in moved]
    return [replace(row, visible=sum(1 << i for i in those)) for row, those in zip(moved, seen, strict=True)]


def test_a_row_s_place_in_the_pass_does_not_matter(backend: Backend) -> None:
    random = np.random.default_rng(5)
    sequence = backend.open()
    backend.prefill(sequence, text_of(backend.config, 10))
    rows, _ = random_tree(random, backend.config, sequence, 10, 16)
    outputs = run(backend, rows)
    order = random.permutation(16).tolist()
    assert run(backend, shuffled(rows, order)) == [outputs[index] for index in order]


@pytest.mark.parametrize("seed", range(2))
def test_a_path_of_a_tree_becomes_history(backend: Backend, seed: int) -> None:
    sequence, other = backend.open(), backend.open()
    history = text_of(backend.config, 10)
    backend.prefill(sequence, history)
    rows, paths = random_tree(np.random.default_rng(seed), backend.config, sequence, 10, 18)
    path = max((path for path in paths if all(rows[i].token >= 0 for i in path)), key=len)
    assert path != list(range(len(path)))
    backend.step(rows)
    backend.materialize(sequence, path)
    backend.prefill(other, [*history, *(rows[index].token for index in path)])
    assert backend.length(sequence) == backend.length(other) == 10 + len(path)
    later = text_of(backend.config, 4, seed=8)
    assert feed(backend, sequence, later, [4]) == feed(backend, other, later, [4])


def test_materializing_some_of_the_rows(plain: Backend) -> None:
    sequence, other = plain.open(), plain.open()
    tokens = text_of(plain.config, 9)
    plain.step(causal_rows(sequence, tokens, 0, [Head.NONE] * 9, GREEDY))
    plain.materialize(sequence, range(4))
    plain.prefill(other, tokens[:4])
    assert feed(plain, sequence, [80, 81], [2]) == feed(plain, other, [80, 81], [2])


def test_rows_without_a_head(plain: Backend) -> None:
    rows = causal_rows(plain.open(), [40, 41, 42], 0, [Head.EXACT] * 3, GREEDY)
    full = run(plain, rows)
    some = run(plain, [replace(rows[0], head=Head.NONE), rows[1], replace(rows[2], head=Head.NONE)])
    assert some == [None, full[1], None]


def test_sequences_share_a_pass(backend: Backend) -> None:
    random = np.random.default_rng(2)
    sequences = [backend.open() for _ in range(3)]
    rows = []
    for count, sequence in zip((5, 30, 1), sequences, strict=True):
        backend.prefill(sequence, text_of(backend.config, count, seed=count))
        rows.append(draft(sequence, text_of(backend.config, 3, seed=count), count, 4))
    alone = [run(backend, own) for own in rows]
    mixed = sorted(((which, i) for which in range(3) for i in range(7)), key=lambda pair: (pair[1], random.random()))
    outputs = run(backend, [rows[which][i] for which, i in mixed])
    for which, i in mixed:
        assert outputs[mixed.index((which, i))] == alone[which][i]
    backend.materialize(sequences[1], range(3))
    backend.materialize(sequences[0], range(2))
    assert [backend.length(sequence) for sequence in sequences] == [7, 33, 1]


# Medusa heads: a mask row is made of its anchor's


@pytest.fixture
def medusa(backend_name: str) -> Backend:
    return backend_or_skip(backend_name, random_checkpoint(tiny_config(drafter="medusa")))


def test_a_medusa_row_is_its_anchor_s(medusa: Backend) -> None:
    """Whatever stands between them; and the anchor needs no head."""
    sequence = medusa.open()
    medusa.prefill(sequence, text_of(medusa.config, 12))
    rows = draft(sequence, [44], 12, 4)
    outputs = run(medusa, rows)
    assert len({output[4] for output in outputs if output}) == 5
    alone = [replace(rows[0], head=Head.NONE), replace(rows[3], visible=0b11)]
    assert run(medusa, alone)[1] == outputs[3]
    windowed = [replace(rows[0], window=Window(1, 3)), *rows[1:]]
    assert [a != b for a, b in zip(run(medusa, windowed), outputs, strict=True)] == [True] * 5
    own = [rows[0], *(replace(row, window=Window(1, 3)) for row in rows[1:])]
    assert run(medusa, own) == outputs


def test_medusa_rows_are_those_of_the_reference(medusa: Backend) -> None:
    reference = make_backend("reference", random_checkpoint(medusa.config))
    found = []
    for backend in (medusa, reference):
        first, second = backend.open(), backend.open()
        backend.prefill(first, text_of(backend.config, 9))
        tree, _ = random_tree(np.random.default_rng(4), backend.config, first, 9, 20)
        block = [replace(row, choice=SAMPLED) for row in draft(second, text_of(backend.config, 3), 0, 7)]
        found.append(run(backend, [row for pair in zip(tree, block, strict=False) for row in pair]))
    assert found[0] == found[1]


def test_medusa_passes_refused(medusa: Backend) -> None:
    sequence = medusa.open()
    medusa.prefill(sequence, text_of(medusa.config, 5))
    (anchor, first, second), behind = draft(sequence, [40], 5, 2), Row(sequence, 41, 7, 0b111)
    for rows in (
        [replace(first, visible=1)],  # its anchor is history
        [anchor, replace(first, visible=0b10)],  # it does not see it
        [anchor, first, replace(first, position=7, visible=0b111)],  # nor this one: a mask stands there
        [anchor, first, behind],  # a mask has no keys
    ):
        with pytest.raises(ValueError, match=r"mask"):
            medusa.step(rows)
    assert medusa.step([anchor, first, second])


# Windows


def test_a_wide_window_is_no_window(plain: Backend) -> None:
    sequence = plain.open()
    plain.prefill(sequence, text_of(plain.config, 20))
    rows = draft(sequence, [50], 20, 3)
    windowed = [replace(row, window=Window(0, 100)) for row in rows]
    assert run(plain, windowed) == run(plain, rows)
    split = [replace(row, window=Window(10, row.position - 9)) for row in rows]
    assert run(plain, split) == run(plain, rows)


@pytest.mark.parametrize("change", range(12))
def test_a_window_hides_what_it_hides(backend_name: str, change: int) -> None:
    """With one layer, a key depends on its own token alone: changing a hidden token must change nothing."""
    config = tiny_config(num_layers=1)
    backend = make_backend(backend_name, random_checkpoint(config))
    tokens = text_of(config, 12)
    other = tokens.copy()
    other[change] = tokens[change] % (config.vocab_size - 1) + 1
    outputs = []
    for text in (tokens, other):
        sequence = backend.open()
        backend.prefill(sequence, text)
        outputs.append(run(backend, [Row(sequence, 60, 12, 1, window=Window(sinks=2, recent=5))]))
    visible = change < 2 or change > 12 - 5
    assert (outputs[0] != outputs[1]) == visible


# Sequences


def test_rows_before_a_mark_are_seen_as_if_by_bits(backend: Backend) -> None:
    """A row sees every row of its text before ``since``, and from there on those whose bits are set."""
    tokens, outputs = random_tokens(np.random.default_rng(2), 40, backend.config), []
    for marked in (False, True):
        sequence = backend.open()
        rows = causal_rows(sequence, tokens, 0, [Head.EXACT] * 40, GREEDY)
        branch = replace(rows[30], token=tokens[0], visible=(1 << 30) - 1 | 1 << 40)
        if marked:
            rows = [replace(row, visible=1, since=index) for index, row in enumerate(rows)]
            branch = replace(branch, visible=1 << 10, since=30)
        outputs.append(run(backend, [*rows, branch]))
        backend.materialize(sequence, range(40))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(("visible", "since"), [(1, 2), (1, 1), (0b10, 0), (1, -1)])
def test_marks_that_are_wrong_are_refused(backend: Backend, visible: int, since: int) -> None:
    first, second = causal_rows(backend.open(), [5, 6], 0, [Head.EXACT] * 2, GREEDY)
    if (visible, since) in ((1, 1), (0b10, 0)):  # itself alone, or itself behind all before it: sound
        backend.step([first, replace(second, visible=visible, since=since)])
        return
    with pytest.raises(ValueError, match="bits are wrong"):
        backend.step([first, replace(second, visible=visible, since=since)])


def test_fork_and_truncate(backend: Backend) -> None:
    tokens, later = text_of(backend.config, 30), text_of(backend.config, 4, seed=7)
    source, fresh = backend.open(), backend.open()
    backend.prefill(source, tokens)
    backend.prefill(fresh, tokens[:17])
    want = feed(backend, fresh, later, [4])
    branch = backend.fork(source, 17)
    assert backend.length(branch) == 17
    assert feed(backend, branch, later, [1, 3]) == want
    again = backend.fork(source, 30)
    backend.truncate(source, 17)
    assert feed(backend, source, later, [2, 2]) == want
    backend.close(source)
    backend.close(branch)
    whole = backend.open()
    backend.prefill(whole, tokens)
    assert feed(backend, again, later, [4]) == feed(backend, whole, later, [4])


def test_truncating_to_nothing_is_a_new_sequence(plain: Backend) -> None:
    used = plain.open()
    plain.prefill(used, text_of(plain.config, 20))
    plain.truncate(used, 0)
    assert feed(plain, used, [40, 41], [2]) == feed(plain, plain.open(), [40, 41], [2])


# Outputs


def test_what_an_output_says(backend: Backend) -> None:
    rows = causal_rows(backend.open(), text_of(backend.config, 6), 0, [Head.EXACT] * 6, GREEDY)
    for output in backend.step(rows, top=9, logits=True):
        assert output is not None
        raw = np.asarray(output.logits)
        assert raw.dtype == np.float32
        assert raw.shape == (backend.config.vocab_size,)
        order = np.lexsort((np.arange(len(raw)), -raw))[:9]
        assert output.top == tuple((int(i), float(raw[i])) for i in order)
        wide = np.exp(raw.astype(np.float64) - raw.max())
        shares = wide / wide.sum()
        assert output.token == order[0]
        assert output.probability == pytest.approx(shares[output.token], rel=1e-5)
        assert output.entropy == pytest.approx(-(shares * np.log(shares + 1e-300)).sum(), rel=1e-4, abs=1e-5)


def test_nothing_is_listed_unasked(plain: Backend) -> None:
    (output,) = plain.step([Row(plain.open(), 40, 0, 1)])
    assert output is not None
    assert (output.top, output.logits) == ((), None)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, seed=1),
        Sampling(2.0, top_k=5, seed=2),
        Sampling(0.7, top_p=0.6, seed=3, choice=4),
        Sampling(1.5, min_p=0.1, seed=(1 << 64) - 1),
        Sampling(1.0, top_k=40, top_p=0.9, min_p=0.02, frequency_penalty=0.5, logit_bias=((41, 4.0), (42, -9.0))),
        Sampling(0.0, presence_penalty=3.0, repetition_penalty=1.3),
    ],
    ids=str,
)
def test_tokens_are_chosen_as_specified(plain: Backend, sampling: Sampling) -> None:
    counts = {40: 1, 70: 0, 90: 3, 200: 2}
    choice = Choice.with_counts(sampling, counts)
    rows = causal_rows(plain.open(), text_of(plain.config, 40), 0, [Head.EXACT] * 40, choice)
    ids = np.arange(plain.config.vocab_size, dtype=np.int32)
    found = []
    for row, output in zip(rows, plain.step(rows, logits=True), strict=True):
        assert output is not None
        raw = np.asarray(output.logits)
        assert output.token == choose(ids, raw, choice, row.position + 1)
        wide = np.exp(raw.astype(np.float64) - raw.max())
        assert output.probability == pytest.approx(wide[output.token] / wide.sum(), rel=1e-4)
        found.append(output.token)
    assert len(set(found)) > 1


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.5, top_k=4, seed=2)], ids=str)
def test_a_grammar_is_obeyed(plain: Backend, sampling: Sampling) -> None:
    ids = np.arange(plain.config.vocab_size, dtype=np.int32)
    words = np.random.default_rng(0).integers(0, 1 << 32, len(ids) // 32, dtype=np.uint32)
    choice = Choice(sampling, allowed=words)
    rows = causal_rows(plain.open(), text_of(plain.config, 40), 0, [Head.EXACT] * 40, choice)
    forbidden = 0
    for row, output in zip(rows, plain.step(rows, logits=True), strict=True):
        assert output is not None
        raw = np.asarray(output.logits)
        assert words[output.token // 32] >> (output.token % 32) & 1
        assert output.token == choose(ids, raw, choice, row.position + 1)
        best = int(raw.argmax())
        forbidden += not words[best // 32] >> (best % 32) & 1
    assert forbidden


# Refusals


def test_what_may_not_be_materialized(plain: Backend) -> None:
    def attempt(rows: Sequence[Row], indices: Sequence[int]) -> None:
        plain.step(rows)
        with pytest.raises(ValueError, match=r"."):
            plain.materialize(sequence, indices)
        assert plain.length(sequence) == 5

    sequence = plain.open()
    plain.prefill(sequence, text_of(plain.config, 5))
    causal = causal_rows(sequence, [40, 41, 42], 5, [Head.EXACT] * 3, GREEDY)
    attempt(causal, [1])  # leaves a gap
    attempt(causal, [0, 2])  # sees a row that is left out
    attempt(causal, [1, 0])
    attempt(causal, [0, 0])
    attempt(causal, [0, 3])
    attempt(causal, [-1])
    attempt(draft(sequence, [40], 5, 1), [0, 1])  # a mask
    attempt([replace(causal[0], window=Window())], [0])
    attempt([causal[0], replace(causal[1], visible=0b10)], [0, 1])  # does not see what stands before it
    attempt([replace(causal[0], position=6)], [0])


def test_rows_are_gone_after_the_next_pass(plain: Backend) -> None:
    sequence, other = plain.open(), plain.open()
    plain.step([Row(sequence, 40, 0, 1)])
    plain.step([Row(other, 40, 0, 1)])
    with pytest.raises(ValueError, match=r"."):
        plain.materialize(sequence, [0])


def test_a_refused_pass_leaves_nothing_to_materialize(plain: Backend) -> None:
    sequence = plain.open()
    with pytest.raises(ValueError, match=r"."):
        plain.step([Row(sequence, 40, 0, 1), Row(sequence, plain.config.vocab_size, 1, 3)])
    with pytest.raises(ValueError, match=r"."):
        plain.materialize(sequence, [0])
    assert plain.length(sequence) == 0


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [Row(1, 40, index, (2 << index) - 1) for index in range(65)],
        [Row(99, 40, 0, 1)],
        [Row(1, 320, 0, 1)],
        [Row(1, mask(16), 0, 1)],
        [Row(1, 40, 512, 1)],
        [Row(1, 40, -1, 1)],
        [Row(1, 40, 0, 0)],
        [Row(1, 40, 0, 0b11)],
        [Row(1, 40, 0, 0b11), Row(1, 40, 1, 0b10)],
        [Row(1, 40, 0, 0b01), Row(1, 40, 0, 0b11)],
    ],
    ids=["none", "65", "sequence", "token", "mask", "context", "negative", "blind", "absent", "future", "same place"],
)
def test_passes_refused(plain: Backend, rows: list[Row]) -> None:
    assert plain.open() == 1
    with pytest.raises(ValueError, match=r"."):
        plain.step(rows)


def test_a_row_inside_the_history_is_refused(plain: Backend) -> None:
    sequence = plain.open()
    plain.prefill(sequence, [40, 41])
    with pytest.raises(ValueError, match=r"."):
        plain.step([Row(sequence, 42, 1, 1)])


def test_handles_and_lengths_that_do_not_exist(plain: Backend) -> None:
    sequence, gone = plain.open(), plain.open()
    plain.prefill(sequence, [40, 41])
    plain.close(gone)
    calls = [
        lambda: plain.close(gone),
        lambda: plain.length(gone),
        lambda: plain.truncate(gone, 0),
        lambda: plain.fork(gone, 0),
        lambda: plain.prefill(gone, [40]),
        lambda: plain.materialize(gone, []),
        lambda: plain.truncate(sequence, 3),
        lambda: plain.truncate(sequence, -1),
        lambda: plain.fork(sequence, 3),
        lambda: plain.prefill(sequence, []),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"."):
            call()
    assert plain.length(sequence) == 2


def test_describe_names_what_runs(plain: Backend) -> None:
    assert all(isinstance(text, str) and text for text in plain.describe().values())
    assert plain.describe()
