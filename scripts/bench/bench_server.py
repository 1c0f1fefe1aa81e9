#!/usr/bin/env python3
"""Measures the cost of serving per token compared with the library, and the time that kept states save in a chat's
second turn.

    scripts/bench/make_random_model.py --variant qwen3.6-35b-a3b --layers 4 OUT --checkpoint OUT-mlx
    scripts/bench/bench_server.py --model OUT [--tokens 4000 --rounds 9 --turns 3] [--beside OUT-mlx]

A server is started on the model, and the library opens the same one in this process, both with experts that stream
through a pool; they run in turn, never at once, and must give the same text. Answers are kept to plain letters, so
that every token is a piece of text. Reported:

    token          milliseconds in server and library; what the server adds to the same token of the same answer, the
                   median of all pairs with its interval of 95 %, in milliseconds and as a share; on Linux the processor
                   time of each too, which says more where other programs run
    turns          seconds to the first piece of a chat's first and second turn, and their ratios
    after a kill   the same second turn from a server that was killed and begun again with the same prompt directory,
                   beside the same prompt in the library with a copy of that directory

`--beside` is a checkpoint of the same weights on which mlx_lm.server is started, or the URL of a server of OpenAI's API
that runs already; it takes part in the same rounds. mlx-lm holds text back until a word ends, so its tokens are timed
by answers of two lengths. The last line is JSON.
"""

import argparse
import contextlib
import http.client
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit
from urllib.request import urlopen

from measuring import quartiles, shown

from moeflux_mlx.driving.sampling import make_logits_processors
from moeflux_mlx.driving.session import Session
from moeflux_mlx.formats.packed import FOLDER
from moeflux_mlx.opening.engine import Engine, open_engine
from moeflux_mlx.state.prompt_store import PromptDirectory

SHORT = 64  # tokens of the prompt before answers whose tokens are timed one by one
ANSWER = 16  # tokens of the answer in one turn


class Server:
    """A process with `python -m moeflux_mlx.serve`."""

    def __init__(self, options: argparse.Namespace, folder: str | None = None):
        command = [sys.executable, "-m", "moeflux_mlx.serve", "--model", options.model, "--port", "0"]
        command += ["--context", str(context(options)), "--expert-io", "pread"]
        command += ["--expert-cache-gb", str(cache_bytes(options) / 1e9), "--prefetch", options.prefetch]
        command += ["--prompt-cache-dir", folder] if folder else []
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.url = ""
        for line in self.process.stderr:
            self.url = next(iter(re.findall(r"http://[^/;]+", line)), self.url)
            if "serving at" in line:
                return
        raise SystemExit("error: the server did not start")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Beside:
    """The server to compare with: mlx_lm.server on a checkpoint, or a server that already runs."""

    def __init__(self, where: str):
        self.url, self.process = where, None
        if where.startswith("http"):
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "mlx_lm.server", "--model", where, "--port", str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while self.process.poll() is None:
            with contextlib.suppress(OSError), urlopen(f"{self.url}/health", timeout=1):
                return
            time.sleep(0.5)
        raise SystemExit("error: mlx_lm.server did not start; pip install mlx-lm")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def main() -> None:
    options = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server lives longer than this process
    load = os.getloadavg()[0]
    engine = open_engine(
        Path(options.model),
        context=context(options),
        expert_io="pread",
        expert_cache_bytes=cache_bytes(options),
        prefetch=options.prefetch,
        warm_start="off",
    )
    bias = {engine.tokenizer.encode(letter)[-1]: 100.0 for letter in string.ascii_letters + string.digits}
    with tempfile.TemporaryDirectory(prefix="bench-server-") as folder:
        results = bench(options, engine, bias, folder)
    engine.experts.close()
    print(json.dumps({"load_average": load, "cpus": os.cpu_count(), "rounds": options.rounds, **results}))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("--model", required=True)
    made.add_argument("--tokens", type=int, default=4000, help="of the first turn's prompt (%(default)s)")
    made.add_argument("--share", type=float, default=0.25, help="of the experts that the pool holds (%(default)s)")
    made.add_argument("--prefetch", choices=("auto", "off"), default="auto", help="off: both read alike (%(default)s)")
    made.add_argument("--rounds", type=int, default=9)
    made.add_argument("--answer", type=int, default=48, help="tokens of answers that are timed (%(default)s)")
    made.add_argument("--turns", type=int, default=3, help="chats whose turns are timed (%(default)s)")
    made.add_argument("--beside", metavar="DIR|URL", help="a checkpoint of the same weights for mlx_lm.server")
    return made


