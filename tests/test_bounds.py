"""The lowest versions that are declared are those that ``make lowest`` tests with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version(text: str) -> list[int]:
    """As many numbers as any bound has; what is not said is 0."""
    return [*map(int, text.split(".")), 0, 0][:3]


def test_the_lowest_versions_are_those_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["convert"], *extras["serve"]]
    bounds = {name: version(low) for name, low in (bound.split(">=") for bound in declared)}
    text = (ROOT / "constraints" / "lowest.txt").read_text(encoding="utf-8")
    pinned = {name: version(low) for name, low in re.findall(r"^([\w-]+)==([\d.]+)$", text, re.MULTILINE)}
    assert pinned == bounds
