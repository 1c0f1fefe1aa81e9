"""A live server with the demo model, called by the official clients and by hand."""

import contextlib
import copy
import json
import os
import resource
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.error import HTTPError
from urllib.request import urlopen

import anthropic
import openai
import pydantic
import pytest
from live_server import FakeEngine, Live, demo_engine, wait_for
from tiny_heads import headed_directory

from moeflux_mlx.driving import loop
from moeflux_mlx.driving.session import Session
from moeflux_mlx.errors import DeviceError
from moeflux_mlx.opening.engine import open_engine
from moeflux_mlx.planning.machine import used_memory
from moeflux_mlx.server import live as live_module
from moeflux_mlx.server.running import Totals

QUESTION = [{"role": "user", "content": "Tell me a story about Mira, who can talk to owls."}]


@pytest.fixture(scope="module")
def live():
    with Live(demo_engine) as server:
        yield server


@pytest.fixture(scope="module")
def chat(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(live):
    with anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0) as client:
        yield client


def test_models(chat, claude):
    (model,) = chat.models.list().data
    assert model.id == "tiny" and chat.models.retrieve("anything").id == "anything"
    assert claude.models.list().data[0].id == "tiny"


def test_chat_streams_the_text_of_the_whole_reply(chat):
    options = {"model": "m", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = chat.chat.completions.create(**options)
    assert whole.model == "m" and whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 24 and whole.usage.prompt_tokens > 10
    chunks = list(chat.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content and said
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens and not chunks[-1].choices
    assert len({chunk.id for chunk in chunks}) == 1
    assert whole.usage.prompt_tokens_details.cached_tokens < whole.usage.prompt_tokens


def test_chat_with_the_stream_helper(chat):
    with chat.chat.completions.stream(model="m", messages=QUESTION, stop=["girl"]) as stream:
        kinds = {event.type for event in stream}
    assert "content.delta" in kinds and stream.get_final_completion().choices[0].message.content


def test_a_second_turn_computes_only_new_tokens(chat):
    first = chat.chat.completions.create(model="m", messages=QUESTION, max_tokens=40)
    more = [*QUESTION, first.choices[0].message, {"role": "user", "content": "And then?"}]
    usage = chat.chat.completions.create(model="m", messages=more, max_tokens=4).usage
    assert usage.prompt_tokens_details.cached_tokens >= first.usage.total_tokens - 2


def test_the_same_seed_gives_the_same_text(chat):
    options = {"model": "m", "messages": QUESTION, "max_tokens": 16, "temperature": 1.5}
    said = [chat.chat.completions.create(**options, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2]


def test_a_top_p_of_nothing_takes_the_likeliest(chat):
    options = {"model": "m", "messages": QUESTION, "max_tokens": 16}
    said = [
        chat.chat.completions.create(**options, **more).choices[0].message.content
        for more in ({"temperature": 0}, {"temperature": 2, "top_p": 0})
    ]
    assert said[0] == said[1]


def test_a_conversation_is_known_by_its_header_or_field(live, chat):
    taken, take = [], live.worker.sessions.take
    live.worker.sessions.take = lambda tokens, hint=None: taken.append(hint) or take(tokens, hint)
    for more in (
        {"extra_headers": {"X-Claude-Code-Session-Id": "a"}},
        {"extra_headers": {"session_id": "b"}},
        {"extra_headers": {"session_id": "b"}, "prompt_cache_key": "c"},
        {},
    ):
        chat.chat.completions.create(model="m", messages=QUESTION, max_tokens=1, **more)
    live.worker.sessions.take = take
    assert taken == ["a", "b", "c", None]


def test_a_stream_that_is_polled_but_not_read_ends(live):
    import urllib.request

    for path in ("/live", "/", "/health", "/v1/models"):
        with urllib.request.urlopen(urllib.request.Request(f"{live.url}{path}", method="HEAD"), timeout=5) as reply:
            assert reply.status == 200 and reply.read() == b""


def test_stop_texts(chat):
    whole = chat.chat.completions.create(model="m", messages=QUESTION, max_tokens=40).choices[0].message.content
    word = whole.split()[5]
    choice = chat.chat.completions.create(model="m", messages=QUESTION, max_tokens=40, stop=[word]).choices[0]
    assert choice.message.content == whole[: whole.index(word)] and choice.finish_reason == "stop"


def test_logprobs(chat):
    choice = chat.chat.completions.create(
        model="m", messages=QUESTION, max_tokens=6, logprobs=True, top_logprobs=3
    ).choices[0]
    content = choice.logprobs.content
    assert "".join(token.token for token in content) == choice.message.content
    for token in content:
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].token == token.token
        assert token.bytes == list(token.token.encode()) and token.logprob == token.top_logprobs[0].logprob


def test_logprobs_of_what_was_held_back_for_a_stop_text(chat):
    options = {"model": "m", "messages": QUESTION, "max_tokens": 6, "logprobs": True}
    whole = chat.chat.completions.create(**options).choices[0]
    held = chat.chat.completions.create(**options, stop=[whole.message.content[-3:] + "x"]).choices[0]
    assert held.message.content == whole.message.content and held.logprobs == whole.logprobs


def test_a_client_that_leaves_within_its_body_is_not_an_error(live, capfd):
    head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost:{live.port}\r\nContent-Type: application/json\r\n"
    live.raw(f"{head}Content-Length: 100\r\n\r\n{{".encode(), seconds=0.2)
    wait_for(lambda: 'path="/v1/responses",status="499"' in live.get("/metrics"))
    assert "a request failed" not in capfd.readouterr().err


def test_errors_that_only_the_servers_owner_can_fix_are_in_its_log(chat, monkeypatch, capfd):
    def ends(*_, **__):
        raise DeviceError("computing failed: Caused GPU Timeout Error; give a smaller --prefill-step-size")

    monkeypatch.setattr(Session, "answer", ends)
    with pytest.raises(openai.InternalServerError, match="computing failed .DeviceError.") as told:
        chat.chat.completions.create(model="m", messages=QUESTION, max_tokens=4)
    assert "--prefill-step-size" in capfd.readouterr().err and "--prefill" not in str(told.value)


def test_a_step_that_the_device_refuses_ends_its_answers_and_no_others(chat, monkeypatch):
    def refuses(_):
        monkeypatch.undo()
        raise DeviceError("memory is at an end; give --context less")

    options = {"model": "m", "messages": QUESTION, "max_tokens": 4}
    before = chat.chat.completions.create(**options).choices[0].message.content
    monkeypatch.setattr(loop, "advance_together", refuses)
    with pytest.raises(openai.InternalServerError, match="DeviceError"):
        chat.chat.completions.create(**options)
    assert chat.chat.completions.create(**options).choices[0].message.content == before


def test_bias_and_penalties(chat, live):
    first = live.post("/tokenize", {"content": "Once"})["tokens"][0]
    banned = chat.chat.completions.create(model="m", messages=QUESTION, max_tokens=4, logit_bias={str(first): -100})
    assert not banned.choices[0].message.content.startswith("Once")
    options = {"model": "m", "messages": QUESTION, "max_tokens": 60}
    plain = chat.chat.completions.create(**options).choices[0].message.content
    other = chat.chat.completions.create(**options, frequency_penalty=2, presence_penalty=2).choices[0].message.content
    assert len(set(other.split())) / len(other.split()) > len(set(plain.split())) / len(plain.split())


def test_structured_output(chat):
    schema = {
        "type": "object",
        "properties": {"owl": {"type": "boolean"}, "wings": {"enum": [2, 4]}},
        "required": ["owl", "wings"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    choice = chat.chat.completions.create(model="m", messages=QUESTION, response_format=form).choices[0]
    said = json.loads(choice.message.content)
    assert choice.finish_reason == "stop" and type(said["owl"]) is bool and said["wings"] in (2, 4)
    form["json_schema"]["schema"] = {"type": "object", "unevaluatedProperties": False, "not": {}}
    with pytest.raises(openai.BadRequestError, match="not|unevaluatedProperties"):
        chat.chat.completions.create(model="m", messages=QUESTION, response_format=form)


def test_a_schema_for_a_model_whose_end_is_no_token_is_refused():
    served = FakeEngine(lambda prompt: "</think>Yes.")
    served.tokenizer = copy.copy(served.tokenizer)
    served.tokenizer.eos_token_ids = {248044}
    body = {"messages": QUESTION, "response_format": {"type": "json_object"}}
    with Live(lambda: served) as live, pytest.raises(HTTPError) as told:
        live.post("/v1/chat/completions", body)
    with told.value as error:
        assert error.code == 400 and b"248044, which its tokenizer does not have" in error.read()


def test_an_answer_that_has_begun_is_the_same_answer(chat):
    options = {"model": "m", "max_tokens": 24, "temperature": 0}
    whole = chat.chat.completions.create(**options, messages=QUESTION).choices[0].message.content
    words = " ".join(whole.split(" ")[:5])
    begun = [*QUESTION, {"role": "assistant", "content": words}]
    assert whole.removeprefix(words).startswith(
        chat.chat.completions.create(**options | {"max_tokens": 5}, messages=begun).choices[0].message.content
    )


def test_a_begun_answer_keeps_to_its_schema(claude):
    schema = {"type": "object", "properties": {"wings": {"enum": [2, 4]}}, "additionalProperties": False}
    options = {"model": "m", "max_tokens": 40, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    begun = [*QUESTION, {"role": "assistant", "content": '{"wings":'}]
    said = claude.messages.create(messages=begun, **options).content[0].text
    assert json.loads('{"wings":' + said)["wings"] in (2, 4)
    with pytest.raises(anthropic.BadRequestError, match="beginning of the answer"):
        claude.messages.create(messages=[*QUESTION, {"role": "assistant", "content": "Sure: "}], **options)


def test_structured_messages(claude):
    class Owl(pydantic.BaseModel):
        owl: bool
        wings: Literal[2, 4]

    message = claude.messages.parse(model="m", messages=QUESTION, max_tokens=60, output_format=Owl)
    assert message.parsed_output.wings in (2, 4) and message.stop_reason == "end_turn"
    with pytest.raises(anthropic.BadRequestError, match="cannot be enforced"):
        form = {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}
        claude.messages.create(model="m", messages=QUESTION, max_tokens=9, output_config={"format": form})


def test_completions(chat):
    options = {"model": "m", "prompt": "Once there was", "max_tokens": 8}
    whole = chat.completions.create(**options)
    streamed = "".join(chunk.choices[0].text for chunk in chat.completions.create(**options, stream=True))
    assert streamed == whole.choices[0].text and whole.id and whole.choices[0].finish_reason == "length"


def test_messages(claude):
    options = {"model": "m", "messages": QUESTION, "max_tokens": 12}
    whole = claude.messages.create(**options)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 12
    with claude.messages.stream(**options) as stream:
        said = "".join(stream.text_stream)
        assert said == whole.content[0].text
    usage = stream.get_final_message().usage
    counted = claude.messages.count_tokens(model="m", messages=QUESTION).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == counted


def test_responses(chat):
    options = {"model": "m", "input": QUESTION[0]["content"], "max_output_tokens": 12}
    whole = chat.responses.create(**options)
    assert whole.status == "incomplete" and whole.usage.output_tokens == 12
    form = {"type": "json_schema", "name": "x", "schema": {"enum": ["an owl"]}}
    with chat.responses.stream(model="m", input=QUESTION[0]["content"], text={"format": form}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert json.loads(final.output_text) == "an owl" and final.status == "completed"


def test_a_request_that_does_not_fit_names_both_numbers(chat, claude):
    long = [{"role": "user", "content": "owl " * 2000}]
    with pytest.raises(openai.BadRequestError, match=r"prompt is too long: \d+ tokens > 1024 maximum") as error:
        chat.chat.completions.create(model="m", messages=long)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        claude.messages.create(model="m", messages=long, max_tokens=4)


def test_text_far_beyond_the_context_is_not_tokenised_whole(live, chat, monkeypatch):
    tokenizer, encoded = live.worker.state.engine.tokenizer, []
    for name in ("encode", "encode_after"):
        real = getattr(tokenizer, name)

        def counting(text, *more, real=real, **options):
            encoded.append(len(text))
            return real(text, *more, **options)

        monkeypatch.setattr(tokenizer, name, counting)
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "owl " * 500_000}]}),
        ("/v1/completions", {"prompt": "owl " * 500_000}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "owl " * 500_000}]}),
        ("/tokenize", {"content": "owl " * 500_000}),
    ):
        with pytest.raises(openai.BadRequestError, match=r"too long: (\d+) tokens > 1024 maximum \(at least") as error:
            chat.post(f"{live.url}{path}", body=body, cast_to=object)
        assert error.value.code == "context_length_exceeded" or "messages" in path
        assert 2048 <= int(error.value.message.split(" tokens >")[0].split()[-1]) < 40_000
    assert sum(encoded) < 400_000
    # A text that only looks too long is counted in pieces, and served.
    monkeypatch.setattr("moeflux_mlx.server.prepare.SUSPECT", 1)
    monkeypatch.setattr("moeflux_mlx.server.prepare.PIECE", 64)
    words = [{"role": "user", "content": "Tell me of an owl. " * 150}]
    assert chat.chat.completions.create(model="m", messages=words, max_tokens=1).usage.prompt_tokens < 1024


