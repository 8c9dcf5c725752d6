"""``bitmtp chat`` without a terminal: a line is a turn or a command."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bitmtp.backends.base import Output, Row
from bitmtp.backends.reference import ReferenceBackend
from bitmtp.engine import Engine, Request

from .conftest import NEVER_END, Command, Ran

Talk = Callable[..., Ran]


@pytest.fixture
def talk(bitmtp: Command, model_flags: list[str], monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Pipe lines into a chat."""

    def run(*lines: str, flags: Sequence[str] = ("--max-tokens", "8")) -> Ran:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        return bitmtp("chat", *model_flags, *flags)

    return run


def test_turns_see_the_ones_before_and_reuse_their_keys(
    bitmtp: Command,
    model_flags: list[str],
    tiny_model: Path,
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, prefilled, step = Engine.load(tiny_model, backend="reference"), Counter[int](), ReferenceBackend.step

    def counting(self: ReferenceBackend, rows: Sequence[Row], **options: Any) -> list[Output | None]:
        length = len(engine.encode(requests[-1]))
        prefilled[len(requests)] += sum(row.position < length for row in rows)
        return step(self, rows, **options)

    monkeypatch.setattr(ReferenceBackend, "step", counting)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\nAgain\n/exit\nNever\n"))
    ran = bitmtp("chat", *model_flags, "--max-tokens", "8", "--json", "--system", "Be brief.")
    assert (ran.code, ran.err) == (0, "")

    first, _ = (json.loads(line) for line in ran.out.splitlines())
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    answered = [*asked, {"role": "assistant", "content": first["text"]}, {"role": "user", "content": "Again"}]
    assert [request.prompt for request in requests] == [asked, answered]
    assert prefilled[1] == len(engine.encode(Request(asked)))
    assert prefilled[2] <= len(engine.encode(Request(answered))) - prefilled[1]


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


def test_help_names_every_command(talk: Talk) -> None:
    ran = talk("/help")
    assert (ran.code, ran.out) == (0, "")
    for name in ("/help", "/reset", "/system", "/set", "/save", "/load", "/stats", "/exit"):
        assert f"  {name}" in ran.err


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("/levitate now", "/levitate"),
        ("/set volume 11", "volume"),
        ("/set temperature warm", "warm"),
        ("/set temperature -1", "temperature"),
        ("/set max_tokens 0", "max_tokens"),
        ("/set policy telepathic", "telepathic"),
        ("/set policy speculative\n/set tau 0.5", "tau"),
        ("/save", "file"),
        ("/load no/such/file", "no/such/file"),
    ],
)
def test_a_command_that_cannot_be_done_is_an_error(talk: Talk, requests: list[Request], line: str, word: str) -> None:
    ran = talk(line)
    assert ran.code == 2
    assert word in ran.err.splitlines()[-1]
    assert requests == []


def test_a_slash_behind_a_space_is_for_the_model(talk: Talk, requests: list[Request]) -> None:
    assert talk(" /levitate").code == 0
    assert requests[0].prompt == [{"role": "user", "content": " /levitate"}]


def test_settings_change_the_next_answer(talk: Talk, requests: list[Request]) -> None:
    lines = ("/set policy hybrid", "/set tau 0.5", "/set max-tokens 3", "/set temperature 0.5", "/set seed 4", "Hello")
    ran = talk(*lines, "/set policy autoregressive", "Hello")
    assert ran.code == 0, ran
    first, second = requests
    assert first.policy is not None
    assert second.policy is not None
    assert (first.policy.name, first.policy.tau, second.policy.name) == ("hybrid", 0.5, "autoregressive")
    assert (first.max_tokens, first.sampling.temperature, first.seed) == (3, 0.5, 4)
    assert "  policy hybrid\n  block_size 8\n  tau 0.5\n" in ran.err


def test_reset_forgets_the_turns_and_keeps_the_system_message(talk: Talk, requests: list[Request]) -> None:
    talk("/system Be brief.", "Hello", "/reset", "Again")
    system = {"role": "system", "content": "Be brief."}
    assert requests[1].prompt == [system, {"role": "user", "content": "Again"}]


def test_a_saved_chat_goes_on_where_it_ended(talk: Talk, requests: list[Request], tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    assert talk("/system Be brief.", "Hello", f"/save {file}", f"/save {file}").code == 0
    saved = json.loads(file.read_text(encoding="utf-8"))["messages"]
    assert [message["role"] for message in saved] == ["system", "user", "assistant"]
    assert talk(f"/load {file}", "Again").code == 0
    assert requests[1].prompt == [*saved, {"role": "user", "content": "Again"}]


def test_saving_replaces_nothing_but_a_chat(talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    for text in ("my notes", "[]", '{"messages": [{"role": "assistant", "content": "Hello"}]}'):
        file.write_text(text, encoding="utf-8")
        for command in ("save", "load"):
            ran = talk(f"/{command} {file}")
            assert ran.code == 2
            assert "notes.txt" in ran.err
        assert file.read_text(encoding="utf-8") == text


def test_stats_count_every_answer(talk: Talk) -> None:
    ran = talk("/stats", "Hello", "Again", "/stats", flags=("--max-tokens", "8", *NEVER_END))
    assert ran.err.splitlines()[0] == "no answer yet"
    assert "last answer\n  8 tokens" in ran.err
    assert "this chat\n  2 answers · 16 tokens" in ran.err
    assert "of 512 tokens" in ran.err


def test_a_full_context_drops_the_oldest_turns_and_says_so(talk: Talk, requests: list[Request]) -> None:
    lines = [f"{number} " + "word " * 50 for number in range(6)]
    ran = talk("/system Be brief.", *lines)
    assert ran.code == 0, ran
    assert "the context of 512 tokens is full; the oldest 1 turn left it" in ran.err
    prompt = requests[-1].prompt
    assert isinstance(prompt[0], dict)
    assert [prompt[0]["content"], prompt[-1]["content"]] == ["Be brief.", lines[-1]]  # type: ignore[index]
    assert lines[0] not in [message["content"] for message in prompt]  # type: ignore[index]
