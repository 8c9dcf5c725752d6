"""A study of the tiny model, on every backend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bitmtp.benchmark.records import ResultLog
from bitmtp.core.policies import make_policy
from bitmtp.engine import Engine, Request
from bitmtp.errors import RequestError
from bitmtp.study.record import Plan, interleave, run
from bitmtp.study.workloads import build

POLICIES = {name: make_policy(name, 16) for name in ("autoregressive", "speculative", "confidence")}


def plan(data: Path, max_tokens: int = 12) -> Plan:
    requests = tuple(interleave([build(name, data, 2) for name in ("plain", "reasoning")]))
    return Plan("tiny", "abc", POLICIES, requests, max_tokens)


def test_workloads_take_turns(data: Path) -> None:
    order = [(each.workload, each.number) for each in plan(data).requests]
    assert order == [("plain", 0), ("reasoning", 0), ("plain", 1), ("reasoning", 1)]


def test_measures_what_the_engine_writes(backend_name: str, tiny_model: Path, data: Path, tmp_path: Path) -> None:
    ticks: list[None] = []
    engine = Engine.load(tiny_model, backend=backend_name, threads=2)
    made = run(engine, plan(data), ResultLog(tmp_path / "log.jsonl"), lambda: ticks.append(None))
    assert len(ticks) == 4 * len(POLICIES)
    assert {name: len(rows) for name, rows in made.texts.items()} == {"plain": 2, "reasoning": 2}
    other = Engine.load(tiny_model, backend=backend_name, threads=2)
    first = made.texts["plain"][0]
    for policy, measured in zip(POLICIES.values(), first, strict=True):
        result = other.generate(Request(plan(data).requests[0].messages, 12, policy))
        assert measured.tokens == result.num_tokens
        assert measured.passes == result.passes
        assert list(measured.lengths) == result.acceptance_histogram
        assert 0 < measured.ttft < measured.latency
        if backend_name != "cuda":
            assert 0 < sum(measured.stages.values()) < measured.latency
    assert first[0].ids == first[1].ids
    assert made.breakdown.first_token["64"]["prefill"] > 0
    assert bool(made.breakdown.passes) == (backend_name == "cuda")
    if first[0].stages:
        assert first[0].stages["draft"] == 0 < first[0].stages["exact"]
        assert first[2].stages["draft"] > 0


def test_goes_on_where_it_stopped(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    def again(max_tokens: int = 12) -> object:
        engine = Engine.load(tiny_model, backend="reference")
        return run(engine, plan(data, max_tokens), ResultLog(tmp_path / "log.jsonl"), lambda: None)

    first = again()
    log = tmp_path / "log.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 6  # environment, breakdown, four requests
    assert again() == first
    assert log.read_text(encoding="utf-8").splitlines() == lines
    log.write_text("\n".join(lines[:4]) + "\n", encoding="utf-8")
    again()
    grown = log.read_text(encoding="utf-8").splitlines()
    assert grown[:4] == lines[:4]
    assert [json.loads(line)["key"] for line in grown] == [json.loads(line)["key"] for line in lines]
    again(max_tokens=13)
    assert len(log.read_text(encoding="utf-8").splitlines()) == 10


def test_a_log_of_another_machine_is_refused(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    run(Engine.load(tiny_model, backend="reference"), plan(data), ResultLog(log), lambda: None)
    first, *others = log.read_text(encoding="utf-8").splitlines()
    changed = json.loads(first)
    changed["environment"]["cpu"] = "another"
    log.write_text("\n".join([json.dumps(changed), *others]) + "\n", encoding="utf-8")
    with pytest.raises(RequestError, match="was begun with cpu 'another'"):
        run(Engine.load(tiny_model, backend="reference"), plan(data), ResultLog(log), lambda: None)
