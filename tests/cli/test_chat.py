"""``bitmtp chat`` without a terminal: a line is a turn."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from bitmtp.backends.reference import ReferenceBackend
from bitmtp.engine import Engine, Request

from .conftest import NEVER_END, Command


def test_turns_see_the_ones_before_and_reuse_their_keys(
    bitmtp: Command,
    model_flags: list[str],
    tiny_model: Path,
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefilled: list[int] = []
    prefill = ReferenceBackend.prefill

    def counting(self: ReferenceBackend, sequence: int, tokens: list[int], *rest: object) -> object:
        prefilled.append(len(tokens))
        return prefill(self, sequence, tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ReferenceBackend, "prefill", counting)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\nAgain\n/exit\nNever\n"))
    ran = bitmtp("chat", *model_flags, "--max-tokens", "8", "--json", "--system", "Be brief.")
    assert (ran.code, ran.err) == (0, "")

    first, _ = (json.loads(line) for line in ran.out.splitlines())
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    answered = [*asked, {"role": "assistant", "content": first["text"]}, {"role": "user", "content": "Again"}]
    assert [request.prompt for request in requests] == [asked, answered]
    engine = Engine.load(tiny_model, backend="reference")
    assert prefilled[0] == len(engine.encode(Request(asked)))
    assert prefilled[1] <= len(engine.encode(Request(answered))) - prefilled[0]


def test_answers_are_lines_of_plain_text(
    bitmtp: Command, model_flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    chat = bitmtp("chat", *model_flags, "--max-tokens", "8", *NEVER_END)
    assert chat.out == bitmtp("generate", "Hello", *model_flags, "--max-tokens", "8", *NEVER_END).out


def test_a_turn_that_does_not_fit_ends_a_piped_chat(
    bitmtp: Command, model_flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("word " * 400))
    ran = bitmtp("chat", *model_flags)
    assert ran.code == 2
    assert "512" in ran.err
