"""The page in a real browser: Debian's Chromium, driven by Playwright, before a server of this process."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import any_backend, make_engine, random_checkpoint, tiny_config

from bitmtp.core.costs import CostTable, Tuning
from bitmtp.engine import Engine

# What the extras bring is imported where it is used: a conftest that skips while it is loaded is an error.
if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page
    from server.conftest import Running

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Brake:
    """A backend whose passes take at least ``delay`` seconds; the host drives them all."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.delay = 0.0

    def __getattr__(self, name: str) -> Any:
        if name in ("can_run", "run", "settle"):
            raise AttributeError(name)
        return getattr(self._backend, name)

    def step(self, rows: Any, **options: Any) -> Any:
        time.sleep(self.delay)
        return self._backend.step(rows, **options)


@pytest.fixture(scope="module")
def engine(tokenizer_folder: Path) -> Engine:
    """A tiny model on the fastest backend that runs here, behind a brake. What its passes cost is given: by measured
    costs the adaptive policy would decide anew in each run, and draft wider than the server lets it."""
    backend = any_backend()
    made = make_engine(backend, random_checkpoint(tiny_config(max_position=2048)), tokenizer_folder)
    costs = Tuning(CostTable((1, 2, 8, 16), (3.7, 4.4, 7.4, 13.2)))
    return Engine(Brake(made.backend), made.tokenizer, made.context, costs)  # type: ignore[arg-type]


@pytest.fixture
def brake(engine: Engine) -> Iterator[Brake]:
    """The engine's brake; it is off again after the test."""
    assert isinstance(engine.backend, Brake)
    yield engine.backend
    engine.backend.delay = 0.0


@pytest.fixture(scope="module")
def served(engine: Engine) -> Iterator[Running]:
    """A server without keys."""
    from server.conftest import running

    with running(engine) as server:
        yield server


# Of a module, not of the session: while Playwright runs, nothing else on this thread may run an event loop.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser without windows."""
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("there is no chromium here")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, url: str, complaints: list[str], **options: Any) -> Iterator[Page]:
    """The page, in a profile of its own; what its console says is added to ``complaints``."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    page = context.new_page()
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    yield page
    context.close()
    assert requested
    assert [one for one in requested if not one.startswith(url + "/")] == []


@pytest.fixture
def page(browser: Browser, served: Running) -> Iterator[Page]:
    """The page on a desk. It must leave nothing in the console and ask nobody but its server."""
    complaints: list[str] = []
    with opened(browser, served.url, complaints) as page:
        yield page
    assert complaints == []
