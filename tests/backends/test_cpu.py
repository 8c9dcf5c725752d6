"""The CPU backend returns the reference's bits, whatever the model, the pass, the threads and the instruction set."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from conftest import LOW_BIT, make_backend, random_checkpoint, random_tokens, tiny_config, why_unavailable
from cpu_scenarios import Pair, exercise

from bitmtp.backends.base import Head, Row, Window, causal_rows
from bitmtp.backends.reference import ReferenceBackend
from bitmtp.errors import BackendError
from bitmtp.sampling import GREEDY

pytestmark = pytest.mark.skipif(bool(why_unavailable("cpu")), reason=why_unavailable("cpu") or "")

MODELS: dict[str, dict[str, Any]] = {
    "plain": {"sub_norm": False},
    "tensor scales": {"ternary_scale": "tensor"},
    "group scales": {"ternary_scale": "group"},
    "relu2": {"activation": "relu2"},
    "qk norm and bias": {"qk_norm": True, "attention_bias": True},
    "tied": {"tie_embeddings": True},
    "ternary head": {"embedding_bits": 2},
    "ternary head in groups": {"embedding_bits": 2, "ternary_scale": "group", "tie_embeddings": True},
    "4-bit head": {"embedding_bits": 4},
    "float head": {"embedding_bits": 16, "head_activation_bits": 16},
    "float32 store": {"kv_type": "float32"},
    "chain": {"chain_rank": 6},
    "chain on a tied float head": {
        "chain_rank": 20, "embedding_bits": 16, "head_activation_bits": 16, "tie_embeddings": True,
    },
    "no masks": {"block_size": 1},
    "medusa": {"drafter": "medusa", "block_size": 6},
    "medusa on a tied float head": {
        "drafter": "medusa", "embedding_bits": 16, "head_activation_bits": 16, "tie_embeddings": True,
    },
    "medusa, odd sizes": {"drafter": "medusa", "hidden_size": 100, "head_dim": 20, "vocab_size": 331},
    "one kv head": {"num_heads": 7, "num_kv_heads": 1, "hidden_size": 52, "intermediate_size": 76},
    "odd heads": {"num_heads": 6, "num_kv_heads": 3, "head_dim": 22, "qk_norm": True, "kv_type": "float32"},
    "odd sizes": {"hidden_size": 100, "intermediate_size": 148, "vocab_size": 331, "head_dim": 20},
    "wide heads": {"num_heads": 2, "head_dim": 80, "num_kv_heads": 1},
    "low bits": LOW_BIT,
    "low bits, steps by group": LOW_BIT | {"activation_scale": "group", "group_size": 32},
    "ternary, steps by group": {"activation_scale": "group", "ternary_scale": "group", "embedding_bits": 2},
    "ternary rows, steps by group": {"activation_scale": "group"},
    "tiny vocabulary": {"vocab_size": 11, "chain_rank": 3},
}  # fmt: skip

ISAS = ("avx512vbmi", "avx512", "avx2", "neon", "portable")
POISON = 7  # a token that makes NaN


def pair_of(options: dict[str, Any], seed: int = 0, threads: int = 2) -> Pair:
    made = random_checkpoint(tiny_config(**options), seed)
    return Pair(ReferenceBackend(made), make_backend("cpu", made, threads=threads))


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model(name: str) -> None:
    exercise(pair_of(MODELS[name], seed=len(name)), seed=len(name))


@pytest.mark.parametrize("seed", range(6))
def test_random_passes(seed: int) -> None:
    exercise(pair_of({}, seed), seed, passes=10, width=[1, 3, 12, 64, 64, 64][seed])


@pytest.mark.parametrize("kv_type", ["float16", "float32"])
def test_histories_longer_than_a_piece(kv_type: str) -> None:
    exercise(pair_of({"kv_type": kv_type, "max_position": 900}), seed=5, passes=8, history=500)


@pytest.mark.parametrize("options", [{}, {"chain_rank": 6}])
def test_choosing_from_a_large_vocabulary(options: dict[str, Any]) -> None:
    exercise(pair_of({"vocab_size": 9_001, "num_layers": 1, **options}), seed=9, passes=8, width=24)


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITMTP_ISA", isa)
    if reason := _refusal():
        pytest.skip(reason)
    grouped = {"ternary_scale": "group", "group_size": 32, "embedding_bits": 2, "tie_embeddings": True}
    grouped |= {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    for options in (
        {"chain_rank": 6},
        {"drafter": "medusa"},
        {"ternary_scale": "group", "embedding_bits": 4},
        MODELS["float head"],
        MODELS["low bits"],
        MODELS["low bits, steps by group"],
        MODELS["ternary, steps by group"],
        grouped,
    ):
        pair = pair_of(options)
        assert pair.subject.describe()["kernels"] == isa
        exercise(pair, seed=3, history=270)


def _refusal() -> str | None:
    try:
        make_backend("cpu", random_checkpoint(tiny_config()))
    except BackendError as error:
        return str(error)
    return None


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITMTP_ISA", "mmx")
    assert "mmx" in (_refusal() or "")


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(threads: int) -> None:
    exercise(pair_of({"chain_rank": 6, "max_position": 900}, threads=threads), seed=11, history=300, passes=3)


def test_a_text_gives_the_same_bits_however_it_is_cut() -> None:
    made = random_checkpoint(tiny_config())
    backend = make_backend("cpu", made)
    random = np.random.default_rng(0)
    tokens = random_tokens(random, 330, made.config)
    outputs = [_run_in_pieces(backend, tokens, width) for width in (1, 7, 64)]
    assert outputs[0] == outputs[1] == outputs[2]


def _run_in_pieces(backend: Any, tokens: list[int], width: int) -> list[Any]:
    sequence, outputs = backend.open(), []
    for start in range(0, len(tokens), width):
        piece = tokens[start : start + width]
        outputs += backend.step(causal_rows(sequence, piece, start, [Head.EXACT] * len(piece), GREEDY), top=2)
        backend.materialize(sequence, range(len(piece)))
    return outputs


def test_a_fork_and_its_origin_do_not_disturb_each_other() -> None:
    made = random_checkpoint(tiny_config())
    backend = make_backend("cpu", made)
    tokens = random_tokens(np.random.default_rng(1), 40, made.config)
    first = backend.open()
    backend.prefill(first, tokens[:20])
    second = backend.fork(first, 18)
    backend.prefill(first, tokens[20:30])
    backend.prefill(second, tokens[30:])
    for sequence, text in ((first, tokens[:30]), (second, tokens[:18] + tokens[30:])):
        alone = backend.open()
        backend.prefill(alone, text)
        rows = [Row(handle, 7, len(text), 1) for handle in (sequence, alone)]
        found, expected = backend.step(rows)
        assert found == expected


def test_stale_slots_are_never_read() -> None:
    """Behind a truncation lie K/V of another text; a shorter text must not notice."""
    made = random_checkpoint(tiny_config())
    backend = make_backend("cpu", made)
    tokens = random_tokens(np.random.default_rng(2), 300, made.config)
    used, fresh = backend.open(), backend.open()
    backend.prefill(used, tokens)
    backend.truncate(used, 3)
    backend.prefill(fresh, tokens[:3])
    window = Window(1, 1)
    found, expected = backend.step([Row(handle, 9, 3, 1, window=window) for handle in (used, fresh)])
    assert found == expected


@pytest.mark.parametrize("kv_type", ["float16", "float32"])
@pytest.mark.parametrize("isa", ISAS)
def test_what_a_row_does_not_see_may_be_anything(isa: str, kv_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows share the vectors of a block of keys; a sibling's NaN, in this pass or left from the last, reaches none."""
    monkeypatch.setenv("BITMTP_ISA", isa)
    if reason := _refusal():
        pytest.skip(reason)
    made = random_checkpoint(tiny_config(**MODELS["float head"], kv_type=kv_type))
    made.tensors["embedding.weight"][POISON] = np.nan
    backend = make_backend("cpu", made)
    for length in (3, 250, 256):
        tokens = random_tokens(np.random.default_rng(length), length, made.config)
        tokens = [token if token != POISON else POISON + 1 for token in tokens]
        used, clean = backend.open(), backend.open()
        for sequence in (used, clean):
            backend.prefill(sequence, tokens)
        outputs = _siblings(backend, used, length, POISON)
        assert len(outputs) == 8
        assert outputs == _siblings(backend, clean, length, POISON + 1)
        found, expected = backend.step([Row(sequence, 9, length, 1) for sequence in (used, clean)])
        assert found == expected


