"""Hostile requests: each gets a 4xx in the form of its API, and the server continues."""

import json
import re
import socket
import threading

import pytest
from live_server import FakeEngine, Live, wait_for

from moeflux_mlx.server.guard import Rules
from moeflux_mlx.server.listen import PatientProtocol

KEY = "a-key-of-letters"
CHAT = b'{"messages": [{"role": "user", "content": "Hi"}]}'
MESSAGES = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}'
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/v1/messages/count_tokens")


@pytest.fixture(scope="module")
def live():
    rules = Rules(("box.example",), ("https://chat.example", "app://chat"), KEY)
    with Live(lambda: FakeEngine(lambda prompt: "</think>Yes.", context=512), rules=rules) as server:
        yield server


def request(path, body=CHAT, method="POST", length=None, **headers):
    """Returns the bytes of a request. A header of None is left out."""
    given = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Authorization": f"Bearer {KEY}",
        "Content-Length": str(len(body) if length is None else length),
    }
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items() if value is not None)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def answer(live, data):
    """Returns status, headers and body."""
    reply = live.raw(data)
    head, _, body = reply.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {line.split(":", 1)[0].lower(): line.split(":", 1)[1].strip() for line in lines[1:]}
    return int(lines[0].split()[1]), headers, body


def nested(depth):
    return b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"


BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"\xff\xfe",
    b'{"messages": "\xc3"}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [], "temperature": NaN}',
    b'{"messages": 1e999}',
    nested(100),
    nested(100_000),
    b'{"a":' * 50_000,
    b'{"messages": {}}',
    b'{"messages": [1]}',
    b'{"messages": [{"role": "wizard", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": {"type": "image_url"}}]}',
    b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": "many", "max_output_tokens": "many"}',
]


@pytest.mark.parametrize("path", PATHS)
def test_invalid_bodies(live, path):
    for body in BODIES:
        status, headers, reply = answer(live, request(path, body))
        parsed = json.loads(reply)
        assert 400 <= status < 500, body[:60]
        assert parsed["error"]["message"] and headers["content-type"] == "application/json"
        assert (parsed.get("type") == "error") == path.startswith("/v1/messages")
        assert len(reply) < 2000


REFUSED = [
    (401, {"Authorization": None}),
    (401, {"Authorization": "Bearer wrong"}),
    (401, {"Authorization": "Basic " + KEY}),
    (401, {"Authorization": f"Bearer {KEY}x"}),
    (401, {"Authorization": f"Bearer {KEY[:-1]}"}),
    (401, {"Authorization": None, "x_api_key": KEY[:3]}),
    (401, {"Authorization": None, "x_api_key": "\xe9"}),
    (403, {"Host": "evil.example"}),
    (403, {"Host": "localhost.evil.example"}),
    (403, {"Host": ""}),
    (403, {"Host": "[::1"}),
    (403, {"Host": "evil.example@127.0.0.1"}),
    (403, {"Host": "127.0.0.1#.evil.example"}),
    (403, {"Host": "127.0.0.1?.evil.example"}),
    (403, {"Host": "127.0.0.1/.evil.example"}),
    (403, {"Host": "[::1].evil.example"}),
    (403, {"Host": "localhost:8080.evil.example"}),
    (403, {"Origin": "https://evil.example"}),
    (403, {"Origin": "null"}),
    (403, {"Origin": "http://localhost:1"}),
    (403, {"Sec-Fetch-Site": "cross-site"}),
    (403, {"Sec-Fetch-Site": "same-site"}),
    (415, {"Content_Type": "text/plain"}),
    (415, {"Content_Type": None}),
    (415, {"Content_Type": "application/x-www-form-urlencoded"}),
    (415, {"Content_Encoding": "gzip"}),
    (413, {"length": (64 << 20) + 1}),
]


@pytest.mark.parametrize(("status", "change"), REFUSED, ids=str)
@pytest.mark.parametrize("path", PATHS[:2])
def test_forbidden_requests(live, path, status, change):
    changed = {name.replace("Content_", "Content-"): value for name, value in change.items()}
    length = changed.pop("length", None)
    got, headers, body = answer(live, request(path, MESSAGES, length=length, **changed))
    assert got == status and json.loads(body)["error"]["message"]
    assert KEY.encode() not in body and "access-control-allow-origin" not in headers
    assert ("www-authenticate" in headers) == (status == 401)


