"""Metrics, health, tokens, errors, ids, and the folding of answers."""

import pytest
from wire_events import ENDS

from moeflux_mlx.errors import BadRequestError
from moeflux_mlx.server import about
from moeflux_mlx.server.request import Accepted, Finish, Logprobs, TokenLogprob
from moeflux_mlx.server.wire import replies
from moeflux_mlx.server.wire.replies import Ids, folded
from moeflux_mlx.text.events import CallDelta, CallEnd, CallStart, Reasoning, Text


def test_metrics(monkeypatch):
    monkeypatch.setattr(about, "HELP", {"requests_total": "Requests answered.", "memory_bytes": "Memory."})
    values = {
        "requests_total": {(("api", "chat"), ("status", "200")): 3, (("api", 'a"\\\nb'), ("status", "x")): 0},
        "memory_bytes": 1.5,
    }
    assert about.metrics_text(values) == (
        "# HELP moeflux_requests_total Requests answered.\n"
        "# TYPE moeflux_requests_total counter\n"
        'moeflux_requests_total{api="chat",status="200"} 3\n'
        'moeflux_requests_total{api="a\\"\\\\\\nb",status="x"} 0\n'
        "# HELP moeflux_memory_bytes Memory.\n"
        "# TYPE moeflux_memory_bytes gauge\n"
        "moeflux_memory_bytes 1.5\n"
    )


def test_health():
    assert replies.health(True) == (200, {"status": "ok"})
    status, body = replies.health(False)
    assert status == 503 and body["error"]["code"] == "loading"


@pytest.mark.parametrize(
    ("status", "openai", "anthropic"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (403, "permission_error", "permission_error"),
        (404, "invalid_request_error", "not_found_error"),
        (413, "invalid_request_error", "request_too_large"),
        (429, "rate_limit_error", "rate_limit_error"),
        (500, "server_error", "api_error"),
        (503, "server_error", "overloaded_error"),
    ],
)
def test_types_of_errors(status, openai, anthropic):
    assert replies.openai_error(status, "c", "m", "p")["error"] == {
        "message": "m",
        "type": openai,
        "param": "p",
        "code": "c",
    }
    assert replies.anthropic_error(status, "c", "m")["error"] == {"type": anthropic, "message": "m"}


def test_headers_of_errors():
    assert replies.error_headers(429) == {"Retry-After": "5"}
    assert replies.error_headers(503) == {"Retry-After": "5"}
    assert replies.error_headers(401) == {"WWW-Authenticate": "Bearer"}
    assert replies.error_headers(400) == {}


def test_an_error_knows_its_reply():
    error = BadRequestError("no", "n", status=413, code="too_large")
    assert (str(error), error.param, error.status, error.code) == ("no", "n", 413, "too_large")


def test_models_have_a_date():
    assert about.model_entry("a", 0.9, 5, {})["created_at"] == "1970-01-01T00:00:00Z"


def test_ids_differ():
    assert len({Ids().make("call_") for _ in range(100)}) == 100
    ids = Ids()
    assert ids.call(0, "call_") == ids.call(0, "call_") != ids.call(1, "call_")
    assert abs(ids.now() - 1.7e9) < 1e10


def test_an_event_is_one_line_of_ascii():
    assert replies.encode({"a": "é\n\u2028\x85"}, "x") == b'event: x\ndata: {"a":"\\u00e9\\n\\u2028\\u0085"}\n\n'


def token(text):
    return TokenLogprob(text, 1, -1.0, text.encode())


def test_logprobs_are_given_for_text_only():
    told = [Reasoning("a"), Text("b"), Text(""), Text("c")]
    events = [event for said in told for event in (Logprobs((token(said.text or "held"),)), said)]
    answer = folded([*events, Logprobs((token("end"),)), ENDS[0]])
    assert [token.token for token in answer.logprobs()] == ["b", "held", "c"]


CALL = [CallStart(0, "f"), CallDelta(0, '{"a"'), CallEnd(0, "f", '{"a":1}', "raw")]


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([], None),
        (CALL, "tool_calls"),
        ([*CALL, Text("x")], "tool_calls"),
        (CALL[:2], "length"),
        ([*CALL, CallStart(1, "f")], "length"),
        ([*CALL[:2], Text("x")], "length"),
    ],
)
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.reason)
def test_reasons(events, reason, end):
    own = "stop" if end.reason == "tool_calls" else end.reason
    assert folded([Accepted(1, 0), *events, end]).reason() == (reason or own)


def test_blocks_never_overlap():
    answer = folded([*CALL[:2], Text("x"), CALL[2], Text("y"), Finish("length", 1, 0, 1)])
    assert [(block.kind, block.text, block.whole) for block in answer.blocks] == [
        ("call", '{"a"', False),
        ("text", "xy", False),
    ]
