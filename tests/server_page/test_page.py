"""The playground: what is shown is what was committed, it can be stopped and compared, and everybody can use it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from server.conftest import Running, running, wait_for

from bitmtp.core.policies import make_policy
from bitmtp.engine import Engine, Request
from bitmtp.sampling import Sampling

from .conftest import Brake, opened

PROMPT = "Once there was a model"
KEY = "sk-page"
DONE = re.compile(r"^Done: \d+ tokens$")
SAME = re.compile(r"^\d+\.\d\d × autoregressive, same text$")
OTHER = re.compile(r"^\d+\.\d\d × autoregressive, another text from token (\d+) on$")
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
    """Let every request be answered by these events of a stream."""
    body = "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)
    page.route(
        re.compile("/v1/(chat/)?completions"), lambda route: route.fulfill(body=body, content_type="text/event-stream")
    )


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
    assert page.locator(".speed").inner_text().isdigit()
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
    expect(page.locator("#headline")).to_have_text(SAME, timeout=30_000)
    first, second = page.locator(".text").all_text_contents()
    assert first == second
    assert first
    assert page.locator(".differs").count() == 0


def test_a_lossy_text_is_marked_where_it_departs(page: Page) -> None:
    compare(page, "confidence", "autoregressive", tau=0, block_size=8, temperature=0)
    expect(page.locator("#headline")).to_have_text(OTHER, timeout=30_000)
    assert "(lossy)" in page.locator("#policy option:checked").inner_text()
    expect(page.locator(".badge")).to_have_text(["lossy", "lossless"])
    found = OTHER.match(page.locator("#headline").inner_text())
    assert found
    place = int(found[1]) - 1
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
        expect(page.locator("#headline")).to_have_text(SAME, timeout=30_000)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        colours = page.evaluate("[getComputedStyle(document.body)].map(look => [look.backgroundColor, look.color])[0]")
        page_light, ink_light = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
        assert (page_light > ink_light) == (scheme == "light")
    assert complaints == []


def test_the_keyboard_is_enough(page: Page) -> None:
    expect(page.locator("#prompt")).to_be_focused()
    reached = [
        "run",
        "compare",
        "summary",
        "system",
        "policy",
        "block_size",
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
    ]
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


def event(ms: float, *tokens: str, proposals: Sequence[tuple[str, int]] = ()) -> dict[str, Any]:
    """An event of a stream: the text of tokens behind their sources (=: exact, +: accepted), and what was checked."""
    sources = {"=": "exact", "+": "accepted"}
    written = [{"id": number(one[1:]), "text": one[1:], "source": sources[one[0]]} for one in tokens]
    checked = [{"id": number(text), "text": text, "after": after} for text, after in proposals]
    return {"choices": [{"tokens": written, "proposals": checked, "ms": ms}]}


def number(text: str) -> int:
    """An id for a made-up token."""
    return sum(ord(character) << 8 * place for place, character in enumerate(text[:3]))


def chips(page: Page) -> list[list[tuple[str, str]]]:
    """What the step shows: for each place its candidates, with what became of them."""
    columns: list[list[tuple[str, str]]] = page.locator(".columns li").evaluate_all(
        "all => all.map(one => [...one.children].map(chip => [chip.firstChild.data, chip.className.slice(5)]))"
    )
    return [[(text, state) for text, state in column] for column in columns]


def test_arrow_keys_step_through_what_was_drafted(page: Page) -> None:
    tree = [("a", -1), ("b", -1), ("c", 0), ("d", 0), ("e", 2)]
    answer_with(
        page,
        event(0, "=first"),
        event(10, "+a", "+c", "=x", proposals=tree),
        event(25, "=k", "+l", "=m", proposals=[("k", -1), (" l", 0), ("l", 0)]),
        event(30, "=n"),
        "[DONE]",
    )
    set_up(page)
    page.locator("#run").click()
    status(page, "Done: 8 tokens")
    place, story = page.locator(".place"), page.locator(".story")
    expect(place).to_have_text("Iteration 1 of 3, 10.0 ms")
    expect(story).to_contain_text("2 of 5 drafted tokens stood. The model said “x” instead of “e”. A tree")
    assert chips(page) == [
        [("a", "stood"), ("b", "fell")],
        [("c", "stood"), ("d", "fell")],
        [("x", "own"), ("e", "fell")],
    ]
    assert page.locator(".text [data-current]").all_text_contents() == ["a", "c", "x"]

    page.keyboard.press("ArrowRight")
    expect(place).to_have_text("Iteration 2 of 3, 15.0 ms")
    expect(story).to_contain_text("1 of 2 drafted tokens stood, and the model added “m”.")
    assert chips(page) == [[("k", "own")], [("l", "stood"), ("l", "fell")], [("m", "own")]]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(place).to_have_text("Iteration 3 of 3, 5.0 ms")
    expect(story).to_have_text("No draft: the model wrote one token.")
    page.locator(".back").click()
    expect(place).to_have_text("Iteration 2 of 3, 15.0 ms")
    page.locator("#prompt").focus()
    page.keyboard.press("ArrowRight")
    expect(place).to_have_text("Iteration 2 of 3, 15.0 ms")


def test_steps_of_a_real_text_agree_with_its_figures(page: Page) -> None:
    set_up(page, policy="speculative", temperature=0.8, seed=5)
    page.locator("#run").click()
    status(page, DONE)
    words = page.locator(".place").inner_text().split()
    accepted = 0
    for step in range(int(words[3].rstrip(","))):
        expect(page.locator(".place")).to_contain_text(f"Iteration {step + 1} of")
        written = page.locator(".text [data-current]").evaluate_all("all => all.map(one => one.className)")
        shown = [column[0][1] for column in chips(page)][: len(written)]
        assert shown == ["own" if source == "exact" else "stood" for source in written]
        accepted += written.count("accepted")
        page.keyboard.press("ArrowRight")
    assert accepted == page.locator(".text span.accepted").count() > 0


def test_both_strips_have_one_scale_of_time(page: Page) -> None:
    compare(page, "speculative", "autoregressive")
    expect(page.locator("#headline")).to_have_text(SAME, timeout=30_000)
    first, second = page.locator(".chart").evaluate_all("all => all.map(one => one.getAttribute('viewBox'))")
    assert first == second
    spans = page.locator("figcaption .span").all_inner_texts()
    assert spans[0] == spans[1] in page.locator("dd.seconds").all_inner_texts()


def test_several_turns_and_a_system_message(page: Page) -> None:
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    expect(page.locator("#next")).to_be_disabled()
    set_up(page, form_of_prompt="chat", system="Be brief.")
    page.locator("#run").click()
    status(page, DONE)
    answer = page.locator(".text").text_content()
    page.locator("#next").click()
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator("#prompt")).to_have_value("")
    expect(page.locator("article")).to_have_count(0)
    expect(page.locator("#turns .asked")).to_have_text(PROMPT)
    page.locator("#prompt").fill("And then?")
    page.keyboard.press("Control+Enter")
    status(page, DONE)
    turns = [("system", "Be brief."), ("user", PROMPT), ("assistant", answer), ("user", "And then?")]
    assert sent[-1]["messages"] == [{"role": role, "content": content} for role, content in turns]
    page.locator("#forget").click()
    expect(page.locator("#before")).to_be_hidden()
    page.locator("#prompt").fill("Again")
    page.keyboard.press("Control+Enter")
    status(page, DONE)
    assert [message["content"] for message in sent[-1]["messages"]] == ["Be brief.", "Again"]


MARKDOWN = (
    "# Title\n\n*Soft* [link](javascript:alert(1)) ![x](http://evil.invalid/x.png) <b>raw</b>\n\n```py\na = 1\n```\n"
)


def test_markdown_is_shown_without_its_dangers_and_code_can_be_copied(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer_with(page, event(0, "=" + MARKDOWN), "[DONE]")
    set_up(page)
    page.locator("#formatted").check()
    page.locator("#run").click()
    shown = page.locator("article .formatted")
    expect(shown.locator("em")).to_have_text("Soft")
    assert shown.locator("img, b, script, a[href^=javascript]").count() == 0
    expect(page.locator("article .text")).to_be_hidden()
    for button, copied in ((shown.locator(".copy"), "a = 1\n"), (page.locator(".head .copy"), MARKDOWN)):
        button.click()
        expect(button).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == copied


def test_spaces_are_not_underlined(page: Page) -> None:
    answer_with(page, event(0, "=a"), event(1, "+ word", "=\n  "), "[DONE]")
    set_up(page)
    page.locator("#run").click()
    status(page, "Done: 3 tokens")
    assert page.locator(".text").text_content() == "a word\n  "
    lines = "all => all.map(one => getComputedStyle(one).textDecorationLine)"
    assert page.locator(".text span").evaluate_all(lines) == ["none"] * 3
    assert page.locator(".text .accepted u").evaluate_all(lines) == ["underline"]
    assert page.locator(".text u").all_text_contents() == ["a", "word", ""]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, served: Running, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    with opened(browser, served.url, [], color_scheme=scheme, bypass_csp=True) as page:
        set_up(page, form_of_prompt="chat")
        page.locator("#run").click()
        status(page, DONE)
        page.locator("#next").click()
        page.locator("#compare").check()
        page.locator("#prompt").fill("And then?")
        page.locator("#run").click()
        expect(page.locator("#headline")).to_have_text(SAME, timeout=30_000)
        for formatted in (False, True):
            page.locator("#formatted").set_checked(formatted)
            found = Axe().run(page).response["violations"]
            serious = [
                (one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")
            ]
            assert serious == []
