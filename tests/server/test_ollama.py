"""Ollama's API, driven by its official clients for Python and JavaScript."""

import json
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live_server import FakeEngine, Live, demo_engine, wait_for
from test_switch import Loads, statuses
from test_tools import CALL, TOOL

from moeflux_mlx.errors import BadRequestError
from moeflux_mlx.server.wire import chat, ollama

client_library = pytest.importorskip("ollama", reason="the Python client of Ollama is not installed")
HI = [{"role": "user", "content": "Tell me a story about Mira, who can talk to owls."}]
FIXED = {"num_predict": 12, "num_ctx": 4096, "num_thread": 2, "anything": 1}
JS = r"""
import { Ollama } from "ollama"
const client = new Ollama({ host: process.argv[2] })
const ask = { model: "m", messages: JSON.parse(process.argv[3]), options: { num_predict: 12 } }
let text = ""
for await (const part of await client.chat({ ...ask, stream: true })) text += part.message.content
const whole = await client.chat(ask)
console.log(JSON.stringify({ text, whole, models: await client.list(), shown: await client.show({ model: "m" }) }))
"""


@pytest.fixture(scope="module")
def live():
    with Live(demo_engine) as live:
        yield live


@pytest.fixture(scope="module")
def client(live):
    with client_library.Client(host=live.url) as client:
        yield client


def by_openai(live, **more):
    reply = live.post("/v1/chat/completions", {"messages": HI, "max_tokens": 12, **more})
    return reply["choices"][0]["message"]["content"], reply["usage"]


def test_a_chat_is_that_of_the_other_apis(live, client):
    text, usage = by_openai(live)
    whole = client.chat("demo:latest", HI, options=FIXED)
    assert whole.message.content == text and whole.message.role == "assistant"
    assert (whole.done, whole.done_reason, whole.model) == (True, "length", "demo")
    assert (whole.prompt_eval_count, whole.eval_count) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert whole.total_duration >= whole.eval_duration > 0
    parts = list(client.chat("demo", HI, options=FIXED, stream=True))
    assert "".join(part.message.content for part in parts) == text
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True] and parts[-1].eval_count == 12


def test_a_prompt_is_generated_from_with_the_template_or_raw(live, client):
    text, _ = by_openai(live)
    assert client.generate("m", HI[0]["content"], options=FIXED).response == text
    parts = list(client.generate("m", HI[0]["content"], options=FIXED, stream=True))
    assert "".join(part.response for part in parts) == text
    raw = client.generate("m", "Once upon a time", raw=True, options=FIXED).response
    plain = live.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 12})
    assert raw == plain["choices"][0]["text"]


def test_options_formats_and_logprobs_are_those_of_a_chat(live, client):
    drawn = {"temperature": 0.9, "top_k": 20, "seed": 7, "repeat_penalty": 1.2, "stop": ["owl"]}
    text, _ = by_openai(live, **drawn)
    assert client.chat("m", HI, options={**drawn, **FIXED}).message.content == text
    schema = {"type": "object", "properties": {"owl": {"type": "boolean"}}, "required": ["owl"]}
    schema["additionalProperties"] = False
    assert set(json.loads(client.chat("m", HI, format=schema).message.content)) == {"owl"}
    told = client.chat("m", HI, options=FIXED, logprobs=True, top_logprobs=2)
    assert "".join(one.token for one in told.logprobs) == told.message.content
    assert [len(one.top_logprobs) for one in told.logprobs] == [2] * len(told.logprobs)


def test_what_is_not_served_is_refused_by_name(client):
    for more, name in (
        ({"options": {"mirostat": 2}}, "mirostat"),
        ({"options": {"num_predict": 0}}, "options.num_predict"),
        ({"think": "maybe"}, "think"),
    ):
        with pytest.raises(client_library.ResponseError, match=f"^{name} is ") as caught:
            client.chat("m", HI, **more)
        assert caught.value.status_code == 400
    with pytest.raises(client_library.ResponseError, match="^template is .*the model's own template is used"):
        client.generate("m", "hi", template="{{ .Prompt }}")
    named = {"role": "tool", "tool_name": 4, "content": "x"}
    with pytest.raises(BadRequestError, match=r"^messages\[0\].tool_name is 4"):
        ollama.Ollama(chats=True).read({"model": "m", "messages": [named]})
    with pytest.raises(client_library.ResponseError, match="^suffix was sent; this model has no marks"):
        client.generate("m", "def f(", suffix="return")


def test_a_request_without_a_text_loads_or_unloads_the_model():
    loads = Loads("a", "b")
    with (
        Live(loads.of) as live,
        client_library.Client(host=live.url) as client,
        ThreadPoolExecutor(1) as clients,
    ):
        loaded = client.generate("b", "", images=["aGk="])
        assert (loaded.response, loaded.done, loaded.done_reason) == ("", True, "load") and loads.order == ["a", "b"]
        (loaded,) = client.chat("a", [], keep_alive="5m", stream=True)
        assert (loaded.message.role, loaded.message.content, loaded.done_reason) == ("assistant", "", "load")
        assert loads.order == ["a", "b", "a"] and live.models.loaded.choice.name == "a"
        for time in (0, "0s", 0.0, "0"):
            assert client.generate("b", keep_alive=time).done_reason == "unload"
        assert statuses(live)["a"] == "loaded" and client.chat("a", HI, keep_alive=0).message.content == "a"
        loads.may_answer.clear()
        running = clients.submit(client.chat, "a", HI)
        wait_for(lambda: live.worker.running)
        assert client.chat("a", [], keep_alive=0).done_reason == "unload" and statuses(live)["a"] == "loaded"
        loads.may_answer.set()
        assert running.result().message.content == "a"
        wait_for(lambda: statuses(live)["a"] == "unloaded" and loads.engines["a"].experts.closed)
        assert client.chat("a", HI).message.content == "a" and loads.order == ["a", "b", "a", "a"]
        with pytest.raises(client_library.ResponseError, match="the model 'c' does not exist"):
            client.generate("c")


