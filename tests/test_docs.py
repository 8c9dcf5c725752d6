"""Documents: short pages that say whom they are for, and name only what exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from bitmtp.cli.app import app

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
LAB = sorted((ROOT / "docs" / "lab").glob("2*.md"))
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in LAB]  # what has to be true today
FOLDERS = ("benchmarks", "deploy", "recipes", "src", "tests")
FILES = {str(file.relative_to(ROOT)) for folder in FOLDERS for file in (ROOT / folder).rglob("*")}
PROGRAM: Any = typer.main.get_command(app)
SCRIPTS = "\n".join(script.read_text(encoding="utf-8") for script in (ROOT / "benchmarks").glob("*.py"))

each_page = pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
each_file = pytest.mark.parametrize(
    "page",
    [README, ROOT / "CHANGELOG.md", *(ROOT / "models").glob("*/README.md"), *PAGES, *LAB],
    ids=lambda page: str(page.relative_to(ROOT)),
)


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str = r"\w*") -> list[str]:
    """Fenced blocks."""
    return re.findall(rf"^```{language}\n(.*?)^```", read(page), flags=re.MULTILINE | re.DOTALL)


def inline(page: Path) -> list[str]:
    """Code within sentences."""
    prose = re.sub(r"^```.*?^```", "", read(page), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


def anchors(page: Path) -> set[str]:
    """What links to headings of a page say behind the #."""
    titles = re.findall(r"^#+ (.*)$", read(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def options(command: Any) -> set[str]:
    """Names of a command's options; every command has -h and --help."""
    return {name for parameter in command.params for name in parameter.opts} | {"-h", "--help"}


def calls(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Calls of the program: the command's name (or nothing), and the options given."""
    for text in [line.partition(" # ")[0] for block in blocks(page) for line in block.splitlines()] + inline(page):
        for words in re.findall(r"(?:^|[|;(] *|do )bitmtp((?: +[^|&;]*)?)", text):
            arguments = words.split()
            name = arguments[0] if arguments and re.fullmatch("[a-z]+", arguments[0]) else ""
            yield name, [word.partition("=")[0] for word in arguments if re.match("--?[a-z]", word)]


def test_the_readme_is_one_screen() -> None:
    assert len(read(README).split()) < 500


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_short_and_names_its_reader_and_question(page: Path) -> None:
    assert len(read(page).split()) < 1300
    title, first, *_ = read(page).split("\n\n")
    assert title.startswith("# ")
    assert first.startswith("*For ")
    assert "?" in first or page.parent.name == "clients"  # whose question is in their title


@each_file
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        if link.startswith(("http:", "https:")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@each_page
def test_commands_and_options_exist(page: Path) -> None:
    for name, given in calls(page):
        assert not name or name in PROGRAM.commands, name
        known = options(PROGRAM.commands[name] if name else PROGRAM)
        assert set(given) <= known, f"bitmtp {name} {' '.join(given)}"


@each_page
def test_options_named_alone_exist(page: Path) -> None:
    known = {name for command in PROGRAM.commands.values() for name in options(command)}
    for code in inline(page):
        option = re.match(r"--[a-z-]+", code)
        assert option is None or option[0] in known or f'"{option[0]}"' in SCRIPTS, code


@each_page
def test_source_files_named_exist(page: Path) -> None:
    for text in inline(page):
        if re.fullmatch(r"[\w/]+\.(?:py|hpp|cpp|cuh?|js)|(?:benchmarks|deploy|recipes|src|tests)/[\w./]+", text):
            assert any(f"/{file}".endswith(f"/{text.rstrip('/')}") for file in FILES), text


@each_page
def test_python_examples_compile(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")
