"""Sequences of events as an engine sends them, and fixed ids and times for exact streams."""

import json
from itertools import count

from hypothesis import strategies as st

from moeflux_mlx.server.request import Accepted, Failed, Finish, Logprobs, PromptProgress, TokenLogprob
from moeflux_mlx.server.wire import chat, completions, messages, responses
from moeflux_mlx.server.wire.replies import Ids
from moeflux_mlx.text.events import CallDelta, CallEnd, CallStart, Reasoning, Text

APIS = {"chat": chat, "completions": completions, "messages": messages, "responses": responses}


def fixed_ids():
    numbers = count(1)
    return Ids(random=lambda: str(next(numbers)), clock=lambda: 1700000000.9)


def sent(api, request, events, ids=None, waits=()):
    """Returns the stream's bytes, with a keepalive before each of the events in `waits`."""
    reply, out = api.stream(request, ids or fixed_ids()), []
    for place, event in enumerate(events):
        out += [reply.keepalive()] if place in waits else []
        out += reply.events(event)
    return b"".join([*out, reply.end()])


def decoded(stream):
    """Returns (event name or None, data) of each server-sent event; "[DONE]" stays as it is."""
    for block in stream.decode("ascii").split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        assert set(lines) <= {"event", "data"}
        data = lines["data"]
        yield lines.get("event"), data if data == "[DONE]" else json.loads(data)


TOKEN = TokenLogprob("Hi", 7, -0.5, b"Hi", (TokenLogprob("Ho", 8, -1.5, b"Ho"),))
ENDS = [
    Finish("stop", 9, 4, 12, 3, prompt_seconds=0.25, completion_seconds=1.5),
    Finish("stop_sequence", 9, 4, 12, 3, "END"),
    Finish("length", 9, 0, 12, 12),
    Finish("tool_calls", 9, 9, 12),
]
FAILED = Failed(500, "server_error", "the disk failed")

texts = st.text(min_size=0, max_size=6)
values = st.dictionaries(texts, texts | st.integers() | st.lists(st.booleans(), max_size=2), max_size=2)


@st.composite
def calls(draw, index, whole=True):
    """Draws one call, in pieces that need not reach its end."""
    arguments = json.dumps(draw(values), ensure_ascii=draw(st.booleans()))
    cuts = sorted(draw(st.lists(st.integers(0, len(arguments)), max_size=3)))
    pieces = [arguments[start:end] for start, end in zip([0, *cuts], cuts, strict=False)]
    name = draw(st.sampled_from(["Read", "apply_patch", "mcp__x__find"]))
    middle = [CallDelta(index, piece) for piece in pieces]
    return [CallStart(index, name), *middle, *([CallEnd(index, name, arguments, "raw")] if whole else [])]


@st.composite
def rows(draw):
    """Draws all events of an answer: accepted, computed, said, called, and ended in one of the ways."""
    events = [Accepted(9, 4), *([PromptProgress(5, 9)] if draw(st.booleans()) else [])]
    index = 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "told", "call"]), max_size=6)):
        if kind == "call":
            events += draw(calls(index))
            index += 1
        else:
            events += [Logprobs((TOKEN,))] * (kind == "told")
            events.append((Reasoning if kind == "reasoning" else Text)(draw(texts)))
    if draw(st.booleans()):
        return [*events, draw(st.sampled_from([*ENDS, FAILED]))]
    return [*events, *draw(calls(index, whole=False)), ENDS[2]]


WHOLE_CALLS = [
    Accepted(9, 4),
    PromptProgress(5, 9),
    Reasoning("Let "),
    Reasoning("me"),
    Logprobs((TOKEN,)),
    Text("Hi \u2028ü"),
    CallStart(0, "Read"),
    CallDelta(0, '{"pa'),
    CallDelta(0, 'th":"a"}'),
    CallEnd(0, "Read", '{"path":"a"}', "raw"),
    CallStart(1, "apply_patch"),
    CallDelta(1, '{"input":"*** '),
    CallEnd(1, "apply_patch", '{"input":"*** \\"x\\""}', "raw"),
    CallStart(2, "mcp__x__find"),
    CallEnd(2, "mcp__x__find", "", "raw"),
    ENDS[0],
]
SCENES = {
    "calls": WHOLE_CALLS,
    "stopped": [Accepted(9, 0), Text("Hi"), ENDS[1]],
    "cut": [Accepted(9, 0), Text("Hi"), CallStart(0, "Read"), CallDelta(0, '{"pa'), ENDS[2]],
    "failed": [Accepted(9, 0), Text("Hi"), FAILED],
}
