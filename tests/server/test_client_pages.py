"""The pages of docs/clients: each example runs, or fits the program it is for."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from conftest import make_engine, random_checkpoint, tiny_config, why_unavailable

from bitmtp.cli.app import app

from .conftest import Running, running

PAGES = Path(__file__).parents[2] / "docs" / "clients"
ADDRESS, NAME = "http://127.0.0.1:8000", "smollm2-135m-bitmtp"
PACKAGES = {"openai": "openai", "litellm": "litellm", "langchain": "langchain_openai"}
CONFIGURED = {"litellm", "llm", "aider", "continue"}


def blocks(language: str) -> list[tuple[str, str]]:
    """The examples in a language: of which page, and the text."""
    found = []
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        found += [(page.stem, block) for block in re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)]
    return found


def commands() -> list[tuple[str, list[str]]]:
    """Each command of a shell example: its page and its words, without settings of the environment."""
    found = []
    for page, block in blocks("sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            found.append(
                (page, [word for word in words if not re.match(r"[A-Z_]+=", word)] if "=" in words[0] else words)
            )
    return [(page, words) for page, words in found if words]


@contextlib.contextmanager
def named(folder: Path, context: int) -> Iterator[Running]:
    """A server under the name of the pages."""
    backend = "reference" if why_unavailable("cpu") else "cpu"
    engine = make_engine(backend, random_checkpoint(tiny_config(max_position=context)), folder)
    with running(engine, model_name=NAME) as found:
        yield found


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path) -> Iterator[Running]:
    """For all pages but one."""
    with named(tokenizer_folder, 1024) as found:
        yield found


def configuration(page: str) -> Any:
    """The YAML of a page."""
    yaml = pytest.importorskip("yaml", reason="the PyYAML package is not installed")
    [text] = [block for name, block in blocks("yaml") if name == page]
    return yaml.safe_load(text)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("page", "code"), blocks("python"), ids=lambda value: value.partition("\n")[0])
def test_python_examples(server: Running, monkeypatch: pytest.MonkeyPatch, page: str, code: str) -> None:
    pytest.importorskip(PACKAGES[page], reason=f"{page} is not installed")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    assert ADDRESS in code
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code.replace(ADDRESS, server.url), f"{page}.md", "exec"), {"__name__": page})
    assert printed.getvalue().strip()


def test_every_command_is_of_a_program_that_is_tested_here() -> None:
    assert {words[0] for _, words in commands()} == {"bitmtp", "llm", "aider", "docker"}
    assert {page for page, _ in blocks("yaml")} == CONFIGURED


def test_bitmtp_has_the_options() -> None:
    for _, (_, name, *arguments) in [each for each in commands() if each[1][0] == "bitmtp"]:
        typer.main.get_command(app).commands[name].make_context(name, arguments)  # type: ignore[attr-defined]


def test_llm(server: Running, tmp_path: Path) -> None:
    pytest.importorskip("llm", reason="the llm package is not installed")
    [settings] = [block for page, block in blocks("yaml") if page == "llm"]
    (tmp_path / "extra-openai-models.yaml").write_text(settings.replace(ADDRESS, server.url), encoding="utf-8")
    asked = [words[1:] for _, words in commands() if words[0] == "llm"]
    assert asked
    for arguments in asked:
        command = [sys.executable, "-m", "llm", *arguments]
        environment = os.environ | {"LLM_USER_PATH": str(tmp_path)}
        ran = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.strip()


@pytest.mark.filterwarnings("ignore")
def test_the_proxy_of_litellm(server: Running) -> None:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    models = configuration("litellm")["model_list"]
    for model in models:
        model["litellm_params"]["api_base"] = model["litellm_params"]["api_base"].replace(ADDRESS, server.url)
    messages = [{"role": "user", "content": "Hello"}]
    answer = litellm.Router(model_list=models).completion(model="bitmtp", messages=messages, max_tokens=5)
    assert answer.usage.completion_tokens == 5


def test_aider_is_configured() -> None:
    found = configuration("aider")
    assert (found["model"], found["openai-api-base"]) == (f"openai/{NAME}", f"{ADDRESS}/v1")
    assert found["openai-api-key"]


def test_aider(tokenizer_folder: Path, tmp_path: Path) -> None:
    if shutil.which("aider") is None:
        pytest.skip("aider is not installed")
    [settings] = [block for page, block in blocks("yaml") if page == "aider"]
    [arguments] = [words for _, words in commands() if words[0] == "aider"]
    quiet = {"AIDER_CHECK_UPDATE": "false", "AIDER_ANALYTICS": "false", "AIDER_PRETTY": "false", "HOME": str(tmp_path)}
    with named(tokenizer_folder, 1 << 14) as server:  # its prompt is long, and read byte by byte here
        (tmp_path / ".aider.conf.yml").write_text(settings.replace(ADDRESS, server.url), encoding="utf-8")
        ran = subprocess.run(
            arguments, env=os.environ | quiet, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert server.metric("bitmtp_generated_tokens_total") > 0, ran.stdout


def test_continue_is_configured() -> None:
    found = configuration("continue")
    assert found["schema"] == "v1"
    [model] = found["models"]
    assert (model["provider"], model["model"], model["apiBase"]) == ("openai", NAME, f"{ADDRESS}/v1")
    assert set(model["roles"]) <= {"chat", "edit", "apply"}


def test_open_webui_is_configured(server: Running) -> None:
    [words] = [words for _, words in commands() if words[0] == "docker"]
    settings = dict(words[place + 1].split("=", 1) for place, word in enumerate(words) if word == "-e")
    assert settings["OPENAI_API_BASE_URL"] == f"{ADDRESS}/v1"
    assert settings["OPENAI_API_KEY"]
    assert "--network=host" in words
    models = server.client.get(settings["OPENAI_API_BASE_URL"].replace(ADDRESS, server.url) + "/models").json()
    assert [model["id"] for model in models["data"]] == [NAME]


def test_pages_are_short_and_say_for_whom_they_are() -> None:
    for page in PAGES.glob("*.md"):
        lines = page.read_text(encoding="utf-8").splitlines()
        assert re.match(r"\*For ", lines[2]), page.name
        assert len(" ".join(lines).split()) < 300, page.name
