"""Many clients, slow ones and disconnected ones: all are served in turn, and memory does not grow."""

import contextlib
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from urllib.error import HTTPError

import pytest
from live_server import FakeEngine, Live, wait_for

from moeflux_mlx.planning.machine import used_memory
from moeflux_mlx.server import listen, reply
from moeflux_mlx.server.listen import PatientProtocol
from moeflux_mlx.server.prepare import Preparer

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BUFFER = 4096  # bytes that a system keeps of an unread answer, or as few as it can
ANSWER = "</think>" + "An owl flew over the lake. " * 4


def body(n, **more):
    message = {"role": "user", "content": f"Client {n} asks."}
    return json.dumps({"messages": [message], "stream": True, "max_tokens": 60, **more}).encode()


def send(live, data):
    """Returns a connection that has sent its request."""
    connection = socket.create_connection(("127.0.0.1", live.port), timeout=60)
    connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return connection


def read_whole(connection):
    received = b""
    while b"[DONE]" not in received and (piece := connection.recv(65536)):
        received += piece
    return received


def test_sixty_four_clients_are_served_in_turn():
    with Live(lambda: FakeEngine(lambda prompt: ANSWER, token_seconds=0.0002), queue=64) as live:
        order, lock = [], threading.Lock()

        def ask(n):
            with send(live, body(n)) as connection:
                received = read_whole(connection)
            with lock:
                order.append((n, received.startswith(b"HTTP/1.1 200") and b"[DONE]" in received))

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(64)]
        for thread in threads:
            thread.start()
            time.sleep(0.002)
        for thread in threads:
            thread.join()
        assert all(whole for _, whole in order) and len(order) == 64
        assert sum(abs(place - n) for place, (n, _) in enumerate(order)) / 64 < 16  # in about the order they came
        assert len(live.worker.sessions) <= 4


def test_clients_that_disconnect():
    with Live(lambda: FakeEngine(lambda prompt: ANSWER, token_seconds=0.001, prompt_seconds=0.002)) as live:
        rng = random.Random(1)
        for n in range(40):
            data = body(n)
            with send(live, data[: len(data) - rng.choice([0, 0, 0, 5])]) as connection:
                connection.settimeout(rng.choice([0.001, 0.01, 0.05]))
                with contextlib.suppress(TimeoutError):
                    connection.recv(rng.choice([1, 200, 4000]))
        wait_for(lambda: live.worker.running == [] and not live.worker.queue, 10)
        assert live.models.totals.failed == 0
        with send(live, body(99)) as connection:
            assert b"[DONE]" in read_whole(connection)


def test_a_client_that_leaves_the_queue_takes_no_place_in_it():
    with Live(lambda: FakeEngine(lambda prompt: ANSWER, token_seconds=0.05)) as live, send(live, body(1)):
        wait_for(lambda: live.worker.running)
        with send(live, body(2)):
            wait_for(lambda: live.worker.queue == 1)
        wait_for(lambda: not live.worker.queue, 2)
        assert live.worker.running[0].job.prepared.request.messages[0]["content"] == "Client 1 asks."


def test_a_slow_reader_delays_nobody():
    long = "</think>" + "word " * 600
    with Live(lambda: FakeEngine(lambda prompt: long if "slow" in prompt else ANSWER, context=100_000)) as live:
        message = [{"role": "user", "content": "slow"}]
        with send(live, json.dumps({"messages": message, "stream": True}).encode()) as slow:
            wait_for(lambda: live.models.totals.generated_tokens > 100)
            with send(live, body(1)) as quick:
                assert b"[DONE]" in read_whole(quick)
            assert read_whole(slow).count(b"data: ") > 2000


