"""The page in a browser with a scripted server: what it sends, what it shows, and what must not happen."""

import base64
import colorsys
import hashlib
import io
import itertools
import json
import re
import threading
import time

import image_goldens
import pytest
from browser import colours, missing, resize, start
from page_server import FEATURES, PageServer, call, feed, text
from PIL import Image

from moeflux_mlx.server import page

LONG_PROMPT = {"prompt_progress": {"processed": 32, "total": 3400, "cache": 32}}
SLOW = [LONG_PROMPT] + [piece for i in range(400) for piece in ({"content": f"word{i} "}, 0.02)]
HOSTILE = r"""<img src=x onerror="document.title='taken'"><script>document.title='taken'</script>

[a](javascript:document.title='taken') ![b](http://127.0.0.1:9/x.png) <http://127.0.0.1:9/ok>

| a | b |
|---|---|
| <svg onload="document.title='taken'"> | `<b>` |

```html" onclick="document.title='taken'
<script>document.title = 'taken'</script>
```
> - <iframe srcdoc="<script>parent.document.title='taken'</script>"></iframe>

$<img src=x onerror="document.title='taken'">$ $$\text{<script>document.title='taken'</script>}$$
$\constructor \href{javascript:1}{x}$
"""
RICH = """## Title

1. first
2. second with **bold**, *slanted*, ~~gone~~ and `code`
   - inner

> quoted

| name | size |
|---|---:|
| one | 1 |

```python
def f(x):  # a comment
    return "text"
```

See https://example.org/a_b_c, then stop.
"""
FORMULAS = r"""The mean $\bar x_1 = \frac{1}{n}\sum_{i=1}^n x_i$ and \(a*b*c\), written:

$$
\begin{aligned}
y' &= \sqrt{x^{2}} - 1 \\
- \alpha &\in \mathbb{R}
\end{aligned}
$$

1. \[ \text{softmax}(x)_i = \begin{cases} 1 & x > 0 \\ 0 & \text{else} \end{cases} \]

| with $\left( \hat p \right)$ | without |
|---|---|
| $\unheard{x}_1$ | $5 and $10, `$x$`, $HOME/bin:$PATH, \$3 |
"""
# Texts for which a careless pattern takes quadratic time, or a careless parser its whole stack.
LENGTHY = [
    *("*a " * 3000, "**a*" * 2000, "_" * 4000, "[" * 4000, "[a](" * 1000, "![" * 3000, "\\" * 4000),
    *("> " * 4000 + "x", "- " * 4000 + "x", "\n".join(" " * i + "- x" for i in range(300))),
    *("# a" + " " * 18000 + "x", "~" * 18000 + "`", "```" + " " * 18000 + "`"),
    *("|" * 9000 + "\n" + "|-" * 9000, "|" + " " * 18000 + "-|x\n|" + " " * 18000 + "-|x"),
    *("<http://" * 1000, "https://a" * 1000, "```js\n" + "/*" * 5000 + "'" * 5000 + "\n```"),
    *(
        "$" * 9000,
        "$a" * 9000,
        "\\[\n" * 4000,
        "$$" + "{" * 9000 + "$$",
        "$" + "\\hat" * 900 + "$",
        "$$" + "x_" * 9000 + "$$",
    ),
    *("$" + "{" * 1800 + "}" * 1800 + "$", "$$" + r"\begin{matrix}" * 900 + "$$"),
    "`" * 9000 + "x",  # the last one is a fence that nothing closes
]
# A list and a quote that grow by pieces of code, in an answer that is shown again and again.
GROWING = ["- a\n", *["  ```\n  x\n  ```\n" * 10] * 10, "\n---\n", *["> ```\n> x\n> ```\n> - b\n" * 10] * 10]
GO_ON = threading.Event()
TAKES = itertools.count(1)


def lasting(processed=1, *opening):
    """Returns an answer that comes when the test says so."""
    yield {"prompt_progress": {"processed": processed, "total": 4096, "cache": 0}}
    yield from opening
    GO_ON.wait(30)
    yield {"content": "at last"}


