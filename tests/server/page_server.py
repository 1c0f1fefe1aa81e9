"""A server without a model for tests of the page: scripted answers, refusals and a feed of live figures."""

import base64
import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from moeflux_mlx.server import page

LAYERS, EXPERTS = [3, 4, 5, 6, 7, 8], 16
FEATURES = {"demo": False, "images": True, "thinking": True, "efforts": ["low", "high"]}


def text(words):
    """Returns the deltas of an answer, one word each."""
    return [{"content": word} for word in words.split(" ") for word in (word, " ")][:-1]


def call(name, *pieces):
    """Returns the deltas of a tool call, with its arguments in pieces."""
    first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": ""}}
    return [{"tool_calls": [first]}] + [
        {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in pieces
    ]


def rates(tokens):
    """Returns the rates of a model that writes `tokens` per second; a model that writes none is idle."""
    rest = {"hit_rate": 0.875, "gb_per_second": 3.25, "prompt_tokens_per_second": 410.0}
    return {**(rest if tokens else dict.fromkeys(rest, 0.0)), "tokens_per_second": tokens}


def feed(step):
    """Returns live figures of a model with a few experts, in which a hit moves through the map."""
    cells = bytearray(len(LAYERS) * EXPERTS)
    for i in range(len(cells)):
        cells[i] = 1 if i % 3 else 0
    cells[step % len(cells)], cells[(step * 7) % len(cells)] = 3, 4
    busy = step % 2 == 1
    return {
        "model": "tiny-moe", "busy": busy, "queue": 0, "context": 4096, "layers": LAYERS, "experts": EXPERTS,
        "map": base64.b64encode(cells).decode(), **rates(17.6 if busy else 0.0), "request": rates(195.0),
        "memory": {"used": 6_200_000_000, "planned": 8_000_000_000, "pool": 4_100_000_000},
        "lanes": [{"name": None, "prompt": None, "tokens": 20, "tokens_per_second": 17.6}] if busy else [],
    }  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    """One connection. `self.server` has the script and the requests."""

    def log_message(self, *args):
        """Writes nothing."""

    def reply(self, status, body, kind="application/json", **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def event(self, data):
        self.wfile.write(f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode())
        self.wfile.flush()

    def begin_events(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def allowed(self):
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.reply(401, {"error": {"message": "this server asks for a key", "type": "authentication_error"}})
            return False
        return True

    def do_GET(self):
        if self.path == "/":
            self.reply(200, page.content(), "text/html; charset=utf-8", Content_Security_Policy=page.csp())
        elif self.path == "/v1/models" and self.allowed():
            self.server.lists += 1
            more = {"object": "model", "max_model_len": self.server.context, "features": self.server.features}
            self.reply(200, {"object": "list", "data": [{"id": name, **more} for name in self.server.models]})
        elif self.path == "/live" and self.allowed():
            self.live()

    def live(self):
        self.begin_events()
        self.server.listeners += 1
        with contextlib.suppress(OSError):
            while not self.server.closing.wait(self.server.pause):
                self.server.step += 1
                self.event(self.server.feed(self.server.step))
        self.server.listeners -= 1

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        self.server.requests.append(request)
        said = self.server.script(request)
        if isinstance(said, tuple):
            self.reply(*said)
            return
        self.begin_events()
        try:
            self.stream(said)
        except OSError:
            self.server.left.set()

    def stream(self, said):
        tokens, reason = 0, "stop"
        for delta in said:
            if isinstance(delta, float):
                time.sleep(delta)
            elif delta.keys() & {"error", "prompt_progress", "timings"}:
                self.event({"choices": [], **delta})
            else:
                tokens, reason = tokens + 1, "tool_calls" if "tool_calls" in delta else delta.pop("finish", reason)
                self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        usage = {"prompt_tokens": 40, "completion_tokens": tokens, "total_tokens": 40 + tokens}
        usage["prompt_tokens_details"] = {"cached_tokens": 32}
        self.event({"choices": [], "usage": usage})
        self.event("[DONE]")


class PageServer(ThreadingHTTPServer):
    """Serves the page and `script`: from a request to deltas, seconds to wait (floats), or (status, body)."""

    daemon_threads = True

    def __init__(self, script, feed=feed, pause=0.2):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.feed, self.pause, first = script, feed, pause, feed(0)
        self.models, self.context = [first["model"]], first["context"]
        self.requests, self.key, self.step, self.listeners, self.features = [], None, 0, 0, FEATURES
        self.lists = 0  # how often the models were requested
        self.left, self.closing = threading.Event(), threading.Event()
        self.address = f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request, client_address):
        """Ignores a browser that closes the connection."""

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *args):
        self.closing.set()
        self.shutdown()
        self.server_close()
