"""The worker's loop: which request begins, which goes first, how time is shared, and what happens when one fails."""

import contextlib
import threading
import time
import types
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from live_server import FakeEngine, Live, wait_for

from moeflux_mlx.errors import RequestError
from moeflux_mlx.server import admission, worker
from moeflux_mlx.server.admission import Admission
from moeflux_mlx.server.prepare import PreparedRequest, Preparer
from moeflux_mlx.server.request import Request as ServerRequest
from moeflux_mlx.server.running import Job, Running, Totals
from moeflux_mlx.server.sessions import Sessions

LONG, SHORT = "the lake " * 80, "an owl"
ANSWER = "</think>An owl."


def engine(**options):
    """Returns an engine for which a long prompt takes at least a second."""
    return FakeEngine(lambda prompt: ANSWER, prompt_seconds=0.02, token_seconds=0.005, step=16, **options)


class Client(threading.Thread):
    """Sends its request at once, and notes when it was answered."""

    def __init__(self, live, text, order, name=None):
        super().__init__(daemon=True)
        self.live, self.text, self.order, self.reply, self.session = live, text, order, None, name
        self.start()

    def run(self):
        try:
            message = {"messages": [{"role": "user", "content": self.text}], "prompt_cache_key": self.session}
            self.reply = self.live.post("/v1/chat/completions", message)
        except HTTPError as error:
            with error:
                self.reply = error.code
        self.order.append(self.text)


def said(client):
    return client.reply["choices"][0]["message"]["content"]


def texts(live):
    """Returns the questions of the running requests, in the order in which they began."""
    return [one.job.prepared.request.messages[0]["content"] for one in live.worker.running]


def begun(live, order):
    """Returns a client whose long prompt is being computed."""
    client = Client(live, LONG, order)
    wait_for(lambda: LONG in texts(live) and live.worker.running[texts(live).index(LONG)].progress[0] > 0)
    return client


def answering(live, order, words=400):
    """Returns a client whose long answer is being written."""
    live.worker.engine.script = lambda prompt: "</think>" + ("word " * words if "write" in prompt else "An owl.")
    client = Client(live, "write", order)
    wait_for(lambda: live.models.totals.generated_tokens > 5)
    return client


def test_a_short_prompt_goes_before_the_rest_of_a_long_one():
    with Live(engine) as live:
        order = []
        clients = [begun(live, order), Client(live, SHORT, order)]
        wait_for(lambda: texts(live) == [LONG, SHORT])
        assert "moeflux_requests_running 2" in live.get("/metrics")
        assert "moeflux_requests_waiting 0" in live.get("/metrics")
        wait_for(lambda: len(order) == 2)
        assert order == [SHORT, LONG] and [said(one) for one in clients] == ["An owl."] * 2
        done = [done for total, done in live.worker.engine.prompts if total > 400]
        assert len(done) - len(set(done)) <= 1, "one step of the long prompt is computed twice"


def test_no_prompt_waits_for_more_tokens_than_it_has():
    """Clients that keep asking short questions do not keep a long prompt from being computed."""
    with Live(engine, sessions=9) as live:
        order = []
        long = begun(live, order)

        def keep_asking(name):
            while not order:
                live.post("/v1/chat/completions", {"messages": [{"role": "user", "content": f"{name} {len(shorts)}"}]})
                shorts.append(name)

        shorts = []
        threads = [threading.Thread(target=keep_asking, args=[name]) for name in "abc"]
        for thread in threads:
            thread.start()
        long.join(30)
        for thread in threads:
            thread.join()
        total = long.reply["usage"]["prompt_tokens"]
        assert order == [LONG] and len(shorts) > 3
        assert live.models.totals.computed_tokens < 2.5 * total


def test_long_prompts_are_computed_one_after_the_other():
    with Live(engine) as live:
        order = []
        begun(live, order)
        Client(live, LONG + "again", order)
        wait_for(lambda: len(texts(live)) == 2)
        wait_for(lambda: len(order) == 2)
        prompts = [total for total, _ in live.worker.engine.prompts]
        assert order == [LONG, LONG + "again"] and prompts == sorted(prompts)


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0.0, 0.05), (1 / 3, 0.15, 0.5), (0.75, 0.55, 0.95)])
def test_answers_have_their_share_while_a_prompt_is_computed(share, least, most):
    with Live(engine, decode_share=share) as live:
        order, totals = [], live.models.totals
        answering(live, order)
        before = totals.prompt_seconds, totals.answer_seconds
        begun(live, order)
        wait_for(lambda: not live.worker.running[1].in_prompt)
        prompt, answer = totals.prompt_seconds - before[0], totals.answer_seconds - before[1]
        assert least <= answer / (prompt + answer) <= most
        live.worker.begin_stop()
        wait_for(lambda: len(order) == 2)