def send_and_never_read(live, data):
    """Returns a connection with small buffers that is not read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    connection.connect(("127.0.0.1", live.port))
    connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return connection


@pytest.fixture
def small_buffers(monkeypatch):
    """The server's system buffers little of an answer; not every system takes this from the listening socket."""
    made = PatientProtocol.connection_made

    def connection_made(self, transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        made(self, transport)

    monkeypatch.setattr(PatientProtocol, "connection_made", connection_made)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_never_reads_is_disconnected(monkeypatch, stream):
    monkeypatch.setattr(PatientProtocol, "read_seconds", 0.3)
    endless = "</think>" + "word " * 2000
    with Live(lambda: FakeEngine(lambda prompt: endless, context=200_000)) as live:
        many = body(1, max_tokens=None if stream else 800, stream=stream, logprobs=not stream)
        with send_and_never_read(live, many) as connection:
            wait_for(lambda: live.worker.running)
            wait_for(lambda: not live.worker.running)
            assert live.models.totals.cancelled == stream
            wait_for(lambda: not live.listener.server_state.connections, 5)
            connection.settimeout(5)
            with contextlib.suppress(ConnectionError):
                while connection.recv(1 << 20):
                    pass
        with send(live, body(2, max_tokens=3)) as connection:
            assert b"[DONE]" in read_whole(connection)


@pytest.mark.usefixtures("small_buffers")
def test_unread_output_is_limited(monkeypatch):
    monkeypatch.setattr(reply, "MOST_UNREAD", 50)
    monkeypatch.setattr(PatientProtocol, "read_seconds", 20)
    endless = "</think>" + "word " * 2000
    with (
        Live(lambda: FakeEngine(lambda prompt: endless, context=200_000)) as live,
        send_and_never_read(live, body(1, max_tokens=None)) as connection,
    ):
        wait_for(lambda: live.models.totals.cancelled)
        connection.settimeout(20)
        assert b'"not_read"' in read_whole(connection)[-400:]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closed_its_sending_side_gets_the_answer(stream, monkeypatch):
    monkeypatch.setattr(listen, "KNOCK_SECONDS", 0.02)
    with Live(lambda: FakeEngine(lambda prompt: ANSWER, prompt_seconds=0.02, step=8, context=100_000)) as live:
        with send(live, body(1, stream=stream)) as connection:
            connection.shutdown(socket.SHUT_WR)
            answer = HTTPResponse(connection)
            answer.begin()
            said = answer.read().decode()
            assert answer.status == 200 and ("[DONE]" if stream else "An owl flew over the lake.") in said
            assert connection.recv(1) == b""
        wait_for(lambda: not live.worker.running)  # the answer is complete before the worker has forgotten it
        left = body(2, messages=[{"role": "user", "content": "a" * 20_000}], stream=stream)
        with send(live, left) as connection:
            wait_for(lambda: live.worker.running)
            while stream and b'"role"' not in connection.recv(65536):  # unread data would show that the client has left
                pass
        wait_for(lambda: not live.worker.running, 2)
        assert live.models.totals.cancelled == 1


def test_no_answer_waits_for_statistics(monkeypatch):
    monkeypatch.setattr(reply, "MAX_BODY", 1000)
    begun, go_on, entered = threading.Event(), threading.Event(), []

    def slow(preparer, request):
        entered.append(request)
        begun.set()
        assert go_on.wait(20)
        return 7

    monkeypatch.setattr(Preparer, "count", slow)
    count = {"messages": [{"role": "user", "content": "a" * 300}]}
    with Live(lambda: FakeEngine(lambda prompt: ANSWER)) as live, ThreadPoolExecutor(2) as clients:
        counted = [clients.submit(live.post, "/v1/messages/count_tokens", count) for _ in range(2)]
        assert begun.wait(20)
        wait_for(lambda: live.listener.config.app.app.held > 600)
        with pytest.raises(HTTPError, match="503") as busy:
            live.post("/tokenize", {"content": "a" * 500})
        assert b"try again later" in busy.value.read()
        with send(live, body(1)) as connection:
            assert b"[DONE]" in read_whole(connection)
        assert len(entered) == 1
        go_on.set()
        assert [one.result() for one in counted] == [{"input_tokens": 7}] * 2
        assert len(live.post("/tokenize", {"content": "a" * 500})["tokens"]) > 100


@pytest.mark.full
def test_a_thousand_requests_leave_no_trace():
    with Live(lambda: FakeEngine(lambda prompt: ANSWER), sessions=2) as live:
        sizes = []
        for n in range(1000):
            with send(live, body(n)) as connection:
                read_whole(connection)
            if n in (200, 999):
                sizes.append(used_memory())
        assert sizes[1] - sizes[0] < 20 << 20
