"""A server whose model has drafts: the same answers, and counts of drafts."""

import threading
from functools import partial
from urllib.request import urlopen

import pytest
from live_server import Live, demo_engine
from tiny_heads import headed_directory

from moeflux_mlx.opening.engine import open_engine
from moeflux_mlx.server import live as live_module
from moeflux_mlx.server.running import Totals

REPEATS = [{"role": "user", "content": "Tom saw a red ball. Tom saw a red ball. Tom saw a red ball."}]


def ask(live, **more):
    reply = live.post("/v1/chat/completions", {"messages": REPEATS, "max_tokens": 24, "temperature": 0, **more})
    return reply["choices"][0]["message"]["content"]


@pytest.mark.parametrize("kind", ["lookup", "head"])
def test_answers_alone_and_together_are_those_without_drafts(monkeypatch, kind):
    open_model = demo_engine if kind == "lookup" else partial(open_engine, headed_directory("qwen3_5_moe"))
    asked = [{"seed": 3, "temperature": 0.7}, {"max_tokens": 40}, {"stop": ["."]}]
    with Live(lambda: open_model(draft="off")) as live:
        ask(live, max_tokens=1)  # the others continue its prompt; a GPU computes a whole one with other bits
        wanted = [ask(live, **more) for more in asked]
    with Live(lambda: open_model(draft=kind)) as live:
        engine = live.worker.engine
        engine.model.drafting.fixed = True
        ask(live, max_tokens=1)
        assert [ask(live, **more) for more in asked] == wanted
        said = {}
        threads = [threading.Thread(target=lambda i=i: said.update({i: ask(live, **asked[i])})) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [said[i] for i in range(3)] == wanted
        metrics = urlopen(f"{live.url}/metrics").read().decode()
        seen = picture(monkeypatch, engine)["drafts"]
    assert 'moeflux_draft_steps_total{drafts="4"}' in metrics and "moeflux_drafts_taken_total" in metrics
    checked = next(line for line in metrics.splitlines() if line.startswith("moeflux_drafts_checked_total "))
    assert seen["kind"] == kind and float(checked.split()[1]) == seen["checked"] > 0


def picture(monkeypatch, engine):
    """Returns what the page is shown."""
    monkeypatch.setattr(live_module, "EVERY", 0)
    watch = live_module.Watch()
    watch.watchers += 1
    for _ in range(2):
        watch.look(engine, [], 0, Totals())
    return watch.latest