def _siblings(backend: Any, sequence: int, length: int, token: int) -> list[Any]:
    """A chain of eight rows that skips every other one: those hang from the history, and hold `token`."""
    rows = [Row(sequence, token, length, 1, Head.NONE)]
    for i in range(1, 9):
        rows.append(Row(sequence, 10 + i, length + i - 1, sum(1 << 2 * j + 1 for j in range(i)), Head.EXACT))
        rows.append(Row(sequence, token, length, 1 << 2 * i, Head.NONE))
    return [out for out in backend.step(rows, top=2) if out is not None]


def _row(**changes: Any) -> Row:
    return Row(**{"sequence": 1, "token": 5, "position": 3, "visible": 1, **changes})


BAD_CALLS: dict[str, tuple[str, Any]] = {
    "unknown sequence": ("not open", lambda b: b.step([_row(sequence=99)])),
    "unknown length": ("not open", lambda b: b.length(99)),
    "position behind the context": ("context of 512", lambda b: b.step([_row(position=512)])),
    "negative position": ("context of 512", lambda b: b.step([_row(position=-1)])),
    "token": ("token 320", lambda b: b.step([_row(token=320)])),
    "mask too deep": ("token -16", lambda b: b.step([_row(token=-16)])),
    "own bit missing": ("bits are wrong", lambda b: b.step([_row(visible=0)])),
    "bit of no row": ("bits are wrong", lambda b: b.step([_row(visible=3)])),
    "position inside the history": ("must not", lambda b: b.step([_row(position=2)])),
    "sees the future": ("must not", lambda b: b.step([_row(visible=3), _row(position=4, visible=2)])),
    "one position twice": ("must not", lambda b: b.step([_row(), _row(visible=3)])),
    "no rows": ("1 to 64 rows", lambda b: b.step([])),
    "65 rows": ("1 to 64 rows", lambda b: b.step([_row()] * 65)),
    "truncate too far": ("cannot truncate", lambda b: b.truncate(1, 4)),
    "fork too long": ("cannot fork", lambda b: b.fork(1, 4)),
    "negative fork": ("cannot fork", lambda b: b.fork(1, -1)),
    "closed twice": ("not open", lambda b: (b.close(1), b.close(1))),
    "row that was not run": ("last pass", lambda b: b.materialize(1, [0])),
    "mask": ("continue", lambda b: (b.step([_row(token=-1)]), b.materialize(1, [0]))),
    "windowed row": ("continue", lambda b: (b.step([_row(window=Window())]), b.materialize(1, [0]))),
    "row out of place": ("continue", lambda b: (b.step([_row(position=4)]), b.materialize(1, [0]))),
    "row of before a truncation": (
        "last pass",
        lambda b: (b.step([_row()]), b.truncate(1, 3), b.materialize(1, [0])),
    ),
}