def test_a_mistake_of_a_client_that_shows_late_is_no_failure_of_the_server(capfd):
    def script(prompt):
        raise RequestError("the answer cannot go on under its schema")

    with Live(lambda: FakeEngine(script)) as live:
        client = Client(live, SHORT, [])
        client.join(30)
        assert client.reply == 400 and live.models.totals.failed == 0
    assert "error" not in capfd.readouterr().err


def test_a_prompt_that_goes_first_and_fails_affects_nobody(capfd):
    with Live(engine) as live:
        order, served = [], live.worker.engine
        right = served.script

        def script(prompt):
            if "lake" not in prompt:
                raise OSError("unplugged")
            return right(prompt)

        served.script = script
        long, short = begun(live, order), Client(live, SHORT, order)
        wait_for(lambda: len(order) == 2)
        assert order == [SHORT, LONG]
        assert short.reply == 500 and said(long) == "An owl."
        assert live.models.totals.failed == 1
    assert "a request failed: OSError" in capfd.readouterr().err


def test_one_that_is_cancelled_meanwhile_ends_at_once():
    """Its session can be used again, and the others continue: a half-computed prompt, an answer next to a prompt."""
    with Live(engine) as live:
        order, sessions = [], live.worker.sessions
        story = answering(live, order)
        long = begun(live, order)
        short = Client(live, SHORT, order)
        wait_for(lambda: len(texts(live)) == 3)
        for one in live.worker.running[:2]:
            one.job.cancel()
        wait_for(lambda: len(order) == 3)
        assert story.reply == long.reply == 503 and said(short) == "An owl."
        assert live.models.totals.cancelled == 2
        wait_for(lambda: not any(kept.busy for kept in sessions.kept))  # the last answer ends before it is free


def test_all_running_requests_end_with_the_server():
    with Live(engine) as live:
        order, heard = [], []
        served = live.worker.engine
        clients = [answering(live, order), begun(live, order)]
        served.token_seconds = 0.1
        clients.append(Client(live, SHORT, order))
        wait_for(lambda: len(texts(live)) == 3)
        late = Job(live.worker.running[-1].job.prepared, heard.append)
        started = time.monotonic()
        live.worker.begin_stop()
        live.worker.submit(late)
        wait_for(lambda: len(order) == 3)
        assert time.monotonic() - started < 30 and [one.reply for one in clients] == [503] * 3
    assert served.experts.closed and heard == [worker.CANCELLED], "nobody begins any more"


def test_an_unexpected_error_leaves_its_traceback_once_in_the_log(capfd, monkeypatch):
    """Both where a request is answered and before; its message, which may contain the request, is not logged."""

    question = "Snow on the lake"

    def broken(*arguments):
        raise ValueError(question) from KeyError(question)

    with Live(engine) as live:
        live.worker.engine.script = broken
        clients = [Client(live, question, [])]
        clients[0].join(10)
        monkeypatch.setattr(Preparer, "fitted", broken)
        clients.append(Client(live, question, []))
        clients[1].join(10)
        assert [one.reply for one in clients] == [500, 500]
    log = capfd.readouterr().err
    assert log.count("error: a request failed: ValueError\n") == log.count("because of KeyError") == 2
    assert log.count("server/test_loop.py, line ") == 2 and log.count("in broken: raise ValueError(") == 2
    assert "server/app.py, line " in log and "server/running.py, line " in log
    assert "Snow" not in log


def test_a_client_with_many_requests_does_not_block_others():
    with Live(engine, parallel=2, queue=8) as live:
        order, served = [], live.worker.engine
        served.prompt_seconds = 1  # nobody is answered before all have sent their requests
        many = [Client(live, f"many {n}", order, "many") for n in range(2)]
        wait_for(lambda: len(texts(live)) == 2)
        many += [Client(live, f"many {n}", order, "many") for n in range(2, 10)]
        wait_for(lambda: live.worker.queue == 8)
        refused = Client(live, "one more", order, "many")
        refused.join(10)
        assert refused.reply == 429
        served.prompt_seconds = 0.02
        single = Client(live, "single", order, "single")
        single.join(10)
        assert said(single) == "An owl." and len(order) <= 6
        wait_for(lambda: len(order) == 12)
        assert [said(one) for one in many] == ["An owl."] * 10


def test_subagents_compute_their_common_prompt_once():
    system = {"role": "system", "content": LONG}
    with Live(engine, sessions=4) as live:
        replies = []

        def ask(n):
            messages = [system, {"role": "user", "content": f"Task {n}."}]
            replies.append(live.post("/v1/chat/completions", {"messages": messages})["usage"])

        agents = [threading.Thread(target=ask, args=[n]) for n in range(4)]
        for agent in agents:
            agent.start()
        for agent in agents:
            agent.join()
    cached = sorted(usage["prompt_tokens_details"]["cached_tokens"] for usage in replies)
    assert cached[0] == 0 and all(n > len(LONG) for n in cached[1:])


def asked(live, order, task):
    """Returns a client that asks for a task behind the long beginning that all of them have."""
    return Client(live, f"{LONG}{task}", order)


