"""Several models, one loaded at a time: which requests wait, which go first, and that memory is freed."""

import asyncio
import contextlib
import dataclasses
import json
import random
import subprocess
import sys
import threading
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError

import anthropic
import mlx.core as mx
import openai
import pytest
from live_server import FakeEngine, Live, demo_engine, tokenizer_of, wait_for
from test_load import send
from tiny_models import child_environment, tiny_directory

from moeflux_mlx.errors import RequestError
from moeflux_mlx.opening.engine import open_engine
from moeflux_mlx.server import switch
from moeflux_mlx.server.admission import Admission
from moeflux_mlx.server.model_thread import ModelThread
from moeflux_mlx.server.prepare import Defaults, Preparer
from moeflux_mlx.server.request import Sampling
from moeflux_mlx.server.sessions import Sessions
from moeflux_mlx.server.switch import ModelSwitch

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
THREADS = Path("/proc/self/task")
HI = [{"role": "user", "content": "Hi"}]


class Loads:
    """Makes fake engines that answer with their name, and records loads and unloads.

    No answer begins before `may_answer` is set.
    """

    def __init__(self, *names, **options):
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.order, self.engines, self.failing, self.options = [], {}, set(), options
        self.of = {name: lambda name=name: self.load(name) for name in names}

    def load(self, name):
        assert all(engine.experts.closed for engine in self.engines.values()), "two models at once"
        self.order.append(name)
        if name in self.failing:
            raise RequestError("/secret/path does not fit")
        self.engines[name] = FakeEngine(lambda prompt: self.answer(name), **self.options)
        return self.engines[name]

    def answer(self, name):
        assert self.may_answer.wait(60)
        return f"</think>{name}"


def ask(live, name):
    return live.post("/v1/chat/completions", {"model": name, "messages": HI})["choices"][0]["message"]["content"]


def refused(ask, *arguments):
    """Returns the status of a refusal."""
    with pytest.raises(HTTPError) as told:
        ask(*arguments)
    with told.value as error:
        return error.code


def statuses(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="any") as client:
        return {model.id: model.status["value"] for model in client.models.list()}


def test_a_model_is_loaded_when_it_is_requested():
    loads = Loads("a", "b")
    with Live(loads.of) as live:
        assert statuses(live) == {"a": "loaded", "b": "unloaded"} and loads.order == ["a"]
        assert [ask(live, name) for name in ("a", "b", "b", "a")] == ["a", "b", "b", "a"]
        assert loads.order == ["a", "b", "a"] and statuses(live) == {"a": "loaded", "b": "unloaded"}
        body = {"messages": HI, "model": "b", "max_tokens": 4}
        assert live.post("/v1/messages/count_tokens", body)["input_tokens"] > 2 and statuses(live)["b"] == "unloaded"
        assert 'moeflux_model_loaded{model="a"} 1' in live.get("/metrics")


def described(name, defaults):
    """Returns what prepares requests for a model of these tests that is not loaded; "plain" calls no tools."""
    return Preparer(tokenizer_of("minimax_style" if name == "plain" else "qwen35_style"), 256, 8192, defaults)


REFUSED = {
    "an image for a model that reads none": {"messages": [{"role": "user", "content": [PICTURE]}]},
    "a schema that cannot be enforced": {"response_format": {"type": "json_object", "schema": {"type": "nothing"}}},
    "a prompt without an end": {"messages": [{"role": "user", "content": "a" * 9000}]},
    "an answer that cannot be begun": {"messages": [{"role": "assistant", "content": "The"}]},
    "a token outside the vocabulary": {"logit_bias": {"9999": 1}},
}


