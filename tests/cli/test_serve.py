"""`serve` as users run it: start, end, one-line errors, and what survives a kill."""

import argparse
import json
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from tiny_models import child_environment

from moeflux_mlx import serve
from moeflux_mlx.cli import serving
from moeflux_mlx.cli.opening import note_idle_options
from moeflux_mlx.cli.serving import model_name
from moeflux_mlx.errors import RequestError
from moeflux_mlx.experts.source import IoMode
from moeflux_mlx.server import app, listen
from moeflux_mlx.server.request import Sampling

LONG = "Tell me of the owl that flew over the lake. " * 24


class Served:
    """A process that serves the demo model."""

    def __init__(self, *options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "moeflux_mlx.serve", "--port", str(self.port), *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=child_environment())

    def __enter__(self):
        end = time.monotonic() + 60
        while self._status("/health") != 200:
            assert time.monotonic() < end and self.process.poll() is None, self.process.stderr.read()
            time.sleep(0.05)
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self.process.stderr.close()

    def _status(self, path):
        try:
            with urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as reply:
                return reply.status
        except URLError as error:
            return getattr(error, "code", 0)

    def ask(self, text, **more):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **more}
        headers = {"Content-Type": "application/json"}
        request = Request(f"http://127.0.0.1:{self.port}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urlopen(request, timeout=60) as reply:
            return reply if more.get("stream") else json.loads(reply.read())

    def end(self, number):
        """Sends a signal. Returns the seconds that the process took to end, its exit code, and its output."""
        began = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(60)
        return time.monotonic() - began, code, self.process.stderr.read()


@pytest.mark.parametrize(
    ("number", "code", "options", "lines"),
    [(signal.SIGINT, 130, (), 1), (signal.SIGTERM, 0, ("--quiet",), 0), (signal.SIGHUP, 0, (), 1)],
)
def test_a_signal_ends_it_in_the_middle_of_an_answer(number, code, options, lines, interruptible):
    with Served(*options) as served:
        served.ask("Hi")  # a GPU compiles its kernels first, which no signal interrupts
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
        head = "POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            seconds, exit_code, said = served.end(number)
    assert seconds < 30 and exit_code == code and "Traceback" not in said
    assert "context: 1024 tokens" in said and f"http://127.0.0.1:{served.port}/v1" in said
    assert said.count(" /v1/messages 503: ") == lines


def test_computed_prompts_survive_a_kill(tmp_path, interruptible):
    folder = tmp_path / "prompts"
    with Served("--prompt-cache-dir", str(folder)) as served:
        first = served.ask(LONG)["usage"]
        served.process.kill()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with Served("--prompt-cache-dir", str(folder)) as served:
        again = served.ask(LONG)["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] >= 0.9 * again["prompt_tokens"] > 200


def line(capsys, *options):
    """Returns the one line that a wrong start prints."""
    assert serve.main([*options]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    return said


def test_a_port_that_is_taken(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port} of 127.0.0.1 is taken; give another with --port" in line(capsys, "--port", port)


def test_wrong_starts(capsys, tmp_path):
    assert "--host 0.0.0.0 lets other machines in" in line(capsys, "--host", "0.0.0.0", "--port", "0")
    assert "--port 70000 is not a port" in line(capsys, "--port", "70000")
    assert "--host nowhere.invalid cannot be used" in line(capsys, "--host", "nowhere.invalid", "--no-key")
    assert "--sessions is 0; it must be at least 1" in line(capsys, "--sessions", "0")
    assert "--idle-minutes is 0.0; it must be positive" in line(capsys, "--idle-minutes", "0", "--port", "0")
    with pytest.raises(SystemExit, match="2"):
        serve.main(["--no-key", "--api-key-file", "file"])
    assert "--api-key-file: not allowed with argument --no-key" in capsys.readouterr().err
    for option, value in (("--temp", "-1"), ("--top-p", "2"), ("--top-k", "-1"), ("--repetition-penalty", "-1")):
        assert f"{option[2:].replace('-', '_')} is {value}" in line(capsys, option, value, "--port", "0")
    for option, value in (("--repetition-context-size", "0"), ("--xtc-probability", "2"), ("--xtc-threshold", "0.6")):
        assert f"{option[2:].replace('-', '_')} is {value}" in line(capsys, option, value, "--port", "0")
    said = line(capsys, "--model", "/a/model", "--model", "/a/model")
    assert said == "error: two models are called /a/model; rename the directory of one"
    assert "/a/model does not exist" in line(capsys, "--model", "/a/model", "--model", "/b/model")
    assert "are for a single --model" in line(capsys, "--model", "/a", "--model", "/b", "--revision", "main")
    assert "--api-key-file cannot be read" in line(capsys, "--api-key-file", str(tmp_path / "none"))
    (tmp_path / "key").write_text("short\n")
    said = line(capsys, "--api-key-file", str(tmp_path / "key"))
    assert "at least 8 letters" in said and "short" not in said


def test_sampling_options_are_the_defaults_of_requests(capsys, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.2}')
    words = ["--repetition-context-size", "64", "--xtc-probability", "0.5", "--xtc-threshold", "0.2", "--temp", "0"]
    options = serve.parser().parse_args([*words, "--model", str(tmp_path)])
    wanted = Sampling(0.0, None, None, None, 1.2, xtc_probability=0.5, xtc_threshold=0.2, repetition_context_size=64)
    assert serving.defaults_of(options, {}, tmp_path).sampling == wanted
    options.model = None
    note_idle_options(options, IoMode.PREAD)  # a request can set the penalty and the temperature
    assert "no effect" not in capsys.readouterr().err


@pytest.fixture
def rules(monkeypatch):
    """Gives the rules of servers that were about to start; none does."""
    made = []

    def make_app(served, rules):
        made.append(rules)
        raise RequestError("started")

    monkeypatch.setattr(app, "make_app", make_app)
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        monkeypatch.setattr(listen, "bind", lambda *_: port)
        yield made


NO_ORIGINS = """
chat.example.org https:// https://a/ https://a?x https://a#x https://u@a https://*.example.org https://a: https://a:443
http://A:80 http://[::1]:80 http://a:080 http://a:x http://::1 http://b\u00fccher.example
"""
NO_HOSTS = "*.example.org box:80 http://box box. . b\u00fccher.example"
ORIGINS = "https://Chat.example.org:8443 http://a:443 https://[::1]:8080 http://my_box app://-:80 null *"


@pytest.mark.parametrize(
    ("option", "values", "wanted"),
    [("--cors-origin", NO_ORIGINS, "give an origin"), ("--allowed-host", NO_HOSTS, "give a whole name")],
)
def test_what_no_request_can_match_is_refused(capsys, rules, option, values, wanted):
    for value in ("", "a b", *values.split()):
        assert f"{option} is {value!r}; {wanted}" in line(capsys, option, value)
    assert not rules


def test_origins_and_hosts_are_compared_in_lower_case(capsys, rules):
    line(capsys, *[f"--cors-origin={origin}" for origin in ORIGINS.split()], "--allowed-host=Box_1.local")
    assert rules[0].origins == ORIGINS.lower().split() and "box_1.local" in rules[0].hosts


def test_several_ranks_run_one_model():
    options = argparse.Namespace(models=["one"], idle_minutes=None, parallel=1)
    serve.check_for_ranks(options)
    options.models = ["one", "two"]
    with pytest.raises(RequestError, match="several ranks run one model"):
        serve.check_for_ranks(options)


def test_several_ranks_answer_one_request_at_a_time():
    options = argparse.Namespace(
        models=None, revision=None, shards_in=None, ranks=object(), idle_minutes=None, parallel=4, embedding_model=None
    )
    with pytest.raises(RequestError, match="--parallel is 4; several ranks answer one request at a time"):
        serve.run(options)


def test_a_model_that_cannot_be_loaded(capsys):
    assert serve.main(["--port", "0", "--model", "/nowhere/model"]) == 1
    assert "/nowhere/model" in capsys.readouterr().err.splitlines()[-1]


def test_without_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert re.search(r"; pip install ('starlette>=1.0' 'uvicorn>=|-e .*\[server\])", line(capsys, "--port", "0"))


def test_names_contain_no_path(tmp_path):
    (tmp_path / "Qwen").mkdir()
    assert model_name(None) == serving.DEMO and model_name(str(tmp_path / "Qwen")) == "Qwen"
    assert model_name("org/name") == "org/name"


def test_the_command_is_listed():
    done = subprocess.run(
        [sys.executable, "-m", "moeflux_mlx", "serve", "--help"],
        capture_output=True,
        text=True,
        env=child_environment(),
    )
    assert done.returncode == 0 and "--idle-minutes" in done.stdout
