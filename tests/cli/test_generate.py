"""``bitmtp generate``: what it prints, and that flags reach the engine."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path

import pytest

from bitmtp.cli import render
from bitmtp.core.policies import make_policy
from bitmtp.engine import Chunk, Engine, Request
from bitmtp.sampling import Sampling

from .conftest import NEVER_END, Command

FIELDS = [
    "text", "token_ids", "num_tokens", "policy", "backend", "seed", "mean_acceptance_length", "draft_acceptance_rate",
    "acceptance_histogram", "num_spec_steps", "passes", "graph_replays", "tokens_per_pass", "ttft_ms", "tpot_ms",
    "tokens_per_second",
]  # fmt: skip


def test_plain_text_and_nothing_else(bitmtp: Command, model_flags: list[str], tiny_model: Path) -> None:
    ran = bitmtp("generate", "Hello", *model_flags, "--max-tokens", "8")
    request = Request([{"role": "user", "content": "Hello"}], max_tokens=8)
    text = Engine.load(tiny_model, backend="reference").generate(request).text
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == (text if text.endswith("\n") else text + "\n")


def test_json_is_one_object_with_the_promised_fields(bitmtp: Command, model_flags: list[str]) -> None:
    ran = bitmtp("generate", "Hello", *model_flags, "--json", "--max-tokens", "20", *NEVER_END)
    assert ran.out.count("\n") == 1
    found = json.loads(ran.out)
    assert list(found) == FIELDS
    assert found["num_tokens"] == len(found["token_ids"]) == 20
    assert (found["policy"], found["backend"]) == ("auto", "reference")
    committed = sum(length * times for length, times in enumerate(found["acceptance_histogram"], start=1))
    assert committed == 19  # the first token belongs to no iteration


@pytest.mark.parametrize("sampling", [[], ["--temperature", "1", "--seed", "5", "--top-p", "0.9", "--top-k", "50"]])
def test_lossless_policies_write_the_same_text(bitmtp: Command, model_flags: list[str], sampling: list[str]) -> None:
    def ids(*policy: str) -> list[int]:
        ran = bitmtp("generate", "Once", *model_flags, "--json", "--max-tokens", "24", *NEVER_END, *sampling, *policy)
        found: list[int] = json.loads(ran.out)["token_ids"]
        return found

    autoregressive = ids("--policy", "autoregressive")
    assert ids() == autoregressive
    assert ids("--policy", "speculative", "--block-size", "3") == autoregressive


def test_every_flag_reaches_the_engine(bitmtp: Command, model_flags: list[str], requests: list[Request]) -> None:
    flags = {
        "temperature": 0.9, "top_p": 0.8, "top_k": 40, "min_p": 0.02, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.4,
    }  # fmt: skip
    given = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    given += ["--logit-bias", "2=-9000", "--logit-bias", "9=1.5", "--stop", "a", "--stop", "bc", "--seed", "7"]
    given += ["--policy", "hybrid", "--block-size", "6", "--tau", "0.4"]
    ran = bitmtp("generate", "Go", *model_flags, *given, "--max-tokens", "5", "--no-chat-template")
    sampling = Sampling(**flags, logit_bias=((2, -9000.0), (9, 1.5)))  # type: ignore[arg-type]
    policy = make_policy("hybrid", 16, block_size=6, tau=0.4)
    assert ran.code == 0
    assert requests == [Request("Go", 5, policy, sampling, seed=7, stop=("a", "bc"))]


def test_system_message(bitmtp: Command, model_flags: list[str], requests: list[Request]) -> None:
    bitmtp("generate", "Hello", *model_flags, "--system", "Be brief.", "--max-tokens", "2")
    assert requests[0].prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("dash", [[], ["-"]])
def test_prompt_from_standard_input(
    bitmtp: Command, model_flags: list[str], requests: list[Request], monkeypatch: pytest.MonkeyPatch, dash: list[str]
) -> None:
    flags = [*model_flags, "--max-tokens", "12"]
    monkeypatch.setattr("sys.stdin", io.StringIO("Two\nlines\n"))
    assert bitmtp("generate", *dash, *flags).code == 0
    assert requests[0].prompt == [{"role": "user", "content": "Two\nlines"}]


def test_stop_string_ends_the_text(bitmtp: Command, model_flags: list[str]) -> None:
    flags = [*model_flags, "--max-tokens", "40", *NEVER_END]
    whole = bitmtp("generate", "Hello", *flags).out
    stop = whole[5:7]
    assert bitmtp("generate", "Hello", *flags, "--stop", stop).out.removesuffix("\n") == whole[: whole.index(stop)]


def test_a_note_when_filters_have_nothing_to_do(bitmtp: Command, model_flags: list[str]) -> None:
    ran = bitmtp("generate", "Hello", *model_flags, "--top-p", "0.5", "--max-tokens", "2")
    assert ran.code == 0
    assert "temperature 0" in ran.err


def test_a_warning_when_drafts_are_rejected(
    bitmtp: Command, model_flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = bitmtp("generate", "Hello", *model_flags, "--max-tokens", "4")
    monkeypatch.setattr("bitmtp.engine.Result.drafts_rejected", True)
    loud = bitmtp("generate", "Hello", *model_flags, "--max-tokens", "4")
    assert quiet.err == ""
    assert loud.out == quiet.out
    assert "drafts were accepted" in loud.err


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_keeps_what_was_committed(
    bitmtp: Command, model_flags: list[str], monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    flags = [*model_flags, "--max-tokens", "60", *NEVER_END]
    whole = json.loads(bitmtp("generate", "Hello", *flags, "--json").out)
    writer, seen = (render.JsonWriter if as_json else render.PlainWriter), []
    write = writer.write

    def interrupt_at_the_tenth(self: render.Writer, chunk: Chunk) -> None:
        seen.append(chunk)
        write(self, chunk)  # type: ignore[arg-type]
        if len(seen) == 10:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(writer, "write", interrupt_at_the_tenth)
    before = signal.getsignal(signal.SIGINT)
    ran = bitmtp("generate", "Hello", *flags, *(["--json"] if as_json else []))
    assert (ran.code, ran.err) == (130, "")
    assert 10 <= len(seen) < 60
    if as_json:
        found = json.loads(ran.out)
        assert found["token_ids"] == whole["token_ids"][: len(seen)]
    else:
        assert ran.out.endswith("\n")
        assert whole["text"].startswith(ran.out.removesuffix("\n"))
        assert ran.out.removesuffix("\n") == "".join(chunk.text for chunk in seen)
    assert signal.getsignal(signal.SIGINT) is before