def test_a_limit_beyond_the_context_is_cut(chat):
    words = [{"role": "user", "content": "owl " * 980}]
    usage = chat.chat.completions.create(model="m", messages=words, max_tokens=100000).usage
    assert usage.prompt_tokens > 980 and usage.total_tokens <= 1024


def test_health_metrics_and_page(live):
    assert json.loads(live.get("/health")) == {"status": "ok"}
    text = live.get("/metrics")
    assert "\n# HELP moeflux_tokens_generated_total Tokens" in text and 'path="/health",status="200"' in text
    assert "moeflux" in live.get("/").lower()


def test_tokenize(live):
    tokens = live.post("/tokenize", {"content": "Once there was"})["tokens"]
    assert live.worker.state.engine.tokenizer.decode(tokens) == "Once there was"


def test_the_last_report_on_a_prompt_comes_with_the_first_token_even_if_that_has_no_text(chat):
    settings = {"model": "m", "messages": QUESTION, "logit_bias": {"3": 100}}  # the token that ends an answer
    stream = chat.chat.completions.create(**settings, stream=True, extra_body={"return_progress": True})
    chunks = [chunk.to_dict() for chunk in stream]
    *_, last = (chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk)
    assert last["processed"] == last["total"] > 0
    assert not any(choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"])


def next_picture(reply):
    line = ""
    while not line.startswith("data: "):
        line = reply.readline().decode()
    return json.loads(line[6:])


def test_live_pictures(live, chat):
    import urllib.request

    reply = urllib.request.urlopen(f"{live.url}/live", timeout=20)
    replies, settings = [], {"model": "m", "messages": QUESTION, "max_tokens": 100}
    thread = threading.Thread(target=lambda: replies.append(chat.chat.completions.create(**settings)))
    thread.start()
    pictures = [next_picture(reply)]
    while thread.is_alive():
        pictures.append(next_picture(reply))
    thread.join()
    pictures.append(next_picture(reply))  # a GPU may answer between two pictures
    picture, timings = pictures[-1], replies[0].timings
    assert picture["experts"] == 16 and picture["layers"] == list(range(8)) and picture["context"] == 1024
    assert picture["memory"]["used"] > 0 == picture["memory"]["given_back"]
    assert any(one["tokens_per_second"] > 0 for one in pictures)
    rates = {
        "prompt_tokens_per_second": pytest.approx(1000 * timings["prompt_n"] / timings["prompt_ms"], rel=0.3),
        "tokens_per_second": pytest.approx(1000 * timings["predicted_n"] / timings["predicted_ms"], rel=0.3),
    }
    shown = (next_picture(reply)["request"] for _ in range(10))
    assert any({name: request[name] for name in rates} == rates for request in shown), "those of the whole answer"
    reply.close()


def test_a_client_that_leaves_stops_the_work(live):
    endless = {"1": -100, "3": -100}  # not a token that ends an answer
    body = json.dumps({"model": "m", "messages": QUESTION, "max_tokens": 900, "logit_bias": endless}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    before = live.models.totals.cancelled
    for stream in (b"false", b"true"):
        sent = body[:-1] + b', "stream": ' + stream + b"}"
        with socket.create_connection(("127.0.0.1", live.port)) as connection:
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(sent) + sent)
            wait_for(lambda: live.worker.state.running)
        wait_for(lambda: live.worker.state.running == [], 5)
    assert live.models.totals.cancelled == before + 2


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux lists the open files of a process there")
def test_too_many_open_files_are_reported_once(capfd):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Live(lambda: FakeEngine(lambda prompt: "</think>Hi")) as live, contextlib.ExitStack() as held:
        clients = [held.enter_context(socket.socket()) for _ in range(3)]
        open_files = [int(fd.name) for fd in Path("/proc/self/fd").iterdir()]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(open_files) + 1, limits[1]))
            with contextlib.suppress(OSError):
                while True:
                    held.enter_context(open(os.devnull))
            for client in clients:
                client.connect(("127.0.0.1", live.port))
            assert used_memory() > 0  # the model's thread asks while the page is watched
            time.sleep(1.1)  # asyncio tries again after a second
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        wait_for(lambda: '"ok"' in live.get("/health"))
    said = capfd.readouterr().err
    assert said.count("a connection cannot be accepted: Too many open files; raise the limit") == 1
    assert "Traceback" not in said and "out of system resource" not in said


def test_unknown_paths_and_methods(live):
    for path, status in (("/v1/nothing", 404), ("/v1/messages", 405)):
        with pytest.raises(HTTPError) as error:
            live.get(path)
        body = json.loads(error.value.read())
        assert error.value.code == status and body["error"]["message"]
        assert (body.get("type") == "error") == path.startswith("/v1/messages")


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
        engine = live.worker.state.engine
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
    watch.begin()
    for _ in range(2):
        watch.look(engine, [], 0, Totals())
    return watch.latest
