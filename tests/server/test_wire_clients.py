"""The official clients with our own transport: they accept every event and collect what `whole` returns."""

import anthropic
import httpx2
import openai
import pytest
from anthropic.types import Message, ModelInfo, RawMessageStreamEvent
from grids import examples
from hypothesis import given, settings
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from wire_events import SCENES, decoded, fixed_ids, rows, sent

from moeflux_mlx.server import about
from moeflux_mlx.server.request import Failed
from moeflux_mlx.server.wire import chat, completions, messages, replies, responses

HI = [{"role": "user", "content": "hi"}]
CHAT = chat.read({"model": "m", "messages": HI, "stream_options": {"include_usage": True}})
COMPLETION = completions.read({"model": "m", "prompt": "hi"})
MESSAGE = messages.read({"model": "m", "messages": HI})
PATCH = {"type": "custom", "name": "apply_patch"}
RESPONSE = responses.read({"model": "m", "input": "hi", "tools": [PATCH]})


class Server:
    """Answers every request of a client with given data."""

    def __init__(self):
        self.status, self.body, self.kind, self.headers = 200, b"", "text/event-stream", {}
        self.http = httpx2.Client(transport=httpx2.MockTransport(self._answer))

    def _answer(self, request):
        return httpx2.Response(self.status, content=self.body, headers={"content-type": self.kind, **self.headers})

    def streams(self, body):
        self.status, self.body, self.kind = 200, body, "text/event-stream"

    def refuses(self, status, error):
        self.status, self.body, self.kind = status, httpx2.Response(200, json=error).content, "application/json"
        self.headers = replies.error_headers(status)


SERVER = Server()
OPENAI = openai.OpenAI(api_key="k", base_url="http://moeflux/v1", http_client=SERVER.http, max_retries=0)
ANTHROPIC = anthropic.Anthropic(api_key="k", base_url="http://moeflux", http_client=SERVER.http, max_retries=0)
MESSAGE_EVENT, RESPONSE_EVENT = TypeAdapter(RawMessageStreamEvent), TypeAdapter(ResponseStreamEvent)
SAID = {"model": "m", "messages": HI}


def final_completion(stream):
    """Returns the completion, also of a cut answer, which the client's parser calls an error."""
    try:
        return stream.get_final_completion()
    except openai.LengthFinishReasonError as error:
        return error.completion


def is_cut(events):
    """Returns whether the last call is incomplete."""
    return type(events[-2]).__name__ in ("CallStart", "CallDelta")


@settings(max_examples=examples(40))
@given(rows())
def test_openai_chat(events):
    SERVER.streams(sent(chat, CHAT, events, waits=(0, 1, 3)))
    with OPENAI.chat.completions.stream(**SAID) as stream:
        if isinstance(events[-1], Failed):
            with pytest.raises(openai.APIError, match="the disk failed"):
                stream.until_done()
            return
        gathered = final_completion(stream)
    whole = ChatCompletion.model_validate(chat.whole(CHAT, events, fixed_ids()))
    mine, theirs = gathered.choices[0], whole.choices[0]
    assert (gathered.id, gathered.usage, mine.finish_reason) == (whole.id, whole.usage, theirs.finish_reason)
    assert (mine.message.role, mine.message.content or "") == ("assistant", theirs.message.content or "")
    for message in (mine.message, theirs.message):
        message.reasoning_content = getattr(message, "reasoning_content", "")
    assert mine.message.reasoning_content == theirs.message.reasoning_content
    calls = [(call.id, call.function.name, call.function.arguments) for call in mine.message.tool_calls or ()]
    assert calls[: len(calls) - is_cut(events)] == [
        (call.id, call.function.name, call.function.arguments) for call in theirs.message.tool_calls or ()
    ]


@settings(max_examples=examples(20))
@given(rows())
def test_openai_completions(events):
    SERVER.streams(sent(completions, COMPLETION, events, waits=(0, 2)))
    stream = OPENAI.completions.create(model="m", prompt="hi", stream=True)
    if isinstance(events[-1], Failed):
        with pytest.raises(openai.APIError, match="the disk failed"):
            list(stream)
        return
    choices = [choice for chunk in stream for choice in chunk.choices]
    whole = Completion.model_validate(completions.whole(COMPLETION, events))
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert choices[-1].finish_reason == whole.choices[0].finish_reason


@settings(max_examples=examples(40))
@given(rows())
def test_anthropic_messages(events):
    SERVER.streams(sent(messages, MESSAGE, events, waits=(0, 1, 3)))
    if isinstance(events[-1], Failed):
        with (
            pytest.raises(anthropic.APIStatusError, match="the disk failed"),
            ANTHROPIC.messages.stream(**SAID, max_tokens=9) as stream,
        ):
            stream.until_done()
        return
    with ANTHROPIC.messages.stream(**SAID, max_tokens=9) as stream:
        gathered = stream.get_final_message().to_dict()
    whole = messages.whole(MESSAGE, events, fixed_ids())
    Message.model_validate(whole)
    content = [{key: block[key] for key in block if key not in ("parsed_output",)} for block in gathered["content"]]
    assert content[: len(content) - is_cut(events)] == whole["content"]
    for key in ("id", "role", "model", "stop_reason", "stop_sequence"):
        assert gathered[key] == whole[key]
    counts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens")
    assert {key: gathered["usage"][key] for key in counts} == {key: whole["usage"][key] for key in counts}


