"""Requests that share steps of a real model: each is answered as if alone, while others come, leave or fail."""

import json
import os
import random
import shutil
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import anthropic
import httpx2
import numpy as np
import openai
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import Live, demo_engine, wait_for
from tiny_models import tiny_directory

from moeflux_mlx.opening.engine import open_engine
from moeflux_mlx.ops import grouped, interrupt, native
from moeflux_mlx.server.admission import Admission
from moeflux_mlx.server.live import ExpertMap, Watch
from moeflux_mlx.server.model_thread import ModelThread
from moeflux_mlx.server.prepare import PreparedRequest
from moeflux_mlx.server.request import Failed, Finish, Request, Sampling, Text
from moeflux_mlx.server.running import Job, Totals
from moeflux_mlx.server.sessions import Sessions
from moeflux_mlx.server.worker import Worker


@dataclass(frozen=True)
class Ask:
    """A request and its result.

    Args:
        length: of its prompt.
        limit: of its answer.
        seed: of its sampler; None takes the likeliest.
        at: how many events others must have had before it comes.
        end: "left" or "broken" after so many tokens, or None.
        client: who asks.
    """

    length: int
    limit: int
    seed: int | None
    at: int
    end: tuple[str, int] | None
    client: str


ASKS = st.builds(
    Ask,
    st.integers(1, 60),
    st.integers(1, 8),
    st.none() | st.integers(0, 3),
    st.integers(0, 30),
    st.none() | st.tuples(st.sampled_from(["left", "broken"]), st.integers(0, 6)),
    st.sampled_from("ab"),
)


class Breaking:
    """A mask that allows everything, until it fails."""

    def __init__(self, after):
        self.after = after

    def allowed(self):
        if self.after == 0:
            raise OSError("unplugged")
        self.after -= 1
        return np.ones(256, bool)

    def redirected(self):
        return None

    def consume(self, token):
        pass


class Bench:
    """A worker whose jobs arrive when others have received a number of events; everything runs in the model's
    thread.
    """

    def __init__(self, engine, decode_share=1 / 3):
        self.engine, begun = engine, threading.Event()
        self.worker = Worker(
            lambda: engine,
            lambda engine: Sessions(engine.session, 3, 1 << 30),
            lambda engine: Admission(5, 400, lambda tokens: tokens),
            decode_share,
            Totals(),
            Watch(),
            begun.set,
            lambda: None,
        )
        self.thread = ModelThread()
        self.thread.start()
        self.thread.run(self.worker.main)
        assert begun.wait(30) and self.worker.engine
        self.alone = {}

    def stop(self):
        """Returns whether the worker has ended in time."""
        self.worker.begin_stop()
        return self.thread.stop(10)

    def run(self, asks):
        """Runs the requests. Returns the events of each."""
        heard, pending, over, count = [[] for _ in asks], list(range(len(asks))), threading.Event(), 0
        jobs = {}

        def submit_due():
            while pending and (count >= asks[pending[0]].at or all(self.is_over(heard[i]) for i in jobs)):
                self.submit(asks[pending[0]], pending.pop(0), hear, jobs)

        def hear(i, event):
            nonlocal count
            count += 1
            heard[i].append(event)
            end = asks[i].end
            if end == ("left", sum(isinstance(one, Text) for one in heard[i])):
                jobs[i].cancel()
            submit_due()
            if not pending and all(map(self.is_over, heard)):
                over.set()

        submit_due()
        assert over.wait(60), "it hangs"
        wait_for(lambda: not self.worker.running)
        return heard

    def submit(self, ask, number, hear, jobs):
        """Submits a request whose prompt begins like no other, so that no session knows it."""
        tokens = [int(n) for n in np.random.default_rng([ask.length, number]).integers(0, 200, ask.length)]
        tokens[0] = 201 + number
        sampling = Sampling(temperature=0.0 if ask.seed is None else 0.9, seed=ask.seed)
        broken = ask.end[1] if ask.end is not None and ask.end[0] == "broken" else None
        prepared = PreparedRequest(
            Request("completions", "tiny", prompt=tokens, sampling=sampling),
            tokens,
            max_tokens=ask.limit,
            mask=None if broken is None else lambda: Breaking(broken),
        )
        jobs[number] = Job(prepared, lambda event: hear(number, event), ask.client)
        self.worker.submit(jobs[number])

    @staticmethod
    def is_over(events):
        return bool(events) and isinstance(events[-1], (Finish, Failed))

    def answer_alone(self, ask, number):
        """Returns the events of the request alone, with a prompt that is computed whole: a GPU gives a continued one
        other bits.
        """
        self.worker.sessions.kept.clear()
        if (ask, number) not in self.alone:
            padded = [None] * number + [ask]
            heard, over, jobs = [], threading.Event(), {}

            def hear(_, event):
                heard.append(event)
                if ask.end == ("left", sum(isinstance(one, Text) for one in heard)):
                    jobs[number].cancel()
                if self.is_over(heard):
                    over.set()

            self.submit(padded[number], number, hear, jobs)
            assert over.wait(60)
            self.alone[ask, number] = heard
        return self.alone[ask, number]


