"""The worker's loop: who is admitted, who goes first, and what becomes of the others when one ends badly."""

import threading
import time
from urllib.error import HTTPError

import pytest
from live_server import FakeEngine, Live, wait_for

from moeflux_mlx.server import worker
from moeflux_mlx.server.job import Job

LONG, SHORT = "the lake " * 80, "an owl"
ANSWER = "</think>An owl."


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    monkeypatch.setattr(worker, "SHORT", 100)
    monkeypatch.setattr(worker, "LONG", 150)


def engine(**options):
    """A long prompt takes at least a second."""
    return FakeEngine(lambda prompt: ANSWER, prompt_seconds=0.05, token_seconds=0.01, step=16, **options)


class Client(threading.Thread):
    """Asks at once, and notes when it was answered."""

    def __init__(self, live, text, order):
        super().__init__(daemon=True)
        self.live, self.text, self.order, self.reply = live, text, order, None
        self.start()

    def run(self):
        try:
            message = [{"role": "user", "content": self.text}]
            self.reply = self.live.post("/v1/chat/completions", {"messages": message})
        except HTTPError as error:
            with error:
                self.reply = error.code
        self.order.append(self.text)


def said(client):
    return client.reply["choices"][0]["message"]["content"]


def texts(live):
    """What those that run were asked, in the order in which they began."""
    return [one.job.prepared.request.messages[0]["content"] for one in live.worker.state.running]


def begun(live, order):
    """A client whose long prompt is being computed."""
    client = Client(live, LONG, order)
    wait_for(lambda: texts(live) and live.worker.state.running[0].progress[0] > 0)
    return client


def test_a_few_short_prompts_go_before_a_long_one():
    with Live(engine, sessions=6) as live:
        order = []
        clients = [begun(live, order)]
        for n in range(worker.IN_A_ROW + 1):
            clients.append(Client(live, f"{SHORT} {n}", order))
            wait_for(lambda: len(order) + live.worker.queue + len(texts(live)) == len(clients))
        wait_for(lambda: len(order) == len(clients))
        assert order == [*(f"{SHORT} {n}" for n in range(worker.IN_A_ROW)), LONG, f"{SHORT} {worker.IN_A_ROW}"]
        assert texts(live) == [] and live.worker.state.totals.failed == 0


def test_both_count_as_running_while_one_goes_first():
    with Live(engine) as live:
        order = []
        begun(live, order)
        Client(live, SHORT, order)
        wait_for(lambda: texts(live) == [LONG, SHORT])
        assert "moeflux_requests_running 2" in live.get("/metrics")
        assert "moeflux_requests_waiting 0" in live.get("/metrics")
        wait_for(lambda: len(order) == 2)
        assert order == [SHORT, LONG]


def test_two_long_prompts_take_turns_as_they_come():
    with Live(engine) as live:
        order = []
        begun(live, order)
        Client(live, LONG + "again", order)
        wait_for(lambda: live.worker.queue == 1)
        wait_for(lambda: order == [LONG])
        wait_for(lambda: order == [LONG, LONG + "again"])


def test_one_that_goes_first_and_fails_harms_nobody(capfd):
    with Live(engine) as live:
        order, served = [], live.worker.state.engine
        right, short_jobs, short_job = served.script, [], served.experts.short_job
        served.experts.short_job = lambda per_layer: short_jobs.append(per_layer) or short_job(per_layer)

        def script(prompt):
            if "lake" not in prompt:
                raise OSError("unplugged")
            return right(prompt)

        served.script = script
        long, short = begun(live, order), Client(live, SHORT, order)
        wait_for(lambda: len(order) == 2)
        assert order == [SHORT, LONG] and short_jobs == [2]
        assert short.reply == 500 and said(long) == "An owl."
        assert live.worker.state.totals.failed == 1
    assert "a request failed: OSError" in capfd.readouterr().err


def test_one_that_is_cancelled_while_another_goes_first_ends_at_once():
    """Its session can be taken again, and the other one goes on."""
    with Live(engine) as live:
        order, sessions = [], live.worker._sessions
        long = begun(live, order)
        live.worker.state.engine.token_seconds = 0.1
        short = Client(live, SHORT, order)
        wait_for(lambda: texts(live) == [LONG, SHORT])
        live.worker.state.running[0].job.cancel()
        wait_for(lambda: texts(live) == [SHORT])
        assert [kept.busy for kept in sessions._kept].count(True) == 1
        wait_for(lambda: len(order) == 2)
        assert order == [LONG, SHORT] and long.reply == 503 and said(short) == "An owl."
        assert live.worker.state.totals.cancelled == 1 and not any(kept.busy for kept in sessions._kept)


def test_all_that_run_end_with_the_server():
    with Live(engine) as live:
        order, heard = [], []
        long = begun(live, order)
        live.worker.state.engine.token_seconds = 0.1
        short = Client(live, SHORT, order)
        wait_for(lambda: texts(live) == [LONG, SHORT])
        late = Job(live.worker.state.running[-1].job.prepared, heard.append)
        started = time.monotonic()
        live.worker.begin_stop()
        live.worker.submit(late)
        wait_for(lambda: len(order) == 2)
        assert time.monotonic() - started < 1 and long.reply == short.reply == 503
    assert live.worker.state.engine.experts.closed and heard == [worker.CANCELLED], "nobody begins any more"