def test_allowed_requests(live):
    for change in (
        {},
        {"Authorization": None, "x-api-key": KEY},
        {"Authorization": f"bearer {KEY}"},
        {"Host": "box.example:8080"},
        {"Host": "[::1]:8080"},
        {"Host": "192.168.1.7"},
        {"Origin": "http://localhost"},
        {"Sec-Fetch-Site": "same-origin"},
        {"Origin": "https://chat.example", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "app://Chat", "Sec-Fetch-Site": "cross-site"},
        {"Content-Type": "application/json; charset=utf-8"},
    ):
        assert answer(live, request(PATHS[0], **change))[0] == 200, change
    assert answer(live, request("/health", b"", "GET", Authorization=None))[0] == 200
    assert answer(live, request("/metrics", b"", "GET", Authorization=None))[0] == 401


def test_pages_of_other_sites_are_allowed_only_if_configured(live):
    origin = {"Origin": "https://chat.example"}
    status, headers, _ = answer(live, request(PATHS[0], b"", "OPTIONS", Authorization=None, **origin))
    assert status == 204 and headers["access-control-allow-origin"] == origin["Origin"]
    asked = {"Access-Control-Request-Headers": "content-type,x-stainless-os"}
    _, headers, _ = answer(live, request(PATHS[0], b"", "OPTIONS", Authorization=None, **origin, **asked))
    assert headers["access-control-allow-headers"] == asked["Access-Control-Request-Headers"]
    status, headers, _ = answer(live, request(PATHS[0], **origin))
    assert status == 200 and headers["access-control-allow-origin"] == origin["Origin"]


def test_pages_of_other_sites_see_nothing_live(live):
    """An image or a link makes a request without Origin."""
    elsewhere = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    for path in ("/live", "/metrics", "/v1/models"):
        status, _, body = answer(live, request(path, b"", "GET", **elsewhere))
        assert status == 403 and b"--cors-origin" in body
    assert answer(live, request("/", b"", "GET", **elsewhere))[0] == 200