def test_a_short_prompt_waits_for_the_beginning_that_it_shares_with_a_long_one():
    """It does not compute it again, and goes first behind it."""
    with Live(engine) as live:
        order, tail = [], "a tail " * 400
        live.worker.engine.prompt_seconds = 0.008
        long = asked(live, order, tail)
        wait_for(lambda: live.worker.running and live.worker.running[0].progress[0] > 0)
        short = asked(live, order, "Now.")
        wait_for(lambda: len(order) == 2)
        assert order == [LONG + "Now.", LONG + tail]
        assert live.models.totals.computed_tokens < long.reply["usage"]["prompt_tokens"] + 64
        assert short.reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(LONG) - 64


def test_who_leaves_hands_the_common_beginning_over():
    with Live(engine, sessions=4) as live:
        order = []
        agents = [asked(live, order, f"Task {n}.") for n in range(4)]
        wait_for(lambda: len(live.worker.running) == 4)
        first = live.worker.running[0]
        wait_for(lambda: first.progress[0] > 100)
        first.job.cancel()
        wait_for(lambda: len(order) == 4)
        assert sorted(isinstance(one.reply, dict) for one in agents) == [False, True, True, True]
        total = len(first.job.prepared.tokens)
        assert live.models.totals.computed_tokens < total + 4 * 48, "the beginning is computed once"


def job(client="", tokens=100, limit=50):
    return Job(PreparedRequest(None, [0] * tokens, max_tokens=limit), print, client)


def running(tokens, set_aside=None, client=""):
    return types.SimpleNamespace(length=tokens, set_aside=set_aside or tokens, job=job(client))


def test_a_request_that_does_not_fit_waits_and_nobody_overtakes_it():
    room = Admission(4, 1000, lambda tokens: tokens)
    large, small = job(tokens=600), job(tokens=10)
    assert room.choose([large, small], []) is large
    assert room.choose([job(tokens=5000)], []) is not None, "alone, the planned context is enough"
    assert room.choose([large, small], [running(500)]) is None
    assert room.choose([small, large], [running(500)]) is small
    assert room.choose([small], [running(1)] * 4) is None
    assert room.choose([job("a"), other := job("b")], [running(1, client="a")]) is other


def test_an_answer_that_outgrows_its_memory_waits_for_others(monkeypatch):
    monkeypatch.setattr(admission, "AHEAD", 100)
    room = Admission(4, 1000, lambda tokens: tokens)
    first, second, third = all_of = [running(400), running(740, 750), running(150)]
    assert room.may_step(all_of, all_of) == [first, second] and first.set_aside == 500
    assert room.may_step([second, third], [second, third]) == [second, third] and third.set_aside == 250


def test_an_answer_that_must_wait_goes_on_when_another_has_ended(monkeypatch):
    """If two answers outgrow the memory, no answer is lost and nothing hangs."""
    monkeypatch.setattr(admission, "AHEAD", 8)
    with Live(engine) as live:
        live.worker.admission.nbytes, order = 150, []
        live.worker.engine.script = lambda prompt: "</think>" + "word " * 20
        clients = [Client(live, f"{n}", order) for n in range(3)]
        wait_for(lambda: len(order) == 3)
        assert all(said(one) == ("word " * 20).strip() or said(one) == "word " * 20 for one in clients)


def test_every_running_request_has_a_lane():
    with Live(engine) as live, urlopen(Request(f"{live.url}/live"), timeout=10) as feed:
        order, lanes = [], []
        answering(live, order, words=100)
        Client(live, LONG, order, "the lake")
        while len(order) < 2:
            line = feed.readline()
            if line.startswith(b"data:"):
                lanes.append(worker_lanes(line))
        with contextlib.suppress(StopIteration):
            both = next(one for one in lanes if len(one) == 2 and one[1]["prompt"])
        assert both[0]["name"] is None and both[0]["tokens"] > 0 and both[0]["tokens_per_second"] > 0
        assert both[1]["name"] == "the lake" and 0 <= both[1]["prompt"]["done"] < both[1]["prompt"]["total"]


def worker_lanes(line):
    import json

    return json.loads(line[5:])["lanes"]


def test_a_short_prompt_goes_before_a_long_one_with_which_it_shares_little():
    """It waits where that saves it most of its work, or where it would not go first anyway."""
    made = FakeEngine(lambda prompt: ANSWER)

    def prompt(*parts):
        tokens = [token for first, length in parts for token in range(first, first + length)]
        asked = ServerRequest("completions", "m")
        return Running(Job(PreparedRequest(asked, tokens), print), Sessions(made.session, 4, 1 << 30), Totals())

    long = prompt((0, 8000))
    long.begin()
    short, alike, almost_as_long = prompt((0, 100), (9000, 500)), prompt((0, 500), (9000, 100)), prompt((0, 5000))
    for one in (short, alike, almost_as_long):
        one.follow([long])
    assert (short.waits, alike.waits, almost_as_long.waits) == (False, True, True)
    middling = prompt((0, 100), (9000, 6000))
    middling.follow([long])
    assert middling.waits
