#!/usr/bin/env python3
"""Times CPU decode and prompts of ours and of llama.cpp in turns, each in its own process, which keeps its model.

    scripts/bench/bench_cpu_turns.py MODEL FILE.gguf [--llama-python VENV/bin/python] [--rounds 13] [--busy]

MODEL and FILE.gguf as for bench_llama_cpp.py, which writes the file; llama.cpp's weights are repacked. In each round
both decode `--tokens` after a prompt of 32 and compute a prompt of 128, in alternating order; the first round does not
count. `--busy`: another process uses one core. Prints medians, and the median and quartiles of the paired ratios ours /
llama.cpp.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np

BEFORE, PROMPT, WARMUP, CONTEXT = 32, 128, 100, 512
OURS, PEER = "ours", "llama.cpp"
Timed = Callable[[str, int], float]  # what to compute ("decode" or "prompt") and how many tokens -> tokens per second


def ours(options: Namespace) -> Timed:
    import bench_cpu

    model = bench_cpu.load_model(options.model)
    runner = bench_cpu.Runner(model, np.random.default_rng(0).integers(0, model.args.vocab_size, 256))

    def run(what: str, count: int) -> float:
        if what == "prompt":
            return count / bench_cpu.seconds(lambda: runner.start(count))
        runner.start(BEFORE)
        return count / bench_cpu.seconds(lambda: runner.decode(count))

    return run


def peer(options: Namespace) -> Timed:
    import bench_llama_cpp as b

    b.llama_cpp.llama_log_set(b.log, None)
    b.llama_cpp.llama_backend_init()
    runner = b.Runner(Namespace(gguf=options.gguf, context=CONTEXT, threads=options.threads), repack=True)
    tokens = np.random.default_rng(0).integers(0, runner.vocab, CONTEXT)

    def run(what: str, count: int) -> float:
        b.llama_cpp.llama_memory_clear(b.llama_cpp.llama_get_memory(runner.context), True)
        if what == "decode":
            runner.feed(tokens[:BEFORE])
        start = time.perf_counter()
        if what == "prompt":
            runner.feed(tokens[:count])
        else:
            for token in tokens[:count]:
                runner.feed(token[None]).argmax()
        return count / (time.perf_counter() - start)

    return run


def answer(run: Timed) -> None:
    """The child process answers each line `what count` with a rate."""
    run("decode", WARMUP)
    print("ready", flush=True)
    for line in sys.stdin:
        what, count = line.split()
        print(run(what, int(count)), flush=True)


class Child:
    def __init__(self, python: str, name: str):
        command = [python, __file__, *sys.argv[1:], "--child", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.read_line() == "ready"

    def read_line(self) -> str:
        line = self.process.stdout.readline().strip()
        if not line:
            raise SystemExit("error: a child ended; what it said is above")
        return line

    def rate(self, what: str, count: int) -> float:
        self.process.stdin.write(f"{what} {count}\n")
        self.process.stdin.flush()
        return float(self.read_line())


def main() -> None:
    options = parsed()
    if options.child:
        return answer({OURS: ours, PEER: peer}[options.child](options))
    from bench_cpu import busy_core

    children = {OURS: Child(sys.executable, OURS), PEER: Child(options.llama_python, PEER)}
    counts, rounds = {"decode": options.tokens, "prompt": PROMPT}, []
    with busy_core() if options.busy else nullcontext():
        for i in range(options.rounds + 1):
            order = list(children)[:: 1 if i % 2 else -1]
            rounds.append({(what, name): children[name].rate(what, n) for what, n in counts.items() for name in order})
    for what in counts:
        mine, other = ([one[what, name] for one in rounds[1:]] for name in (OURS, PEER))
        low, middle, high = statistics.quantiles([a / b for a, b in zip(mine, other, strict=True)], n=4)
        rates = f"{statistics.median(mine):.1f} and {statistics.median(other):.1f} tokens/s"
        print(f"{what}: {rates}, {middle:.2f} times llama.cpp ({low:.2f} to {high:.2f})")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--llama-python", default=sys.executable, help="that has llama-cpp-python (default: this one)")
    parser.add_argument("--rounds", type=int, default=13)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of llama.cpp (default: one for each core)")
    parser.add_argument("--busy", action="store_true", help="another process keeps one core busy")
    parser.add_argument("--child", choices=(OURS, PEER), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
