"""Images through the APIs with the official clients; anything that is not an image is a 400."""

import base64
import io
import json
import os
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from urllib.error import HTTPError

import anthropic
import image_goldens
import mlx.core as mx
import numpy as np
import openai
import pytest
from image_models import image_directory, needs_encoder, random_image
from live_server import FakeEngine, Live, wait_for

from moeflux_mlx.errors import BadRequestError, RequestError
from moeflux_mlx.model.drafting import Drafting
from moeflux_mlx.opening.engine import open_engine
from moeflux_mlx.server import image_pool, prepare
from moeflux_mlx.server.prepare import Defaults, Preparer
from moeflux_mlx.server.request import Sampling
from moeflux_mlx.server.wire import chat as chat_api
from moeflux_mlx.server.wire.parts import MOST, without_images
from moeflux_mlx.text.tokenizer import load_tokenizer
from moeflux_mlx.vision.pixels import count_pixels

FAMILY = "qwen3_vl_moe"
MOST_TOKENS = 4


@pytest.fixture(scope="module")
def live():
    with Live(lambda: open_engine(image_directory(FAMILY), dtype=mx.float32)) as server:
        yield server


@pytest.fixture(scope="module")
def gpt(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(live):
    with anthropic.Anthropic(base_url=live.url, api_key="k", max_retries=0) as client:
        yield client


def url(number=0, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(image_goldens.png(FAMILY, number)).decode()}"


def chat(gpt, content):
    messages = [{"role": "user", "content": content}]
    return gpt.chat.completions.create(model="tiny", messages=messages, max_tokens=MOST_TOKENS)


def respond(gpt, content):
    asked = [{"role": "user", "content": content}]
    return gpt.responses.create(model="tiny", input=asked, max_output_tokens=MOST_TOKENS)


def say(claude, content):
    asked = [{"role": "user", "content": content}]
    return claude.messages.create(model="tiny", messages=asked, max_tokens=MOST_TOKENS)


def image_url(source):
    return {"type": "image_url", "image_url": {"url": source}}


def input_image(source):
    return {"type": "input_image", "image_url": source, "detail": "auto"}


ASKED = {"type": "text", "text": "what is it?"}
INPUT_ASKED = {"type": "input_text", "text": "what is it?"}


@needs_encoder
def test_all_apis_read_the_same_images(gpt, claude):
    by_chat = chat(gpt, [image_url(url(0)), ASKED, image_url(url(1))])
    alone = chat(gpt, [ASKED])
    assert by_chat.usage.prompt_tokens == alone.usage.prompt_tokens + (15 + 2) + (6 + 2)
    by_responses = respond(gpt, [input_image(url(0)), INPUT_ASKED, input_image(url(1))])
    assert by_responses.usage.input_tokens == by_chat.usage.prompt_tokens
    assert by_responses.output_text == by_chat.choices[0].message.content
    blocks = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url(i).split(",")[1]}}
        for i in range(2)
    ]
    content = [blocks[0], ASKED, blocks[1]]
    assert say(claude, content).content[0].text == by_chat.choices[0].message.content
    counted = claude.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": content}])
    assert counted.input_tokens == by_chat.usage.prompt_tokens


@needs_encoder
def test_another_image_is_another_prompt_and_the_same_one_is_known(gpt):
    first = chat(gpt, [image_url(url(0)), ASKED])
    again = chat(gpt, [image_url(url(0)), ASKED])
    other = chat(gpt, [image_url(url(1)), ASKED])
    assert again.usage.prompt_tokens_details.cached_tokens > 15
    assert again.choices[0].message.content == first.choices[0].message.content
    assert other.usage.prompt_tokens_details.cached_tokens < 15


@needs_encoder
def test_a_result_of_a_tool_may_hold_an_image(claude):
    source = {"type": "base64", "media_type": "image/png", "data": url(0).split(",")[1]}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": source}]}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "see", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    tools = [{"name": "see", "input_schema": {"type": "object"}}]
    with_image = claude.messages.count_tokens(model="tiny", messages=messages, tools=tools).input_tokens
    result["content"] = ""
    without = claude.messages.count_tokens(model="tiny", messages=messages, tools=tools).input_tokens
    assert with_image == without + 17


