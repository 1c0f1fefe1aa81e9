#!/usr/bin/env python3
"""Measures one model over several processes of this machine, each with its own slowed drive.

    scripts/bench/bench_ranks.py --model DIR --ranks 1 2 3 --share 0.25 --drive-gb-per-s 0.1
    scripts/bench/bench_ranks.py --model DIR --ranks 1 2 --gpus --backend nccl --drive-gb-per-s 2 --warm-up \\
        --rounds 1 --repeats 3 --first-tokens 4096 --link-gb-per-s 0.5 1 3

Every process's pool holds `--share` of all experts, and its reads take no less time than a drive of its own would
need: the processes share one. With a share of 1 a process that is alone holds every expert without a pool. The first
token and those after it are timed apart; the text is random (`--temp`), and a pool that reads is empty when it begins.
A longer prompt (`--first-tokens`) is timed over each of the links. Reported are medians over rounds, in which the
numbers of ranks take turns, the digest of the tokens, which must not depend on the number of ranks, and what bare
exchanges of as many words take of a token. The last line is JSON.
"""

import argparse
import functools
import hashlib
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from measuring import medians, random_prompt

from moeflux_mlx.driving.generation import generate_step
from moeflux_mlx.driving.sampling import make_sampler
from moeflux_mlx.experts import streamed
from moeflux_mlx.experts.reader import ExpertReader
from moeflux_mlx.opening.engine import open_engine
from moeflux_mlx.opening.weights import open_weights
from moeflux_mlx.ops import backend, native
from moeflux_mlx.packing.located import Located
from moeflux_mlx.planning.settings import configure_mlx
from moeflux_mlx.several import ranks as several_ranks
from moeflux_mlx.several.group import Exchange
from moeflux_mlx.several.joining import join
from moeflux_mlx.several.ranks import Ranks

EXCHANGES = 200


def main() -> None:
    options = parser().parse_args()
    if options.worker:
        print(json.dumps(work(options)))
        return
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs")
    runs: dict[int, list[dict]] = {count: [] for count in options.ranks}
    for _ in range(options.rounds):
        for count in options.ranks:
            runs[count].append(together(options, count))
            print(f"{count} ranks: {json.dumps(runs[count][-1])}", flush=True)
    report(options, runs)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("--model", type=Path, required=True)
    made.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    made.add_argument("--share", type=float, default=0.25, help="of all experts, in each rank's pool")
    made.add_argument("--total-share", type=float, help="of all experts, in all pools together, in place of --share")
    made.add_argument("--drive-gb-per-s", type=float, help="of each rank; default: as fast as it is")
    made.add_argument("--first-tokens", type=int, help="of a prompt whose first token is timed, link by link")
    made.add_argument("--link-gb-per-s", type=float, nargs="+", default=[], help="what a rank receives in a second")
    made.add_argument("--warm-up", action="store_true", help="begin with a run at full speed that is not counted")
    made.add_argument("--repeats", type=int, default=1, help="runs in a process")
    made.add_argument("--prompt-tokens", type=int, default=16)
    made.add_argument("--max-tokens", type=int, default=24)
    made.add_argument("--temp", type=float, default=5.0)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--backend", choices=("ring", "nccl"), default="ring")
    made.add_argument("--static", action="store_true", help="each expert is read by its owner; default: dealt out")
    made.add_argument("--gpus", action="store_true", help="give each rank a GPU of its own")
    made.add_argument("--threads", type=int, default=1, help="of each rank's CPU kernels")
    made.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return made