def told(events):
    """Returns the text, and how it ended."""
    text = "".join(event.text for event in events if isinstance(event, Text))
    last = events[-1]
    how = (last.reason, last.completion_tokens) if isinstance(last, Finish) else (last.status, last.code)
    return text, how


def check(bench, asks):
    asks = sorted(asks, key=lambda ask: ask.at)
    for number, (ask, events) in enumerate(zip(asks, bench.run(asks), strict=True)):
        text, how = told(events)
        wanted, wanted_how = told(bench.answer_alone(ask, number))
        cut = how == (503, "cancelled") or wanted_how == (503, "cancelled")
        assert (text, how) == (wanted, wanted_how) or (cut and (text.startswith(wanted) or wanted.startswith(text)))
    worker = bench.worker
    assert worker.running == [] and worker.queue == 0
    assert not any(kept.busy for kept in worker.sessions.kept)
    assert all(not pool.is_leased for pool in getattr(bench.engine.experts, "pools", []))


READ = {"expert_io": "pread", "expert_cache_bytes": 1, "set": {"span": 512}}
BENCHES = {
    "read": lambda: open_engine(tiny_directory("qwen3_moe"), **READ),
    "recurrent": lambda: open_engine(tiny_directory("qwen3_5_moe"), prefill_step_size=8),
}

KINDS = {"read": "qwen3_moe", "recurrent": "qwen3_5_moe"}


@pytest.fixture(scope="module", params=BENCHES)
def bench(request):
    made = Bench(BENCHES[request.param]())
    yield made
    assert made.stop()


@settings(max_examples=examples(6))
@given(asks=st.lists(ASKS, min_size=2, max_size=7))
def test_each_request_is_answered_as_if_alone(bench, asks):
    check(bench, asks)


def test_all_at_once(bench):
    check(
        bench,
        [Ask(40 + n, 6, n % 3, 0, ("left", 2) if n == 3 else ("broken", 1) if n == 4 else None, "a") for n in range(8)],
    )