def test_counting_loads_no_model_and_waits_for_no_answer():
    loads = Loads("a", "b")
    loads.may_answer.clear()
    with Live(loads.of, describe=described) as live, ThreadPoolExecutor(1) as clients:
        running = clients.submit(ask, live, "a")
        wait_for(lambda: live.worker.running)
        counts = {}
        for name in ("a", "b"):
            body = {"messages": HI, "model": name, "max_tokens": 4}
            tokens = live.post("/tokenize", {"content": "Hi", "model": name})["tokens"]
            counts[name] = live.post("/v1/messages/count_tokens", body)["input_tokens"], len(tokens)
        assert not running.done() and counts["a"] == counts["b"] == (counts["a"][0], 2) and counts["a"][0] > 2
        loads.may_answer.set()
        assert running.result() == "a"
    assert loads.order == ["a"]


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
def test_a_refused_request_loads_no_model(body):
    loads = Loads("a", "b")
    with Live(loads.of, describe=described) as live:
        for model in ("b", "a"):
            assert refused(live.post, "/v1/chat/completions", {"messages": HI, **body, "model": model}) == 400
        assert statuses(live) == {"a": "loaded", "b": "unloaded"} and loads.order == ["a"]


def test_a_request_that_only_the_loaded_model_can_refuse():
    """The files allow 8192 tokens, and the plan of the loaded model 1000."""
    loads = Loads("a", "b", context=1000)
    long = {"messages": [{"role": "user", "content": "a" * 2000}], "model": "b"}
    with Live(loads.of, describe=described) as live:
        assert refused(live.post, "/v1/chat/completions", long) == 400 and loads.order == ["a", "b"]
        assert ask(live, "a") == "a"
        assert refused(live.post, "/v1/chat/completions", long) == 400 and loads.order == ["a", "b", "a"]


def test_a_model_whose_files_cannot_be_read_is_not_loaded():
    def damaged(name, defaults):
        raise RequestError("/secret/path/tokenizer.json is damaged")

    loads = Loads("a", "b")
    with Live(loads.of, describe=damaged) as live:
        assert refused(ask, live, "b") == 500 and ask(live, "a") == "a" and loads.order == ["a"]
        assert listed(live)["b"]["status"] == FAILED


def test_what_fails_and_what_is_read_delays_nobody_else():
    """A damaged model is no sign that the first one is loaded; it is well again once its files are, and another model's
    files may be read slowly.
    """
    broken, slow, may_load = {"b"}, threading.Event(), threading.Event()
    loads = Loads("a", "b", "c")

    def first():
        assert may_load.wait(60)
        return loads.load("a")

    def describe(name, defaults):
        if name in broken:
            raise RequestError("/a b/config.json is damaged")
        assert name != "c" or slow.wait(60)
        return described(name, defaults)

    def count(name):
        return live.post("/v1/messages/count_tokens", {"messages": HI, "model": name, "max_tokens": 1})["input_tokens"]

    live = Live({**loads.of, "a": first}, describe=describe)
    live.thread.start()
    try:
        wait_for(lambda: refused(live.get, "/health") == 503)
        for _ in range(2):
            assert refused(count, "b") == 500 and refused(live.get, "/health") == 503
        assert listed(live)["b"]["status"]["error"] == "config.json is damaged"
        broken.clear()
        assert count("b") > 2 and listed(live)["b"]["status"] == {"value": "unloaded"}
        with ThreadPoolExecutor(1) as clients:
            waiting = clients.submit(count, "c")
            assert count("b") > 2 and not waiting.done()
            slow.set()
            assert waiting.result() > 2
    finally:
        may_load.set()
        live.__exit__()


def test_a_request_of_old_files_is_prepared_again(tmp_path):
    """The model has been written anew, with another tokenizer, since its files were read."""
    (tmp_path / "tokenizer.json").write_text("old")

    def old(name, defaults):
        return Preparer(tokenizer_of("minimax_style"), 256, 8192, defaults, path=tmp_path)

    def load():
        (tmp_path / "tokenizer.json").write_text("anew")
        engine = FakeEngine(lambda prompt: "yes")
        engine.path = tmp_path
        return engine

    loads = Loads("a")
    with Live({**loads.of, "b": load}, describe=old) as live:
        before = live.post("/v1/messages/count_tokens", {"messages": HI, "model": "b", "max_tokens": 1})["input_tokens"]
        reply = live.post("/v1/chat/completions", {"messages": HI, "model": "b"})
        after = live.post("/v1/messages/count_tokens", {"messages": HI, "model": "b", "max_tokens": 1})["input_tokens"]
        assert reply["usage"]["prompt_tokens"] == after != before


FAILED = {"value": "unloaded", "failed": True, "error": "tokenizer.json is damaged"}


