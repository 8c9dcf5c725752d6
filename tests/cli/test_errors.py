"""Bad input: one line on standard error, nothing on standard output, exit code 2."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from .conftest import Command, Ran


def check(ran: Ran, *words: str) -> None:
    assert ran.code == 2, ran
    assert ran.out == "", ran
    assert ran.err.startswith("bitmtp: "), ran
    assert ran.err.count("\n") == 1, ran
    for word in words:
        assert word in ran.err, ran


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "telepathic"], ["telepathic", "speculative"]),
        (["--policy", "confidence", "--tau", "1.5"], ["tau", "1.5"]),
        (["--policy", "confidence", "--tau", "-0.1"], ["tau"]),
        (["--policy", "confidence", "--tau", "nan"], ["tau"]),
        (["--block-size", "17"], ["17", "16"]),
        (["--block-size", "0"], ["block size"]),
        (["--tau", "0.5"], ["tau", "auto"]),
        (["--policy", "autoregressive", "--block-size", "4"], ["block_size", "autoregressive"]),
        (["--max-tokens", "0"], ["max_tokens"]),
        (["--temperature", "-1"], ["temperature"]),
        (["--top-p", "1.5"], ["top_p"]),
        (["--seed", "-1"], ["seed"]),
        (["--logit-bias", "five=1"], ["five=1"]),
        (["--logit-bias", "320=1"], ["320"]),
        (["--stop", ""], ["stop"]),
        (["--context", "100000"], ["context", "512"]),
        (["--backend", "abacus"], ["abacus"]),
        (["--no-chat-template", "--system", "Be brief."], ["--system"]),
        (["--threads", "0"], ["--threads"]),
        (["--max-tokens", "many"], ["--max-tokens"]),
        (["--no-such-flag"], ["--no-such-flag"]),
    ],
)
def test_generate_refuses(bitmtp: Command, model_flags: list[str], arguments: list[str], words: list[str]) -> None:
    check(bitmtp("generate", "Hello", *model_flags, *arguments), *words)


def test_empty_prompt(bitmtp: Command, model_flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    check(bitmtp("generate", "", *model_flags), "empty")
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    check(bitmtp("generate", *model_flags), "empty")


def test_prompt_longer_than_the_context(bitmtp: Command, model_flags: list[str]) -> None:
    check(bitmtp("generate", "word " * 400, *model_flags), "512")


def test_prompt_that_is_not_utf8(bitmtp: Command, model_flags: list[str]) -> None:
    check(bitmtp("generate", "caf\udce9", *model_flags), "UTF-8")


def test_missing_model(bitmtp: Command, tmp_path: Path) -> None:
    check(bitmtp("generate", "Hello", "--model", tmp_path / "nowhere"), "nowhere")
    check(bitmtp("info", "--model", tmp_path / "nowhere"), "nowhere")


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "Hello"],
        ["chat"],
        ["info"],
        ["serve"],
        ["bench"],
        ["tune"],
        ["eval", "--tasks", ""],
        ["study", "--data", "questions"],
    ],
    ids=lambda command: command[0],
)
def test_a_model_to_convert_is_told_how(
    bitmtp: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr("bitmtp.cli.study._requests", lambda _: ())
    file, folder = tmp_path / "my model.gguf", tmp_path / "hub"
    file.write_bytes(b"GGUF")
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3", "architectures": []}', encoding="utf-8")
    check(bitmtp(*command, "--model", file), "a GGUF file", f"`bitmtp convert '{file}' 'my model-bitmtp'`")
    check(bitmtp(*command, "--model", folder), "a Hugging Face folder", f"`bitmtp convert {folder} hub-bitmtp`")
    check(
        bitmtp(*command, "--model", tmp_path), "a folder of GGUF files", f"`bitmtp convert '{file}' 'my model-bitmtp'`"
    )


def test_a_file_is_no_model_folder(bitmtp: Command, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    check(bitmtp("info", "--model", tmp_path / "model.safetensors"), "a file", "give the folder")


def test_cut_off_weights(bitmtp: Command, tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    check(bitmtp("generate", "Hello", "--model", folder), "model.safetensors")


def test_tokenizer_of_another_size(bitmtp: Command, tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"] |= {f"extra{number}": 320 + number for number in range(9)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    check(bitmtp("generate", "Hello", "--model", folder), "tokenizer.json", "320")


def test_chat_refuses_to_go_without_template(bitmtp: Command, model_flags: list[str]) -> None:
    check(bitmtp("chat", *model_flags, "--no-chat-template"), "chat template")


def test_unknown_command(bitmtp: Command) -> None:
    check(bitmtp("levitate"), "levitate")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
        (["--shape", "sphere"], "sphere"),
        (["--limit", "3"], "--prompts"),
        (["--block-size", "4,x"], "'x'"),
        (["--widths", "--prompts", "missing.jsonl"], "--widths"),
        (["--policy", "telepathic"], "telepathic"),
        (["--json", "no/such/folder/file.json"], "no/such/folder"),
        (["--widths", "--max-tokens", "600"], "--max-tokens"),
    ],
)
def test_bench_refuses(bitmtp: Command, tiny_model: Path, arguments: list[str], word: str) -> None:
    model = [] if "--shape" in arguments else ["--model", str(tiny_model)]
    short = [] if "--max-tokens" in arguments else ["--max-tokens", "4"]
    check(bitmtp("bench", "--backend", "reference", *short, *model, *arguments), word)


def test_training_without_its_extra(bitmtp: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('source = "a"\ntokenizer = "b"\noutput = "c"\nsteps = 1\n[data]\n"d" = 1\n', encoding="utf-8")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    monkeypatch.delitem(__import__("sys").modules, "bitmtp.training.train", raising=False)
    check(bitmtp("train", recipe), "torch", "bitmtp[train]")
    check(bitmtp("train", tmp_path / "missing.toml"), "missing.toml")
