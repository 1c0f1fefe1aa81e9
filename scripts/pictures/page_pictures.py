#!/usr/bin/env python3
"""Takes the pictures of the server's page in docs/pictures: light, dark and on a phone.

The conversation and the live figures are scripted, so that the pictures show states and not a measurement. Needs
chromium and chromium-driver, the fonts Inter and JetBrains Mono for the look of the published ones, the extra `test`,
and Pillow. `python scripts/pictures/page_pictures.py [FOLDER]`
"""

import base64
import io
import json
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "server")]

from browser import colours, missing, resize, start  # noqa: E402
from page_server import PageServer  # noqa: E402

LAYERS, EXPERTS, TOP, POOL = 40, 256, 8, 0.55
QUESTION = "Only 8 of 256 experts run for a token. Which 8, and who decides that?"
THOUGHT = "They ask about routing. I should name the router, the scores, the top k, and show it in a few lines."
ANSWER = """Each layer has a small **router**, a single matrix that gives every expert a score for the token at hand. \
The eight best run, and their outputs are added, weighted by their scores.

```python
def route(x, router, k=8):
    scores = softmax(x @ router.T)      # one score for each expert
    best = scores.argsort()[-k:]        # the experts that run
    return best, scores[best] / scores[best].sum()
```

So the choice is new for *every token in every layer*:

| | for one token | in the whole model |
|---|---:|---:|
| experts of a layer | 8 | 256 |
| experts of all 40 layers | 320 | 10,240 |

Neighbouring tokens often choose the same experts. That is why keeping the recent ones in memory pays off.
"""
PAUSE = 12.0  # before the last word, for pictures of an unfinished answer
EARLIER = ["Tomas and the geese", "Longest word in a text", "What does a router learn?", "Letter to the landlord"]


class Pool:
    """Experts that come and go as a router might request them: a few are requested often, the others in turn."""

    def __init__(self):
        self.random = np.random.default_rng(7)
        self.liking = self.random.pareto(1.3, (LAYERS, EXPERTS)) + 0.02
        self.used = self.random.random((LAYERS, EXPERTS)) + (self.liking > np.quantile(self.liking, 1 - POOL))
        self.rates = []

    def feed(self, step):
        held = self.used >= np.quantile(self.used, 1 - POOL)
        cells = held.astype(np.uint8)
        for layer in range(LAYERS):
            chances = self.liking[layer] / self.liking[layer].sum()
            asked = self.random.choice(EXPERTS, TOP * 3, replace=False, p=chances)
            cells[layer, asked] = np.where(held[layer, asked], 3, 4)
            self.used[layer, asked] = 2 + step
        cells[(step * 5) % LAYERS, self.random.choice(EXPERTS, 12)] = 2
        hits = (cells == 3).sum() / ((cells == 3) | (cells == 4)).sum()
        wobble = 1 + 0.09 * np.sin(step / 3) + 0.05 * self.random.standard_normal()
        rates = {
            "hit_rate": float(hits), "gb_per_second": 2.4 * wobble, "prompt_tokens_per_second": 380 * wobble,
            "tokens_per_second": 17.2 / wobble,
        }  # fmt: skip
        return {
            "model": "Qwen3.6-35B-A3B", "busy": True, "queue": 0, "context": 65536, "layers": list(range(LAYERS)),
            "experts": EXPERTS, "map": base64.b64encode(cells.tobytes()).decode(),
            "lanes": [{"name": None, "prompt": None, "tokens": 9, "tokens_per_second": 17.2}],
            **rates, "request": rates,
            "memory": {"used": 12_900_000_000, "planned": 14_000_000_000, "pool": 9_900_000_000},
        }  # fmt: skip


def script(request):
    """Yields reasoning and answer in small pieces, so that the times below them look real."""
    yield 0.6
    for kind, said in (("reasoning_content", THOUGHT), ("content", ANSWER[:-6])):
        for i in range(0, len(said), 4):
            yield {kind: said[i : i + 4]}
            yield 0.058
    yield PAUSE
    yield {"content": ANSWER[-6:]}
    yield {"timings": {"predicted_n": 201, "predicted_ms": 201 / 17.4 * 1000}}


def remember(browser):
    """Stores earlier conversations for the list beside the chat."""
    index = []
    for age, title in enumerate(EARLIER):
        entry = {"id": f"old{age}", "title": title, "updated": int(time.time() * 1000) - (age + 1) * 40_000_000}
        chat = {**entry, "settings": {}, "messages": [{"role": "user", "content": title}]}
        browser.execute_script("localStorage[arguments[0]] = arguments[1]", f"moeflux.chat.old{age}", json.dumps(chat))
        index.append(entry)
    browser.execute_script("localStorage['moeflux.index'] = arguments[0]", json.dumps(index))


def wait_for(browser, condition):
    while not browser.execute_script(f"return {condition}"):
        time.sleep(0.1)


def ask(browser, address):
    """Asks the question, and returns when all of the answer except the last word is there."""
    browser.get(address)
    remember(browser)
    browser.refresh()
    browser.find_element("id", "prompt").send_keys(QUESTION + "\n")
    wait_for(browser, "document.querySelector('.md')?.textContent.includes('pays')")


def take(browser, folder, name):
    """Takes a picture with a palette, which is a third of the size and looks the same."""
    time.sleep(0.8)
    picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    file = folder / f"{name}.png"
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file} {file.stat().st_size:,} bytes")


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    browser = start()
    try:
        with PageServer(script, Pool().feed, pause=0.25) as server:
            resize(browser, 1360, 880)
            colours(browser, "light")
            ask(browser, server.address)
            take(browser, folder, "page-light")
            colours(browser, "dark")
            take(browser, folder, "page-dark")
            browser.find_element("id", "enlarge").click()
            take(browser, folder, "page-map")
            wait_for(browser, "document.getElementById('send').ariaLabel === 'Send'")
            resize(browser, 390, 780, mobile=True)
            colours(browser, "light")
            take(browser, folder, "page-phone")
            browser.find_element("id", "open-engine").click()
            take(browser, folder, "page-phone-engine")
    finally:
        browser.quit()


if __name__ == "__main__":
    if missing():
        sys.exit(f"error: {missing()}")
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures")
