"""The page in a browser against the server itself: the demo model, and a model that calls a tool."""

import json
import re

import pytest
from live_server import FakeEngine, Live, demo_engine, wait_for
from test_page import Page, browser  # noqa: F401 (a fixture)

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"


def opened(browser, server, **settings):  # noqa: F811
    """Returns the page, newly opened with these settings."""
    page = Page(browser, server)
    browser.get_log("browser")  # the storage belongs to another page
    browser.get(server.url)
    page.run("localStorage.setItem('moeflux.settings', arguments[0])", json.dumps(settings))
    browser.refresh()
    page.until(lambda: page.see("#model").startswith("tiny"))
    return page


def number(text):
    return float(text.replace(",", "")) if text[:1].isdigit() else 0.0


@pytest.fixture
def log(browser):  # noqa: F811
    """Checks that the browser's log is empty: no script error, and nothing that the policy refused."""
    yield
    browser.get("about:blank")
    assert browser.get_log("browser") == []


def test_a_chat_with_the_demo_model(browser, log):  # noqa: F811
    with Live(demo_engine) as server:
        page = opened(browser, server, max_tokens="20")
        page.send("Tell me a story.")
        said, tokens = page.see(".assistant .md"), server.models.totals.generated_tokens
        assert said and tokens
        rate = number(re.search(r"([\d.,]+) per second", page.see(".figures"))[1])
        page.until(lambda: number(page.see(".figure:nth-child(1) dd.past span")) == pytest.approx(rate, rel=0.3))
        page.click("[aria-label=Regenerate]")
        page.until(lambda: server.models.totals.generated_tokens == 2 * tokens)
        page.ended()
        said = page.see(".assistant .md")  # another one: the demo model's second answer is sampled
        assert said and page.count(".message") == 2
        assert page.see(".ended") == "Ended at the limit of tokens.Continue" and page.see(".versions") == "2/2"
        page.click(".ended button")
        page.until(lambda: server.models.totals.generated_tokens == 3 * tokens)
        page.ended()
        assert page.see(".assistant .md").startswith(said) and page.see(".assistant .md") != said
        assert page.see("#about").startswith("This is the demo model")
        assert not page.shown("thinking-field") and not page.shown("add-pictures")
        assert page.see(".figure:nth-child(3) span") == "all in memory"
        browser.get("about:blank")


def test_an_answer_is_stopped_and_a_call_shown(browser, log):  # noqa: F811
    def script(prompt):
        return "</think>" + ("word " * 2000 if "long" in prompt else CALL)

    with Live(lambda: FakeEngine(script, token_seconds=0.01)) as server:
        page = opened(browser, server, tools=json.dumps([TOOL]))
        page.write("long")
        page.press("\ue007")
        page.until(lambda: "word word" in page.see(".md"))
        page.click("#send")
        page.ended()
        wait_for(lambda: server.models.totals.cancelled == 1)
        used, totals = re.search(r"at least ([\d,]+) of 8,192", page.see("#usage"))[1], server.models.totals
        assert 0 < int(used.replace(",", "")) - totals.prompt_tokens <= totals.generated_tokens
        page.click("#new")
        page.send("call")
        assert "weather" in page.see(".assistant") and "Paris" in page.see(".assistant")
        browser.get("about:blank")
