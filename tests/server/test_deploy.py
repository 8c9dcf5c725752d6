"""What operators are given: the service, the container, the metrics and the dashboard fit the program."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main
from prometheus_client.parser import text_string_to_metric_families

from bitmtp import __version__
from bitmtp.cli.app import app
from bitmtp.server.metrics import Metrics

from .conftest import Running, wait_for

ROOT = Path(__file__).parents[2]
UNIT = (ROOT / "deploy" / "bitmtp.service").read_text(encoding="utf-8")


def test_the_dashboard_asks_for_what_the_server_tells() -> None:
    metrics = Metrics()
    metrics.requests.labels("/health", "200").inc()
    for labelled, value in ((metrics.prompt, "computed"), (metrics.policies, "auto"), (metrics.ended, "stop")):
        labelled.labels(value).inc()
    families = text_string_to_metric_families(metrics.render().decode())
    samples = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    for query in queries():
        [*names] = re.findall(r"bitmtp_\w+", query)
        assert names
        for name in names:
            assert set(re.findall(r"by \((\w+)\)", query)) <= samples[name], query
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text(encoding="utf-8"))
    assert len({panel["title"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def queries() -> list[str]:
    """What the dashboard asks for."""
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_metrics_are_valid(served: Running) -> None:
    served.complete("otter", max_tokens=3)
    text = served.client.get(served.url + "/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(family.documentation and family.type != "unknown" for family in families.values())
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool here")
    ran = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")


def test_prometheus_answers_the_dashboard(served: Running, tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("there is no Prometheus here")
    config = (ROOT / "deploy" / "prometheus.yml").read_text(encoding="utf-8")
    config = config.replace("127.0.0.1:8000", f"127.0.0.1:{served.port}")
    (tmp_path / "prometheus.yml").write_text("global: {scrape_interval: 1s}\n" + config, encoding="utf-8")
    port = free_port()
    command = ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL)

    def ask(query: str) -> Any:
        try:
            answer = served.client.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": query})
        except httpx.TransportError:
            return []
        return answer.json()["data"]["result"] if answer.status_code == 200 else []

    def answered(query: str) -> bool:
        served.complete("otter otter otter", max_tokens=9, decoding={"policy": "speculative"})
        return bool(ask(query))

    try:
        for query in queries():
            wait_for(lambda query=query: answered(query.replace("$__rate_interval", "1m")))  # type: ignore[misc]
    finally:
        process.terminate()
        process.wait(30)


def free_port() -> int:
    """A port of loopback on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_the_service_is_sound(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd here")
    unit = tmp_path / "bitmtp.service"
    unit.write_text(UNIT.replace("/opt/bitmtp/bin/bitmtp", str(shutil.which("true"))), encoding="utf-8")
    ran = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_service_and_container_start_the_server_with_options_it_has() -> None:
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    [line] = re.findall(r"^ExecStart=(.*)$", UNIT, re.M)
    container = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    [words] = re.findall(r"^CMD (\[.*\])$", container, re.M)
    for name, *arguments in (shlex.split(line)[1:], json.loads(words)):
        assert name == "serve"
        serve.make_context(name, arguments)


def test_the_changes_begin_with_this_version() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changes, re.M)[0] == __version__
