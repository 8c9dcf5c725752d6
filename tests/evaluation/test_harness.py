"""lm-evaluation-harness through our model, on generated tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bitmtp.benchmark.records import ResultLog
from bitmtp.core.policies import make_policy
from bitmtp.engine import Engine, Request
from bitmtp.errors import RequestError
from bitmtp.evaluation.likelihood import log_likelihood

pytest.importorskip("lm_eval", reason="pip install 'bitmtp[harness]'")
from bitmtp.evaluation.harness import HarnessModel, run_tasks

TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
metric_list:
  - metric: {metric}
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two task files and their questions, whose right answers are what the model holds likeliest or writes."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "questions.jsonl"
    choice = TASK.format(name="pick", file=file, kind="multiple_choice", metric="acc")
    (tmp_path / "pick.yaml").write_text(choice + 'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\n')
    text = TASK.format(name="write", file=file, kind="generate_until", metric="exact_match")
    (tmp_path / "write.yaml").write_text(
        text + 'doc_to_target: "{{written}}"\ngeneration_kwargs: {until: ["\\n"], max_gen_toks: 6}\n'
    )
    return tmp_path


def _write_questions(engine: Engine, file: Path, wrong: int) -> None:
    """Eight questions; the key of the first ``wrong`` ones is not what the model says."""
    lines = []
    for number in range(8):
        question, choices = f"Question {number}:", [" red", " blue", " green and yellow"]
        context = engine.tokenizer.encode(question)
        scores = [log_likelihood(engine, context, engine.tokenizer.encode(each))[0] for each in choices]
        best = scores.index(max(scores))
        written = engine.generate(Request(context, 6, stop=("\n",))).text
        answer = best if number >= wrong else (best + 1) % 3
        said = written if number >= wrong else written + "!"
        lines.append({"question": question, "choices": choices, "answer": answer, "written": said})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_scores_and_resuming(tiny_engine: Engine, folder: Path) -> None:
    _write_questions(tiny_engine, folder / "questions.jsonl", wrong=2)
    log = ResultLog(folder / "log.jsonl")
    for policy in ("autoregressive", "speculative"):
        model = HarnessModel(tiny_engine, make_policy(policy, 16), log=log, name="tiny")
        scores = {(each.task, each.metric): each for each in run_tasks(model, ["pick", "write"], folder=folder)}
        assert scores["pick", "acc,none"].value == scores["write", "exact_match,none"].value == 0.75
        assert scores["pick", "acc,none"].questions == 8
        assert 0 < (scores["pick", "acc,none"].error or 0) < 0.3
    before = (folder / "log.jsonl").read_text()
    assert before.count('"key"') == 8 * 3 + 2 * 8  # likelihoods once, texts by each policy
    run_tasks(HarnessModel(tiny_engine, make_policy("speculative", 16), log=log, name="tiny"), ["write"], folder=folder)
    assert (folder / "log.jsonl").read_text() == before


def _requests(*arguments: tuple[Any, ...]) -> Sequence[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


def test_rolling_windows(tiny_engine: Engine) -> None:
    model = HarnessModel(tiny_engine, make_policy("autoregressive", 16))
    ids = tiny_engine.tokenizer.encode("Some words, one after the other.")
    [whole] = model.loglikelihood_rolling(_requests(("Some words, one after the other.",)))
    assert whole == pytest.approx(log_likelihood(tiny_engine, [1], ids)[0])  # 1: the first token of a text


def test_a_context_that_is_too_long_loses_its_oldest_tokens(tiny_engine: Engine) -> None:
    model = HarnessModel(tiny_engine, make_policy("autoregressive", 16))
    [(total, _)] = model.loglikelihood(_requests(("word " * 600, " end")))
    assert total < 0
    [text] = model.generate_until(_requests(("word " * 600, {"until": ["\n"], "max_gen_toks": 4})))
    assert isinstance(text, str)


def test_from_the_harness_arguments(tiny_model: Path) -> None:
    model = HarnessModel.create_from_arg_string(f"model={tiny_model},backend=reference,policy=hybrid,block_size=4")
    assert (model.policy.name, model.policy.block_size) == ("hybrid", 4)


def test_unknown_task(tiny_model: Path, folder: Path) -> None:
    model = HarnessModel.create_from_arg_string(f"model={tiny_model},backend=reference")
    with pytest.raises(RequestError, match="no-such-task"):
        run_tasks(model, ["no-such-task"], folder=folder)
