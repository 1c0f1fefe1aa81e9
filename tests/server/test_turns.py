"""Requests that meet in one model: in any order, the answers are those of separate servers."""

import base64
import threading
from urllib.error import HTTPError

import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import FakeEngine, Live, demo_engine, wait_for

from moeflux_mlx.server import live as live_module
from moeflux_mlx.text.history import History

STORY = "The owl flew over the lake and looked for Mira. "
LONG = [{"role": "user", "content": STORY * 45}]
SHORT = [{"role": "user", "content": "Tell me a story."}]


def ask(live, messages, **more):
    reply = live.post("/v1/chat/completions", {"messages": messages, "max_tokens": 12, "temperature": 0, **more})
    return reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def alone():
    """Returns each answer of a server that has received nothing else."""
    with Live(lambda: demo_engine(set={"span": 512}, prefill_step_size=64), sessions=1) as live:
        return ask(live, SHORT)[0], ask(live, LONG)[0]


@pytest.mark.parametrize("options", [{}, {"expert_io": "pread", "expert_cache_bytes": 1}])
def test_a_short_prompt_in_the_middle_of_a_long_one(alone, options):
    """The short prompt goes first, and its answer continues while the rest of the long prompt is computed."""
    with Live(lambda: demo_engine(set={"span": 512}, prefill_step_size=64, **options)) as live:
        answers = []
        long = threading.Thread(target=lambda: answers.append(("long", ask(live, LONG)[0])))
        long.start()
        wait_for(lambda: live.worker.running)
        answers.append(("short", ask(live, SHORT)[0]))
        long.join()
    assert answers == [("short", alone[0]), ("long", alone[1])]


def test_agents_share_what_they_have_in_common(alone):
    """Copies of a session answer and continue as if each were alone."""
    system = {"role": "system", "content": STORY * 12}
    tasks = [[system, {"role": "user", "content": f"Tell of {name}."}] for name in ("Mira", "an owl", "the lake")]
    with Live(demo_engine, sessions=1) as live:
        wanted = [ask(live, task)[0] for task in tasks]
    with Live(demo_engine, sessions=4) as live:
        answers = [ask(live, task) for task in tasks]
        assert [said for said, _ in answers] == wanted
        assert answers[0][1] == 0 and all(cached > 100 for _, cached in answers[1:])
        more = [*tasks[0], {"role": "assistant", "content": wanted[0]}, {"role": "user", "content": "And?"}]
        assert ask(live, more)[1] > answers[1][1]


def test_the_map_shows_which_conversation_requested_an_expert_last(monkeypatch):
    monkeypatch.setattr(live_module, "EVERY", 0.01)
    with Live(lambda: demo_engine(expert_io="pread", expert_cache_bytes=1)) as live:
        watch = live.worker.watch
        watch.watchers += 1
        live.worker.wake()
        wait_for(lambda: watch.latest)

        def asked_by(name):
            """Returns the numbers in the map after a conversation has been answered."""
            ask(live, SHORT, prompt_cache_key=name)
            last = watch.latest
            wait_for(lambda: watch.latest is not last and not watch.latest["busy"])
            return set(base64.b64decode(watch.latest["askers"])) - {0}

        assert asked_by("one") == {1} and 2 in asked_by("two") and asked_by("one") <= {1, 2}
        watch.watchers -= 1


def test_a_conversation_that_cannot_be_kept_ends_no_other(alone, capfd):
    with Live(demo_engine) as live:
        sessions = live.worker.sessions
        right = sessions.give_back

        def fails(*given):
            sessions.give_back = right
            raise OSError("no room")

        sessions.give_back = fails
        assert [ask(live, SHORT)[0] for _ in range(2)] == [alone[0]] * 2
    assert "a conversation was lost: OSError" in capfd.readouterr().err


def test_a_client_that_comes_back_goes_on(alone):
    """What an abandoned request has computed is not computed again, and the answer is the same."""
    with Live(lambda: demo_engine(set={"span": 128}, prefill_step_size=64)) as live:
        look = live.worker.look

        def look_and_leave():
            look()
            for one in live.worker.running:
                if 300 < one.progress[0] < one.progress[1]:
                    one.job.cancel()

        live.worker.look = look_and_leave
        with pytest.raises(HTTPError, match="503"):
            ask(live, LONG)
        live.worker.look = look
        said, cached = ask(live, LONG)
        assert cached >= 200 and said == alone[1]


@pytest.fixture(scope="module")
def letters():
    """Returns a model whose tokens are the bytes of whole letters."""
    with Live(lambda: FakeEngine(lambda prompt: "né€🙂", "cogito_style")) as live:
        yield live


@settings(max_examples=examples(25))
@given(turns=st.lists(st.tuples(st.integers(1, 11), st.sampled_from(["again", "on", "whole letters on"])), max_size=6))
def test_a_prompt_depends_on_its_messages_alone(letters, turns):
    """The prompt is the same after any earlier requests, and with an answer cut anywhere, even within a character."""
    engine, messages = letters.worker.engine, SHORT
    history = History(engine.tokenizer)
    for limit, how in turns:
        reply = letters.post("/v1/chat/completions", {"messages": messages, "max_tokens": limit})
        tokens = history.tokens(messages)
        assert engine.asked[-1] == tokens and reply["usage"]["prompt_tokens"] == len(tokens)
        said = reply["choices"][0]["message"]["content"]
        if how != "again":
            said = said.rstrip("\ufffd") if how == "whole letters on" else said
            messages = [*messages, {"role": "assistant", "content": said}, *SHORT]