@pytest.mark.parametrize(("message", "call"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_wrong_calls_are_refused_and_harm_nothing(message: str, call: Any) -> None:
    backend = make_backend("cpu", random_checkpoint(tiny_config()))
    sequence = backend.open()
    backend.prefill(sequence, [1, 2, 3])
    with pytest.raises(ValueError, match=message):
        call(backend)
    other, untouched = backend.open(), make_backend("cpu", random_checkpoint(tiny_config()))
    assert backend.prefill(other, [1, 2, 3]) == untouched.prefill(untouched.open(), [1, 2, 3])


def test_memory_is_shared_by_forks_and_given_back() -> None:
    backend = make_backend("cpu", random_checkpoint(tiny_config()))

    def used() -> int:
        return int(backend.describe()["kv bytes"])

    first = backend.open()
    backend.prefill(first, [1, 2, 3])
    once = used()
    second = backend.fork(first, 3)
    assert used() == once > 0
    backend.prefill(second, [4])
    assert used() == 2 * once
    backend.close(first)
    backend.close(second)
    assert used() == 0


def test_without_the_extension_the_error_says_how_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitmtp.backends.cpu._native", None)
    with pytest.raises(BackendError, match="pip install"):
        make_backend("cpu", random_checkpoint(tiny_config()))