def together(options: argparse.Namespace, count: int) -> dict:
    """Runs one generation on `count` ranks and returns the figures of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        file = hosts(Path(folder), count)
        command = [sys.executable, __file__, *sys.argv[1:], "--worker"]
        if options.total_share is not None:
            command += ["--share", str(options.total_share / count)]
        processes = [
            subprocess.Popen(command, env=environment(options, rank, count, file), stdout=subprocess.PIPE, text=True)
            for rank in range(count)
        ]
        outputs = [process.communicate(timeout=3600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("error: a rank has failed")
    results = [json.loads(text.splitlines()[-1]) for text in outputs]
    if len({one["tokens"] for one in results}) != 1:
        results[0]["tokens"] = "unlike"
    return results[0] | {"hits": statistics.mean(one["hits"] for one in results)}


def hosts(folder: Path, count: int) -> Path:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    file = folder / "hosts.json"
    file.write_text(json.dumps([[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]))
    for one in sockets:
        one.close()
    return file


def environment(options: argparse.Namespace, rank: int, count: int, file: Path) -> dict[str, str]:
    more = {"CUDA_VISIBLE_DEVICES": str(rank)} if options.gpus else {}
    if count > 1 and options.backend == "ring":
        more |= {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(file)}
    elif count > 1:
        more |= {"MLX_RANK": str(rank), "MLX_WORLD_SIZE": str(count), "NCCL_NVLS_ENABLE": "0"}
        host, port = json.loads(file.read_text())[0][0].split(":")
        more |= {"NCCL_HOST_IP": host, "NCCL_PORT": port}
    return os.environ | more


class Drive:
    """Makes reads take at least the time that a drive of its own would need. If no rate is given, they stay as they
    are.
    """

    def __init__(self) -> None:
        self.rate, self.lock, self.free = math.inf, threading.Lock(), 0.0

    def preadv(self, file, targets, offset):
        got = os.preadv(file, targets, offset)
        with self.lock:
            self.free = max(self.free, time.monotonic()) + got / self.rate
            until = self.free
        time.sleep(max(until - time.monotonic(), 0))
        return got


class Link:
    """A group whose messages take at least the time that a link with so many bytes per second would need."""

    def __init__(self, group):
        self.group, self.rate, self.rank, self.size = group, math.inf, group.rank, group.size
        self.on_device = group.on_device

    def gather(self, words):
        start = time.monotonic()
        gathered = self.group.gather(words)
        wanted = words.nbytes * (self.size - 1) / self.rate
        time.sleep(max(wanted - (time.monotonic() - start), 0))
        return gathered


def work(options: argparse.Namespace) -> dict:
    """Runs what one rank measures."""
    configure_mlx()
    if not backend.has_kernels():
        native.set_threads(options.threads)
    drive = Drive()
    if options.drive_gb_per_s is not None:
        streamed.ExpertReader = functools.partial(ExpertReader, preadv=drive.preadv)
    if options.static:
        several_ranks.Dealing = lambda owners, slots: None
    joined = join(os.environ)
    link = None if joined is None else Link(joined)
    model = opened(options, link)
    if options.warm_up:
        first_token(options, model, options.first_tokens or options.prompt_tokens)
        generated(options, model)
    if options.drive_gb_per_s is not None:
        drive.rate = options.drive_gb_per_s * 1e9
    runs = [generated(options, model) for _ in range(options.repeats)]
    return numbers(runs) | prompts(options, model, link) | exchange_cost(link, model) | {"tokens": digest_of(runs)}


def opened(options: argparse.Namespace, link: Link | None):
    """Opens the model with a pool as large as the options say."""
    ranks = None if link is None else Ranks(Exchange(link), say=lambda text: print(text, file=sys.stderr))
    total = open_weights(Located(options.model)).experts.layout.total_bytes
    longest = max(options.prompt_tokens, options.first_tokens or 0)
    return open_engine(
        options.model,
        expert_io="auto" if ranks is None and options.share >= 1 else "pread",
        expert_cache_bytes=int(options.share * total),
        context=longest + options.max_tokens + 16,
        set={"span": longest},
        ranks=ranks,
    ).model


def emptied(options: argparse.Namespace, model) -> None:
    """Empties the pool, unless it is to hold everything."""
    if options.share < 1:
        model.experts.invalidate()


def generated(options: argparse.Namespace, model) -> dict:
    prompt = random_prompt(model, options.prompt_tokens, seed=0)
    emptied(options, model)
    mx.random.seed(0)
    start, tokens, moments = time.perf_counter(), [], []
    sampler = make_sampler(temp=options.temp)
    for token, _ in generate_step(prompt, model, max_tokens=options.max_tokens, sampler=sampler):
        moments.append(time.perf_counter())
        tokens.append(token)
        if len(tokens) == 1:
            model.experts.reset_stats()
    seconds = moments[-1] - moments[0]
    stats = model.experts.stats
    return {
        "first": moments[0] - start,
        "tokens/s": (len(tokens) - 1) / seconds,
        "hits": stats.hit_rate,
        "MB/token": stats.bytes_read / (len(tokens) - 1) / 1e6,
        "waited": stats.wait_seconds / seconds,
        "tokens": hashlib.sha256(np.array(tokens).tobytes()).hexdigest()[:16],
    }


def numbers(runs: list[dict]) -> dict:
    """Returns the medians of all but the tokens' digest."""
    return medians([{name: value for name, value in run.items() if name != "tokens"} for run in runs])


