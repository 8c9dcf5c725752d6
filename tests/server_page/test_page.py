"""The playground: what is shown is what was committed, it can be stopped and compared, and everybody can use it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from server.conftest import Running, running, wait_for

from bitmtp.decoding.policies import make_policy
from bitmtp.engine import Engine, Request
from bitmtp.sampling import Sampling

from .conftest import Brake, opened

PROMPT = "Once there was a model"
KEY = "sk-page"
DONE = re.compile(r"^Done: \d+ tokens$")
POLICIES = ("speculative", "auto", "autoregressive", "confidence", "hybrid")


def set_up(page: Page, **settings: Any) -> None:
    """Fill in the form: a text to continue, and settings by the ids of their fields."""
    page.locator("#prompt").fill(PROMPT)
    if not page.locator("#policy").is_visible():
        page.locator("summary").click()
    for name, value in {"form_of_prompt": "text", "max_tokens": 40, **settings}.items():
        field = page.locator(f"#{name}")
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(str(value))


def compare(page: Page, first: str, second: str, **settings: Any) -> None:
    """Run the prompt under two policies."""
    page.locator("#compare").check()
    set_up(page, policy=first, other=second, **settings)
    page.keyboard.press("Control+Enter")


def status(page: Page, expected: str | re.Pattern[str]) -> None:
    expect(page.locator("#status")).to_have_text(expected, timeout=30_000)


def figure(page: Page, name: str) -> str:
    return page.locator(f"dd.{name}").inner_text()


def answer_with(page: Page, *events: object) -> None:
    """Let every request for a text be answered by these events of a stream."""
    body = "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)
    page.route("**/v1/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


@pytest.mark.parametrize("policy", POLICIES)
def test_it_shows_what_was_committed_and_how(page: Page, served: Running, engine: Engine, policy: str) -> None:
    settings = {"tau": 0.02} if policy in ("confidence", "hybrid") else {}
    set_up(page, policy=policy, temperature=0.8, seed=5, **settings)
    page.locator("#run").click()
    status(page, DONE)

    decoding = {"policy": policy, **settings, "trace": True}
    asked = {"max_tokens": 40, "temperature": 0.8, "seed": 5}
    choice = served.complete(PROMPT, **asked, decoding=decoding)["choices"][0]
    spans = page.locator(".text span")
    assert page.locator(".text").text_content() == choice["text"]
    assert spans.evaluate_all("all => all.map(one => one.className)") == [one["source"] for one in choice["tokens"]]

    expect(page.locator(".badge")).to_have_text("lossy" if settings else "lossless")
    made = Request(PROMPT, 40, make_policy(policy, engine.config.block_size, **settings), Sampling(temperature=0.8), 5)
    result = engine.generate(made)
    assert figure(page, "tokens") == str(result.num_tokens)
    assert figure(page, "length") == f"{result.mean_acceptance_length:.2f}"
    assert figure(page, "saved") == str(result.num_tokens - 1 - result.passes)
    rate = f"{100 * result.draft_acceptance_rate:.0f}%" if result.num_spec_steps else "–"
    assert figure(page, "accepted-rate") == rate
    assert page.locator(".chart rect").count() == result.num_tokens - 1


def test_colours_and_underlines_tell_sources_apart(page: Page) -> None:
    looks = page.locator(".legend span").evaluate_all(
        "all => all.map(getComputedStyle).map(look => [look.color, look.textDecorationLine + look.textDecorationStyle])"
    )
    assert len({colour for colour, _ in looks}) == len({line for _, line in looks}) == len(looks) == 3


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_a_run_can_be_stopped(page: Page, served: Running, brake: Brake, how: str) -> None:
    brake.delay = 0.02
    set_up(page, policy="autoregressive", max_tokens=1900)
    page.locator("#run").click()
    expect(page.locator(".text span").nth(3)).to_be_attached()
    assert served.metric("bitmtp_running") == 1
    if how == "button":
        page.locator("#stop").click()
    else:
        page.keyboard.press("Escape")
    status(page, "Stopped")
    wait_for(lambda: served.metric("bitmtp_running") == 0)
    assert 4 <= page.locator(".text span").count() < 1900
    expect(page.locator("#stop")).to_be_disabled()
    expect(page.locator("#run")).to_be_focused()


def test_a_second_run_replaces_the_first(page: Page, served: Running, brake: Brake) -> None:
    brake.delay = 0.02
    set_up(page, policy="autoregressive", max_tokens=1900)
    page.locator("#run").click()
    expect(page.locator(".text span").first).to_be_attached()
    page.locator("#max_tokens").fill("3")
    page.locator("#run").click()
    status(page, "Done: 3 tokens")
    assert page.locator(".text span").count() == 3
    wait_for(lambda: served.metric("bitmtp_running") == 0)


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 1}], ids=["greedy", "sampled"])
def test_speculative_text_is_the_autoregressive_one(page: Page, settings: dict[str, float]) -> None:
    compare(page, "speculative", "autoregressive", **settings)
    status(page, "✓ Identical text")
    first, second = page.locator(".text").all_text_contents()
    assert first == second
    assert first
    assert page.locator(".differs").count() == 0


def test_a_lossy_text_is_marked_where_it_departs(page: Page) -> None:
    compare(page, "confidence", "autoregressive", tau=0, block_size=8, temperature=0)
    status(page, re.compile(r"^≠ Differs at token \d+$"))
    assert "(lossy)" in page.locator("#policy option:checked").inner_text()
    expect(page.locator(".badge")).to_have_text(["lossy", "lossless"])
    place = int(page.locator("#status").inner_text().rsplit(" ", 1)[1]) - 1
    titles = [
        pane.locator(".text span").evaluate_all("all => all.map(one => one.title.split(' ').pop())")
        for pane in page.locator("article").all()
    ]
    assert titles[0][:place] == titles[1][:place]
    assert titles[0][place] != titles[1][place]
    for pane in page.locator("article").all():
        expect(pane.locator(".text span").nth(place)).to_have_class(re.compile("differs"))


def test_only_settings_that_the_policy_has_are_offered_and_sent(page: Page) -> None:
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    expected = {
        "autoregressive": {},
        "speculative": {"block_size": 4},
        "auto": {"block_size": 4},
        "confidence": {"block_size": 4, "tau": 0.5},
        "hybrid": {"block_size": 4, "tau": 0.5, "min_prefix": 2},
    }
    for policy, settings in expected.items():
        set_up(page, policy=policy, top_p=0.9, temperature=0.5, max_tokens=5, **settings)
        for field in ("block_size", "tau", "min_prefix"):
            assert page.locator(f"#{field}").is_enabled() == (field in settings)
        page.locator("#run").click()
        status(page, DONE)
        body = sent.pop()
        assert body["decoding"] == {"policy": policy, **settings, "trace": True}
        assert (body["prompt"], body["top_p"], body["temperature"], body["max_tokens"]) == (PROMPT, 0.9, 0.5, 5)


def test_a_prompt_can_be_a_message(page: Page, served: Running) -> None:
    set_up(page, form_of_prompt="chat")
    page.locator("#run").click()
    status(page, DONE)
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40, "temperature": 0}
    answer = served.post("/v1/chat/completions", **body).json()
    assert page.locator(".text").text_content() == answer["choices"][0]["message"]["content"]


def test_text_of_the_model_is_never_markup(page: Page) -> None:
    text = "<img src=x onerror=alert(1)><script>alert(2)</script>&amp;\u202e"
    tokens = [{"id": 1, "text": text, "source": "exact"}]
    answer_with(page, {"choices": [{"tokens": tokens}]}, "[DONE]")
    set_up(page)
    page.locator("#run").click()
    status(page, "Done: 1 token")
    assert page.locator(".text").text_content() == text
    assert page.locator(".text img, .text script").count() == 0


@pytest.mark.parametrize(
    ("events", "message"),
    [([{"error": {"message": "the server failed"}}], "the server failed"), ([], "the answer broke off")],
)
def test_a_stream_that_fails_says_so(page: Page, events: list[object], message: str) -> None:
    answer_with(page, *events)
    set_up(page)
    page.locator("#run").click()
    status(page, message)
    expect(page.locator("#status")).to_have_class("error")


def test_a_refusal_is_one_line(browser: Browser, served: Running) -> None:
    with opened(browser, served.url, []) as page:
        set_up(page, policy="hybrid", block_size=3, min_prefix=5)
        page.locator("#run").click()
        status(page, "min_prefix 5 is larger than the block size 3")
        expect(page.locator("#status")).to_have_class("error")


def test_a_key_is_asked_for_only_where_one_is_needed(browser: Browser, page: Page, engine: Engine) -> None:
    expect(page.locator("#model")).to_contain_text("tiny")
    expect(page.locator("#key")).to_be_hidden()
    with running(engine, api_keys=(KEY,)) as guarded, opened(browser, guarded.url, []) as locked:
        expect(locked.locator("#key")).to_be_focused()
        expect(locked.locator("#status")).to_contain_text("API key is required")
        locked.locator("#key").fill(KEY)
        set_up(locked)
        expect(locked.locator("#model")).to_contain_text("tiny")
        locked.locator("#run").click()
        status(locked, DONE)
        assert KEY not in json.dumps(locked.context.storage_state())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_by_day_and_by_night(browser: Browser, served: Running, scheme: str) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True, "color_scheme": scheme}
    complaints: list[str] = []
    with opened(browser, served.url, complaints, **phone) as page:
        page.locator("#compare").check()
        set_up(page, prompt="word" * 200)
        page.locator("#run").click()
        status(page, "✓ Identical text")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        colours = page.evaluate("[getComputedStyle(document.body)].map(look => [look.backgroundColor, look.color])[0]")
        page_light, ink_light = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
        assert (page_light > ink_light) == (scheme == "light")
    assert complaints == []


def test_the_keyboard_is_enough(page: Page) -> None:
    expect(page.locator("#prompt")).to_be_focused()
    reached = ["run", "compare", "summary", "policy", "block_size", "max_tokens", "temperature", "top_p", "seed"]
    for name in reached:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id || document.activeElement.localName") == name
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    unnamed = "all => all.filter(one => !one.labels.length).map(one => one.id)"
    assert page.locator("input, select, textarea").evaluate_all(unnamed) == []
    expect(page.locator("#status")).to_have_attribute("role", "status")


def test_a_wrong_setting_is_pointed_at_even_if_it_was_folded_away(page: Page) -> None:
    set_up(page, temperature=3)
    page.locator("summary").click()
    expect(page.locator("#temperature")).to_be_hidden()
    page.locator("#run").click()
    expect(page.locator("#temperature")).to_be_focused()
    assert page.locator("article").count() == 0
