#!/usr/bin/env python3
"""Measures what serving adds: to a token against the library, and what remembering saves a chat's second turn.

    scripts/bench/bench_server.py --model DIR [--tokens 4000 --rounds 9] [--beside URL]

A server is started on the model, and the library opens the same one in this process; they run in turn, never at once,
and must give the same text. Answers are kept to plain letters, so that every token is a piece of text. Reported:

    token          milliseconds in server and library, and the paired ratios of the rounds (quartiles, median)
    turns          seconds to the first piece of a chat's first and second turn, and their ratios
    after a kill   the same second turn from a server that was killed and begun again with the same prompt directory,
                   beside the same prompt in the library with that directory

`--beside` names another server of OpenAI's API on the same weights (mlx_lm.server); it runs in the same rounds. The
last line is JSON.
"""

import argparse
import http.client
import json
import os
import random
import re
import shutil
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from moeflux_mlx.engine.engine import Engine, open_engine
from moeflux_mlx.engine.sampling import make_logits_processors
from moeflux_mlx.engine.session import Session
from moeflux_mlx.state.prompt_store import PromptDirectory

SHORT = 64  # tokens of the prompt before answers that are timed token by token
ANSWER = 16  # tokens of a turn's answer


class Server:
    """`python -m moeflux_mlx.serve` in a process of its own."""

    def __init__(self, options: argparse.Namespace, folder: str | None = None):
        more = ["--prompt-cache-dir", folder] if folder else []
        command = [sys.executable, "-m", "moeflux_mlx.serve", "--model", options.model, "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--context", str(context(options)), *more], stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        self.url = ""
        for line in self.process.stderr:
            self.url = next(iter(re.findall(r"http://[^/;]+", line)), self.url)
            if "serving at" in line:
                return
        raise SystemExit("error: the server did not start")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def main() -> None:
    options = parser().parse_args()
    load = os.getloadavg()[0]
    engine = open_engine(Path(options.model), context=context(options))
    bias = {engine.tokenizer.encode(letter)[-1]: 100.0 for letter in string.ascii_letters + string.digits}
    with tempfile.TemporaryDirectory(prefix="bench-server-") as folder:
        results = bench(options, engine, bias, folder)
    engine.experts.close()
    print(json.dumps({"load_average": load, "cpus": os.cpu_count(), "rounds": options.rounds, **results}))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("--model", required=True)
    made.add_argument("--tokens", type=int, default=4000, help="of the first turn's prompt (%(default)s)")
    made.add_argument("--rounds", type=int, default=9)
    made.add_argument("--answer", type=int, default=48, help="tokens of answers that are timed (%(default)s)")
    made.add_argument("--turns", type=int, default=3, help="chats whose turns are timed (%(default)s)")
    made.add_argument("--beside", metavar="URL", help="another server of the same weights")
    return made


def context(options: argparse.Namespace) -> int:
    return options.tokens + 1024


def bench(options: argparse.Namespace, engine: Engine, bias: dict[int, float], folder: str) -> dict:
    server = Server(options)
    try:
        tokens = bench_tokens(options, engine, server.url, bias)
        turns = [two_turns(server.url, bias, options.tokens) for _ in range(options.turns)]
    finally:
        server.kill()
    ratios = quartiles([first / second for first, second in turns])
    print(f"turns: first {turns[0][0]:.2f} s, second {turns[0][1]:.3f} s; first / second {shown(ratios)}")
    killed = after_kill(options, engine, bias, folder)
    print(f"after a kill: server {killed['server']:.2f} s, library {killed['library']:.2f} s")
    return {**tokens, "turns": turns, "turn_ratios": ratios, "after_kill": killed}


