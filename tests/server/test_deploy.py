"""What operators are given: the service, the container and the dashboard fit the program."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer.main
from prometheus_client.parser import text_string_to_metric_families

from bitmtp import __version__
from bitmtp.cli.app import app
from bitmtp.server.metrics import Metrics

ROOT = Path(__file__).parents[2]
UNIT = (ROOT / "deploy" / "bitmtp.service").read_text(encoding="utf-8")


def test_the_dashboard_asks_for_what_the_server_tells() -> None:
    metrics = Metrics()
    metrics.requests.labels("/health", "200").inc()
    for labelled, value in ((metrics.prompt, "computed"), (metrics.policies, "auto"), (metrics.ended, "stop")):
        labelled.labels(value).inc()
    families = text_string_to_metric_families(metrics.render().decode())
    samples = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for query in queries:
        [*names] = re.findall(r"bitmtp_\w+", query)
        assert names
        for name in names:
            assert set(re.findall(r"by \((\w+)\)", query)) <= samples[name], query
    assert len({panel["title"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


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
