"""Runs a model for minutes as a busy server does, and writes a file that its owner can send: three conversations that
grow and are evicted, and a pool of experts that is cut and grows again.

The file is saved as it goes, so that it says what was seen if the program, or the machine, ends before. It has no
names, paths or keys.
"""

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import mlx.core as mx

from ..driving.loop import Loop
from ..driving.session import Answer
from ..errors import RequestError
from ..experts.source import ExpertLoader
from ..experts.streamed import StreamedExperts
from ..opening.engine import Engine, open_engine
from ..ops import backend
from ..planning.awake import Awake
from ..planning.machine import in_gb, machine_figures, used_memory
from ..tools.demo_check import open_demo
from ..version import full_version
from .diagnosis import Finding, first_lines, machine_lines
from .options import file_to_write
from .reporting import save, without_names
from .terminal import note

FILE = "moeflux-soak.txt"
QUESTIONS = ("Tell me a story", "Tell me a story about a dog", "Tell me a story about the sea")  # of three clients
MORE = " And then?"
ANSWERS = (24, 40, 56)  # tokens of a client's answers
LONGEST = 400  # tokens of a conversation, which is then evicted
EVERY, SHARES = 5.0, (1.0, 0.5, 0.75)  # seconds after which the pool gets another share of its bytes, in this order
JUMP = 5.0  # seconds by which a wall clock must be ahead of the other one: the machine slept
ASLEEP = 30.0  # seconds to wait after the machine was asked to sleep
REFRESH = "MLX_METAL_RESIDENCY_REFRESH_INTERVAL_MS"  # how often MLX asks for the residency of its sets; 0: never
COMPARED = 15.0  # seconds of each way of keeping the pool in memory, in a report
DEMO_POOLS = {"half of the experts": 2 << 20, "all experts": 4 << 20}  # bytes of pools of the demo model


@dataclass
class Seen:
    """What one part of a run has shown. `others`: answers with other tokens than alone."""

    seconds: float = 0.0
    tokens: int = 0
    slowest: float = 0.0
    evicted: int = 0
    others: int = 0
    pools: list[int] = field(default_factory=list)
    slept: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        sizes = [f"{size / 1e6:.1f}" for size in (min(self.pools, default=0), max(self.pools, default=0))]
        pool = f"a pool of {sizes[0]} to {sizes[1]} MB, " if self.pools else ""
        memory = f"{in_gb(used_memory())} in use, {in_gb(mx.get_peak_memory())} of arrays at most"
        slept = f", the machine slept for {self.slept:.0f} s in it" if self.slept else ""
        wrong = f", {self.others} ANSWERS HAD OTHER TOKENS" if self.others else ""
        return (
            f"{self.tokens} tokens, {self.rate:.1f} tokens/s, the slowest step {self.slowest * 1e3:.0f} ms, "
            f"{self.evicted} conversations evicted, {pool}{memory}{slept}{wrong}"
        )


class Client:
    """Asks for one answer after the other, in a conversation that grows until it is evicted."""

    def __init__(self, engine: Engine, question: str, length: int):
        self._engine, self._length = engine, length
        asked = engine.tokenizer.apply_chat_template([{"role": "user", "content": question}])
        self._question, self._more = cast(list[int], asked), engine.tokenizer.encode(MORE)
        self.alone: list[int] = []  # tokens of the first answer without others
        self.begin()

    def begin(self) -> None:
        """Begins a new conversation; the old one is evicted."""
        self._session, self._text = self._engine.session(), list(self._question)
        mx.clear_cache()

    def next_answer(self) -> Answer:
        self.answer = self._session.answer(self._text, max_tokens=self._length)
        return self.answer

    def take(self, seen: Seen) -> None:
        """Takes an answer that is over."""
        tokens = list(self.answer.tokens)
        if len(self._text) == len(self._question):
            self.alone = self.alone or tokens
            seen.others += tokens != self.alone
        self._text += [*tokens, *self._more]
        if len(self._text) > LONGEST:
            seen.evicted += 1
            self.begin()


class Cuts:
    """A limit of the pool that changes while a model runs, beside the machine's own."""

    def __init__(self, experts: StreamedExperts):
        self._inner, self._most, self.share = experts.limit, experts.pool_bytes, 1.0

    def __call__(self, held: int) -> int:
        own = int(self.share * self._most)
        return own if self._inner is None else min(own, self._inner(held))


class Soak:
    """A run of a model, with or without `cuts` of its pool; `seconds` may be called again and again."""

    def __init__(self, engine: Engine, cuts: bool = True):
        self.experts: ExpertLoader = engine.experts
        self._cuts = None
        if cuts and isinstance(engine.experts, StreamedExperts):
            self._cuts = engine.experts.limit = Cuts(engine.experts)
        self.clients = [Client(engine, *each) for each in zip(QUESTIONS, ANSWERS, strict=True)]
        self._loop = Loop[Answer]()
        for client in self.clients:  # each first answer alone
            self._loop.add(client.next_answer())
            while not client.answer.is_over:
                self._step(Seen())
            client.take(Seen())
            client.begin()
        for client in self.clients:
            self._loop.add(client.next_answer())

    def seconds(self, count: float) -> Seen:
        """Runs for so many seconds."""
        seen, start, wall = Seen(), time.monotonic(), time.time()
        while (now := time.monotonic() - start) < count:
            if self._cuts is not None:
                self._cuts.share = SHARES[int(now / EVERY) % len(SHARES)]
            self._step(seen)
            for client in self.clients:
                if client.answer.is_over:
                    client.take(seen)
                    self._loop.add(client.next_answer())
        seen.seconds = time.monotonic() - start
        seen.slept = slept_since(start, wall)
        return seen

    def _step(self, seen: Seen) -> None:
        """A step of the loop.

        Raises:
            Exception: what an answer ended with.
        """
        began = time.perf_counter()
        events = self._loop.step()
        seen.slowest = max(seen.slowest, time.perf_counter() - began)
        for event in events:
            if event.error is not None:
                raise event.error
            seen.tokens += event.token is not None
        if self.experts.slots:
            seen.pools.append(self.experts.pool_bytes)


