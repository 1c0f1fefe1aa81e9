"""Log-probabilities belong to the text that is sent: for any text, tokens, stop texts and end, streamed or not."""

import json
import types
from itertools import accumulate, pairwise

import mlx.core as mx
import pytest
from grids import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moeflux_mlx.driving.generation import GenerationResponse
from moeflux_mlx.experts.stats import Asked
from moeflux_mlx.server.answering import Answering
from moeflux_mlx.server.prepare import PreparedRequest
from moeflux_mlx.server.request import Logprobs, Request, Sampling
from moeflux_mlx.server.wire import chat, completions, responses
from moeflux_mlx.server.wire.replies import Ids
from moeflux_mlx.text.calls.mistral import MISTRAL
from moeflux_mlx.text.calls.tool_call import QWEN_JSON, QWEN_XML
from moeflux_mlx.text.channels import THINK
from moeflux_mlx.text.events import CallEnd, Text
from moeflux_mlx.text.tokenizer import StreamingDetokenizer

APIS = {"chat": chat, "completions": completions, "responses": responses}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
MARKED = '[TOOL_CALLS]f[ARGS]{"a": 1}'
PIECES = [*"abf<é😊 \n", "ab", "\n\n", "<think>", "</think>", "<tool_call>", CALL, CALL[:20], MARKED]
LETTERS = st.text("abk é😊\n", max_size=12)


def answer_of(request, tokens, ended=True, inside_reasoning=False, dialect=None):
    """Returns the events of an answer of these tokens; `ended`: an end follows, otherwise the last one is the limit."""
    vocabulary = types.SimpleNamespace(trim=0, token_bytes=lambda token: (tokens + [b""])[token])
    tokenizer = types.SimpleNamespace(channels=THINK, token_bytes=vocabulary.token_bytes)
    prepared = PreparedRequest(request, [1], inside_reasoning=inside_reasoning, dialect=dialect)
    answering, speller = Answering(prepared, tokenizer), StreamingDetokenizer(vocabulary)
    events, logprobs = [], mx.zeros(len(tokens) + 1)
    for n in range(len(tokens) + ended):
        reason = "stop" if n == len(tokens) else "length" if n + 1 == len(tokens) and not ended else None
        if reason != "stop":
            speller.add_token(n)
        if reason:
            speller.finalize()
        response = GenerationResponse(speller.last_segment, n, logprobs, False, 1, 1.0, n + 1, 1.0, 0, reason)
        events += answering.take(response)
        if reason or answering.done:
            break
    return [*events, *answering.rest(response), answering.finish(response, 0, (0.0, 0.0), Asked())]


def asked(api, stop=(), top=0, tools=()):
    prompt = {"prompt": "x"} if api == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    return Request(api, "m", stop=stop, sampling=Sampling(top_logprobs=top), tools=tools, **prompt)


def told(entries):
    """Returns the bytes of each token of a chat or a response."""
    return [bytes(entry["bytes"]) for entry in entries]


def columns(choices):
    """Returns the tokens of completions, with their offsets."""
    lists = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    return [pair for one in lists for pair in zip(one["tokens"], one["text_offset"], strict=True)]


def whole(request, events):
    """Returns the text and the tokens of the reply that does not stream."""
    body = APIS[request.api].whole(request, events)
    if request.api == "responses":
        parts = [part for item in body["output"] if item["type"] == "message" for part in item["content"]]
        return "".join(part["text"] for part in parts), told(one for part in parts for one in part["logprobs"])
    (choice,) = body["choices"]
    if request.api == "completions":
        return choice["text"], columns([choice])
    return choice["message"]["content"] or "", told(choice["logprobs"]["content"])


def streamed(request, events):
    """Returns the same of the reply that streams."""
    reply = APIS[request.api].stream(request, Ids())
    lines = b"".join(piece for event in events for piece in reply.events(event)).decode().split("\n")
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    if request.api == "responses":
        deltas = [one for one in data if one["type"] == "response.output_text.delta"]
        return "".join(one["delta"] for one in deltas), told(token for one in deltas for token in one["logprobs"])
    choices = [choice for one in data for choice in one["choices"]]
    if request.api == "completions":
        return "".join(choice["text"] for choice in choices), columns(choices)
    sent = "".join(choice["delta"].get("content") or "" for choice in choices)
    contents = [choice["logprobs"]["content"] for choice in choices if choice.get("logprobs")]
    return sent, told(token for one in contents for token in one)


