"""Any JSON of a client becomes a request or a RequestError of one line."""

import copy
import json

import pytest
from bodies import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflux_mlx.errors import RequestError
from moeflux_mlx.server.request import Request
from moeflux_mlx.server.wire import chat, completions, messages, responses
from moeflux_mlx.server.wire.settings import parse

APIS = [(chat, CHAT), (completions, COMPLETIONS), (messages, MESSAGES), (responses, RESPONSES)]


def words_of(value):
    """Returns all keys and short texts of a body."""
    if isinstance(value, dict):
        return {*value, *(word for inner in value.values() for word in words_of(inner))}
    if isinstance(value, list):
        return {word for inner in value for word in words_of(inner)}
    return {value} if isinstance(value, str) else set()


WORDS = st.sampled_from(sorted(words_of([body for _, body in APIS]) | {"image", "audio", "type", "schema", "item_id"}))
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), WORDS, st.text(max_size=8))
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=5),
    max_leaves=20,
)


def places(value, path=()):
    """Yields the path of everything inside a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed(body, path, value):
    body = copy.deepcopy(body)
    inside = body
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return body


def attempt(api, body):
    """Returns a request whose parts are JSON again, or a refusal of one line."""
    try:
        request = api.read(parse(json.dumps(body).encode()))
    except RequestError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 400
        message.encode()
        return
    assert isinstance(request, Request)
    for message in request.messages:
        assert isinstance(message["content"], str) and message["role"] in ("system", "user", "assistant", "tool")
        assert all(isinstance(call["function"]["arguments"], dict) for call in message.get("tool_calls", ()))
    json.dumps([request.messages, request.tools, dict(request.template_variables)], allow_nan=False).encode()


@pytest.mark.parametrize(("api", "body"), APIS, ids=["chat", "completions", "messages", "responses"])
def test_one_value_is_wrong(api, body):
    where = st.sampled_from(list(places(body)))

    @settings(max_examples=examples(125))
    @given(where, JSON)
    def check(path, value):
        attempt(api, changed(body, path, value))

    check()


@pytest.mark.parametrize(("api", "body"), APIS, ids=["chat", "completions", "messages", "responses"])
def test_every_place_gets_every_type(api, body):
    for path in places(body):
        for value in (None, True, 5, -0.5, "x", "", [], [5], ["x"], [[]], {}, {"x": 5}, [{"type": "x"}], {"type": "x"}):
            attempt(api, changed(body, path, value))


@settings(max_examples=examples(125))
@given(st.sampled_from([api for api, _ in APIS]), JSON)
def test_everything_is_wrong(api, body):
    attempt(api, body)