def context(options: argparse.Namespace) -> int:
    return options.tokens + 1024


def cache_bytes(options: argparse.Namespace) -> int:
    """Returns the size of the pool in whole megabytes, so that both ways of stating it mean the same."""
    experts = sum(file.stat().st_size for file in Path(options.model, FOLDER).iterdir())
    return round(options.share * experts / 1e6) * 10**6


def bench(options: argparse.Namespace, engine: Engine, bias: dict[int, float], folder: str) -> dict:
    server = Server(options)
    servers: dict[str, Server | Beside] = {"server": server}
    try:
        if options.beside:
            servers["beside"] = Beside(options.beside)
        urls = {name: one.url for name, one in servers.items()}
        tokens = bench_tokens(options, engine, urls, server.process.pid, bias)
        turns = bench_turns(options, urls, bias)
    finally:
        for one in servers.values():
            one.kill()
    killed = after_kill(options, engine, bias, folder)
    print(f"after a kill: server {killed['server']:.2f} s, library {killed['library']:.2f} s")
    return {**tokens, **turns, "after_kill": killed}


def bench_tokens(
    options: argparse.Namespace, engine: Engine, urls: dict[str, str], pid: int, bias: dict[int, float]
) -> dict:
    """Returns the milliseconds per token, and what the server adds to each. `pid` is the server's process."""
    times: dict[str, list[float]] = {name: [] for name in ("library", *urls)}
    busy: dict[str, list[float]] = {"library": [], "server": []}
    for n in range(options.rounds + 1):  # the first answer warms up
        prompt, texts = letters(SHORT), set()
        for name, process in (("library", os.getpid()), ("server", pid))[:: -1 if n % 2 else 1]:
            before = processor_seconds(process)
            if name == "library":
                seconds, text = in_library(engine, prompt, bias, options.answer)
            else:
                seconds, text = over_http(urls[name], prompt, bias, options.answer)
            times[name] += seconds if n else []
            busy[name] += [(processor_seconds(process) - before) / options.answer * 1e3] if n else []
            texts.add(text)
        if len(texts) > 1:
            raise SystemExit("error: server and library answer differently")
        if "beside" in urls:
            other = by_lengths(urls["beside"], prompt, bias, options.answer)
            times["beside"] += [other] if n else []
    return added(times, busy, engine.experts.stats.hit_rate)


def added(times: dict[str, list[float]], busy: dict[str, list[float]], hits: float) -> dict:
    """Returns what the server adds to a token, from the seconds per token and the milliseconds of processor time."""
    pairs = list(zip(times["library"], times["server"], strict=True))
    more, share = interval([(b - a) * 1e3 for a, b in pairs]), interval([b / a - 1 for a, b in pairs])
    wall = {name: statistics.median(seconds) * 1e3 for name, seconds in times.items()}
    processor = {name: statistics.median(milliseconds) for name, milliseconds in busy.items()}
    print(f"experts in the pool when asked for, in the library: {100 * hits:.0f} %")
    print("ms/token: " + ", ".join(f"{name} {median:.2f}" for name, median in wall.items()))
    print(f"the server adds {shown(more, 3)} ms to a token, {shown([100 * one for one in share], 3)} %")
    print("processor ms/token, the prompt's share included: " + ", ".join(f"{k} {v:.2f}" for k, v in processor.items()))
    figures = {"milliseconds": wall, "processor_ms": processor, "added_ms": more, "added_share": share}
    return {**figures, "pairs": len(pairs), "hits": hits}


def bench_turns(options: argparse.Namespace, urls: dict[str, str], bias: dict[int, float]) -> dict:
    """Returns the seconds to the first piece in the first and the second turn of several chats."""
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in urls}
    for _ in range(options.turns):
        for name, url in urls.items():
            turns[name].append(two_turns(url, bias, options.tokens))
    ratios = {name: quartiles([first / second for first, second in pairs]) for name, pairs in turns.items()}
    for name, pairs in turns.items():
        first, second = (statistics.median(times) for times in zip(*pairs, strict=True))
        print(f"turns, {name}: first {first:.2f} s, second {second:.3f} s; first / second {shown(ratios[name], 3)}")
    return {"turns": turns, "turn_ratios": ratios}


def in_library(engine: Engine, prompt: str, bias: dict[int, float], count: int) -> tuple[list[float], str]:
    """Returns the seconds of each token after the first, and the text."""
    session, times, text = engine.session(), [], ""
    for response in session.respond(
        engine.tokenizer.encode(prompt), max_tokens=count, logits_processors=make_logits_processors(bias)
    ):
        times.append(time.perf_counter())
        text += response.text
    return gaps(times), text


