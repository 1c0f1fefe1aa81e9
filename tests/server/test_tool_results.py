"""Results of tools in any order, and those that match no call, over all three APIs and with every template."""

import json
import re

import pytest
from grids import taking_turns
from styles import STYLES
from three_apis import APIS, REFUSED, scripted_server

QUESTION = {"role": "user", "content": "How is it?"}


def asked(*ids):
    """Returns a message with these calls."""
    functions = [{"name": f"tool{i}", "arguments": json.dumps({"city": f"city{i}"})} for i in ids]
    calls = [{"id": f"id{i}", "type": "function", "function": own} for i, own in zip(ids, functions, strict=True)]
    return {"role": "assistant", "content": "I look.", "tool_calls": calls}


def results(*ids):
    return [{"role": "tool", "tool_call_id": f"id{i}", "content": f"result{i}"} for i in ids]


@pytest.fixture(scope="module", params=STYLES)
def style(request, tmp_path_factory):
    """Returns the style's name, and clients of a server with its template."""
    with scripted_server(tmp_path_factory.mktemp(request.param), request.param) as clients:
        clients.answer = "Fine."
        yield request.param, clients


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    with scripted_server(tmp_path_factory.mktemp("one"), "qwen3_style") as clients:
        clients.answer = "Fine."
        yield clients


def test_results_are_shown_in_the_order_of_the_calls(style):
    name, clients = style
    turn = "city1 city2 city3 result1 result2 result3"
    if name == "harmony_style":
        turn = "city1 result1 city2 result2 city3 result3"
    history = [QUESTION, asked(1, 2, 3), *results(3, 1, 2), QUESTION, asked(4), *results(4)]
    for said, api in taking_turns([history], APIS, [*STYLES].index(name)):
        clients.ask(api, said)
        assert " ".join(re.findall(r"city\d|result\d", clients.prompts[-1])) == f"{turn} city4 result4", api


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    "ids, said",
    [
        ((2,), "the call 'id1' of the tool 'tool1' is not followed by its result; send one result for each call"),
        ((2, 1, 2), "the call 'id2' of the tool 'tool2' has two results; send one result for each call"),
        ((2, 1, 5), "a result names the call 'id5', which is not in the turn before it; send the call too"),
    ],
    ids=["missing", "doubled", "unknown"],
)
def test_results_that_do_not_match_are_refused(clients, api, ids, said, stream):
    with pytest.raises(REFUSED) as refused:
        clients.ask(api, [QUESTION, asked(1, 2), *results(*ids)], stream=stream)
    error = refused.value.body if api != "messages" else refused.value.body["error"]
    assert (error["type"], error["message"]) == ("invalid_request_error", said)
    assert api == "messages" or error["param"] == {"chat": "messages", "responses": "input"}[api]
