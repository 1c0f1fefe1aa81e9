#!/usr/bin/env python3
"""Compares the first tokens of a session with its later ones, with and without a warm start, in alternating rounds.

    scripts/bench/routing_trace.py synthesize --tokens 4000 --layers 12 --experts 512 --top-k 10 FILE
    scripts/bench/bench_warm_start.py --model DIR --trace FILE [--share 0.5] [--prompt 16 64] [--idle 0 5]

Each session is a process of its own that loads a streamed model, waits (`--idle`), computes a prompt and decodes.
Prompt and steps request the experts of the trace (routing_trace.py), each session those of other tokens. An untimed
session of `--learn` tokens notes what it uses in a file of its own; no other session writes there. Reported are, for
each prompt and wait, the medians of the tokens per second and of the records missed per token, of the first `--first`
tokens and of as many at the end, and the median and quartiles of the first rate over the steady one of the session, and
over the mean of both sessions of the round; the last line is JSON.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from measuring import medians, quartiles, ratios
from routing_trace import Traced

from moeflux_mlx import load_model

WAYS = "off", "auto"


def main() -> None:
    options = parser().parse_args()
    if options.way:
        print(json.dumps(session(options)))
        return
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs")
    with tempfile.TemporaryDirectory() as folder:
        learned = Path(folder) / "learned"
        run(options, learned, "auto", 0, options.prompt[0], 0.0, options.learn)
        results = {(prompt, idle): [] for prompt in options.prompt for idle in options.idle}
        for number in range(options.rounds):
            for case, rounds in results.items():
                ways = WAYS if number % 2 else WAYS[::-1]
                rounds.append({way: once(options, learned, way, number, *case) for way in ways})
                print(case, rounds[-1], flush=True)
    print(json.dumps({"load_average": os.getloadavg()[0], "cases": [report(*one) for one in results.items()]}))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("--model", required=True)
    made.add_argument("--trace", type=Path, required=True)
    made.add_argument("--share", type=float, default=0.5, help="of the experts that the pool holds (%(default)s)")
    made.add_argument("--prompt", type=int, nargs="+", default=[16], help="tokens (%(default)s)")
    made.add_argument("--idle", type=float, nargs="+", default=[0.0], help="seconds before the prompt (%(default)s)")
    made.add_argument("--first", type=int, default=40, help="tokens at either end of an answer (%(default)s)")
    made.add_argument("--tokens", type=int, default=240, help="of an answer (%(default)s)")
    made.add_argument("--learn", type=int, default=400, help="tokens of the session that notes (%(default)s)")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    made.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return made


def once(options: argparse.Namespace, learned: Path, way: str, number: int, prompt: int, idle: float) -> dict:
    """A session with a copy of what was learned."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(learned, Path(folder) / "copy")
        start = options.learn + number * (options.tokens + prompt)
        return run(options, Path(folder) / "copy", way, start, prompt, idle, options.tokens)


def run(options: argparse.Namespace, cache: Path, way: str, start: int, prompt: int, idle: float, tokens: int) -> dict:
    given = {"way": way, "start": start, "prompt": prompt, "idle": idle, "tokens": tokens, "first": options.first}
    given |= {"model": options.model, "trace": options.trace, "share": options.share}
    arguments = [str(part) for name, value in given.items() for part in (f"--{name}", value)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run([sys.executable, __file__, *arguments], env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def session(options: argparse.Namespace) -> dict:
    """One process's session."""
    with np.load(options.trace) as file:
        trace = file["trace"].astype(np.int64)[None]
    model = load_model(options.model, expert_io="pread", expert_cache_bytes=1, warm_start="off")
    nbytes = int(options.share * model.experts.layout.total_bytes)
    model.experts.close()
    model = load_model(options.model, expert_io="pread", expert_cache_bytes=nbytes, warm_start=options.way)
    traced, cache = Traced(model, trace), model.make_cache()
    (length,), wanted = options.prompt, iter(range(options.start, options.start + 1_000_000))
    time.sleep(options.idle[0])
    begun = time.perf_counter()
    seconds, missed = [], []
    for count in (length, *[1] * options.tokens):
        before = model.experts.stats.misses - model.experts.stats.late
        places = np.array([next(wanted) for _ in range(count)])
        with traced.requesting(np.zeros(count, int), places):
            mx.eval(model(mx.array(places % 1000)[None], cache))
        missed.append(model.experts.stats.misses - model.experts.stats.late - before)
        seconds.append(time.perf_counter() - begun)
        begun = time.perf_counter()
    stats = model.experts.stats
    report = {
        "prompt_seconds": seconds[0],
        "first": options.first / sum(seconds[1 : options.first + 1]),
        "steady": options.first / sum(seconds[-options.first :]),
        "first_misses": sum(missed[1 : options.first + 1]) / options.first,
        "steady_misses": sum(missed[-options.first :]) / options.first,
        "warmed": stats.warmed,
        "warm_hits": stats.warm_hits,
        "gigabytes": stats.bytes_read / 1e9,
    }
    model.experts.close()
    return report


def report(case: tuple[int, float], rounds: list[dict]) -> dict:
    said: dict = {"prompt": case[0], "idle": case[1]}
    for way in WAYS:
        some = [one[way] for one in rounds]
        said[way] = medians(some)
        said[way]["first_over_steady"] = quartiles(one["first"] / one["steady"] for one in some)
    # Both ways run the same tokens, and both are steady at their end.
    steady = [statistics.mean(one[way]["steady"] for way in WAYS) for one in rounds]
    for way in WAYS:
        said[way]["first_over_both"] = ratios((one[way]["first"] for one in rounds), steady)
    print(json.dumps(said, indent=1))
    return said


if __name__ == "__main__":
    main()