def png_of(width, height, data=b"", text=b""):
    """Returns a PNG that states its size and contains a compressed text."""

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header, texts = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"a\0\0" + zlib.compress(text)
    parts = [(b"IHDR", header), (b"zTXt", texts), (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    parts = [chunk(*part) for part in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def shaped(width, height):
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.zeros((height, width, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


HOSTILE = {
    "huge": (png_of(100_000, 100_000), "exceeds limit|at most 33554432 pixels"),
    "wide": (png_of(2_000_000_000, 2), "pixels|cannot be read"),
    "bomb": (png_of(1, 1, bytes(4), bytes(1 << 22)), "cannot be read: .*[Ll]arge"),
    "short": (png_of(500, 600, bytes(90_000)), "cannot be read"),
    "truncated": (None, "cannot be read"),
    "empty": (b"", "cannot be read"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be read"),
    "long": (shaped(2010, 10), "at most 200 times as long as wide"),
}


@needs_encoder
@pytest.mark.parametrize("name", HOSTILE)
def test_anything_but_an_image_is_a_400(gpt, name):
    data, said = HOSTILE[name]
    data = image_goldens.png(FAMILY, 0)[:300] if data is None else data
    with pytest.raises(openai.BadRequestError, match=said):
        chat(gpt, [image_url(f"data:image/png;base64,{base64.b64encode(data).decode()}"), ASKED])


@needs_encoder
@pytest.mark.parametrize(
    "source, said",
    [
        ("https://10.0.0.1/a.png", "not fetched from elsewhere"),
        ("file:///etc/passwd", "not fetched from elsewhere"),
        ("/etc/passwd", "not fetched from elsewhere"),
        ("data:image/png;base64,!!", "damaged"),
        ("data:image/png,abc", "of another format"),
    ],
)
def test_other_addresses_are_refused(gpt, source, said):
    with pytest.raises(openai.BadRequestError, match=said):
        chat(gpt, [image_url(source), ASKED])


SCHEMA = {
    "type": "object",
    "properties": {"wings": {"enum": [2, 4]}},
    "required": ["wings"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "owl", "schema": SCHEMA}}
TOOL = {
    "type": "function",
    "function": {"name": "count", "description": "Counts.", "strict": True, "parameters": SCHEMA},
}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


@needs_encoder
def test_reasoning_schemas_tools_and_drafts_work_beside_images(live, monkeypatch):
    """Checks an answer with reasoning, one with reasoning and a schema, one that calls a tool, and one after the tool's
    result, which is an image too; nothing before the result is computed again."""
    drafting = Drafting("lookup", most=2, fixed=True)
    monkeypatch.setattr(live.worker.engine.model, "drafting", drafting)
    asked = [{"role": "user", "content": [ASKED, image_url(url(0))]}]
    ended = str(live.post("/tokenize", {"content": "</think>"})["tokens"][-1])

    def ask(messages, **more):
        reply = live.post("/v1/chat/completions", {"messages": messages, "max_tokens": 80, **more})
        return reply["choices"][0]["message"], reply["usage"]

    thought, _ = ask(asked, **THINKING, max_tokens=4)
    assert thought["reasoning_content"] and not thought["content"]
    formed, _ = ask(asked, **THINKING, response_format=FORM, logit_bias={ended: 100})
    assert json.loads(formed["content"])["wings"] in (2, 4)
    called, usage = ask(asked, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = called["tool_calls"]
    assert json.loads(call["function"]["arguments"])["wings"] in (2, 4)
    result = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "2"}, image_url(url(1))]}
    _, more = ask([*asked, called, result], tools=[TOOL], max_tokens=4)
    assert more["prompt_tokens_details"]["cached_tokens"] >= usage["total_tokens"] - 2
    assert more["prompt_tokens"] > usage["total_tokens"] + 8 and drafting.checked


@needs_encoder
def test_each_api_refuses_other_addresses_in_its_own_form(gpt, claude):
    elsewhere, said = "https://example.com/a.png", "images are not fetched from elsewhere; send a data: URL"
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        chat(gpt, [image_url(elsewhere), ASKED])
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match=said):
        respond(gpt, [input_image(elsewhere), INPUT_ASKED])
    with pytest.raises(anthropic.BadRequestError, match=said) as refused:
        say(claude, [{"type": "image", "source": {"type": "url", "url": elsewhere}}, ASKED])
    assert refused.value.body["error"]["type"] == "invalid_request_error"


@needs_encoder
def test_text_cannot_make_a_place_for_an_image(gpt):
    said = chat(gpt, [{"type": "text", "text": "<|image_pad|>"}, image_url(url(1))])
    alone = chat(gpt, [{"type": "text", "text": "<|image_pad|>"}])
    assert said.usage.prompt_tokens == alone.usage.prompt_tokens + 8


@needs_encoder
def test_states_are_kept_at_the_same_ends_as_in_text():
    """States are kept after the system's message, after the messages before the last one, and after the last one."""
    tokenizer, token = load_tokenizer(image_directory(FAMILY)), image_goldens.special_tokens(FAMILY)[1]
    reader = SimpleNamespace(token=token, image=lambda data: random_image(FAMILY, seed=len(data)))
    preparer = Preparer(tokenizer, 256, 4096, Defaults(Sampling(temperature=0.0), {}), reader)
    parts = [[ASKED, image_url(url(0))], [image_url(url(1)), ASKED]]
    said = [("system", "Look."), ("user", parts[0]), ("assistant", "An owl."), ("user", parts[1])]
    body = {"messages": [{"role": role, "content": content} for role, content in said]}
    prepared = preparer(chat_api.read(body))
    tokens = prepared.tokens.tokens.tolist()
    assert tokens.count(token) == 2 * 12 and len(prepared.tokens.images.placed) == 2
    behind = [tokenizer.decode(tokens[place:]) for place in prepared.boundaries]
    image = f"<|vision_start|>{'<|image_pad|>' * 12}<|vision_end|>"
    assert behind[2] == "<|im_start|>assistant\n"
    assert behind[1] == f"{image}what is it?<|im_end|>\n{behind[2]}"
    assert behind[0].startswith(f"what is it?{image}<|im_end|>\n") and behind[0].endswith(behind[1])


# ---- requests beside images


class Stuck:
    """Decodes no image until `go` is set. `asked` counts requests."""

    token = 1

    def __init__(self):
        self.go, self.asked, self.reader = threading.Event(), 0, self

    def image(self, _):
        self.asked += 1
        self.go.wait(60)
        raise RequestError("the image cannot be read")


def status_of(live, path, body):
    try:
        live.post(path, body)
    except HTTPError as error:
        return error.code
    return 200


@needs_encoder
def test_nothing_waits_for_the_images_of_others(monkeypatch):
    """As many requests with images as a pool of asyncio's has threads, as many that are counted, and one too many."""
    stuck, engine = Stuck(), FakeEngine(lambda prompt: "fine")
    engine.model.vision, count = stuck, min(32, os.cpu_count() + 4)
    monkeypatch.setattr(image_pool, "REQUESTS", 2 * count)
    text, image = (
        {"max_tokens": 4, "messages": [{"role": "user", "content": content}]}
        for content in ("hello", [ASKED, {"type": "image", "source": {"type": "url", "url": url(0)}}])
    )
    counting, answering = "/v1/messages/count_tokens", "/v1/messages"
    with Live(lambda: engine) as live, ThreadPoolExecutor(2 * count) as clients:
        try:
            sent = [clients.submit(status_of, live, path, image) for path in [counting, answering] * count]
            wait_for(lambda: stuck.asked == image_pool.THREADS and live.served.images.count == 2 * count)
            began = time.monotonic()
            live.get("/health")
            assert live.post(counting, text)["input_tokens"] > 0
            assert live.post(answering, text)["usage"]["output_tokens"] > 0
            assert time.monotonic() - began < 2
            assert status_of(live, answering, image) == 503
            # The end of the server does not wait for them either.
            assert all(thread.daemon for thread in threading.enumerate() if thread.name == "image")
        finally:
            stuck.go.set()
        assert {one.result() for one in sent} == {400}


@needs_encoder
def test_the_pixels_and_bytes_of_a_request_are_bounded(gpt, monkeypatch):
    """The same image counts once."""
    pixels = [count_pixels(image_goldens.png(FAMILY, number)) for number in range(2)]
    monkeypatch.setattr(image_pool, "REQUEST_PIXELS", sum(pixels) - 1)
    chat(gpt, [image_url(url(0)), ASKED, image_url(url(0) + "#again")])
    most = rf"the images have {sum(pixels)} pixels together; at most {sum(pixels) - 1}: send fewer"
    with pytest.raises(openai.BadRequestError, match=most):
        chat(gpt, [image_url(url(0)), ASKED, image_url(url(1))])
    monkeypatch.setattr(prepare, "MAX_BODY", 100)
    with pytest.raises(openai.BadRequestError, match=r"the images have \d+ bytes together; at most 100"):
        chat(gpt, [image_url(url(0)), ASKED])


def test_the_pixels_in_flight_are_bounded():
    budget = image_pool.PixelBudget(10)
    with budget.hold(6), budget.hold(4):
        with pytest.raises(BadRequestError) as refused, budget.hold(1):
            pass
        assert (refused.value.status, refused.value.code) == (503, "overloaded")
    with pytest.raises(RequestError), budget.hold(10):
        raise RequestError("the image cannot be read")
    with budget.hold(10):
        pass


# ---- bodies


def test_marks_stand_in_texts_where_images_were():
    image = {"type": "image_url", "image_url": {"url": "data:one"}}
    parts = [image, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {**image, "image_url": "data:two"}]
    body, images = without_images({"messages": [{"role": "user", "content": parts}], "model": "m"}, "messages")
    one, two = (f"{images.letters}{n}." for n in range(2))
    texts = [part["text"] for part in body["messages"][0]["content"]]
    assert texts == [f"{one}a", f"b{two}"] and images.sources == ["data:one", "data:two"]
    assert images.replaced(f"x{two}y{one}", "IMG") == ("xIMGyIMG", ["data:two", "data:one"])
    assert json.loads(json.dumps(body)) == body


@pytest.mark.parametrize("parts", [[{"type": "image_url"}], [{"type": "image", "source": {"type": "file"}}]])
def test_a_part_without_an_image_is_refused(parts):
    with pytest.raises(BadRequestError, match="messages\\[0\\].content\\[0\\]"):
        without_images({"messages": [{"role": "user", "content": parts}]}, "messages")


def test_too_many_images_are_refused():
    parts = [{"type": "image_url", "image_url": "data:"}] * (MOST + 1)
    with pytest.raises(BadRequestError, match=f"33 images; at most {MOST}"):
        without_images({"messages": [{"role": "user", "content": parts}]}, "messages")