def slept_since(start: float, wall: float) -> float:
    """Seconds for which the machine slept since these times of the two clocks, of which only one goes on meanwhile."""
    slept = time.time() - wall - (time.monotonic() - start)
    return slept if slept > JUMP else 0.0


def run(options: argparse.Namespace) -> int:
    """Soaks as the options of `doctor` say, and writes the file; returns 1 if something broke or was wrong.

    Raises:
        RequestError: the minutes are not a positive number, or the file cannot be written.
    """
    minutes = options.soak
    if not (math.isfinite(minutes) and minutes > 0):
        raise RequestError(f"--soak is {minutes}; give a number of minutes above 0")
    path = file_to_write("--soak", FILE)
    lines = [f"moeflux {full_version()}", f"made by moeflux doctor --soak {minutes:g}, {time.strftime('%Y-%m-%d')}"]
    lines += [*machine_lines(machine_figures()), f"model     {options.model or 'demo'}, wired: {options.wired}", ""]
    fault = ""
    try:
        with Awake(), closing(soaked(options)) as told:
            for line, is_right in told:
                lines, fault = _said(path, lines, line), fault or ("" if is_right else "an answer had other tokens")
    except Exception as error:
        fault = f"{type(error).__name__}: {first_lines(str(error))}"
    lines = _said(path, [*lines], f"BROKE OR WRONG: {fault}" if fault else "nothing broke", is_over=True)
    note(f"saved in {path}; it holds no names, paths or keys")
    return 1 if fault else 0


def _said(path: Path, lines: Sequence[str], *more: str, is_over: bool = False) -> list[str]:
    """Prints lines and saves them behind the others."""
    said = [*lines, *(without_names(line) for line in more)]
    print("\n".join(said[len(lines) :]), flush=True)
    save(path, said if is_over else [*said, "then the program, or the machine, ended before the next line"])
    return said


def soaked(options: argparse.Namespace) -> Generator[tuple[str, bool], None, None]:
    """Lines of a run, and whether each is right."""
    if options.model is None:
        engine = open_demo("pread", DEMO_POOLS["half of the experts"], options.wired)
    else:
        engine = open_engine(options.model, expert_io="pread", warm_start="off", wired=options.wired)
    with closing(engine.experts):
        yield f"loaded: {without_names(engine.experts.decision)}", True
        soak, left, rates, number = Soak(engine), 60 * options.soak, list[float](), 0
        yield "each client's first answer alone: done", True
        while left > 0:
            number, seen = number + 1, soak.seconds(min(left, 60))
            left -= max(seen.seconds, 1e-3)
            rates.append(seen.rate)
            yield f"minute {number}, {seen.seconds:.0f} s: {seen}", not seen.others
        if options.sleep and sys.platform == "darwin":
            start, wall = time.monotonic(), time.time()
            subprocess.run(["pmset", "sleepnow"], check=False)
            time.sleep(ASLEEP)
            yield f"the machine was asked to sleep, and slept for {slept_since(start, wall):.0f} s", True
            seen = soak.seconds(60)
            yield f"after it, {seen}", not seen.others
        yield f"the last minute had {rates[-1] / max(rates[0], 1e-9):.2f} of the first one's tokens/s", True


def rate(pool: int, wired: str, seconds: float = COMPARED) -> float:
    """Tokens per second of the demo model with so many bytes of a pool that stays as it is."""
    engine = open_demo("pread", pool, wired)
    with closing(engine.experts):
        return Soak(engine, cuts=False).seconds(seconds).rate


def compared(seconds: float = COMPARED) -> Finding:
    """A part of the report: half and whole pool, and on a Mac what is wired and whether MLX refreshes residency."""
    ways = [(name, pool, "pool", "") for name, pool in DEMO_POOLS.items()]
    if backend.name() == "metal":
        whole = DEMO_POOLS["all experts"]
        ways += [(f"--wired {mode}", whole, mode, "") for mode in ("all", "off")]
        ways += [("residency refreshed every 500 ms", whole, "pool", "500")]
    lines = []
    for name, pool, wired, refresh in ways:
        made = _in_a_process(pool, wired, seconds, {REFRESH: refresh} if refresh else {})
        lines.append(f"{name} in the pool: {made}" if name in DEMO_POOLS else f"{name}: {made}")
    return lines, True


def _in_a_process(pool: int, wired: str, seconds: float, environment: dict[str, str]) -> str:
    """What a new process measures: MLX reads its variables once."""
    code = f"from moeflux_mlx.cli.soak import rate; print(rate({pool}, {wired!r}, {seconds}))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return f"failed: {first_lines(done.stderr[-500:])}"
    return f"{float(done.stdout.split()[-1]):.1f} tokens/s with three conversations"
