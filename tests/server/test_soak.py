"""``benchmarks/soak.py`` against a server of the tiny model: it finds nothing, and it can."""

from __future__ import annotations

import json
import runpy
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SCRIPTS, random_checkpoint, tiny_config, write_model

pytest.importorskip("jsonschema", reason="the jsonschema package is not installed")


def test_a_soak(
    script: Callable[..., int], tmp_path: Path, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model", random_checkpoint(tiny_config(max_position=2048)), tokenizer_folder)
    code = script("soak.py", "--seconds", 4, "--round", 2, "--clients", 3, "--pool", 35, "--model", model)
    rounds = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0, rounds
    assert [found["wrong"] for found in rounds] == [[], []]
    assert all(found["figures"]["bitmtp_texts_total"] > 0 for found in rounds)


def test_figures_that_differ_are_found() -> None:
    soak = runpy.run_path(str(SCRIPTS / "soak.py"))
    name = "bitmtp_generated_tokens_total"
    for counted, unknown, wrong in ((30, 0, 0), (29, 0, 1), (31, 0, 1), (35, 5, 0), (36, 5, 1)):
        tally = soak["Tally"](figures=Counter({name: 30}), unknown=Counter({name: unknown}))
        soak["compare"](tally, Counter({name: 100}), Counter({name: 100 + counted}))
        assert len(tally.wrong) == wrong, tally.wrong


def test_an_answer_that_breaks_its_promise_is_found() -> None:
    soak = runpy.run_path(str(SCRIPTS / "soak.py"))
    asked = {"tools": [], "tool_choice": "required"}
    for message, wrong in (
        ({"tool_calls": [{"function": {"arguments": '{"kind": "bird", "sure": true}'}}]}, 0),
        ({"tool_calls": [{"function": {"arguments": '{"kind": "bird"}'}}]}, 1),
        ({"content": "no call"}, 1),
    ):
        tally = soak["Tally"]()
        soak["check"](asked, {"message": message, "finish_reason": "stop"}, tally)
        assert len(tally.wrong) == wrong, tally.wrong