@pytest.mark.usefixtures("files_may_change")
def test_a_failed_read_ends_those_that_chose_the_expert(tmp_path):
    """Other requests of the step do not end. A lone request fails if and only if the same one fails among others."""
    directory = shutil.copytree(tiny_directory("qwen3_moe"), tmp_path / "model")
    bench = Bench(open_engine(directory, **READ))
    file = directory / "packed_experts" / "layer_01.bin"
    os.truncate(file, file.stat().st_size * 15 // 16)  # the last of 16 experts
    bench.engine.experts.invalidate()
    asks = [Ask(1 + n % 2, 3, n % 3, 0, None, "a") for n in range(8)]
    check(bench, asks)
    ends = [told(bench.answer_alone(ask, n)) for n, ask in enumerate(asks)]
    failed = [text for text, how in ends if how == (500, "server_error")]
    assert any(failed) and len(failed) < len(ends), "some said a token before they failed, some ended well"
    assert bench.stop()


@pytest.mark.parametrize("name", BENCHES)
def test_a_prompt_begins_behind_the_part_of_a_longer_one_that_is_computed(name):
    """The longer one is paused in the middle of a span, and both answers are those of the prompts alone."""
    bench = Bench(open_engine(tiny_directory(KINDS[name]), set={"span": 48}))
    bench.worker.sessions = Sessions(lambda: bench.engine.session(checkpoint_every=16), 3, 1 << 30)
    common = [int(n) for n in np.random.default_rng(3).integers(0, 200, 100)]
    prompts = [[*common, *range(1, 200), *range(1, 200)], [*common, 7, 8, 9]]
    jobs, heard, over = {}, [[], []], threading.Event()

    def submit(n):
        request = Request("completions", "tiny", sampling=Sampling(0.0))
        jobs[n] = Job(PreparedRequest(request, prompts[n], max_tokens=6), lambda event: hear(n, event))
        bench.worker.submit(jobs[n])

    def hear(n, event):
        heard[n].append(event)
        if len(jobs) == 1:
            submit(1)
        if all(map(bench.is_over, heard)):
            over.set()

    submit(0)
    assert over.wait(60)
    together = [told(events) for events in heard]
    assert heard[0][-1].cached_tokens == 0 and 64 <= heard[1][-1].cached_tokens <= len(common)
    for n in range(2):
        wait_for(lambda: not bench.worker.running)
        bench.worker.sessions.kept.clear()
        heard[n].clear()
        over.clear()
        submit(n)
        assert over.wait(60) and told(heard[n]) == together[n]
    assert bench.stop()


def test_what_each_request_asked_for_is_counted(tmp_path):
    """The experts are the same alone and among others. A record that several requests read is counted once."""
    engine = open_engine(tiny_directory("qwen3_moe"), prefetch="off", **READ)
    bench = Bench(engine, decode_share=0)  # all prompts come first, so that answers share steps
    asks = [Ask(3 + n, 5, None, 0, None, "a") for n in range(4)]
    layers, stats = len(engine.model.args.moe_layers), engine.experts.stats
    engine.experts.reset_stats()
    counts = [events[-1].asked for events in bench.run(asks)]
    for ask, asked in zip(asks, counts, strict=True):
        prompt, steps = asked.hits + asked.misses - 4 * 4 * layers, 4  # four tokens after the first, of four experts
        assert 4 * layers <= prompt <= 4 * layers * ask.length and steps == ask.limit - 1
    stats = engine.experts.stats
    assert sum(asked.nbytes for asked in counts) == pytest.approx(stats.bytes_read)
    assert sum(asked.hits + asked.misses for asked in counts) > stats.hits + stats.misses, "they had experts in common"
    assert bench.stop()


def test_an_expert_is_put_down_to_whoever_asked_for_it():
    """Experts that a client requests alone are those that it requested last among others."""
    engine = open_engine(tiny_directory("qwen3_moe"), **READ)
    bench, asks = Bench(engine), [Ask(1, 4, None, 0, None, client) for client in "ab"]

    def last_askers(run):
        experts = ExpertMap(engine.experts, lambda: bench.worker.watch.asking)
        run()
        return experts.last_askers()

    alone = [last_askers(lambda ask=ask, n=n: bench.answer_alone(ask, n)) for n, ask in enumerate(asks)]
    assert [set(np.unique(numbers)) for numbers in alone] == [{0, 1}, {0, 2}]
    together = last_askers(lambda: bench.run(asks))
    for numbers, own in zip(alone, (1, 2), strict=True):
        assert (together == own).sum() > 0 and not (together == own)[numbers != own].any()
    assert bench.stop()


def schema(name):
    return {
        "type": "object",
        "properties": {name: {"type": "boolean"}, "wings": {"enum": [2, 4]}},
        "required": [name, "wings"],
        "additionalProperties": False,
    }


def question(n):
    return [{"role": "user", "content": f"{n} owls and a girl called Mira live at the lake. Tell me of owl {n}."}]


def by_chat(chat, claude, n):
    return chat.chat.completions.create(model="m", messages=question(n), max_tokens=14).choices[0].message.content


def by_chat_stream(chat, claude, n):
    with chat.chat.completions.stream(
        model="m", messages=question(n), max_tokens=18, temperature=0.8, seed=n
    ) as stream:
        for _ in stream:
            pass
    return stream.current_completion_snapshot.choices[0].message.content


def by_schema(chat, claude, n):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema(f"owl{n}")}}
    said = (
        chat.chat.completions.create(model="m", messages=question(n), response_format=form).choices[0].message.content
    )
    assert set(json.loads(said)) == {f"owl{n}", "wings"}
    return said


def by_messages(chat, claude, n):
    message = claude.messages.create(model="m", messages=question(n), max_tokens=14, stop_sequences=["owl"])
    return [block.text for block in message.content], message.stop_reason


def by_messages_stream(chat, claude, n):
    with claude.messages.stream(model="m", messages=question(n), max_tokens=18) as stream:
        return stream.get_final_text()


def by_messages_schema(chat, claude, n):
    form = {"format": {"type": "json_schema", "schema": schema(f"owl{n}")}}
    said = claude.messages.create(model="m", messages=question(n), max_tokens=60, output_config=form).content[0].text
    assert set(json.loads(said)) == {f"owl{n}", "wings"}
    return said


def by_responses(chat, claude, n):
    return chat.responses.create(model="m", input=question(n)[0]["content"], max_output_tokens=14).output_text


def by_completion(chat, claude, n):
    choice = chat.completions.create(
        model="m", prompt=f"Owl {n} sat by the lake and", max_tokens=14, logprobs=2
    ).choices[0]
    return choice.text, choice.logprobs.token_logprobs