def listed(live):
    """Returns what /v1/models says of each model."""
    return {model["id"]: model for model in json.loads(live.get("/v1/models"))["data"]}


def test_the_list_says_the_lengths_that_are_known_and_why_a_model_failed():
    loads = Loads("a", "b", context=1000)
    loads.failing.add("b")
    with Live(loads.of) as live:
        assert live.get("/v1/models/") == live.get("/v1/models")
        assert "max_model_len" not in listed(live)["b"] and listed(live)["a"]["max_model_len"] == 1000
        assert refused(ask, live, "b") == 500
        said = {"value": "unloaded", "failed": True, "error": "path does not fit"}
        assert listed(live)["b"]["status"] == said and json.loads(live.get("/v1/models/b"))["status"] == said
        loads.failing.clear()
        assert ask(live, "b") == "b" and listed(live)["b"]["status"]["value"] == "loaded"
    with Live(loads.of, describe=described, context=32768) as live:
        assert listed(live)["b"]["max_model_len"] == listed(live)["b"]["max_tokens"] == 32768


def test_an_unknown_name_is_not_found():
    with (
        Live(Loads("a", "b").of) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="any") as chat,
        anthropic.Anthropic(base_url=live.url, api_key="any") as claude,
    ):
        with pytest.raises(openai.NotFoundError, match="there are a, b") as told:
            chat.chat.completions.create(model="c", messages=HI)
        assert told.value.code == "model_not_found" and told.value.param == "model"
        with pytest.raises(openai.NotFoundError):
            chat.models.retrieve("c")
        with pytest.raises(anthropic.NotFoundError) as told:
            claude.messages.create(model="c", messages=HI, max_tokens=4)
        assert told.value.body["error"]["type"] == "not_found_error"
        assert chat.models.retrieve("b").id == "b"
        assert live.post("/v1/chat/completions", {"messages": HI})["model"] == "a"


@pytest.fixture
def group_seconds(monkeypatch):
    """Returns a function that says how long requests for the loaded model go first."""
    return lambda seconds: monkeypatch.setattr(switch, "GROUP_SECONDS", seconds)


def held_and_waiting(live):
    """Returns how many requests use the loaded model, and how many wait."""
    return live.models.loaded.uses, live.models.queue - live.worker.queue


def test_requests_for_a_model_go_together(group_seconds):
    group_seconds(60)
    loads = Loads("a", "b")
    loads.may_answer.clear()
    with Live(loads.of) as live, ThreadPoolExecutor(12) as clients:
        names = ["a", "b"] * 6
        asked = [clients.submit(ask, live, "a")]
        wait_for(lambda: held_and_waiting(live) == (1, 0))
        asked += [clients.submit(ask, live, name) for name in names[1:]]
        wait_for(lambda: held_and_waiting(live) == (6, 6))
        loads.may_answer.set()
        assert [one.result() for one in asked] == names
    assert loads.order == ["a", "b"]


def test_a_request_after_the_time_of_a_group_waits_behind_the_others(group_seconds):
    group_seconds(60)
    loads = Loads("a", "b")
    loads.may_answer.clear()
    with Live(loads.of) as live, ThreadPoolExecutor(4) as clients:
        asked = []
        for name, counts in (("a", (1, 0)), ("b", (1, 1)), ("a", (2, 1)), ("a", (2, 2))):
            if counts == (2, 2):  # the time of the group is over
                group_seconds(0)
                live.models.loaded.seconds = 0.0
            asked.append(clients.submit(ask, live, name))
            wait_for(lambda counts=counts: held_and_waiting(live) == counts)
        loads.may_answer.set()
        assert [one.result() for one in asked] == ["a", "b", "a", "a"]
    assert loads.order == ["a", "b", "a"]


def test_a_model_in_demand_does_not_block_others(group_seconds):
    group_seconds(0.1)
    loads, over = Loads("a", "b", token_seconds=0.01), threading.Event()
    with Live(loads.of) as live, ThreadPoolExecutor(4) as clients:

        def keep_asking():
            while not over.is_set():
                assert ask(live, "a") == "a"

        busy = [clients.submit(keep_asking) for _ in range(3)]
        wait_for(lambda: live.models.loaded.uses)
        assert ask(live, "b") == "b"
        over.set()
        assert [one.result() for one in busy] == [None] * 3