def spelt(tokens, before, text):
    """Returns the numbers of the tokens that spell a part of `text`, which comes after `before` bytes, and where in it
    each begins.
    """
    sizes = [len(char.encode()) for char in text]
    if text.endswith("\ufffd"):  # the limit came within a character
        sizes[-1] = sum(map(len, tokens)) - before - sum(sizes[:-1])
    ends = list(accumulate(sizes, initial=before))
    spans = pairwise(accumulate(map(len, tokens), initial=0))
    return [
        (number, sum(end <= begin for end in ends[1:]))
        for number, (begin, end) in enumerate(spans)
        if max(begin, before) < min(end, ends[-1])
    ]


def cut(text, places):
    """Returns the bytes of a text as tokens; a place that comes twice makes one that spells nothing."""
    data = text.encode()
    return [data[a:b] for a, b in pairwise([0, *sorted(place % (len(data) + 1) for place in places), len(data)])]


def check(request, tokens, before=0, **options):
    """Compares the tokens of an answer, of which `before` bytes are no text, with those that spell what was sent;
    returns that.
    """
    events = answer_of(request, tokens, **options)
    text, sent = whole(request, events)
    assert streamed(request, events) == (text, sent)
    wanted = spelt(tokens, before, text)
    assert [(token.token_id, token.offset) for token in logprobs(events)] == wanted
    if request.api == "completions":
        assert sent == [(tokens[number].decode(errors="replace"), offset) for number, offset in wanted]
    else:
        assert sent == [tokens[number] for number, _ in wanted]
    return text


def logprobs(events):
    return [token for event in events if isinstance(event, Logprobs) for token in event.tokens]


def within_calls(tokens, data, events):
    """Returns the numbers of the tokens in the calls of an answer of these bytes."""
    bounds, inside, at = [*accumulate(map(len, tokens), initial=0)], set(), 0
    for raw in (event.raw.encode() for event in events if isinstance(event, CallEnd)):
        at = data.index(raw, at)
        inside |= {n for n, (begin, end) in enumerate(pairwise(bounds)) if at <= begin and end <= at + len(raw)}
        at += len(raw)
    return inside


PLACES = st.lists(st.integers(0, 60), max_size=30) | st.just(range(60))
STOPS = st.lists(st.text("ab é😊\n", min_size=1, max_size=3), max_size=2)


@pytest.mark.parametrize("api", APIS)
@settings(max_examples=examples(300), deadline=None)
@given(LETTERS, PLACES, STOPS, st.none() | st.integers(1, 12), st.sampled_from(["", "ab</think>\n\n"]))
@example("xaaab", range(60), ["aab"], None, "")
@example("ab😊cd", range(60), [], None, "")
@example("ab😊cd", range(60), [], 4, "")
def test_tokens_are_those_of_the_text(api, text, places, stops, limit, reasoning):
    reasoning = "" if api == "completions" else reasoning
    text = text.lstrip() if reasoning else text  # line breaks after reasoning are no text
    tokens = cut(reasoning + text, places)
    ended = limit is None or limit > len(tokens)
    options = {"ended": ended, "inside_reasoning": bool(reasoning)}
    said = check(asked(api, stops), tokens[:limit], len(reasoning), **options)
    free = answer_of(asked(api, stops, top=None), tokens[:limit], **options)
    assert "".join(event.text for event in free if isinstance(event, Text)) == said


@pytest.mark.parametrize("dialect", [QWEN_JSON, QWEN_XML, MISTRAL, None], ids=["json", "xml", "mistral", "none"])
@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=8), PLACES, STOPS, st.booleans(), st.booleans())
def test_tokens_of_calls_tags_and_reasoning_are_left_out(dialect, pieces, places, stops, in_reasoning, ended):
    tokens = cut("".join(pieces), places)
    replies = []
    for api in ("chat", "responses"):
        request = asked(api, stops, tools=TOOLS if dialect else ())
        events = answer_of(request, tokens, ended, in_reasoning, dialect)
        text, sent = whole(request, events)
        assert streamed(request, events) == (text, sent)
        rest = iter(b"".join(sent).decode(errors="replace"))
        assert all(char in rest for char in text if char != "\ufffd"), "each character has its token"
        offsets = [token.offset for token in logprobs(events)]
        assert offsets == sorted(offsets) and all(offset < len(text) for offset in offsets)
        if all(len(token) == 1 for token in tokens) and "".join(pieces).isascii():
            assert b"".join(sent).decode() == text and offsets == list(range(len(text))), "a token for each character"
        inside = within_calls(tokens, "".join(pieces).encode(), events)
        assert not inside & {token.token_id for token in logprobs(events)}
        replies.append((text, sent))
    assert replies[0] == replies[1]
