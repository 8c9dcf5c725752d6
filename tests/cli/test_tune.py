"""``bitmtp tune``."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitmtp.benchmark import busy
from bitmtp.benchmark.busy import Reading
from bitmtp.benchmark.records import model_fingerprint
from bitmtp.tuning import search
from bitmtp.tuning.profile import Profile

from .conftest import Command

IDLE, BUSY = Reading(2, 0.02, 0.0), Reading(2, 0.9, 0.2)


@pytest.fixture(autouse=True)
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Reading | None]:
    """What the machine says of others, look by look; idle when the list is empty."""
    found: list[Reading | None] = []
    monkeypatch.setattr(busy, "look", lambda: found.pop(0) if found else IDLE)
    monkeypatch.setattr(busy.Watch, "reading", lambda _: found.pop(0) if found else IDLE)
    return found


@pytest.mark.parametrize("seen", [[BUSY], [IDLE, BUSY]])
def test_a_busy_machine_is_not_tuned_for(
    bitmtp: Command, model_flags: list[str], tmp_path: Path, readings: list[Reading | None], seen: list[Reading]
) -> None:
    readings += seen
    ran = bitmtp("tune", *model_flags, "--limit", "1", "--max-tokens", "8", "--output", tmp_path / "profile.json")
    assert (ran.code, ran.out) == (2, "")
    assert "other processes took 0.9 and the host of this virtual machine took 0.2 of 2 cores" in ran.err
    assert "--threads" in ran.err
    assert list(tmp_path.glob("profile*")) == []


@pytest.mark.parametrize("seen", [BUSY, None])
def test_named_threads_are_tuned_for_anyway(
    bitmtp: Command,
    model_flags: list[str],
    tmp_path: Path,
    readings: list[Reading | None],
    seen: Reading | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "BLOCK_SIZES", ())
    readings.append(seen)
    file = tmp_path / "profile.json"
    ran = bitmtp("tune", *model_flags, "--threads", "2", "--limit", "1", "--max-tokens", "8", "--output", file)
    assert ran.code == 0
    assert ("this machine is busy" in ran.err) == (seen is BUSY)
    assert Profile.read(file).threads == 2


def test_writes_a_profile(
    bitmtp: Command, model_flags: list[str], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "BLOCK_SIZES", (2, 4))
    monkeypatch.setattr(search, "BOUNDS", (0.1,))
    (tmp_path / "prompts.txt").write_text("One\nTwo\n", encoding="utf-8")
    file = tmp_path / "profile.json"
    ran = bitmtp(
        "tune",
        *model_flags,
        "--threads",
        "1",
        "--prompts",
        tmp_path / "prompts.txt",
        "--max-tokens",
        "8",
        "--output",
        file,
    )
    assert ran.code == 0
    profile = Profile.read(file)
    profile.check(model_fingerprint(tiny_model))
    policy = profile.make_policy(16)
    assert policy.lossless
    assert policy.name in ran.out.splitlines()[-1]
    assert ("drafting does not pay" in ran.out) == (policy.name == "autoregressive")
    assert profile.threads == 1
    used = bitmtp("generate", "One", *model_flags, "--profile", file, "--max-tokens", "4", "--json")
    assert used.code == 0
    assert f'"{policy.name}"' in used.out
    both = bitmtp("generate", "One", *model_flags, "--profile", file, "--policy", "hybrid")
    assert both.code == 2
    assert "leave --policy and its options out" in both.err


def test_commands_find_what_it_wrote(
    bitmtp: Command, model_flags: list[str], settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "BLOCK_SIZES", (2,))
    monkeypatch.setattr(search, "BOUNDS", (0.1,))
    monkeypatch.setattr(
        search, "best", lambda figures: next(each for each in figures if each.policy.name == "speculative")
    )
    tuned = bitmtp("tune", *model_flags, "--threads", "1", "--limit", "2", "--max-tokens", "8")
    assert tuned.code == 0
    (file,) = (settings / "bitmtp").iterdir()
    profile = Profile.read(file)
    assert profile.tuning is not None

    text = ("generate", "One", *model_flags, "--max-tokens", "4", "--json")
    assert '"speculative"' in bitmtp(*text).out
    assert '"auto"' in bitmtp(*text, "--policy", "auto").out, "an option counts for more"
    file.write_text(file.read_text(encoding="utf-8").replace(profile.model, "another"), encoding="utf-8")
    stale = bitmtp(*text)
    assert stale.code == 0
    assert '"auto"' in stale.out
    assert "is not used: this profile was made for model another" in stale.err


def test_errors(bitmtp: Command, model_flags: list[str], tmp_path: Path) -> None:
    ran = bitmtp("tune", *model_flags, "--output", tmp_path / "none" / "profile.json")
    assert ran.code == 2
    assert "its folder does not exist" in ran.err