def test_a_model_that_cannot_be_loaded_fails_its_own_requests(capfd):
    loads = Loads("a", "b")
    loads.failing.add("b")
    with Live(loads.of) as live, openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError, match="the model b cannot be loaded") as told:
            client.chat.completions.create(model="b", messages=HI)
        assert "secret" not in str(told.value) and str(live.models.error).startswith("/secret")
        assert ask(live, "a") == "a"
        loads.failing.clear()
        assert ask(live, "b") == "b"
    assert loads.order == ["a", "b", "a", "b"]


def test_the_first_one_that_cannot_be_loaded_leaves_the_others():
    loads = Loads("a", "b")
    loads.failing.add("a")
    with Live(loads.of) as live:
        assert ask(live, "b") == "b" and '"ok"' in live.get("/health")


def test_an_unused_model_is_unloaded():
    loads = Loads("a", token_seconds=0.02)
    with Live(loads.of, idle_seconds=0.1) as live:
        assert ask(live, "any") == "a"
        wait_for(lambda: statuses(live) == {"a": "unloaded"} and loads.engines["a"].experts.closed)
        assert '"ok"' in live.get("/health")
        assert ask(live, "any") == "a" and loads.order == ["a", "a"]


def test_a_request_that_comes_while_the_model_is_idle_keeps_it():
    loads = Loads("a", token_seconds=0.1)
    with Live(loads.of, idle_seconds=0.2) as live:
        assert ask(live, "any") == ask(live, "any") == "a"  # the second takes longer than the rest of the idle time
    assert loads.order == ["a"]


def test_a_client_that_leaves_does_not_wait_any_more():
    loads = Loads("a", "b", token_seconds=0.5)
    asked = {"stream": True, "messages": HI, "prompt_cache_key": "one"}
    body = json.dumps({"model": "%s", **asked}).encode()
    with Live(loads.of, queue=1) as live, send(live, body % b"a") as first:
        wait_for(lambda: live.worker.running)
        with send(live, body % b"b"):
            wait_for(lambda: live.models.queue == 1)
            assert refused(live.post, "/v1/chat/completions", {"model": "b", **asked}) == 429
        wait_for(lambda: live.models.queue == 0)
        first.close()
        wait_for(lambda: live.models.loaded.uses == 0)
    assert loads.order == ["a"]


def ask_as(live, client, name):
    """Returns the answer, or the message of a refusal."""
    body = {"model": name, "messages": HI, "prompt_cache_key": client}
    try:
        return live.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    except HTTPError as error:
        with error:
            return json.loads(error.read())["error"]["message"]


def test_a_busy_client_does_not_lock_others_out_of_another_model():
    loads = Loads("a", "b")
    loads.may_answer.clear()
    with Live(loads.of, queue=2, parallel=1) as live, ThreadPoolExecutor(6) as clients:
        many = [clients.submit(ask_as, live, "many", "a")]
        wait_for(lambda: live.worker.running)
        many += [clients.submit(ask_as, live, "many", "a") for _ in range(4)]
        wait_for(lambda: sum(one.done() for one in many) == 2 and live.worker.queue == 2)
        other = clients.submit(ask_as, live, "other", "b")
        wait_for(lambda: live.models.queue == 3 or other.done())
        assert not other.done()
        loads.may_answer.set()
        assert other.result() == "b"
        full = "2 requests wait already, and --queue allows 2; try again later"
        assert sorted(one.result() for one in many) == [full] * 2 + ["a"] * 3


def test_the_places_of_all_models_together_are_limited():
    loads = Loads("a", "b")
    loads.may_answer.clear()
    with Live(loads.of, queue=2, parallel=1) as live, ThreadPoolExecutor(6) as clients:
        asked = []
        for name, count in ("a", 1), ("b", 2), ("b", 3):
            asked.append(clients.submit(ask_as, live, "one", name))
            wait_for(lambda count=count: live.models.queue + len(live.worker.running) == count)
        for name in "ab":
            assert ask_as(live, "one", name).startswith("2 requests wait already")
        loads.may_answer.set()
        assert [one.result() for one in asked] == ["a", "b", "b"]
        assert not live.models.queue


