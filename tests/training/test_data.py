"""Files, the held-out split, packing, shuffling and the recipe reader."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import zstandard

from bitmtp.errors import ConfigError
from bitmtp.tokenizer import Tokenizer
from bitmtp.training.config import GenerateConfig, TrainConfig, read_config
from bitmtp.training.data import Batches, Corpus, cut_rows, is_heldout, read_corpus, read_records
from bitmtp.training.generate import read_prompts
from bitmtp.training.schedule import blend_factor, rate_factor


def test_the_split_is_fixed() -> None:
    """Published figures rest on it: these hashes may never change."""
    held = [number for number in range(1000) if is_heldout(f"text {number}")]
    assert held == [199, 323, 607]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_records_of_every_ending(tmp_path: Path, ending: str) -> None:
    raw = b'{"text": "a"}\n{"text": "\xc3\xa4"}\n'
    pack = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.ZstdCompressor().compress}[ending]
    file = tmp_path / f"x.{ending}"
    file.write_bytes(pack(raw))
    assert list(read_records(file)) == [{"text": "a"}, {"text": "ä"}]


def test_bad_data_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such data file"):
        list(read_records(tmp_path / "none.jsonl"))
    (tmp_path / "x.csv").write_text("a")
    with pytest.raises(ConfigError, match=r"x.csv: expected .jsonl"):
        list(read_records(tmp_path / "x.csv"))
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"te\n')
    with pytest.raises(ConfigError, match="line 2 is not JSON"):
        list(read_records(tmp_path / "x.jsonl"))


def test_corpus_ends_texts_and_keeps_heldout_apart(tiny: Path) -> None:
    tokenizer = Tokenizer(tiny / "source")
    corpus, heldout = read_corpus({str(tiny / "text.jsonl"): 3}, tokenizer, eos=2)
    assert len(corpus.lengths) + len(heldout.lengths) == 800
    assert 0 < len(heldout.lengths) < 20
    assert set(corpus.repeats) == {3}
    ends = np.cumsum(corpus.lengths)
    for start, end in zip(ends - corpus.lengths, ends, strict=True):
        ids = corpus.tokens[start:end].tolist()
        text = tokenizer.decode(ids, skip_special=False)
        assert text.endswith("<|im_end|>\n" if text.startswith("<|im_start|>") else ".<|im_end|>")
        assert not is_heldout(text.removesuffix("<|im_end|>"))


def test_an_epoch_holds_every_record_as_often_as_it_repeats() -> None:
    corpus = Corpus.of([[5, 6], [7], [8, 9, 10]], [1, 3, 2])
    stream = corpus.epoch(seed=0, number=0)
    assert sorted(stream) == sorted([5, 6, 7, 7, 7, 8, 9, 10, 8, 9, 10])
    assert any(not np.array_equal(stream, corpus.epoch(0, number)) for number in range(1, 5))
    assert np.array_equal(stream, corpus.epoch(0, 0))


def test_batches_cover_the_stream_and_resume() -> None:
    corpus = Corpus.of([list(range(100))], [1])
    assert cut_rows(corpus.tokens, 8)[:2].tolist() == [list(range(9)), list(range(8, 17))]
    batches = Batches(corpus, seed=0, batch_size=3, seq_len=8)
    seen = [batches.next() for _ in range(4)]
    assert np.array_equal(np.concatenate(seen), cut_rows(corpus.tokens, 8))
    assert batches.position == (1, 0)
    other = Batches(corpus, seed=0, batch_size=3, seq_len=8)
    other.position = (0, 2)
    assert np.array_equal(other.next(), seen[2])
    with pytest.raises(ConfigError, match="does not fill one batch"):
        Batches(corpus, seed=0, batch_size=13, seq_len=8)


def test_prompts_are_first_user_turns_once(tiny: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny / "source")
    file = tmp_path / "p.jsonl"
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
    ]
    records = [{"messages": turns}, {"messages": turns}, {"text": "t", "prompt": "x"}, {"problem": "P"}, {"other": "x"}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    begin = "<|im_start|>assistant\n"
    assert read_prompts({str(file): 1}, (), tokenizer) == [
        f"<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n{begin}",
        f"<|im_start|>user\nP<|im_end|>\n{begin}",
    ]


RECIPE = 'source = "s"\ntokenizer = "t"\noutput = "o"\nsteps = 5\n[data]\n"a.jsonl" = 3\n'


def test_recipe_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text(RECIPE.replace("[data]", "clip = 2\n[data]") + '[generate]\nseconds = 4\nprompt_files = ["p"]\n')
    expected = GenerateConfig(seconds=4.0, prompt_files=("p",))
    assert read_config(file) == TrainConfig(
        "s", "t", "o", {"a.jsonl": 3}, steps=5, clip=2.0, generate=expected
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("steps = 5", "stepz = 5"), "unknown key stepz"),
        (("steps = 5", 'steps = "5"'), "steps is '5'; expected int"),
        (("steps = 5", "steps = 5\ntime_budget_seconds = 3"), "either steps or time_budget_seconds"),
        (("steps = 5", ""), "either steps or time_budget_seconds"),
        (('source = "s"', ""), "missing 1 required positional argument: 'source'"),
        (("= 3", "= 0"), "at least 1"),
        (("[data]", "[generate]\nsecond = 1\n[data]"), "unknown key generate.second"),
        (("steps = 5", "block_size = 99\nsteps = 5"), "block_size is 99"),
        (("steps = 5", "steps = "), "not valid TOML"),
    ],
)
def test_recipe_errors(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    file = tmp_path / "r.toml"
    file.write_text(RECIPE.replace(*change))
    with pytest.raises(ConfigError, match=f"{file.name}: .*{message}"):
        read_config(file)


def test_schedule() -> None:
    config = TrainConfig("s", "t", "o", {"a": 1}, steps=1)
    assert rate_factor(config, 0.01) == pytest.approx(0.5)
    assert rate_factor(config, 0.02) == pytest.approx(1.0)
    assert rate_factor(config, 1.0) == pytest.approx(0.02)
    assert [blend_factor(config, p) for p in (0.0, 0.04, 0.08, 0.5)] == pytest.approx([0.0, 0.5, 1.0, 1.0])
