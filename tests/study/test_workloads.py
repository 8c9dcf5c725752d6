"""Which requests a study makes of the files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bitmtp.errors import RequestError
from bitmtp.study.workloads import LONGEST, WORKLOADS, build


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_rule_gives_the_same_requests_every_time(name: str, data: Path) -> None:
    requests = build(name, data)
    assert requests == build(name, data)
    assert [each.number for each in requests] == list(range(len(requests)))
    assert build(name, data, 2) == requests[:2]


def test_sources_give_equal_shares_and_leave_out_what_is_not_theirs(tmp_path: Path) -> None:
    for source in WORKLOADS["plain"]:
        categories = source.categories or ("",)
        records = [
            {source.field: f"{source.file} {category} {number}", "category": category}
            for number in range(100)
            for category in (categories[0], "coding")
        ]
        records.append({source.field: "y" * (LONGEST + 1), "category": categories[0]})
        file = tmp_path / source.file
        file.parent.mkdir(parents=True)
        file.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    asked = [str(each.messages[0]["content"]) for each in build("plain", tmp_path)]
    assert len(asked) == len(set(asked)) == 120
    first, second = WORKLOADS["plain"]
    assert sum(text.startswith(first.file) for text in asked) == 60
    chosen = [text for text in asked if text.startswith(second.file)]
    assert len(chosen) == 60
    assert not any("coding" in text for text in chosen)
    assert not any("yy" in text for text in asked)


def test_tool_requests_offer_two_tools_and_show_a_call(data: Path) -> None:
    requests = build("tools", data)
    assert len(requests) == 4
    for request in requests:
        system, *exchange, question = request.messages
        offered = [line for line in system["content"].splitlines() if line.startswith('{"type"')]
        names = [json.loads(line)["function"]["name"] for line in offered]
        assert len(names) == 2
        call = json.loads(exchange[1]["content"].split("<tool_call>")[1].split("</tool_call>")[0])
        assert call["name"] in names
        assert [each["role"] for each in request.messages] == [
            "system",
            "user",
            "assistant",
            "user",
            "assistant",
            "user",
        ]
        assert "Not used" not in question["content"]


def test_what_is_wrong_is_named(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="unknown workload 'chat'; choose of plain, reasoning, tools"):
        build("chat", data)
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    (tmp_path / "gsm8k/test.jsonl").write_text('{"question": "1?"}\n{"answer": "2"}\n', encoding="utf-8")
    with pytest.raises(RequestError, match=r"test\.jsonl:2: expected an object with question"):
        build("reasoning", tmp_path)
    (tmp_path / "gsm8k/test.jsonl").unlink()
    with pytest.raises(RequestError, match="missing"):
        build("reasoning", tmp_path)