def test_a_client_that_waits_for_a_model_is_told_that_the_server_ends():
    loads = Loads("a", "b")
    loads.may_answer.clear()
    with Live(loads.of) as live, ThreadPoolExecutor(2) as clients:
        running = clients.submit(ask, live, "a")
        wait_for(lambda: live.worker.running)
        waiting = clients.submit(ask, live, "b")
        wait_for(lambda: live.models.queue == 1)
        live.listener.stop_soon()
        assert refused(waiting.result) == 503 and not running.done()
        loads.may_answer.set()
        assert refused(running.result) == 503
        live.thread.join(10)  # `Live` begins the end once more
    assert loads.order == ["a"]


def test_a_request_that_is_cancelled_when_its_turn_has_come_gives_the_model_back():
    one = switch.ModelChoice(
        "a",
        Loads("a").of["a"],
        lambda engine: Sessions(engine.session, 1, 1 << 30),
        lambda engine: Admission(1, 1 << 30, lambda tokens: tokens),
        lambda engine: Defaults(Sampling(), {}),
    )
    models = switch.ModelSwitch([one])

    async def take_and_cancel(cancel):
        loaded = await models.take("a")
        cancel()  # the other request has its turn too, and has not gone on yet
        return loaded

    async def uses():
        models.start()
        first = asyncio.create_task(take_and_cancel(lambda: second.cancel()))
        second = asyncio.create_task(models.take("a"))
        loaded = await first
        with pytest.raises(asyncio.CancelledError):
            await second
        models.begin_stop()
        return loaded.uses

    assert asyncio.run(uses()) == 1 and models.stop(10)


def test_a_server_that_ends_releases_nothing():
    """Its worker has let the engine go, and the model is still the loaded one."""
    loads = Loads("a")
    with Live(loads.of) as live:
        models, worker = live.models, live.worker
        models.begin_stop()
        wait_for(lambda: worker.engine is None)
        models.release("a")
        assert models.loaded is not None


def test_memory_is_given_back_before_the_next_is_loaded():
    """Weak references and MLX's own count are checked at the moment when the next model is about to be loaded."""
    held, there, memory = [], [], []

    def load(make):
        there.append([one() for one in held if one() is not None])
        memory.append(mx.get_active_memory())
        engine = make()
        held[:] = [weakref.ref(one) for one in (engine, engine.model, engine.experts, *engine.model.layers)]
        return engine

    tiny = tiny_directory("qwen3_moe", template="qwen35_style")
    loads = {"demo": lambda: load(demo_engine), "tiny": lambda: load(lambda: open_engine(tiny))}
    with Live(loads) as live:
        for name in ("demo", "tiny", "demo", "tiny"):
            body = {"model": name, "messages": HI, "max_tokens": 4}
            assert live.post("/v1/chat/completions", body)["usage"]["completion_tokens"] > 0
    assert there == [[], [], [], []] and max(memory) - memory[0] < 100_000
    wait_for(lambda: all(one() is None for one in held))


@pytest.mark.skipif(not THREADS.is_dir(), reason="only Linux lists the threads of a process there")
def test_changes_of_models_leave_no_thread_behind():
    """MLX keeps a thread for each thread that has computed."""
    loads = Loads("a", "b")

    def load(name):
        mx.eval(mx.ones(4) + 1)
        return loads.load(name)

    with Live({name: lambda name=name: load(name) for name in "ab"}) as live:
        counts = []
        for _ in range(20):
            assert [ask(live, name) for name in "ba"] == ["b", "a"]
            counts.append(len(list(THREADS.iterdir())))
    assert len(loads.order) == 41 and counts[-1] < counts[3] + 16  # asyncio adds some of its own


