#!/usr/bin/env python3
"""Measures one model over several processes of this machine, each with a slowed drive of its own.

    scripts/bench/bench_ranks.py --model DIR --ranks 1 2 3 --share 0.25 --drive-gb-per-s 0.1
    scripts/bench/bench_ranks.py --model DIR --ranks 1 2 --gpus --backend nccl --drive-gb-per-s 2 --prompt-tokens 4096
    scripts/bench/bench_ranks.py --model DIR --ranks 2 --link-gb-per-s 0.5 --prompt-tokens 4096

Every process's pool holds `--share` of all experts, and its reads take no less time than a drive of its own would need:
the processes share one. The first token and those after it are timed apart; the text is random (`--temp`). Reported
are medians over rounds, in which the numbers of ranks take turns, the digest of the tokens, which must not depend on
the number of ranks, and what bare exchanges of as many words take of a token. The last line is JSON.
"""

import argparse
import functools
import hashlib
import json
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

from moeflux_mlx.engine.engine import open_engine
from moeflux_mlx.engine.generation import generate_step
from moeflux_mlx.engine.joining import join
from moeflux_mlx.engine.ranks import Ranks
from moeflux_mlx.engine.sampling import make_sampler
from moeflux_mlx.engine.weights import open_weights
from moeflux_mlx.experts import streamed
from moeflux_mlx.experts.group import Exchange
from moeflux_mlx.experts.reader import ExpertReader
from moeflux_mlx.ops import backend, native

EXCHANGES = 200
PORT = 29500  # where NCCL's first rank listens


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
    made.add_argument("--link-gb-per-s", type=float, help="what a rank receives in a second; default: as it is")
    made.add_argument("--prompt-tokens", type=int, default=16)
    made.add_argument("--max-tokens", type=int, default=24)
    made.add_argument("--temp", type=float, default=5.0)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--backend", choices=("ring", "nccl"), default="ring")
    made.add_argument("--gpus", action="store_true", help="give each rank a GPU of its own")
    made.add_argument("--threads", type=int, default=1, help="of each rank's CPU kernels")
    made.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return made


def together(options: argparse.Namespace, count: int) -> dict:
    """One generation on so many ranks: rank 0's figures."""
    with tempfile.TemporaryDirectory() as folder:
        file = hosts(Path(folder), count)
        command = [sys.executable, *sys.argv, "--worker"]
        if options.total_share is not None:
            command += ["--share", str(options.total_share / count)]
        processes = [
            subprocess.Popen(command, env=environment(options, rank, count, file), stdout=subprocess.PIPE, text=True)
            for rank in range(count)
        ]
        found = [process.communicate(timeout=3600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("error: a rank has failed")
    results = [json.loads(text.splitlines()[-1]) for text in found]
    if len({one["tokens"] for one in results}) != 1:
        raise SystemExit("error: the ranks came to different tokens")
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
        more |= {"NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(PORT)}
    return os.environ | more


class Drive:
    """Reads that take no less time than a drive of its own would need."""

    def __init__(self, bytes_per_second: float):
        self.rate, self.lock, self.free = bytes_per_second, threading.Lock(), 0.0

    def preadv(self, file, targets, offset):
        got = os.preadv(file, targets, offset)
        with self.lock:
            self.free = max(self.free, time.monotonic()) + got / self.rate
            until = self.free
        time.sleep(max(until - time.monotonic(), 0))
        return got


class Link:
    """A group whose messages take no less time than a link of so many bytes a second would need."""

    def __init__(self, group, bytes_per_second: float):
        self.group, self.rate, self.rank, self.size = group, bytes_per_second, group.rank, group.size

    def gather(self, words: np.ndarray) -> np.ndarray:
        start = time.monotonic()
        found = self.group.gather(words)
        wanted = words.nbytes * (self.size - 1) / self.rate
        time.sleep(max(wanted - (time.monotonic() - start), 0))
        return found


def work(options: argparse.Namespace) -> dict:
    """What one rank measures."""
    if not backend.has_kernels():
        native.set_threads(options.threads)
    if options.drive_gb_per_s is not None:
        drive = Drive(options.drive_gb_per_s * 1e9)
        streamed.ExpertReader = functools.partial(ExpertReader, preadv=drive.preadv)
    group = join(os.environ)
    if group is not None and options.link_gb_per_s is not None:
        group = Link(group, options.link_gb_per_s * 1e9)
    ranks = None if group is None else Ranks(Exchange(group), say=lambda text: print(text, file=sys.stderr))
    total = open_weights(options.model).experts.layout.total_bytes
    engine = open_engine(
        options.model,
        expert_io="pread",
        expert_cache_bytes=int(options.share * total),
        context=options.prompt_tokens + options.max_tokens + 16,
        span=options.prompt_tokens,
        ranks=ranks,
    )
    return generated(options, engine.model) | ({} if group is None else exchange_cost(group, engine.model))


def generated(options: argparse.Namespace, model) -> dict:
    prompt = np.random.default_rng(0).integers(0, model.args.vocab_size, options.prompt_tokens).tolist()
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


def exchange_cost(group, model) -> dict:
    """Milliseconds that a token's exchanges take when nobody is late."""
    args = model.args
    words = np.zeros(-(-args.num_experts_per_tok // group.size) * args.hidden_size + 5, np.uint32)
    seconds = []
    for _ in range(EXCHANGES):
        start = time.perf_counter()
        group.gather(words)
        seconds.append(time.perf_counter() - start)
    return {"exchange ms/token": statistics.median(seconds) * 1000 * len(args.moe_layers)}


def report(options: argparse.Namespace, runs: dict[int, list[dict]]) -> None:
    if len({run["tokens"] for results in runs.values() for run in results}) != 1:
        raise SystemExit("error: the tokens depend on the number of ranks")
    names = [name for name in next(iter(runs.values()))[0] if name != "tokens"]
    table = {count: {name: statistics.median(run[name] for run in of) for name in names} for count, of in runs.items()}
    for count, of in runs.items():
        if "exchange ms/token" in of[0]:
            exchange = statistics.median(run["exchange ms/token"] for run in of)
            table[count]["exchange share"] = exchange / 1000 * table[count]["tokens/s"]
    first = table[options.ranks[0]]
    for count, row in table.items():
        row["against"] = row["tokens/s"] / first["tokens/s"]
        row["first against"] = first["first"] / row["first"]
        print(f"{count} ranks: " + ", ".join(f"{name} {value:.3f}" for name, value in row.items()))
    print(json.dumps({"bench": "ranks", "share": options.share, "ranks": table}))


if __name__ == "__main__":
    main()