WAYS = [
    by_chat_stream,
    by_schema,
    by_messages_stream,
    by_messages,
    by_messages_schema,
    by_responses,
    by_completion,
    by_chat,
]


def clients(live):
    return (
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0),
        anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0),
    )


@pytest.mark.parametrize("count", [4, pytest.param(8, marks=pytest.mark.full)])
def test_official_clients_at_once_are_answered_as_one_alone(count):
    ways = WAYS[:count]
    with Live(demo_engine, sessions=1, parallel=1) as live:
        chat, claude = clients(live)
        with chat, claude:
            alone = [way(chat, claude, n) for n, way in enumerate(ways)]
            assert live.models.totals.steps + len(ways) >= live.models.totals.generated_tokens
    with Live(demo_engine, parallel=8) as live, ThreadPoolExecutor(count) as threads:
        chat, claude = clients(live)
        with chat, claude:
            together = list(threads.map(lambda n: ways[n](chat, claude, n), range(count)))
            assert live.models.totals.steps < 0.8 * live.models.totals.generated_tokens, "they shared steps"
    assert together == alone


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.full)])
def test_mixed_requests_and_departures_leave_nothing_behind(count):
    rng = random.Random(5)
    with Live(demo_engine, parallel=6, sessions=4) as live, ThreadPoolExecutor(12) as threads:
        chat, claude = clients(live)

        def one(n):
            way, patience = rng.choice(WAYS), rng.choice([0.02, 0.1, 0.5, 30, 30, 30])
            try:
                way(chat.with_options(timeout=patience), claude.with_options(timeout=patience), n % 10)
            except (openai.APITimeoutError, anthropic.APITimeoutError, httpx2.TimeoutException):
                assert patience < 30

        with chat, claude:
            list(threads.map(one, range(count)))
            wait_for(lambda: not live.worker.running and not live.models.queue)
            wait_for(lambda: live.models.loaded.uses == 0)
            assert live.models.totals.failed == 0 and not any(kept.busy for kept in live.worker.sessions.kept)
            assert by_chat(chat, claude, 3)


@pytest.mark.skipif(not native.available(), reason="only the native kernels compute in pieces")
@pytest.mark.parametrize("name", ["linear", "attend"])
def test_a_cancelled_prompt_ends_within_a_block(name, monkeypatch):
    """The session keeps nothing of the block, and its next prompt has the tokens of a fresh one."""
    bench, fresh = (Bench(open_engine(tiny_directory("qwen3_moe"))) for _ in range(2))
    ask, jobs, heard = Ask(200, 4, None, 0, None, "a"), {}, []
    monkeypatch.setattr(interrupt, "PIECE_WORK", 1)
    extension, calls = native.extension(), []
    compute = getattr(extension, name)

    def counting(*given):
        calls.append(len(given[0]))
        if len(calls) == 3:
            jobs[0].cancel()
        return compute(*given)

    monkeypatch.setattr(native, "extension", lambda: types.SimpleNamespace(**{**vars(extension), name: counting}))
    bench.submit(ask, 0, lambda _, event: heard.append(event), jobs)
    wait_for(lambda: heard and bench.is_over(heard))
    assert heard[-1].code == "cancelled" and calls == [16, 16, 16]
    monkeypatch.undo()
    assert told(bench.run([ask])[0]) == told(fresh.run([ask])[0])
    assert bench.stop() and fresh.stop()


@pytest.mark.skipif(not native.available(), reason="only the native kernels compute in pieces")
@pytest.mark.parametrize("options", [{}, {"expert_io": "pread", "expert_cache_bytes": 1}], ids=["mapped", "streamed"])
def test_a_cancelled_prompt_ends_within_a_wave(options, monkeypatch):
    bench, fresh = (Bench(open_engine(tiny_directory("qwen3_moe"), **options)) for _ in range(2))
    ask, jobs, heard, checks = Ask(200, 4, None, 0, None, "a"), {}, [], []

    def checked():
        checks.append(1)
        if len(checks) == 2:
            jobs[0].cancel()
        interrupt.check()

    monkeypatch.setattr(grouped, "check", checked)
    bench.submit(ask, 0, lambda _, event: heard.append(event), jobs)
    wait_for(lambda: heard and bench.is_over(heard))
    assert heard[-1].code == "cancelled" and len(checks) == 2
    monkeypatch.undo()
    assert told(bench.run([ask])[0]) == told(fresh.run([ask])[0])
    assert bench.stop() and fresh.stop()