def test_an_error_in_the_thread_of_models_leaves_it_to_the_next(monkeypatch):
    reported, done = [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_type))
    thread = ModelThread()
    thread.start()
    thread.run(lambda: 1 // 0)
    thread.run(done.set)
    assert thread.stop(30) and done.is_set() and reported == [ZeroDivisionError]


def test_a_model_that_fails_while_it_is_loaded_frees_its_memory():
    engines = []

    def half_loaded():
        engine = demo_engine()
        engines.append(weakref.ref(engine.model))
        raise RequestError(f"{engine.path} has no tokenizer")

    with Live({"a": half_loaded, "b": Loads("b").of["b"]}) as live:
        assert ask(live, "b") == "b" and live.models.error is None and engines[0]() is None
        assert refused(ask, live, "a") == 500
        assert len(engines) == 2
        wait_for(lambda: engines[1]() is None)


def test_a_model_whose_conversations_cannot_be_kept_frees_its_memory(monkeypatch):
    """Its sessions are made after it has been loaded; the reason stays, and the model does not."""
    engines = []

    def demo():
        engines.append(demo_engine())
        return engines[-1]

    def fails(engine, *_):
        raise RequestError(f"{engine.path}/prompts cannot be written")

    with Live({"a": Loads("a").of["a"], "b": demo}) as live:
        choice = live.models.choices["b"]
        monkeypatch.setitem(live.models.choices, "b", dataclasses.replace(choice, make_sessions=fails))
        assert refused(ask, live, "b") == 500 and engines[0].experts._closed
        held = weakref.ref(engines.pop())
        wait_for(lambda: held() is None)
        assert listed(live)["b"]["status"]["error"] == "prompts cannot be written"


@pytest.mark.parametrize("part", ["defaults", "forecast"])
def test_a_fault_behind_the_loading_of_a_model_leaves_it_usable_or_failed(part, monkeypatch, capfd):
    """No request waits for ever: without a forecast the model answers, and without defaults it is not loaded."""

    def fails(_):
        raise KeyError("width")

    loads = Loads("a", "b")
    with Live(loads.of) as live:
        choice = live.models.choices["b"]
        monkeypatch.setitem(live.models.choices, "b", dataclasses.replace(choice, **{part: fails}))
        if part == "forecast":
            assert ask(live, "b") == "b" and "no speed can be forecast: KeyError" in capfd.readouterr().err
        else:
            assert refused(ask, live, "b") == 500 and "KeyError" in listed(live)["b"]["status"]["error"]
            wait_for(lambda: loads.engines["b"].experts.closed)
        assert ask(live, "a") == "a"


def test_any_requests_and_departures_leave_the_switch_consistent():
    rng, loads = random.Random(3), Loads("a", "b", "c", token_seconds=0.001)
    with Live(loads.of, idle_seconds=0.02) as live, ThreadPoolExecutor(6) as clients:

        def client(name, patience):
            body = b'{"model": "%s", "stream": true, "messages": [{"role": "user", "content": "Hi"}]}' % name.encode()
            with send(live, body) as connection:
                connection.settimeout(patience)
                received = b""
                with contextlib.suppress(TimeoutError):
                    while b"[DONE]" not in received and (piece := connection.recv(4096)):
                        received += piece
            assert patience < 1 or f'"content":"{name}"'.encode() in received.replace(b" ", b""), received

        asked = []
        for _ in range(30):
            asked.append(clients.submit(client, rng.choice("abc"), rng.choice([0.01, 0.05, 20, 20])))
            time.sleep(rng.choice([0, 0, 0.03]))
        for one in asked:
            one.result()
        wait_for(lambda: live.models.loaded is None and not live.models.queue)
        assert live.models.totals.failed == 0


def test_a_process_whose_model_thread_compiled_functions_ends_well():
    """They are freed in the thread, not while the interpreter ends."""
    script = """
import mlx.core as mx
from moeflux_mlx.server.model_thread import ModelThread

kept = []

def work():
    for i in range(200):
        kept.append(mx.compile(lambda x, i=i: x.reshape(-1, 1 + i % 4)))
        mx.eval(kept[-1](mx.ones(12)))

thread = ModelThread()
thread.start()
thread.run(work)
assert thread.stop(60)
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], env=child_environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_a_model_that_is_unloaded_meanwhile_computes_nothing():
    """The embedding model asks in its own thread."""

    class Unloading:
        seen = iter([types.SimpleNamespace(worker=types.SimpleNamespace(running=[1]))])
        loaded = property(lambda self: next(self.seen, None))

    assert ModelSwitch.is_computing.fget(Unloading()) and not ModelSwitch.is_computing.fget(Unloading())