def chunked(live, piece, count):
    """Sends a body without a stated length."""
    head = request("/v1/messages", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as connection:
        connection.sendall(head)
        received = b""
        try:
            for _ in range(count):
                connection.sendall(b"%x\r\n" % len(piece) + piece + b"\r\n")
            connection.sendall(b"0\r\n\r\n")
        except ConnectionError:
            pass
        try:
            while data := connection.recv(65536):
                received += data
                if b"}}" in received:
                    break
        except OSError:
            pass
        return received


def test_a_body_in_pieces_is_counted():
    with Live(lambda: FakeEngine(lambda prompt: "Yes."), rules=Rules(key=KEY)) as live:
        assert b" 200 " in chunked(live, MESSAGES, 1).split(b"\r\n")[0]
        received = chunked(live, b" " * (4 << 20), 20)
        assert not received or received.startswith(b"HTTP/1.1 413") and b'"request_too_large"' in received
        assert answer(live, request(PATHS[0]))[0] == 200


def test_the_sum_of_bodies_is_limited():
    with Live(lambda: FakeEngine(lambda prompt: "Yes.")) as live:
        guard = live.listener.config.app.app
        guard.max_bodies = 1000
        padded = CHAT + b" " * 600
        with socket.create_connection(("127.0.0.1", live.port), timeout=5) as half:
            half.sendall(request(PATHS[0], padded)[:-10])
            wait_for(lambda: guard.held > 500)
            status, headers, body = answer(live, request("/v1/messages", MESSAGES + b" " * 600))
            assert status == 503 and int(headers["retry-after"]) >= 1 and b"overloaded_error" in body
            received = chunked(live, b" " * 600, 1)
            assert received.startswith(b"HTTP/1.1 503") and b"retry-after: " in received.lower()
            assert answer(live, request(PATHS[0]))[0] == 200
        wait_for(lambda: not guard.held)
        assert answer(live, request(PATHS[0], padded))[0] == 200
        wait_for(lambda: not guard.held)


def test_floods_of_headers_and_no_http(live):
    assert live.raw(b"\x16\x03\x01\x00\xff nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")
    flood = b"GET /health HTTP/1.1\r\n" + b"".join(b"x%d: y\r\n" % i for i in range(20_000))
    assert live.raw(flood).startswith(b"HTTP/1.1 4") or live.raw(flood) == b""
    assert answer(live, request(PATHS[0]))[0] == 200


def test_half_a_request_is_not_waited_for(live, monkeypatch):
    monkeypatch.setattr(PatientProtocol, "header_seconds", 0.2)
    with socket.create_connection(("127.0.0.1", live.port), timeout=5) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        assert connection.recv(100) == b""
    with socket.create_connection(("127.0.0.1", live.port), timeout=5) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = b""
        while b'"ok"' not in received:
            received += connection.recv(1000)
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        assert connection.recv(100) == b""


def test_template_and_reserved_names_are_refused(live):
    for more in (b'"chat_template": "{{ 1 }}"', b'"chat_template_kwargs": {"messages": []}'):
        status, _, body = answer(live, request(PATHS[0], CHAT[:-1] + b", " + more + b"}"))
        assert status == 400 and b"chat_template" in body


def test_a_variable_of_a_template_may_have_any_other_name(live):
    for name in (b"self", b"known", b"template", b"caller", b"", b"a b"):
        body = CHAT[:-1] + b', "chat_template_kwargs": {"%s": 1}}' % name
        assert answer(live, request(PATHS[0], body))[0] == 200, name


def test_each_request_is_told_in_a_line():
    lines = []
    slow = FakeEngine(lambda prompt: "</think>Yes." + " Yes" * ("much" in prompt) * 500, token_seconds=0.002)
    with Live(lambda: slow, rules=Rules(key=KEY), log=lines.append) as live:
        for data in (
            request("/v1/chat/completions"),
            request("/v1/chat/completions"),
            request("/v1/messages", MESSAGES[:-1] + b', "stream": true}', Connection="close"),
            request("/v1/responses", b'{"input": 3}'),
            request("/v1/messages", b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"a" * 9000)),
            request("/v1/messages/count_tokens"),
            request("/v1/chat/completions", Authorization=None),
            request("/tokenize", Host="evil.example"),
            request("/v1/%1b[2Jx", method="GET"),
            request("/v1/models", b"", method="GET"),
            request("/health", b"", method="GET"),
        ):
            live.raw(data)
        with socket.create_connection(("127.0.0.1", live.port)) as leaving:
            leaving.sendall(request("/v1/completions", b'{"prompt": "much"}'))
            wait_for(lambda: live.worker.running)
        wait_for(lambda: len(lines) == 10)
        metrics = live.raw(request("/metrics", b"", method="GET")).decode()
    told = [re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (\S+) (\d+): (.*)\d+\.\d s", line).groups() for line in lines]
    assert [(path, int(status)) for path, status, _ in told] == [
        ("/v1/chat/completions", 200),
        ("/v1/chat/completions", 200),
        ("/v1/messages", 200),
        ("/v1/responses", 400),
        ("/v1/messages", 400),
        ("/v1/messages/count_tokens", 200),
        ("/v1/chat/completions", 401),
        ("/tokenize", 403),
        ("'/v1/\\x1b[2Jx'", 404),
        ("/v1/completions", 499),
    ]
    counts = [re.fullmatch(r"(\d+) tokens in, (\d+) cached, (\d+) out, ", rest) for _, _, rest in told]
    assert [bool(match) for match in counts] == [True] * 3 + [False] * 7
    assert 'path="/tokenize",status="403"} 1' in metrics
    assert counts[0][1] == counts[1][1] and int(counts[0][2]) == 0 < int(counts[1][2]) and counts[2][3] == "4"


def test_a_limited_number_of_requests_waits():
    may_answer = threading.Event()
    slow = FakeEngine(lambda prompt: "</think>Yes." if may_answer.wait(60) else "")
    with Live(lambda: slow, queue=3, parallel=1) as live:
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(answer(live, request(PATHS[0])))) for _ in range(12)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(answers) == 8)
        may_answer.set()
        for thread in threads:
            thread.join()
        refused = [headers for status, headers, _ in answers if status == 429]
        assert {status for status, _, _ in answers} == {200, 429} and len(refused) == 8
        assert all(int(headers["retry-after"]) >= 1 for headers in refused)