def digest_of(runs: list[dict]) -> str:
    """Returns the digest of the tokens. Raises an error if they were not the same in all runs."""
    digests = {run["tokens"] for run in runs}
    return digests.pop() if len(digests) == 1 else "unlike"


def first_token(options: argparse.Namespace, model, tokens: int) -> float:
    """Returns the seconds until the first token after a prompt of `tokens` tokens."""
    emptied(options, model)
    start = time.perf_counter()
    next(iter(generate_step(random_prompt(model, tokens, seed=0), model, max_tokens=1)))
    return time.perf_counter() - start


def prompts(options: argparse.Namespace, model, link: Link | None) -> dict:
    """Returns the seconds to the first token of a longer prompt, over the link as it is and over each slower one."""
    if options.first_tokens is None:
        return {}
    name = f"{options.first_tokens} tokens"
    seconds = {name: first_token(options, model, options.first_tokens)}
    for rate in [] if link is None else options.link_gb_per_s:
        link.rate = rate * 1e9
        seconds[f"{name} at {rate:g} GB/s"] = first_token(options, model, options.first_tokens)
        link.rate = math.inf
    return seconds


def exchange_cost(link: Link | None, model) -> dict:
    """Returns the cost of exchanges if no rank is late: microseconds of one exchange, and milliseconds per token."""
    if link is None:
        return {}
    args = model.args
    words = np.zeros(-(-args.num_experts_per_tok // link.size) * args.hidden_size + 5, np.uint32)
    if link.on_device:
        words = mx.array(words) + 0  # on the device that computes
        mx.eval(words)
    seconds = []
    for _ in range(EXCHANGES):
        start = time.perf_counter()
        link.gather(words)
        seconds.append(time.perf_counter() - start)
    one = statistics.median(seconds)
    return {"exchange us": one * 1e6, "exchange ms/token": one * 1000 * len(args.moe_layers)}


def report(options: argparse.Namespace, runs: dict[int, list[dict]]) -> None:
    table = {count: numbers(of) for count, of in runs.items()}
    first = table[options.ranks[0]]
    for count, row in table.items():
        if "exchange ms/token" in row:
            row["exchange share"] = row["exchange ms/token"] / 1000 * row["tokens/s"]
        row["against"] = row["tokens/s"] / first["tokens/s"]
        row["first against"] = first["first"] / row["first"]
        print(f"{count} ranks: " + ", ".join(f"{name} {value:.3f}" for name, value in row.items()))
    digests = sorted({run["tokens"] for results in runs.values() for run in results})
    print(json.dumps({"bench": "ranks", "share": options.share, "ranks": table, "tokens": digests}))
    if len(digests) != 1:
        raise SystemExit("error: the tokens depend on the number of ranks")


if __name__ == "__main__":
    main()
