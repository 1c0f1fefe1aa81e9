#!/usr/bin/env python3
"""Measures what remembered prompts save: time to the first token and bytes of experts read.

    scripts/bench/bench_prompt_cache.py --model DIR [--tokens 2000] [--expert-io pread --expert-cache-gb 2]

Every measurement is a new process that loads the model, computes a few tokens to warm up, forgets all experts
that were read, and then times one prompt of random tokens:

    first             the prompt, nothing known
    first, saving     the same with a prompt directory; the state is written after the answer, timed by itself
    again             the same prompt after a restart, from the prompt directory
    second turn       the prompt, its answer and 64 new tokens in the session that gave the answer
    second, anew      the same text with nothing known

The rounds alternate between these; reported are medians, and ratios to computing everything again. The last line is
JSON. Bytes are counted where experts are read (pread), not where they are mapped.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from measuring import medians

from moeflux_mlx import load, model_fingerprint
from moeflux_mlx.driving.session import Session
from moeflux_mlx.state.prompt_store import PromptDirectory

CASES = ("first", "first, saving", "again", "second turn", "second, anew")
BASELINE = {"again": "first", "second turn": "second, anew"}
ANSWER, NEW = 16, 64  # tokens of the answer and of the second question


def main() -> None:
    options = parser().parse_args()
    if options.case:
        print(json.dumps(measure(options)))
        return
    load_before = os.getloadavg()[0]
    runs = []
    for _ in range(options.rounds):  # each one starts with nothing saved
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="prompts-") as folder:
            runs.append({case: run(case, folder) for case in CASES})
            size = sum(file.stat().st_size for file in Path(folder).iterdir())
    results = {case: medians([one[case] for one in runs]) for case in CASES}
    report(results, size)
    context = {"model": options.model, "tokens": options.tokens, "rounds": options.rounds}
    context |= {"load_average": load_before, "cpus": os.cpu_count(), "file_bytes": size}
    print(json.dumps({**context, "results": results}))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("--model", required=True)
    made.add_argument("--tokens", type=int, default=2000, help="of the first prompt (%(default)s)")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--expert-io", choices=("auto", "mmap", "pread"), default="pread")
    made.add_argument("--expert-cache-gb", type=float, help="default: what the memory plan gives")
    made.add_argument("--folder", help="where prompts are saved (default: the system's temporary folder)")
    made.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    return made


def run(case: str, folder: str) -> dict:
    """Runs one measurement in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--case", case, "--folder", folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> dict:
    start = time.perf_counter()
    cache_bytes = None if options.expert_cache_gb is None else int(options.expert_cache_gb * 1e9)
    model, tokenizer = load(
        options.model, expert_io=options.expert_io, expert_cache_bytes=cache_bytes, warm_start="off"
    )
    loaded = time.perf_counter() - start
    tokenizer.eos_token_ids = set()  # random text may end at once
    tokens = np.random.default_rng(0).integers(0, model.args.vocab_size, options.tokens + ANSWER + NEW)
    first = tokens[: options.tokens].tolist()
    respond(Session(model, tokenizer), tokens[::-1][:40].tolist())
    store = None
    if options.case in ("first, saving", "again"):
        fingerprint = model_fingerprint(options.model, model.activation_dtype)
        store = PromptDirectory(options.folder, fingerprint)
    session, prompt = Session(model, tokenizer, store=store), first
    if options.case == "second turn":
        respond(session, first, ANSWER)
    if options.case.startswith("second"):
        prompt = tokens.tolist() if options.case == "second, anew" else session.tokens + tokens[-NEW:].tolist()
    model.experts.drain()
    model.experts.invalidate()
    model.experts.reset_stats()
    mx.synchronize()
    start = time.perf_counter()
    stats = respond(session, prompt)
    rest = time.perf_counter() - start - session.first_token_seconds
    if session.save_error is not None:
        raise session.save_error
    return {**stats, "load_seconds": loaded, "after_seconds": rest}


def respond(session: Session, prompt: list[int], n: int = 1) -> dict:
    """Computes n tokens. Returns the time to the first one, and what was read until the last one."""
    for _ in session.respond(prompt, max_tokens=n):
        read = session.model.experts.stats.bytes_read
    return {
        "first_token_seconds": session.first_token_seconds,
        "expert_bytes": read,
        "computed": session.reuse.computed,
    }


def report(results: dict[str, dict], size: int) -> None:
    print(f"{'':16} {'computed':>9} {'first token s':>14} {'ratio':>7} {'experts GB':>11} {'ratio':>7} {'after s':>8}")
    for case, result in results.items():
        base = results.get(BASELINE.get(case, ""), {})
        time_ratio = ratio(base.get("first_token_seconds"), result["first_token_seconds"])
        byte_ratio = ratio(base.get("expert_bytes"), result["expert_bytes"])
        print(
            f"{case:16} {result['computed']:9.0f} {result['first_token_seconds']:14.3f} {time_ratio:>7} "
            f"{result['expert_bytes'] / 1e9:11.3f} {byte_ratio:>7} {result['after_seconds']:8.3f}"
        )
    print(f"saved: {size / 1e6:.1f} MB; loading the model took {results['again']['load_seconds']:.2f} s")


def ratio(before: float | None, after: float) -> str:
    return f"{before / after:.1f}x" if before and after else "-"


if __name__ == "__main__":
    main()