def bench_tokens(options: argparse.Namespace, engine: Engine, url: str, bias: dict[int, float]) -> dict:
    """Milliseconds of a token, and paired ratios to the library."""
    urls = {"server": url} | ({"beside": options.beside} if options.beside else {})
    found: dict[str, list[float]] = {name: [] for name in ("library", *urls)}
    for n in range(options.rounds + 1):  # the first warms up
        prompt = letters(SHORT)
        runs = {"library": in_library(engine, prompt, bias, options.answer)}
        runs |= {name: over_http(one, prompt, bias, options.answer) for name, one in urls.items()}
        if runs["server"][1] != runs["library"][1]:
            raise SystemExit("error: server and library answer differently")
        for name, (seconds, _) in runs.items():
            found[name] += [seconds * 1e3] if n else []
    medians = {name: statistics.median(times) for name, times in found.items()}
    paired = {name: quartiles([a / b for a, b in zip(found[name], found["library"], strict=True)]) for name in urls}
    added = {name: quartiles([a - b for a, b in zip(found[name], found["library"], strict=True)]) for name in urls}
    print(f"{'':10} {'ms/token':>9}  to the library  (ms more)")
    for name, median in medians.items():
        more = f"{shown(paired[name])}  {shown(added[name])}" if name in urls else ""
        print(f"{name:10} {median:9.2f}  {more}")
    return {"milliseconds": medians, "ratios": paired, "added_ms": added}


def in_library(engine: Engine, prompt: str, bias: dict[int, float], count: int) -> tuple[float, str]:
    """Seconds of a token, and the text."""
    session, times, text = engine.session(), [], ""
    for response in session.respond(
        engine.tokenizer.encode(prompt), max_tokens=count, logits_processors=make_logits_processors(bias)
    ):
        times.append(time.perf_counter())
        text += response.text
    return (times[-1] - times[0]) / (len(times) - 1), text


def over_http(url: str, prompt: str, bias: dict[int, float], count: int) -> tuple[float, str]:
    """As `in_library`."""
    body = {"prompt": prompt, "max_tokens": count, **asked(bias)}
    times, text = [], ""
    for when, chunk in events(url, "/v1/completions", body):
        piece = chunk["choices"][0].get("text") if chunk["choices"] else ""
        if piece:
            times.append(when)
            text += piece
    return (times[-1] - times[0]) / (count - 1), text


def two_turns(url: str, bias: dict[int, float], tokens: int) -> tuple[float, float]:
    """Seconds to the first piece of each turn."""
    messages = [{"role": "user", "content": letters(tokens)}]
    first, answer = turn(url, messages, bias)
    second, _ = turn(url, second_turn(messages, answer), bias)
    return first, second


def second_turn(messages: list[dict[str, str]], answer: str) -> list[dict[str, str]]:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": letters(32)}]


def turn(url: str, messages: list[dict[str, str]], bias: dict[int, float]) -> tuple[float, str]:
    """Seconds to the first piece, and the answer."""
    start, first, text = time.perf_counter(), 0.0, ""
    for when, chunk in events(url, "/v1/chat/completions", {"messages": messages, "max_tokens": ANSWER, **asked(bias)}):
        piece = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else None
        first = when - start if piece and not text else first
        text += piece or ""
    return first, text


def after_kill(options: argparse.Namespace, engine: Engine, bias: dict[int, float], folder: str) -> dict[str, float]:
    """Seconds to the second turn's first piece, in a new server and in the library, from the same directory."""
    server, messages = Server(options, folder), [{"role": "user", "content": letters(options.tokens)}]
    try:
        _, answer = turn(server.url, messages, bias)
    finally:
        server.kill()
    messages, copy = second_turn(messages, answer), f"{folder}-copy"  # what the server adds must not help the library
    shutil.copytree(folder, copy)
    server = Server(options, folder)
    try:
        turn(server.url, [{"role": "user", "content": "warm"}], bias)
        served, _ = turn(server.url, messages, bias)
    finally:
        server.kill()
    session = Session(engine.model, engine.tokenizer, store=PromptDirectory(Path(copy), engine.fingerprint))
    prompt = engine.tokenizer.encode("".join(f"{one['content']}\n" for one in messages))
    for _ in session.respond(prompt, max_tokens=1, logits_processors=make_logits_processors(bias)):
        pass
    shutil.rmtree(copy)
    return {"server": served, "library": session.first_token_seconds, "from_disk": session.reuse.disk}


def asked(bias: dict[int, float]) -> dict:
    wanted = {str(token): more for token, more in bias.items()}
    return {"model": "any", "stream": True, "temperature": 0, "logit_bias": wanted}


def events(url: str, path: str, body: dict) -> Iterator[tuple[float, dict]]:
    """(when it came, event) of a stream."""
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


def quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def shown(values: list[float]) -> str:
    return "{1:.3f} ({0:.3f} to {2:.3f})".format(*values)


if __name__ == "__main__":
    main()