@settings(max_examples=examples(40))
@given(rows())
def test_openai_responses(events):
    SERVER.streams(sent(responses, RESPONSE, events, waits=(0, 1, 3)))
    with OPENAI.responses.stream(model="m", input="hi") as stream:
        told = list(stream)
    final = told[-1].response
    if isinstance(events[-1], Failed):
        assert (told[-1].type, final.error.message) == ("response.failed", "the disk failed")
        return
    whole = Response.model_validate(responses.whole(RESPONSE, events, fixed_ids()))
    assert told[-1].type == f"response.{whole.status}"
    assert (final.id, final.usage, final.output_text) == (whole.id, whole.usage, whole.output_text)
    assert [item.to_dict().keys() >= {"id", "type"} for item in final.output] == [True] * len(whole.output)
    assert [(item.type, item.id) for item in final.output] == [(item.type, item.id) for item in whole.output]


@settings(max_examples=examples(30))
@given(rows())
def test_each_event_is_of_the_clients_own_types(events):
    """The clients build types without checking them; here their pydantic models check."""
    reply = [data for _, data in decoded(sent(chat, CHAT, events, waits=(0, 2)))]
    for data in reply[:-1]:
        if "error" not in data:
            ChatCompletionChunk.model_validate(data)
    for data in [data for _, data in decoded(sent(completions, COMPLETION, events))][:-1]:
        if "error" not in data and data["choices"][0]["finish_reason"]:
            Completion.model_validate(data)
    for name, data in decoded(sent(messages, MESSAGE, events)):
        if name not in ("ping", "error"):
            MESSAGE_EVENT.validate_python(data)
    for _, data in decoded(sent(responses, RESPONSE, events)):
        RESPONSE_EVENT.validate_python(data)


def test_errors():
    long = replies.context_exceeded(30000, 8192)
    SERVER.refuses(long.status, replies.openai_error(long.status, long.code, str(long), "messages"))
    with pytest.raises(openai.BadRequestError, match="30000 tokens > 8192") as caught:
        OPENAI.chat.completions.create(**SAID)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    SERVER.refuses(long.status, replies.anthropic_error(long.status, long.code, str(long), None))
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 30000 tokens > 8192 maximum") as other:
        ANTHROPIC.messages.create(**SAID, max_tokens=9)
    assert other.value.body["error"]["type"] == "invalid_request_error"
    assert "set by" not in str(long) and "start the server with a longer --context" in str(long)
    assert str(replies.queue_full(1, 1)).startswith("1 request waits already")
    full = replies.queue_full(64, 64)
    SERVER.refuses(full.status, replies.openai_error(full.status, full.code, str(full), None))
    with pytest.raises(openai.RateLimitError, match="64 requests wait") as busy:
        OPENAI.responses.create(model="m", input="hi")
    assert busy.value.response.headers["retry-after"] == "5"
    SERVER.refuses(401, replies.anthropic_error(401, "invalid_api_key", "no key", None))
    with pytest.raises(anthropic.AuthenticationError):
        ANTHROPIC.messages.count_tokens(**SAID)


def test_models():
    listed = about.listing([about.model_entry("demo", 1700000000.5, 4096, {"value": "loaded"})])
    SERVER.refuses(200, listed)
    assert [Model.model_validate(item.to_dict()).id for item in OPENAI.models.list()] == ["demo"]
    page = ANTHROPIC.models.list()
    model = ModelInfo.model_validate(page.data[0].to_dict())
    assert (model.id, model.max_input_tokens, model.created_at.year, page.has_more) == ("demo", 4096, 2023, False)
    assert about.listing([])["first_id"] is None


def test_a_whole_reply_has_the_clients_own_type():
    for events in (SCENES["calls"], SCENES["cut"]):
        SERVER.refuses(200, chat.whole(CHAT, events))
        assert OPENAI.chat.completions.create(**SAID).choices[0].message.role == "assistant"
        SERVER.refuses(200, responses.whole(RESPONSE, events))
        assert OPENAI.responses.create(model="m", input="hi").output_text.startswith("Hi")
        SERVER.refuses(200, messages.whole(MESSAGE, events))
        assert ANTHROPIC.messages.create(**SAID, max_tokens=9).usage.input_tokens in (5, 9)
    SERVER.refuses(200, messages.count(7))
    assert ANTHROPIC.messages.count_tokens(**SAID).input_tokens == 7
