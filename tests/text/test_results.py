"""Results of tools in the order of their calls, whatever order they come in; those that do not match are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tokenizer import QUICK

from moeflux_mlx.errors import RequestError
from moeflux_mlx.text.results import apart, in_order

USER, LATE = {"role": "user", "content": "And?"}, {"role": "system", "content": "Hurry."}


def asked(*ids):
    """Returns a message with these calls, each of a tool named after its id."""
    return {"role": "assistant", "content": "", "tool_calls": [{"id": i, "function": {"name": f"f{i}"}} for i in ids]}


def result(id, text, **named):
    return {"role": "tool", "content": text, "tool_call_id": id, **named}


@st.composite
def turns(draw, least=0):
    """Returns the calls and results of a turn in their order, and the same as a client may send them."""
    ids = draw(st.lists(st.sampled_from("abcd"), min_size=max(least, 1), max_size=4, unique=True))
    wanted = [result(i, draw(st.text(max_size=2)), name=f"f{i}") for i in ids]
    sent = [result(one["tool_call_id"], one["content"]) for one in wanted]
    nameless = [{key: one[key] for key in ("role", "content")} if draw(st.booleans()) else one for one in sent]
    order = draw(st.permutations(range(len(ids))))
    rest = iter([one for one in nameless if "tool_call_id" not in one])  # those without an id stay in order
    sent = [nameless[n] if "tool_call_id" in nameless[n] else next(rest) for n in order]
    others = draw(st.lists(st.sampled_from([USER, LATE]), max_size=2))
    for other in others:
        sent.insert(draw(st.integers(0, len(sent))), other)
    others = [one for one in sent if one in (USER, LATE)]
    return [asked(*ids), *wanted, *others], [asked(*ids), *sent]


@QUICK
@given(st.lists(turns(), max_size=3), st.sampled_from([[], [asked("a", "b")], [asked("a"), asked("b")]]))
def test_results_come_in_the_order_of_their_calls(chat, end):
    """Each turn uses the same ids again."""
    wanted, sent = ([USER, *(message for turn in chat for message in turn[n]), *end] for n in (0, 1))
    assert in_order(sent) == in_order(wanted) == wanted


@QUICK
@given(turns(), turns(least=2), turns(), st.data())
def test_a_missing_and_a_doubled_result_are_named(before, turn, after, data):
    calls, *results = turn[0]
    n = data.draw(st.integers(0, len(calls["tool_calls"]) - 1))
    place = data.draw(st.integers(0, len(calls["tool_calls"])))
    id = results[n]["tool_call_id"]
    missing, doubled = results[:n] + results[n + 1 :], results[:place] + [results[n]] + results[place:]
    for broken, said in ((missing, "is not followed by its result"), (doubled, "has two results")):
        with pytest.raises(RequestError, match=f"the call '{id}' of the tool 'f{id}' {said}; send one"):
            in_order([*before[1], calls, *broken, *data.draw(st.sampled_from([[], [USER], after[1]]))])


@pytest.mark.parametrize(
    "chat, said",
    [
        ([result("x", "1")], "a result names the call 'x', which is not in the turn before it; send the call too"),
        ([asked("a"), result("a", "1"), result("x", "2")], "a result names the call 'x'"),
        ([asked("a"), result("a", "1"), asked("b"), result("a", "2")], "a result names the call 'a'"),
        ([asked("x" * 900), USER], "the call 'x{59} of the tool 'fx{58} is not followed"),
        ([{"role": "tool", "content": "1"}], "a result without an id follows no call that needs one; send one"),
        ([asked("a"), result("a", "1"), {"role": "tool", "content": "2"}], "a result without an id follows no call"),
    ],
)
def test_results_that_match_no_call_are_refused(chat, said):
    with pytest.raises(RequestError, match=f"^{said}"):
        in_order([USER, *chat])


def test_messages_of_the_assistant_that_follow_each_other_are_one_turn():
    said, first, second = (
        {"role": "assistant", "content": "So?"},
        result("a", "1", name="fa"),
        result("b", "2", name="fb"),
    )
    chat = [USER, said, asked("a"), said, asked("b"), USER, second, first]
    assert in_order(chat) == [USER, said, asked("a"), first, said, asked("b"), second, USER]


def test_calls_with_one_id_have_their_results_in_order():
    chat = [asked("a", "a"), result("a", "1", name="fa"), result("a", "2", name="fa")]
    assert in_order(chat) == chat
    with pytest.raises(RequestError, match="the call 'a' of the tool 'fa' is not followed"):
        in_order(chat[:2])


def test_each_call_of_a_message_apart():
    message, results = {**asked("a", "b"), "content": "Look.", "thinking": "Hm."}, [result("b", "2"), result("a", "1")]
    chat = in_order([*apart(message), *results])
    assert chat[0] == {**message, "tool_calls": message["tool_calls"][:1]} and chat[2] == asked("b")
    assert [one["content"] for one in chat] == ["Look.", "1", "", "2"]
    assert [apart(one) for one in (USER, asked("a"))] == [[USER], [asked("a")]]