TOO_LONG = (400, {"error": {"message": "prompt is too long: 9000 tokens > 4096", "code": "context_length_exceeded"}})
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def script(request):
    """Returns the server's answer to the text of the last message."""
    last = request["messages"][-1]
    answers = {
        "slow": SLOW,
        "refuse": (400, {"error": {"message": "temperature is -1; expected 0 to 5", "code": "invalid_value"}}),
        "too long": TOO_LONG,
        "formulas": [{"content": FORMULAS[i : i + 5]} for i in range(0, len(FORMULAS), 5)],
        "break": [{"content": "half "}, {"error": {"message": "the disk is gone"}}],
        "timed": [{"content": "a"}, {"timings": {"predicted_n": 25, "predicted_ms": 2000.0}}],
        "think": [{"reasoning_content": "Let me see. "}, {"reasoning_content": "Yes."}, {"content": "It is so."}],
        "hostile": [{"content": HOSTILE[i : i + 7]} for i in range(0, len(HOSTILE), 7)]
        + [{"reasoning_content": HOSTILE}],
        "rich": [{"content": RICH[i : i + 5]} for i in range(0, len(RICH), 5)],
        "tool": call("weather", '{"ci', 'ty":"Paris"}'),
        "prompt": [{"prompt_progress": {"processed": 1024, "total": 4096, "cache": 0}}, 1.0, {"content": "read"}],
        "lasting": lasting(),
        "read": lasting(4096),
        "ponder": lasting(4096, {"reasoning_content": "Let me see."}),
        "cut": [{"content": "never ends", "finish": "length"}],
        "lengthy": [{"content": piece + "\n\n"} for piece in LENGTHY] + [{"content": "The end"}],
        "growing": [one for piece in GROWING for one in ({"content": piece}, 0.06)],
        "wide": text("x" * 4000 + " " + "| a |" * 200),
    }
    if last["role"] == "assistant":
        return text(" and the rest")
    if last["content"] == "another":
        return text(f"Take {next(TAKES)}")
    if last["role"] == "tool":
        return text(f"The tool says {last['content']}")
    if isinstance(last["content"], list):
        return text(f"I see {sum(part['type'] == 'image_url' for part in last['content'])} images")
    return answers.get(last["content"], text(f"Answer {len(request['messages'])} to {last['content']}"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if missing():
        pytest.skip(missing())
    folder = tmp_path_factory.mktemp("downloads")
    driver = start(folder=folder)
    driver.folder = folder
    yield driver
    driver.quit()


@pytest.fixture
def open_page(browser):
    """Opens the page of a new server with empty storage. Afterwards the browser's log must be empty."""
    with PageServer(script) as server:
        driven = Page(browser, server)
        resize(browser, 1360, 860)
        browser.get(server.address)
        driven.until(driven.knows_model)
        yield driven
        browser.get("about:blank")
        unexpected = [entry for entry in browser.get_log("browser") if not driven.is_expected(entry["message"])]
        assert unexpected == []


class Page:
    """What a person does with the page and sees on it."""

    def __init__(self, browser, server):
        self.browser, self.server = browser, server
        self.failures = ()  # parts of messages in the browser's log that the test causes

    def is_expected(self, message):
        return any(part in message for part in self.failures)

    def run(self, code, *arguments):
        return self.browser.execute_script(f"return {code}", *arguments)

    def see(self, selector):
        """Returns the text of all elements that match, joined."""
        return self.run("[...document.querySelectorAll(arguments[0])].map(e => e.textContent).join('|')", selector)

    def count(self, selector):
        return self.run("document.querySelectorAll(arguments[0]).length", selector)

    def shown(self, name):
        return not self.run("document.getElementById(arguments[0]).hidden", name)

    def until(self, condition, seconds=20.0):
        end = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < end, self.see("main")[-2000:]
            time.sleep(0.02)
        return value

    def press(self, *keys):
        from selenium.webdriver.common.action_chains import ActionChains

        chain = ActionChains(self.browser, duration=0)
        for key in keys:
            chain.send_keys(key)
        chain.perform()

    def chord(self, modifier, key):
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.browser, duration=0).key_down(modifier).send_keys(key).key_up(modifier).perform()

    def click(self, selector):
        self.browser.find_element("css selector", selector).click()

    def point(self, selector):
        """Moves the pointer to the middle of an element."""
        from selenium.webdriver.common.action_chains import ActionChains

        target = self.browser.find_element("css selector", selector)
        ActionChains(self.browser, duration=0).move_to_element(target).perform()

    def load(self, features):
        """Loads the page anew from a server whose model has these features."""
        self.server.features = features
        self.reload(self.knows_model)

    def knows_model(self):
        """Returns whether the server has told the model, which the page does not name before it has asked."""
        return self.see("#model") not in ("", "No model yet")

    def write(self, message, name="prompt"):
        field = self.browser.find_element("id", name)
        field.clear()
        field.send_keys(message)

    def send(self, message):
        """Sends the message and waits for the end of the answer."""
        self.ask(message)
        self.ended()

    def ask(self, message):
        self.write(message)
        self.press("\ue007")

    def stop(self):
        self.click("#send")
        self.ended()

    def reload(self, condition):
        """Loads the page anew, and waits."""
        self.browser.refresh()
        self.until(condition)

    def paste_image(self):
        self.browser.execute_script(GIVEN, "paste", 30, 20)
        self.until(lambda: self.count("#pictures img") == 1)

    def remove_the_only_image(self):
        """Sends an image without a text, and removes it from the message."""
        self.paste_image()
        self.click("#send")
        self.ended()
        self.run("document.querySelector('[aria-label=\"Remove image 1\"]').click()")

    def regenerate(self):
        """Asks for another last answer and waits for its end."""
        before = len(self.server.requests)
        self.run("[...document.querySelectorAll('[aria-label=Regenerate]')].at(-1).click()")
        self.until(lambda: len(self.server.requests) > before)
        self.ended()

    def ended(self):
        self.until(lambda: self.run("document.getElementById('send').ariaLabel === 'Send'"))


@pytest.fixture
def keys():
    return pytest.importorskip("selenium.webdriver.common.keys").Keys


def test_the_policy_names_the_contents_of_the_page():
    source = page.content().decode()
    for tag in ("script", "style"):
        (inner,) = re.findall(f"<{tag}>(.*?)</{tag}>", source, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in page.csp()
    assert "unsafe" not in page.csp() and "default-src 'none'" in page.csp()


def test_the_page_loads_nothing_from_elsewhere_and_makes_no_markup_of_text():
    source = page.content().decode()
    places = re.findall(r"https?://[\w.]+", source)
    assert set(places) == {"http://www.w3.org"}, "the name space of SVG, which nobody fetches"
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|\son\w+=\"", source
    )
    assert " style=" not in source and '<link rel="stylesheet' not in source


NUMBERS = {"temperature": 0.3, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
NUMBERS |= {"presence_penalty": -0.5, "frequency_penalty": 0.5, "max_tokens": 50, "seed": 7}


def test_a_message_is_sent_and_its_answer_shown(open_page):
    open_page.send("Hello")
    assert open_page.see(".said") == "Hello" and open_page.see(".assistant .md") == "Answer 1 to Hello"
    (request,) = open_page.server.requests
    assert request["messages"] == [{"role": "user", "content": "Hello"}]
    assert request["stream"] is True and request["stream_options"] == {"include_usage": True}
    assert not {*NUMBERS, "reasoning_effort", "tools", "chat_template_kwargs"} & set(request), "empty settings"
    open_page.send("More")
    assert [message["role"] for message in open_page.server.requests[1]["messages"]] == ["user", "assistant", "user"]
    open_page.send("timed")
    assert "12.5 per second" in open_page.see(".figures") and "32 of 40 prompt tokens reused" in open_page.see(
        ".figures"
    )
    assert "of 4,096 tokens" in open_page.see("#usage")


GIVEN = """
const [kind, width, height] = arguments, canvas = document.createElement("canvas");
canvas.width = width; canvas.height = height;
const paint = canvas.getContext("2d");
for (let x = 0; x < width; x += 8) { paint.fillStyle = `hsl(${x} 70% 50%)`; paint.fillRect(x, 0, 8, height); }
canvas.toBlob((blob) => {
  const data = new DataTransfer();
  data.items.add(new File([blob], "shot.png", { type: "image/png" }));
  const target = kind === "paste" ? document.getElementById("prompt") : document.body;
  const more = kind === "paste" ? { clipboardData: data } : { dataTransfer: data };
  const Kind = kind === "paste" ? ClipboardEvent : DragEvent;
  target.dispatchEvent(new Kind(kind, { bubbles: true, cancelable: true, ...more }));
});
"""


def test_images_are_pasted_dropped_and_chosen_and_sent_before_the_text(open_page, tmp_path):
    page = open_page
    page.browser.execute_script(GIVEN, "paste", 300, 200)
    page.until(lambda: page.count("#pictures img") == 1)
    page.browser.execute_script(GIVEN, "drop", 3000, 2000)
    page.until(lambda: page.count("#pictures img") == 2)
    (tmp_path / "one.png").write_bytes(image_goldens.png("qwen3_vl_moe", 0))
    (tmp_path / "none.png").write_bytes(b"no image")
    for name in ("one.png", "none.png"):
        page.browser.find_element("id", "choose").send_keys(str(tmp_path / name))
        page.until(lambda: page.count("#pictures img") == 3)
    page.until(lambda: "no image that this browser can read" in page.see(".toast"))
    page.browser.execute_script("document.querySelector('#pictures button').click()")
    page.until(lambda: page.count("#pictures img") == 2)
    page.send("what is it?")
    page.until(lambda: "I see 2 images" in page.see(".assistant"))
    first, second, said = page.server.requests[-1]["messages"][-1]["content"]
    assert said == {"type": "text", "text": "what is it?"}
    sizes = [size_of(part["image_url"]["url"]) for part in (first, second)]
    assert sizes[1] == image_goldens.image("qwen3_vl_moe", 0).shape[1::-1]
    assert abs(sizes[0][0] * sizes[0][1] / (1 << 20) - 1) < 0.01, "made smaller"
    assert page.count(".user .pictures img") == 2 and not page.shown("pictures")
    page.reload(lambda: page.count(".user .pictures img") == 2)


def test_an_image_that_the_server_refuses_can_be_removed(open_page):
    page = open_page
    page.failures = ("400 (Bad Request)",)
    refused = (400, {"error": {"message": "the image cannot be decoded"}})
    page.server.script = lambda request: refused if "image_url" in json.dumps(request) else script(request)
    page.paste_image()
    page.send("what is it?")
    assert "cannot be decoded" in page.see(".fault p")
    page.click("[aria-label='Remove image 1']")
    assert page.count(".user img") == 0 and page.count(".said") == 1
    page.click(".toast button")
    assert page.count(".user img") == 1
    page.click("[aria-label='Remove image 1']")
    page.click(".fault button")
    page.until(lambda: page.see(".assistant .md") == "Answer 1 to what is it?")
    page.reload(lambda: page.count(".said") == 1)
    assert page.count(".user img") == 0


def test_where_an_image_was_all_of_a_message_its_removal_asks_for_a_text(open_page):
    page = open_page
    page.remove_the_only_image()
    page.press("a text", "\ue007")
    page.until(lambda: page.see(".assistant .md") == "Answer 1 to a text")


def test_where_an_image_was_all_of_a_message_it_stays_until_a_text_is_sent(open_page):
    page = open_page
    page.remove_the_only_image()
    page.click(".rewrite .quiet")
    assert page.count(".user img") == 1
    page.reload(lambda: page.count(".user img") == 1)
    page.regenerate()
    assert page.server.requests[0]["messages"] == page.server.requests[1]["messages"] != []


def test_the_conversation_does_not_move_when_an_image_is_removed(open_page):
    page = open_page
    page.paste_image()
    for message in ("see", "rich", "formulas", "rich"):
        page.send(message)
    page.run("document.getElementById('flow').scrollTo(0, 20)")
    page.run("document.querySelector('[aria-label=\"Remove image 1\"]').click()")
    assert page.count(".user img") == 0 and page.run("document.getElementById('flow').scrollTop") == 20
    page.click(".toast button")
    assert page.count(".user img") == 1 and page.run("document.getElementById('flow').scrollTop") == 20
    page.run("document.querySelector('[aria-label=\"Remove image 1\"]').click()")
    page.click("#new")
    page.click(".toast:last-child button")
    assert page.count(".user img") == 1, "the undo goes back to the conversation"


def size_of(url):
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as picture:
        return picture.size


def test_stopping_ends_the_request_and_keeps_what_came(open_page):
    open_page.ask("slow")
    open_page.until(lambda: "word5" in open_page.see(".md"))
    open_page.stop()
    assert open_page.server.left.wait(5), "the server still writes to nobody"
    assert open_page.see(".note") == "Stopped." and "word5" in open_page.see(".md")
    words = open_page.see(".md").count("word")
    assert open_page.see("#usage") == f"at least {3400 + words:,} of 4,096 tokens", "not those of the answer before"
    open_page.send("Next")
    assert "word5" in open_page.server.requests[1]["messages"][1]["content"]


def test_a_stopped_answer_goes_on(open_page):
    open_page.ask("slow")
    open_page.until(lambda: "word5" in open_page.see(".md"))
    open_page.stop()
    begun = open_page.see(".md")
    open_page.reload(lambda: open_page.see(".ended button") == "Continue")
    open_page.click(".ended button")
    open_page.until(lambda: open_page.see(".md").endswith("and the rest"))
    open_page.ended()
    sent = open_page.server.requests[1]["messages"][1:]
    assert [message["role"] for message in sent] == ["assistant"] and sent[0]["content"].strip() == begun.strip()
    assert open_page.see(".md").startswith(begun.strip()) and open_page.count(".message") == 2
    assert open_page.count(".ended") == 0
    tokens = begun.count("word") + len(text(" and the rest"))
    assert open_page.see(".figures").startswith(f"{tokens} tokens"), "of both parts"


def test_reasoning_that_was_stopped_goes_on(open_page):
    GO_ON.clear()
    open_page.ask("ponder")
    open_page.until(lambda: "Let me see." in open_page.see(".thought .text"))
    open_page.stop()
    GO_ON.set()
    open_page.click(".ended button")
    open_page.until(lambda: open_page.see(".md") == " and the rest")
    sent = open_page.server.requests[1]["messages"][1]
    assert sent == {"role": "assistant", "content": None, "reasoning_content": "Let me see."}


def test_several_conversations_answer_at_once(open_page):
    GO_ON.clear()
    open_page.send("First")
    open_page.ask("lasting")
    open_page.until(lambda: open_page.count(".waiting"))
    open_page.click("#new")
    assert open_page.count(".said") == 0 and open_page.count(".chat .open i") == 1
    open_page.ask("lasting")
    open_page.until(lambda: open_page.count(".chat .open i") == 2)
    names = {request["prompt_cache_key"] for request in open_page.server.requests}
    assert len(open_page.server.requests) == 3 and len(names) == 2
    GO_ON.set()
    open_page.until(lambda: open_page.count(".chat .open i") == 0)
    open_page.ended()
    assert open_page.see(".assistant .md") == "at last"
    open_page.click(".chat:not(.here) .open")
    assert open_page.see(".assistant .md") == "Answer 1 to First|at last"


def test_a_stopped_conversation_leaves_the_others(open_page):
    GO_ON.clear()
    for _ in range(2):
        open_page.click("#new")
        open_page.ask("lasting")
        open_page.until(lambda: open_page.count(".waiting"))
    open_page.click("#send")
    open_page.until(lambda: open_page.see(".note") == "Stopped.")
    GO_ON.set()
    open_page.until(lambda: open_page.count(".chat .open i") == 0)
    open_page.click(".chat:not(.here) .open")
    assert open_page.see(".assistant .md") == "at last"


def test_released_memory_is_shown(open_page):
    open_page.until(lambda: open_page.see("#memory-text") == "6.2 GB of 8.0 GB planned")
    memory = {**feed(1)["memory"], "given_back": 1_500_000_000}
    open_page.server.feed = lambda step: {**feed(1), "memory": memory}
    open_page.until(lambda: open_page.see("#memory-text") == "6.2 GB of 8.0 GB planned, 1.5 GB given back")


def test_hits_and_reads_are_not_counted_where_nothing_is_streamed(open_page):
    values = [f".figure:nth-child({i}) dd {part}" for i in (3, 4) for part in ("span", "small")]
    open_page.until(lambda: open_page.see(values[0]) == "87.5")
    memory = {**feed(1)["memory"], "pool": 0}
    open_page.server.feed = lambda step: {**feed(1), "memory": memory}
    open_page.until(lambda: open_page.see(", ".join(values[::2])) == "all in memory|all in memory")
    shown = "[...document.querySelectorAll(arguments[0])].map(e => e.checkVisibility())"
    assert open_page.run(shown, ", ".join(values)) == [True, False] * 2, "no unit"
    assert open_page.see(".figure:first-child dd span") == "17.6"


def test_drafts_are_shown_where_there_are_any(open_page):
    assert open_page.run("document.getElementById('drafts').hidden")
    made = {"kind": "head", "checked": 1240, "taken": 930}
    open_page.server.feed = lambda step: {**feed(1), "drafts": made}
    open_page.until(lambda: open_page.see("#drafts-text") == "930 of 1,240 taken, by a draft head")


def test_a_model_for_embeddings_and_a_forecast_are_shown(open_page):
    assert open_page.run("['embedding', 'forecast'].every((id) => document.getElementById(id).hidden)")
    model = {"name": "owls", "state": "loaded", "bytes": 1_200_000_000}
    made = {"low": 5.23, "middle": 6.8, "high": 8.84}
    open_page.server.feed = lambda step: {**feed(1), "embedding": model, "forecast": made}
    open_page.until(lambda: open_page.see("#forecast-text") == "5.2 to 8.8 tok/s")
    open_page.until(lambda: open_page.see("#embedding-text") == "owls: loaded, 1.2 GB")
    drafts = {"kind": "head", "checked": 1240, "taken": 930}
    open_page.server.feed = lambda step: {**feed(1), "forecast": made, "drafts": drafts}
    open_page.until(lambda: not open_page.run("document.getElementById('drafts').hidden"))
    open_page.server.feed = lambda step: {"loading": "owls", "queue": 0, "failures": {}, "embedding": None}
    open_page.until(lambda: open_page.see("#state-text") == "Loading owls")
    assert open_page.run("['embedding', 'forecast', 'drafts'].every((id) => document.getElementById(id).hidden)")


def test_every_running_request_has_a_lane(open_page):
    open_page.send("Mine")
    own = open_page.server.requests[0]["prompt_cache_key"]
    lanes = [
        {"name": own, "prompt": None, "tokens": 9, "tokens_per_second": 12.5},
        {"name": "someone", "prompt": {"done": 30, "total": 120}, "tokens": 0, "tokens_per_second": 0},
    ]
    open_page.server.feed = lambda step: {**feed(1), "lanes": lanes, "queue": 1}
    open_page.until(lambda: open_page.count(".lanes li") == 2)
    assert open_page.see(".lanes b") == "This conversation|Another client"
    assert open_page.see(".lanes span") == "Answering, 12.5 tok/s|Reading a prompt, 25 %"
    assert open_page.run("document.querySelector('.lanes progress').position") == 0.25
    assert open_page.see("#state-text") == "2 conversations, 1 waiting"
    open_page.click("#new")
    open_page.until(lambda: open_page.see(".lanes b") == "Mine|Another client")
    open_page.server.feed = lambda step: {**feed(1), "lanes": lanes[:1]}
    open_page.until(lambda: open_page.see("#state-text") == "Answering, 12.5 tok/s")
    assert open_page.run("document.getElementById('lanes').hidden")
    open_page.server.feed = lambda step: {"loading": "other", "queue": 1}
    open_page.until(lambda: open_page.see("#state-text") == "Loading other")
    open_page.server.feed = lambda step: {"loading": None, "queue": 0, "failures": {"other": "it does not fit"}}
    said = "No model is loaded; other cannot be loaded: it does not fit"
    open_page.until(lambda: open_page.see("#state-text") == said)


def test_one_of_several_models_is_chosen(open_page):
    open_page.server.models = ["tiny-moe", "org/other"]
    open_page.reload(lambda: open_page.see("#models option") == "tiny-moe|org/other")
    choose = "(models => { models.value = 'org/other'; models.dispatchEvent(new Event('change')); })"
    open_page.run(f"{choose}(document.getElementById('models'))")  # at once: the list may be drawn anew in between
    open_page.until(lambda: open_page.see("#model").startswith("other"))
    open_page.send("Hello")
    assert open_page.server.requests[-1]["model"] == "org/other"
    open_page.reload(lambda: open_page.see("#model").startswith("other"))


def test_regenerating_keeps_both_answers_and_what_followed_them(open_page, keys):
    page, shown = open_page, lambda: page.see(".md")
    page.send("another")
    first = shown()
    page.send("More")
    page.click("[aria-label=Regenerate]")
    page.until(lambda: len(page.server.requests) == 3)
    page.ended()
    second = shown()
    assert page.server.requests[0] == page.server.requests[2] and second not in (first, "")
    assert page.see(".versions") == "2/2" and page.count(".message") == 2
    assert page.run("[...document.querySelectorAll('.versions button')].map(b => b.disabled)") == [False, True]
    page.click("[aria-label='Previous answer']")
    assert shown() == f"{first}|Answer 3 to More" and page.see(".versions") == "1/2"
    page.reload(lambda: shown() == f"{first}|Answer 3 to More")
    page.send("Hello")
    assert [message["content"] for message in page.server.requests[-1]["messages"][1::2]] == shown().split("|")[:2]
    page.run("document.querySelector('[aria-label=\"Next answer\"]').focus()")
    page.press(keys.ENTER)
    assert shown() == second
    page.press(keys.ENTER)  # the focus is on the other button
    assert page.see(".versions") == "1/2"
    page.click("[aria-label='Next answer']")
    page.send("Hello")
    assert page.server.requests[-1]["messages"][1]["content"] == second


def test_another_answer_of_the_demo_model_is_sampled(open_page):
    open_page.load({**FEATURES, "demo": True})
    open_page.send("another")
    open_page.regenerate()
    assert [request.get("temperature") for request in open_page.server.requests] == [None, 0.8]
    assert not open_page.count(".toast")
    open_page.click("#open-settings")
    open_page.browser.find_element("name", "temperature").send_keys("0")
    open_page.press("\ue00c")
    open_page.regenerate()
    assert open_page.server.requests[-1]["temperature"] == 0


def test_an_answer_that_is_the_same_again_says_why(open_page):
    open_page.send("Hello")
    open_page.regenerate()
    assert "temperature" not in open_page.server.requests[-1] and open_page.see(".versions") == "2/2"
    assert open_page.see(".toast").startswith("The same answer again: the temperature is 0, or a seed is set.")
    open_page.click(".toast button")
    assert open_page.run("document.getElementById('settings').open")


def test_the_answers_to_a_question_that_is_edited_can_be_brought_back(open_page, keys):
    open_page.send("another")
    open_page.run("document.querySelector('[aria-label=Regenerate]').focus()")
    open_page.press(keys.ENTER)
    open_page.until(lambda: open_page.see(".versions") == "2/2")
    assert open_page.run("document.activeElement.id") == "flow", "the focus is not lost with the button"
    open_page.click("[aria-label=Edit]")
    open_page.press("!", keys.ENTER)
    open_page.until(lambda: open_page.see(".md") == "Answer 1 to another!")
    open_page.click(".toast button")
    assert open_page.see(".versions") == "2/2"


def test_an_answer_that_failed_is_not_kept_but_the_others_are(open_page):
    page = open_page
    page.failures = ("503 (Service Unavailable)",)
    page.send("another")
    first = page.see(".md")
    busy = (503, {"error": {"message": "busy"}})
    page.server.script = lambda request: busy if len(page.server.requests) == 2 else script(request)
    page.click("[aria-label=Regenerate]")
    page.until(lambda: page.see(".versions") == "2/2" and page.count(".fault"))
    page.click(".fault button")
    page.until(lambda: len(page.server.requests) == 3)
    page.ended()
    assert page.see(".versions") == "2/2" and page.see(".md").startswith("Take")
    page.click("[aria-label='Previous answer']")
    assert page.see(".md") == first


def test_editing_replaces_what_follows_and_can_be_undone(open_page):
    for message in ("One", "Two"):
        open_page.send(message)
    open_page.click("[aria-label=Edit]")
    open_page.press("!", "\ue007")
    open_page.until(lambda: len(open_page.server.requests) == 3)
    open_page.ended()
    assert open_page.see(".said") == "One!" and len(open_page.server.requests[2]["messages"]) == 1
    open_page.click(".toast button")
    assert open_page.see(".said") == "One|Two"


def test_history_outlasts_a_reload_and_can_be_deleted(open_page):
    open_page.send("Remember this")
    open_page.write("a draft")
    open_page.reload(lambda: open_page.see(".said") == "Remember this")
    assert open_page.see(".assistant .md") == "Answer 1 to Remember this"
    assert open_page.run("document.getElementById('prompt').value") == "a draft"
    open_page.click("#new")
    assert open_page.run("document.getElementById('empty').hidden") is False
    open_page.click(".chat .open")
    assert open_page.see(".said") == "Remember this"
    open_page.click(".chat [aria-label^=Delete]")
    assert open_page.count(".chat") == 0 and open_page.count(".said") == 0
    open_page.click(".toast button")
    assert open_page.see(".chat .open") == "Remember this"


def test_what_another_tab_writes_is_shown(open_page):
    page = open_page
    page.send("One")
    page.click("#new")
    page.send("Two")
    page.browser.execute_script("""
        const { id } = JSON.parse(localStorage.getItem("moeflux.index"))[1], key = `moeflux.chat.${id}`;
        const kept = JSON.parse(localStorage.getItem(key));
        kept.messages.push({ role: "user", content: "Three" });
        localStorage.setItem(key, JSON.stringify(kept));
        dispatchEvent(new StorageEvent("storage", { key }));
    """)
    page.click(".chat:not(.here) .open")
    assert page.see(".said") == "One|Three"


def test_titles_and_texts_of_conversations_are_searched(open_page):
    page, titles = open_page, lambda: page.see("#list .open")
    for message in ("Geese", "rich", "Cats"):
        page.click("#new")
        page.send(message)
    page.reload(lambda: titles() == "Cats|rich|Geese")
    page.click("#find")
    page.press("INNER")
    assert page.count("#list .open") == 1 and titles().startswith("rich")
    assert page.see("#list small b") == "inner" and "`code`" in page.see("#list small"), "with the words around it"
    page.write("answer 1 to c", "find")
    assert titles() == "CatsAnswer 1 to Cats"
    page.write("geese", "find")
    assert page.count("#list .open") == 1
    page.click("#list .open")
    assert page.see(".said") == "Geese"
    page.ask("slow")
    page.write("nobody said this", "find")
    assert page.see("#list") == "Nothing found."
    page.press("\ue00c")
    page.until(lambda: page.count("#list .open") == 3)
    assert page.run("document.getElementById('send').ariaLabel") == "Stop", "Escape only ends the search"
    page.stop()


def test_answers_that_are_not_shown_are_searched_and_shown_if_chosen(open_page):
    page, shown = open_page, lambda: page.see(".md")
    page.send("First")
    page.click("#new")
    page.send("another")
    first = shown()
    page.regenerate()
    page.send("another")
    second, kept = shown().split("|")
    page.regenerate()
    page.click("[aria-label='Previous answer']")
    assert shown() == first
    for sought, wanted, versions in ((kept, f"{second}|{kept}", "2/2|1/2"), (first, first, "1/2")):
        page.click("#new")
        page.write(sought, "find")
        assert page.see("#list small b") == sought
        page.click("#list .open")
        assert shown() == wanted and page.see(".versions") == versions
    page.reload(lambda: shown() == first)


def test_a_search_does_not_exchange_answers_while_one_is_being_written(open_page):
    page = open_page
    page.send("First")
    page.click("#new")
    page.send("another")
    first = page.see(".md")
    page.regenerate()
    second = page.see(".md")
    GO_ON.clear()
    page.ask("lasting")
    page.until(lambda: page.count(".waiting"))
    page.write(first, "find")
    page.click("#list .open")
    assert page.see(".md").startswith(second) and page.see(".toast") == "Stop the answer first."
    GO_ON.set()
    page.ended()
    assert page.see(".md") == f"{second}|at last"


def test_what_is_exported_can_be_imported_and_holds_no_key(open_page):
    open_page.run("localStorage.setItem('moeflux.key', JSON.stringify('secret'))")
    open_page.send("Keep me")
    open_page.click("#export")
    (file,) = open_page.until(lambda: list(open_page.browser.folder.glob("moeflux-*.json")))
    said = open_page.until(lambda: file.read_text())
    assert "Keep me" in said and "secret" not in said
    open_page.browser.find_element("id", "file").send_keys(str(file))
    open_page.until(lambda: open_page.see(".toast") == "0 conversations imported; 1 of the file is here already")
    assert open_page.count("#list .open") == 1
    open_page.run("localStorage.clear()")
    open_page.reload(lambda: open_page.count("#list .none"))
    field = open_page.browser.find_element("id", "file")
    field.send_keys(str(file))
    open_page.until(lambda: open_page.see(".chat .open") == "Keep me")
    broken = file.with_name("broken.json")
    broken.write_text('{"conversations": 3}')
    field.send_keys(str(broken))
    open_page.until(lambda: "is not a file" in open_page.see(".toast"))
    answers = [[None, tail] for tail in ("", [], [{"role": "user"}], [None], 3)] + [[], [None], [None, None], "x"]
    answers += [["", [{"role": "assistant"}]]]
    said = [{"role": "assistant", "content": "a", "others": others} for others in answers]
    broken.write_text(json.dumps({"conversations": [{"title": "Odd", "messages": said}]}))
    field.send_keys(str(broken))
    open_page.until(lambda: open_page.count("#list .open") == 2)
    open_page.click(".chat:not(.here) .open")
    assert open_page.count(".md") == len(said) and open_page.count(".versions") == 0
    file.unlink()


def test_errors_are_shown_and_can_be_tried_again(open_page):
    open_page.failures = ("400 (Bad Request)",)
    open_page.send("refuse")
    assert open_page.see(".fault p") == "The server says (400): temperature is -1; expected 0 to 5"
    open_page.send("break")
    assert open_page.see(".fault p").endswith("|The server says: the disk is gone") and "half" in open_page.see(".md")
    assert [message["role"] for message in open_page.server.requests[1]["messages"]] == ["user", "user"]
    open_page.run("[...document.querySelectorAll('.fault button')].at(-1).click()")
    open_page.until(lambda: len(open_page.server.requests) == 3)
    open_page.ended()
    open_page.send("cut")
    assert open_page.see(".note") == "Ended at the limit of tokens."


def test_a_server_that_is_gone_is_reported(open_page):
    open_page.failures = ("ERR_",)
    open_page.run("(window.fetch = () => Promise.reject(new TypeError('Failed to fetch')), 1)")
    open_page.send("Anyone?")
    assert "cannot be reached" in open_page.see(".fault p")


def test_a_key_is_requested_before_anything_is_sent(open_page):
    open_page.failures = ("401 (Unauthorized)",)
    open_page.server.key = "s3cret"
    open_page.reload(lambda: open_page.shown("lock"))
    assert open_page.see("#lock-text") == "This server asks for an API key."
    open_page.ask("Hello")
    assert open_page.count(".message") == 0 and open_page.run("document.activeElement.id") == "lock-key"
    open_page.press("wrong", "\ue007")
    open_page.until(lambda: open_page.see("#lock-text") == "The server does not accept this API key.")
    open_page.press("s3cret", "\ue007")
    open_page.until(lambda: not open_page.shown("lock") and open_page.server.listeners == 1)
    open_page.press("\ue007")
    open_page.until(lambda: open_page.see(".md") == "Answer 1 to Hello")


def test_a_message_refused_for_its_key_is_answered_once_the_key_is_given(open_page):
    open_page.failures = ("401 (Unauthorized)",)
    open_page.send("Hello")
    open_page.until(lambda: open_page.server.lists == 2)  # at the start and with the first picture, which need no key
    open_page.server.key = "s3cret"
    open_page.send("More")
    assert open_page.shown("lock") and open_page.count(".fault") == 0
    open_page.click("#lock-key")
    open_page.press("s3cret", "\ue007")
    open_page.until(lambda: open_page.see(".md") == "Answer 1 to Hello|Answer 3 to More")
    assert not open_page.shown("lock") and open_page.count(".fault") == 0


def test_a_prompt_that_is_too_long_is_not_sent_again_as_it_is(open_page):
    open_page.failures = ("400 (Bad Request)",)
    names = "[...document.querySelectorAll('.fault button')].map(button => button.textContent)"
    open_page.send("too long")
    assert open_page.run(names) == ["Edit the message"]
    open_page.click(".fault button")
    open_page.press("\ue003" * len("too long"), "short", "\ue007")
    open_page.until(lambda: open_page.see(".md") == "Answer 1 to short")
    open_page.send("too long")
    assert open_page.run(names) == ["Edit the message", "Ask in a new conversation"]
    open_page.browser.refresh()
    open_page.run("document.querySelector('.fault button:last-child').click()")
    assert open_page.count(".message") == 0 and open_page.run("document.getElementById('prompt').value") == "too long"
    open_page.run("[...document.querySelectorAll('.chat .open')].at(-1).click()")
    assert open_page.see(".said") == "short", "and the conversation before can go on"


def test_settings_are_sent(open_page):
    open_page.click("#open-settings")
    assert "Maximum tokens" in open_page.see("#settings .field span")
    open_page.browser.find_element("name", "reasoning_effort").send_keys("high")
    for name, value in {"system": "Be brief.", **NUMBERS}.items():
        open_page.browser.find_element("name", name).send_keys(str(value))
    open_page.browser.find_element("name", "tools").send_keys("[{")
    assert "not a JSON list" in open_page.see("#tools-hint")
    open_page.browser.find_element("name", "tools").clear()
    open_page.press("\ue00c")
    open_page.browser.find_element("id", "thinking").send_keys("Thinking: off")
    open_page.send("Hello")
    (request,) = open_page.server.requests
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    wanted = {**NUMBERS, "reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}
    assert {key: request[key] for key in wanted} == wanted


def test_only_what_the_model_has_is_offered(open_page):
    wish = {"thinking": "on", "reasoning_effort": "high"}
    open_page.run("localStorage.setItem('moeflux.settings', arguments[0])", json.dumps(wish))
    controls = "['#thinking', '#add-pictures', '[name=reasoning_effort]']"
    shown = f"{controls}.map(name => document.querySelector(name).checkVisibility())"
    sent = {"chat_template_kwargs", "reasoning_effort"}
    for has in (True, False):
        open_page.load({**FEATURES, "images": has, "thinking": has, "efforts": ["low", "high"] if has else []})
        open_page.click("#open-settings")
        assert open_page.run(shown) == [has] * 3
        open_page.press("\ue00c")
        open_page.send("Hello")
        assert sent & set(open_page.server.requests[-1]) == (sent if has else set())
        open_page.click("#new")
    open_page.browser.execute_script(GIVEN, "paste", 30, 20)
    open_page.until(lambda: open_page.see(".toast") == "This model does not read images.")
    assert open_page.count("#pictures img") == 0


def test_the_demo_model_offers_stories(open_page):
    assert "stories" not in open_page.see("#about") and "Write a Python function" in open_page.see("#ideas")
    open_page.load({**FEATURES, "demo": True})
    open_page.until(lambda: "tells short stories, and nothing else" in open_page.see("#about"))
    ideas = open_page.see("#ideas button").split("|")
    assert len(ideas) == 3 and all(" story about " in idea for idea in ideas)
    open_page.click("#ideas button")
    assert open_page.run("document.getElementById('prompt').value") == ideas[0]


def test_a_model_that_is_loaded_later_tells_what_it_has(open_page):
    open_page.load(None)
    assert open_page.shown("add-pictures") and open_page.shown("thinking-field"), "nothing is known yet"
    open_page.until(lambda: open_page.see("#memory-text") != "–")
    open_page.click("#close-engine")
    open_page.server.features = {**FEATURES, "images": False}
    open_page.send("Hello")
    open_page.until(lambda: not open_page.shown("add-pictures"))
    open_page.server.features = FEATURES
    open_page.server.feed = lambda step: {**feed(1), "model": "other"}
    open_page.click("#open-engine")
    open_page.until(lambda: open_page.shown("add-pictures"))


def test_the_context_is_that_of_a_server_that_was_restarted(open_page):
    def restart(context):
        open_page.server.context = context
        open_page.server.feed = lambda step: {**feed(1), "context": context}

    open_page.until(lambda: open_page.see("#memory-text") != "–")
    restart(8192)
    open_page.until(lambda: "8,192 tokens of context" in open_page.see("#model"))
    open_page.click("#close-engine")
    open_page.until(lambda: open_page.server.listeners == 0)
    restart(16384)
    open_page.reload(lambda: "16,384 tokens of context" in open_page.see("#model"))
    restart(4096)
    open_page.click("#open-engine")
    open_page.until(lambda: "4,096 tokens of context" in open_page.see("#model"))


def test_the_models_are_not_requested_again_if_their_list_disagrees_with_the_feed(open_page):
    open_page.server.feed = lambda step: {**feed(1), "context": 8192, "queue": step}
    open_page.until(lambda: open_page.see("#state-text").endswith("waiting"))
    before, step = open_page.server.lists, open_page.server.step
    open_page.until(lambda: open_page.server.step > step + 3)
    assert open_page.server.lists <= before + 1 and "4,096 tokens" in open_page.see("#model")


def test_reasoning_is_folded_and_sent_back(open_page):
    open_page.send("think")
    assert open_page.run("document.querySelector('.thought').open") is False
    assert open_page.see(".thought .text") == "Let me see. Yes." and open_page.see(".md") == "It is so."
    open_page.send("Hello")
    assert open_page.server.requests[1]["messages"][1]["reasoning_content"] == "Let me see. Yes."


def test_tool_calls_are_shown_and_answered(open_page):
    open_page.run("localStorage.setItem('moeflux.settings', arguments[0])", json.dumps({"tools": json.dumps([TOOL])}))
    open_page.browser.refresh()
    open_page.send("tool")
    assert open_page.see(".call b") == "weather" and json.loads(open_page.see(".args")) == {"city": "Paris"}
    open_page.click(".answer-call textarea")
    open_page.press("sun", "\ue007")
    open_page.until(lambda: "The tool says sun" in open_page.see(".md"))
    open_page.ended()
    request = open_page.server.requests[1]
    assert request["tools"] == [TOOL]
    assert request["messages"][1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city":"Paris"}'}
    assert request["messages"][2] == {"role": "tool", "tool_call_id": "call_1", "content": "sun"}


def test_a_call_that_the_user_passes_over_has_a_result(open_page):
    open_page.send("tool")
    open_page.send("Hello")
    result = {"role": "tool", "tool_call_id": "call_1", "content": "No result was given."}
    assert open_page.server.requests[1]["messages"][2:] == [result, {"role": "user", "content": "Hello"}]


def test_progress_of_the_prompt_is_shown(open_page):
    open_page.ask("prompt")
    open_page.until(lambda: "Reading the prompt, 1,024 of 4,096 tokens" in open_page.see(".waiting"))
    assert open_page.run("document.querySelector('.waiting progress').position") == 0.25
    open_page.ended()


def test_the_prompt_is_read_when_the_first_token_comes_even_if_that_has_no_text(open_page):
    GO_ON.clear()
    open_page.ask("read")
    open_page.until(lambda: open_page.see(".waiting span") == "Answering")
    assert open_page.run("document.querySelector('.waiting progress').hidden")
    GO_ON.set()
    open_page.ended()


def test_markdown_becomes_elements(open_page):
    open_page.send("rich")
    shown = {"h3": "Title", ".md ol > li": None, ".md strong": "bold", ".md em": "slanted", ".md del": "gone"}
    shown |= {".md ol ul li": "inner", "blockquote": "quoted", "td": "one|1", ".code .k": "def|return"}
    shown |= {".code .c": "# a comment", ".code .s": '"text"', ".code header span": "python"}
    shown |= {".md a": "https://example.org/a_b_c"}
    assert {selector: open_page.see(selector) for selector, text in shown.items() if text} == {
        selector: text for selector, text in shown.items() if text
    }
    assert open_page.count(".md ol > li") == 2
    open_page.click(".code header button")
    open_page.until(lambda: open_page.see(".code header button") == "Copied")


def test_formulas_are_typeset_and_money_is_not(open_page):
    open_page.send("formulas")
    seen = {selector: open_page.see(f".md {selector}") for selector in ("mfrac", "munderover", "mover > mi", "msqrt")}
    assert seen == {"mfrac": "1n", "munderover": "∑i=1n", "mover > mi": "x|p", "msqrt": "x2"}
    assert open_page.see(".md p > math mi") == "x|n|i|n|x|i|a|b|c" and open_page.count(".md em") == 0
    assert open_page.see(".aligned mtd") == "y′|=x2−1|−α|∈ℝ" and open_page.see(".md li .cases mtd") == "1|x>0|0|else"
    assert open_page.see("td") == "$\\unheard{x}_1$|$5 and $10, $x$, $HOME/bin:$PATH, $3"
    assert open_page.see("td code") == "$\\unheard{x}_1$|$x$", "what is unknown is set apart as it is"
    assert open_page.count(".md math") == 5 and open_page.count(".md math[display=block]") == 2
    height = "document.querySelector(arguments[0]).getBoundingClientRect().height"
    assert open_page.run(height, ".md mfrac") > 1.5 * open_page.run(height, ".md mn"), "the browser sets MathML"


def test_markup_from_a_model_stays_text(open_page):
    open_page.send("hostile")
    time.sleep(0.1)
    assert "taken" not in open_page.run("document.title")
    assert (
        open_page.count(":is(.md, .thought) :is(img, script, iframe, svg:not(.icon), [onclick], [onload], [onerror])")
        == 0
    )
    assert "<script>document.title='taken'</script>" in open_page.see(".md")
    addresses = open_page.run("[...document.querySelectorAll('.md a')].map(a => a.getAttribute('href'))")
    assert addresses and all(address.startswith("http://") for address in addresses)


def test_no_text_stops_the_page(open_page):
    open_page.send("lengthy")
    assert open_page.see(".md").endswith("The end")


def test_what_has_been_shown_of_a_list_and_a_quote_is_not_made_again(open_page):
    open_page.run("(window.made = 0, window.create = document.createElement.bind(document))")
    open_page.run("void (document.createElement = (tag) => { window.made++; return window.create(tag); })")
    open_page.send("growing")
    shown = open_page.count(".md *")
    assert open_page.count(".md > ul > li > .code") == 100 and open_page.count(".md > blockquote .code") == 100
    assert open_page.run("window.made") < 3 * shown  # once while it comes, once when it is over


def test_the_map_moves_and_the_figures_are_shown(open_page):
    open_page.until(lambda: open_page.see("#shape") == "6 layers × 16 experts")
    picture = "document.getElementById('canvas').toDataURL()"
    before = open_page.run(picture)
    open_page.until(lambda: open_page.run(picture) != before)
    assert open_page.see("#first-layer") == "layer 3" and "in memory" in open_page.see("#readout")
    assert "of 96 in memory" in open_page.run("document.getElementById('canvas').ariaLabel")
    assert open_page.see("#memory-text") == "6.2 GB of 8.0 GB planned"
    assert [open_page.see(f".figure:nth-child({i}) dd span") for i in (2, 3, 4)] == ["410", "87.5", "3.25"]
    open_page.click("#rows summary")
    open_page.until(lambda: open_page.count("#by-layer tr") == 6)


def test_the_map_is_coloured_by_the_conversation_that_asked_last(open_page):
    """The colours go column by column.

    The first layers were last requested by this conversation, the next by another, the last by none.
    """
    open_page.send("Mine")
    own = open_page.server.requests[0]["prompt_cache_key"]
    lanes = [
        {"number": number, "name": name, "prompt": None, "tokens": 9, "tokens_per_second": 12.5}
        for number, name in ((1, own), (8, "someone"))
    ]
    cells, askers = bytes([1] * 96), bytes([1] * 32 + [8] * 32 + [0] * 32)
    coded = {name: base64.b64encode(data).decode() for name, data in (("map", cells), ("askers", askers))}
    open_page.server.feed = lambda step: {**feed(1), "lanes": lanes, **coded}
    open_page.until(lambda: open_page.see("#lanes b") == "This conversation|Another client")
    picture = "document.getElementById('canvas').toDataURL().split(',')[1]"
    swatch = "getComputedStyle(document.querySelector(`.${arguments[0]}`)).backgroundColor.match(/\\d+/g)"

    def columns():
        """Returns one colour for each layer."""
        shown = Image.open(io.BytesIO(base64.b64decode(open_page.run(picture)))).convert("RGB")
        return [shown.getpixel((shown.width * (2 * i + 1) // 12 + 3, 3)) for i in range(6)]

    names = ("memory-swatch", "asker-1", "asker-2")
    memory, first, second = (tuple(map(int, open_page.run(swatch, name)[:3])) for name in names)
    assert len({memory, first, second}) == 3
    assert open_page.count("#lanes i") == 0 and not open_page.shown("askers")
    open_page.click("#by-asker")
    open_page.until(lambda: columns() == [first] * 2 + [second] * 2 + [memory] * 2)
    classes = "[...document.querySelectorAll('#lanes i')].map(e => e.className)"
    assert open_page.run(classes) == ["asker-1", "asker-2"] and open_page.shown("askers")
    open_page.point("#canvas")
    open_page.until(lambda: open_page.see("#readout").endswith("; asked last: Another client"))
    open_page.click("#by-asker")
    open_page.until(lambda: set(columns()) == {memory})


def test_the_last_answers_rates_stay_when_it_has_ended(open_page):
    answer = ".figure:nth-child(1) dd"
    open_page.until(lambda: open_page.see(f"{answer}:not(.past) span") == "17.6")
    open_page.until(lambda: open_page.see(f"{answer}.past span") == "195")


def test_the_greeting_claims_no_reads(open_page):
    said = "The model runs on your own machine. Experts that are not in its memory come from its disk."
    assert open_page.see("#empty p") == said, "mapped experts are read by nobody"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_states_of_the_map_have_colours_of_their_own(open_page, scheme):
    colours(open_page.browser, scheme)
    colour = "getComputedStyle(document.querySelector(`.legend .${arguments[0]}`)).backgroundColor"
    hues = {}
    for name in ("memory-swatch", "reading", "hit", "missed"):
        red, green, blue = (int(part) / 255 for part in re.findall(r"\d+", open_page.run(colour, name))[:3])
        hues[name] = 360 * colorsys.rgb_to_hls(red, green, blue)[0]
    for one, other in itertools.combinations(hues, 2):
        assert abs((hues[one] - hues[other] + 180) % 360 - 180) > 20, f"a fading {one} looks like {other}"


def test_connections_end_with_the_page(open_page):
    open_page.until(lambda: open_page.server.listeners == 1)
    open_page.click("#close-engine")
    open_page.until(lambda: open_page.server.listeners == 0)
    open_page.click("#open-engine")
    open_page.until(lambda: open_page.server.listeners == 1)
    open_page.ask("slow")
    open_page.until(lambda: "word3" in open_page.see(".md"))
    open_page.browser.get("about:blank")
    assert open_page.server.left.wait(5)
    open_page.until(lambda: open_page.server.listeners == 0)
    open_page.browser.get(open_page.server.address)
    open_page.until(lambda: "word3" in open_page.see(".md") and open_page.see(".note") == "Stopped.")


def test_escape_leaves_the_large_map_before_it_stops_an_answer(open_page, keys):
    GO_ON.clear()
    open_page.ask("lasting")
    open_page.until(lambda: open_page.count(".waiting:not([hidden])"))
    open_page.click("#enlarge")
    large = "[document.getElementById('engine').classList.contains('large'), enlarge.getAttribute('aria-pressed')]"
    assert open_page.run(large) == [True, "true"]
    open_page.press(keys.ESCAPE)
    assert open_page.run(large) == [False, "false"] and open_page.count(".note") == 0
    open_page.press(keys.ESCAPE)
    open_page.until(lambda: open_page.see(".note") == "Stopped.")
    GO_ON.set()


def test_the_engine_is_not_idle_while_an_answer_comes(open_page):
    open_page.server.feed = lambda step: {**feed(0), "lanes": []}
    open_page.until(lambda: open_page.see("#state-text") == "Idle")
    GO_ON.clear()
    open_page.ask("ponder")
    open_page.until(lambda: open_page.see("#state-text") == "Answering")
    assert open_page.run("document.getElementById('state').dataset.at") == "busy"
    GO_ON.set()
    open_page.ended()
    assert open_page.see("#state-text") == "Idle"


def test_a_phone_shows_the_whole_line_below_the_title(open_page):
    open_page.server.models = ["org/A-Model-With-A-Long-Name-235B-A22B-4bit"]
    open_page.server.context = 262144
    resize(open_page.browser, 360, 740, 2.0, mobile=True)
    open_page.reload(lambda: open_page.see("#model").endswith("262,144 tokens of context"))
    assert open_page.run("(e => e.scrollWidth - e.clientWidth)(document.getElementById('model'))") == 0


def test_a_phone_has_no_horizontal_scroll(open_page):
    resize(open_page.browser, 360, 740, 2.0, mobile=True)
    open_page.browser.refresh()
    for message in ("rich", "wide", "formulas", "w" * 300, "hostile"):
        open_page.send(message)
    wide = "[document.documentElement, document.getElementById('flow')].map(e => e.scrollWidth - e.clientWidth)"
    assert open_page.run(wide) == [0, 0]
    assert open_page.run("document.getElementById('down').hidden"), "the end is in sight"
    resize(open_page.browser, 360, 420, 2.0, mobile=True)
    time.sleep(0.1)
    assert open_page.run("document.getElementById('down').hidden"), "and stays there when a keyboard takes half"
    for name in ("chats", "engine"):
        open_page.click(f"#open-{name}")
        box = open_page.run(
            "(r => [r.left, r.right])(document.getElementById(arguments[0]).getBoundingClientRect())", name
        )
        assert box[0] >= 0 and box[1] <= 360 and open_page.run(wide) == [0, 0]
        open_page.press("\ue00c")
        assert open_page.run("document.getElementById(arguments[0]).hidden", name)
        assert open_page.run("document.activeElement.id") == f"open-{name}", "focus goes back"


@pytest.mark.parametrize("height", [667, 380])
def test_the_settings_of_a_phone_can_be_closed_without_scrolling(open_page, height):
    resize(open_page.browser, 375, height, 2.0, mobile=True)
    open_page.click("#open-settings")
    box = "(r => [r.left, r.top, r.right, r.bottom])(document.querySelector(arguments[0]).getBoundingClientRect())"
    done, dialog = (open_page.run(box, selector) for selector in ("#settings [value=done]", "#settings"))
    assert dialog[0] < done[0] and dialog[1] < done[1] and done[2] < dialog[2] < 375 and done[3] < dialog[3] < height
    open_page.browser.find_element("name", "key").send_keys("x")
    assert open_page.run(box, "[name=key]")[3] <= done[1], "nor is a field beneath it"
    open_page.click("#settings [value=done]")
    assert not open_page.run("document.getElementById('settings').open")


def test_the_page_works_with_the_keyboard(open_page, keys):
    first = "document.querySelector('a[href], button, input, textarea, select')"
    assert open_page.run(f"({first}.focus(), {first}.textContent)") == "Skip to the message field"
    open_page.press(keys.ENTER)
    assert open_page.run("document.activeElement.id") == "prompt"
    open_page.press("one")
    open_page.chord(keys.SHIFT, keys.ENTER)
    open_page.press("two", keys.ENTER)
    open_page.until(lambda: open_page.see(".said") == "one\ntwo")
    open_page.ended()
    open_page.press("slow", keys.ENTER)
    open_page.until(lambda: "word2" in open_page.see(".md"))
    open_page.press(keys.ESCAPE)
    open_page.ended()
    assert open_page.see(".note") == "Stopped."
    open_page.press(keys.ARROW_UP, "er", keys.ENTER)
    open_page.until(lambda: open_page.see(".said") == "one\ntwo|slower")
    open_page.ended()
    nameless = "!(e.ariaLabel || e.labels?.length || e.textContent.trim())"
    controls = "[...document.querySelectorAll('button, input, textarea, select, a')]"
    assert open_page.run(f"{controls}.filter(e => e.offsetParent && {nameless}).map(e => e.outerHTML)") == []
    assert open_page.count("[tabindex]:not([tabindex='-1'], [tabindex='0'])") == 0, "the order is the document's"


def test_a_notice_is_beside_the_engine(open_page):
    box = "(r => [r.left, r.right])(document.querySelector(arguments[0]).getBoundingClientRect())"

    def check():
        open_page.until(lambda: open_page.run("document.getElementById('engine').getAnimations().length === 0"))
        (left, right), engine = open_page.run(box, ".toast"), open_page.run(box, "#engine")
        assert 0 < left < right <= engine[0] < engine[1]

    open_page.click("#enlarge")
    open_page.click("#export")
    check()
    resize(open_page.browser, 920, 860)
    open_page.until(lambda: not open_page.shown("engine"))
    open_page.click("#open-engine")
    check()


def test_icons_are_in_the_middle_of_their_buttons(open_page):
    away = """
        const middle = (e) => (r => [r.left + r.width / 2, r.top + r.height / 2])(e.getBoundingClientRect());
        const away = (b) => middle(b).map((x, i) => Math.abs(x - middle(b.querySelector("svg"))[i]));
        return [...document.querySelectorAll(".send, .round")].filter((b) => b.offsetParent).map(away);"""
    open_page.send("one")
    open_page.ended()
    for width in (1360, 390):
        resize(open_page.browser, width, 860)
        distances = open_page.browser.execute_script(away)
        assert len(distances) > 3 and max(map(max, distances)) < 1, distances


def test_colours_follow_the_choice(open_page):
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for _ in range(3):
        open_page.click("#theme")
        seen[open_page.run("document.getElementById('theme').ariaLabel")] = open_page.run(ground)
    assert len(seen) == 3 and seen["Colours: light"] != seen["Colours: dark"]