def over_http(url: str, prompt: str, bias: dict[int, float], count: int) -> tuple[list[float], str]:
    """As `in_library`, over HTTP."""
    times, text = [], ""
    for when, chunk in events(url, "/v1/completions", {"prompt": prompt, "max_tokens": count, **asked(bias)}):
        piece = chunk["choices"][0].get("text") if chunk["choices"] else ""
        if piece:
            times.append(when)
            text += piece
    return gaps(times), text


def processor_seconds(pid: int) -> float:
    """Returns the processor time of all threads of a process; 0 if the system does not report it."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(one.read_text().split()[0]) for one in files) / 1e9


def by_lengths(url: str, prompt: str, bias: dict[int, float], count: int) -> float:
    """Returns the seconds per token: the additional time of a long answer compared with a short one, after a known
    prompt.
    """

    def seconds(length: int) -> float:
        start = time.perf_counter()
        for _ in events(url, "/v1/completions", {"prompt": prompt, "max_tokens": length, **asked(bias)}):
            pass
        return time.perf_counter() - start

    seconds(1)
    short = seconds(1)
    return (seconds(count) - short) / (count - 1)


def two_turns(url: str, bias: dict[int, float], tokens: int) -> tuple[float, float]:
    """Returns the seconds to the first piece in each turn."""
    messages = [{"role": "user", "content": letters(tokens)}]
    first, _ = turn(url, messages, bias, 1)
    _, answer = turn(url, messages, bias, ANSWER)
    second, _ = turn(url, second_turn(messages, answer), bias, 1)
    return first, second


def second_turn(messages: list[dict[str, str]], answer: str) -> list[dict[str, str]]:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": letters(32)}]


def turn(url: str, messages: list[dict[str, str]], bias: dict[int, float], count: int) -> tuple[float, str]:
    """Returns the seconds to the first piece, and the answer."""
    start, first, text = time.perf_counter(), 0.0, ""
    for when, chunk in events(url, "/v1/chat/completions", {"messages": messages, "max_tokens": count, **asked(bias)}):
        piece = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else None
        first = when - start if piece and not text else first
        text += piece or ""
    return first, text


def after_kill(options: argparse.Namespace, engine: Engine, bias: dict[int, float], folder: str) -> dict[str, float]:
    """Returns the seconds to the first piece in the second turn, in a new server and in the library, from the same
    directory.
    """
    server, messages = Server(options, folder), [{"role": "user", "content": letters(options.tokens)}]
    try:
        _, answer = turn(server.url, messages, bias, ANSWER)
    finally:
        server.kill()
    messages, copy = second_turn(messages, answer), f"{folder}-copy"  # the server must not help the library
    shutil.copytree(folder, copy)
    server = Server(options, folder)
    try:
        turn(server.url, [{"role": "user", "content": "warm"}], bias, 1)
        served, _ = turn(server.url, messages, bias, 1)
    finally:
        server.kill()
    session = Session(engine.model, engine.tokenizer, store=PromptDirectory(Path(copy), engine.fingerprint))
    prompt = cast(list[int], engine.tokenizer.apply_chat_template(messages))
    for _ in session.respond(prompt, max_tokens=1, logits_processors=make_logits_processors(bias)):
        pass
    shutil.rmtree(copy)
    return {"server": served, "library": session.first_token_seconds, "from_disk": session.reuse.disk}


def asked(bias: dict[int, float]) -> dict:
    wanted = {str(token): more for token, more in bias.items()}
    return {"model": "default_model", "stream": True, "temperature": 0, "logit_bias": wanted}


def events(url: str, path: str, body: dict) -> Iterator[tuple[float, dict]]:
    """Yields (arrival time, event) of a stream."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=1800)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status != http.client.OK:
        raise SystemExit(f"error: {url}{path} answered {reply.status}: {reply.read(200)!r}")
    for line in reply:
        if line.startswith(b"data: {"):
            yield time.perf_counter(), json.loads(line[6:])
    connection.close()


def letters(count: int) -> str:
    return "".join(random.choices(string.ascii_letters, k=count))


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def interval(values: list[float]) -> list[float]:
    """Returns the median, between the ends of its 95 % interval."""
    ordered, spread = sorted(values), 0.98 * math.sqrt(len(values))
    low, high = round(len(values) / 2 - spread), round(len(values) / 2 + spread)
    return [ordered[max(low, 0)], statistics.median(ordered), ordered[min(high, len(values) - 1)]]


if __name__ == "__main__":
    main()