def test_a_request_to_load_recalls_an_earlier_one_to_unload():
    loads = Loads("a")
    with (
        Live(loads.of) as live,
        client_library.Client(host=live.url) as client,
        ThreadPoolExecutor(1) as clients,
    ):
        loads.may_answer.clear()
        running = clients.submit(client.chat, "a", HI)
        wait_for(lambda: live.worker.running)
        assert [client.chat("a", [], keep_alive=time).done_reason for time in (0, "5m")] == ["unload", "load"]
        loads.may_answer.set()
        assert running.result().message.content == "a"
        assert [client.chat("a", HI).message.content for _ in range(2)] == ["a", "a"] and loads.order == ["a"]


def test_a_model_that_is_being_loaded_is_unloaded_as_soon_as_it_is_loaded():
    loads, may_load = Loads("a", "b"), threading.Event()
    slow = {"a": loads.of["a"], "b": lambda: may_load.wait(60) and loads.load("b")}
    with Live(slow) as live, client_library.Client(host=live.url) as client, ThreadPoolExecutor(1) as clients:
        asked = clients.submit(client.chat, "b", [])
        wait_for(lambda: statuses(live)["b"] == "loading")
        assert client.chat("b", [], keep_alive=0).done_reason == "unload"
        may_load.set()
        assert asked.result().done_reason == "load"
        wait_for(lambda: statuses(live)["b"] == "unloaded" and loads.engines["b"].experts.closed)


def test_clients_see_the_models(live, client):
    (model,) = client.list().models
    assert model.model == "tiny" and model.modified_at.year >= 2026
    shown = client.show("tiny:latest")
    assert shown.capabilities[0] == "completion" and shown.modelinfo["moeflux.context_length"] > 0
    assert json.loads(live.get("/api/version")) == {"version": ollama.API}


@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_reasoning(stream):
    prompts = []

    def script(prompt):
        prompts.append(prompt)
        return "</think>It is 18 C." if "<tool_response>" in prompt else f"I must look.</think>I look.\n\n{CALL}"

    with Live(lambda: FakeEngine(script)) as live, client_library.Client(host=live.url) as client:
        asked = client.chat("m", HI, tools=[TOOL], think=True, stream=stream)
        parts = list(asked) if stream else [asked]
        (call,) = [call for part in parts for call in part.message.tool_calls or ()]
        assert (call.function.name, call.function.arguments) == ("weather", {"city": "Paris"})
        assert "".join(part.message.thinking or "" for part in parts).strip() == "I must look."
        assert "".join(part.message.content or "" for part in parts).strip() == "I look."
        assert parts[-1].done_reason == "stop"
        called = {"role": "assistant", "content": "I look.", "tool_calls": [call.model_dump()]}
        result = {"role": "tool", "content": "18", "tool_name": "weather"}
        assert client.chat("m", [*HI, called, result], tools=[TOOL]).message.content == "It is 18 C."
        client.chat("m", HI, think=False)
        assert prompts[-1].endswith("</think>\n\n") and not prompts[0].endswith("</think>\n\n")


def test_images_are_those_of_a_chat():
    request = ollama.Ollama(chats=True).read({"model": "m", "messages": [{**HI[0], "images": ["aGk="]}]})
    part = {"type": "image_url", "image_url": {"url": "data:;base64,aGk="}}
    content = [{"type": "text", "text": HI[0]["content"]}, part]
    assert request.images.sources == ["data:;base64,aGk="] and request.stream
    assert len(request.messages) == len(chat.read({"messages": [{"role": "user", "content": content}]}).messages) == 1
    generated = ollama.Ollama(chats=False).read(
        {"model": "m", "prompt": "hi", "system": "Be brief.", "images": ["aGk="]}
    )
    assert [one["role"] for one in generated.messages] == ["system", "user"] and generated.images.sources
    for more in ({"raw": True}, {"suffix": "end"}):
        with pytest.raises(BadRequestError, match="^images is .*none beside raw or suffix"):
            ollama.Ollama(chats=False).read({"model": "m", "prompt": "hi", "images": ["aGk="], **more})
    with pytest.raises(BadRequestError, match="images"):
        ollama.Ollama(chats=True).read({"model": "m", "messages": [{**HI[0], "images": [1]}]})


def test_the_official_client_for_javascript(live, tmp_path):
    node, library = shutil.which("node"), Path(__file__).parents[2] / "node_modules" / "ollama"
    if node is None or not library.exists():
        pytest.skip("Node.js or what `npm install ollama` installs is missing")
    script = tmp_path / "client.mjs"
    script.write_text(JS.replace('"ollama"', json.dumps(str(library / "dist" / "index.mjs"))))
    command = [node, str(script), live.url, json.dumps(HI)]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)
    text, _ = by_openai(live)
    assert said["text"] == said["whole"]["message"]["content"] == text
    assert said["models"]["models"][0]["name"] == "tiny" and "completion" in said["shown"]["capabilities"]
