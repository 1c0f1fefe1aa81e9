#!/usr/bin/env python3
"""Measures prompts: the time to the first token, resident and streamed, what the drive reads, and memory.

    scripts/bench/bench_prompt.py resident --model DIR --tokens 512 8192 [--against mlx-lm]
    scripts/bench/bench_prompt.py stream --model DIR --tokens 4096 16384 --share 0.25 [--spans 512 8192]
    scripts/bench/bench_prompt.py io --model DIR --tokens 8192 --pool-gb 0.5
    scripts/bench/bench_prompt.py memory --model DIR --limit-gb 2.0 --tokens 32768
    scripts/bench/bench_prompt.py breathe --model DIR --limits 2.0 1.5 1.0 --choices 512:128 1024:256

`resident` holds every expert in memory; mlx-lm's model of the same shapes, with random weights, takes turns with ours.
`stream` reads experts into a pool that is empty when a prompt begins. The bound of its time is what the drive, measured
just before and after with bare O_DIRECT reads in random order, needs for the experts that the prompt uses, or what
computing takes with everything resident, whichever is longer. `io` counts what the process reads against the bytes of
those experts. `memory` and `breathe` run each measurement in a process of its own, in a version 1 memory control group
if one can be made (as root): a long prompt's peak of rss + shmem against the plan, and decode with default options
against chosen pairs context:prefill_step_size. Prompts are random tokens. Beside medians stand quartiles, ratios are
taken within a round, and the last line is JSON.
"""

import argparse
import importlib
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import mlx.core as mx
import numpy as np
from bench_stream import GROUPS, inside, raw_reads

from moeflux_mlx.driving.generation import generate_step
from moeflux_mlx.errors import MoefluxError
from moeflux_mlx.experts.source import ExpertLoader, IoMode, Lease
from moeflux_mlx.files import read_json
from moeflux_mlx.formats.packed import open_packed
from moeflux_mlx.formats.record import Key
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.opening.engine import Engine, open_engine
from moeflux_mlx.planning.machine import default_dtype
from moeflux_mlx.planning.settings import configure_mlx
from moeflux_mlx.spec import ModelArgs

DRIVE_BYTES = 4 << 30  # how much one measurement of the drive reads; of a smaller model, all of it
DRIVE_THREADS = 8
DECODED = 32  # tokens that `memory` generates after the prompt


def main() -> None:
    options = parser().parse_args()
    configure_mlx()  # as every command does; mlx-lm runs under the same settings
    load = os.getloadavg()[0]
    print(f"load average {load:.1f}, {os.cpu_count()} CPUs, {mx.default_device()}")
    try:
        report = options.run(options)
    except MoefluxError as error:
        raise SystemExit(f"error: {error}") from None
    print(json.dumps({"bench": options.run.__name__, "model": str(options.model), "load_average": load, **report}))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = made.add_subparsers(required=True)

    def command(run: Callable[[argparse.Namespace], dict]) -> argparse.ArgumentParser:
        added = commands.add_parser(run.__name__, help=run.__doc__)
        added.add_argument("--model", type=Path, required=True)
        added.set_defaults(run=run)
        return added

    added = command(resident)
    added.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 4096, 8192, 32768])
    added.add_argument("--rounds", type=int, default=3)
    added.add_argument("--against", choices=["mlx-lm"])
    added.add_argument("--peer-most", type=int, default=1 << 30, help="longer prompts are not given to mlx-lm")
    added = command(stream)
    added.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    added.add_argument("--rounds", type=int, default=3)
    added.add_argument("--share", type=float, default=0.25, help="of all experts that the pool holds")
    added.add_argument("--spans", type=int, nargs="+", default=[None], help="in turn; default: as planned")
    added = command(io)
    added.add_argument("--tokens", type=int, default=8192)
    added.add_argument("--pool-gb", type=float, default=0.5)
    added.add_argument("--span", type=int)
    added = command(memory)
    added.add_argument("--limit-gb", type=float, required=True)
    added.add_argument("--tokens", type=int, default=32768)
    added.add_argument("--context", type=int, help="default: what the prompt and the tokens after it take")
    added = command(breathe)
    added.add_argument("--limits", type=float, nargs="+", default=[2.0, 1.5, 1.0], help="in GB")
    added.add_argument("--choices", nargs="+", default=["512:128", "1024:256"], help="context:prefill_step_size")
    added.add_argument("--rounds", type=int, default=3)
    added.add_argument("--damping", type=float, default=1.0, help="as bench_stream.py's; less: fewer hits")
    added.add_argument("--prompt-tokens", type=int, default=100)
    added.add_argument("--max-tokens", type=int, default=64)
    return made


# Functions that the measurements share.


def random_prompt(model: Model, tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, model.args.vocab_size, tokens).tolist()


def seconds_of(call: Callable[[], object]) -> float:
    """Returns the seconds of `call`, after the memory of earlier calls is freed."""
    mx.synchronize()
    mx.clear_cache()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def first_token(model: Model, prompt: list[int]) -> Callable[[], object]:
    """Computes the prompt and one token after it."""
    return lambda: next(generate_step(prompt, model, max_tokens=1))


def open_for(options: argparse.Namespace, tokens: int, span: int | None = None, **more) -> Engine:
    """Opens the model with room for `tokens` tokens and the one after them."""
    settings = {"context": tokens + 1, "warm_start": "off", **({} if span is None else {"set": {"span": span}})}
    return open_engine(options.model, **settings, **more)


def turns(cases: list, i: int) -> list:
    """Returns the cases in the order of round `i`."""
    return cases[i % len(cases) :] + cases[: i % len(cases)]


def quartiles(values: Iterable[float]) -> list[float]:
    """Returns [lower quartile, median, upper quartile]."""
    sample = list(values)
    return statistics.quantiles(sample, n=4, method="inclusive") if len(sample) > 1 else sample * 3


def spread(values: Iterable[float], digits: int = 2) -> str:
    low, middle, high = quartiles(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def print_table(rows: list[dict[str, str]]) -> None:
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    for row in ({name: name for name in widths}, *rows):
        print("  ".join(f"{row[name]:>{width}}" for name, width in widths.items()))


# With everything in memory.


def resident(options: argparse.Namespace) -> dict:
    """measures the time to the first token with every expert in memory"""
    model = open_for(options, max(options.tokens), expert_io="mmap").model
    peer = mlx_lm_model(options.model) if options.against else None
    rows = [resident_row(model, peer if size <= options.peer_most else None, size, options) for size in options.tokens]
    print_table([resident_text(row) for row in rows])
    return {"rows": rows}


def mlx_lm_model(path: Path) -> object:
    """Returns mlx-lm's model of the same configuration, with weights of its own, in the dtype that ours computes in."""
    from bench_decode import theirs

    model = theirs(read_json(path / "config.json"))
    model.set_dtype(default_dtype())
    mx.eval(model.parameters())
    return model


def mlx_lm_first_token(model: object, prompt: list[int]) -> Callable[[], object]:
    """As `first_token`. It asks for more than one token: for one, mlx-lm would begin the second before it yields the
    first.
    """
    generate = importlib.import_module("mlx_lm.generate")
    tokens = mx.array(prompt)
    return lambda: list(generate.generate_step(tokens, model, max_tokens=0))


def resident_row(model: Model, peer: object, tokens: int, options: argparse.Namespace) -> dict:
    """Returns the seconds of every round. Before the rounds, each model computes a prompt of this size that does not
    count.
    """
    runs: dict[str, list[float]] = {"ours": [], **({} if peer is None else {"mlx-lm": []})}
    for i in range(-1, options.rounds):
        prompt = random_prompt(model, tokens, seed=i + 1)
        work = {"ours": first_token(model, prompt), "mlx-lm": mlx_lm_first_token(peer, prompt) if peer else None}
        for name in turns(list(runs), i):
            seconds = seconds_of(work[name])
            runs[name] += [seconds] if i >= 0 else []
            print(f"{tokens} tokens, {name}: {seconds:.3f} s" + ("" if i >= 0 else " (warm-up)"), flush=True)
    ratios = [theirs / ours for ours, theirs in zip(*runs.values(), strict=True)] if peer else []
    return {"tokens": tokens, "seconds": runs, **({"ratio": quartiles(ratios), "ratios": ratios} if peer else {})}


def resident_text(row: dict) -> dict[str, str]:
    text = {"tokens": str(row["tokens"])}
    for name in ("ours", "mlx-lm"):
        seconds = row["seconds"].get(name)
        text[f"{name} s"] = spread(seconds, 3) if seconds else "-"
        text[f"{name} tok/s"] = f"{row['tokens'] / statistics.median(seconds):.1f}" if seconds else "-"
    return text | {"ours / mlx-lm": spread(row["ratios"]) if "ratio" in row else "-"}


# With experts that are streamed.


class Drive:
    """The bare rate of the drive that holds a model."""

    def __init__(self, path: Path):
        self.packed = open_packed(path, ModelArgs.from_file(path))
        layout = self.packed.layout
        self.blocks = [(layer, expert) for layer in layout.moe_layers for expert in range(layout.num_experts)]
        os.sync()  # a model that was just written may still be on its way to the drive

    def rate(self) -> float:
        """Returns the bytes per second of reading whole records in random order, other records each time."""
        count = min(-(-DRIVE_BYTES // self.packed.layout.record.stride), len(self.blocks))
        blocks = random.sample(self.blocks, count)
        start = time.perf_counter()
        return raw_reads(self.packed, blocks, DRIVE_THREADS) / (time.perf_counter() - start)


class Watched:
    """A streamed model that notes which of its experts are requested."""

    def __init__(self, engine: Engine):
        self.model, self.experts, self.span = engine.model, engine.experts, engine.plan.sizes.span
        self.used: set[Key] = set()
        self._request = engine.experts.request
        engine.experts.request = self._note  # type: ignore[method-assign]

    def _note(self, layer: int, ids: np.ndarray) -> Lease:
        self.used.update((layer, expert) for expert in np.unique(ids).tolist())
        return self._request(layer, ids)

    def run(self, prompt: list[int]) -> dict:
        """Computes one prompt with an empty pool."""
        self.experts.invalidate()
        self.experts.reset_stats()
        self.used.clear()
        before = bytes_read()
        seconds = seconds_of(first_token(self.model, prompt))
        self.experts.drain()
        return {
            "tokens": len(prompt),
            "span": self.span,
            "seconds": seconds,
            "loader_bytes": self.experts.stats.bytes_read,
            "process_bytes": bytes_read() - before,
            "used": len(self.used),
            "used_bytes": used_bytes(self.experts, self.used),
            "waited": self.experts.stats.wait_seconds / seconds,
        }


def used_bytes(experts: ExpertLoader, used: set[Key]) -> int:
    return sum(experts.layout.records[layer].stride for layer, _ in used)


def bytes_read() -> int:
    """Returns the bytes that all threads of this process have read from storage."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def stream(options: argparse.Namespace) -> dict:
    """measures prompts whose experts are read into a pool, against what the drive and computing allow"""
    drive, longest = Drive(options.model), max(options.tokens)
    pool = int(options.share * drive.packed.layout.total_bytes)
    streamed = [
        Watched(open_for(options, longest, span, expert_io="pread", expert_cache_bytes=pool)) for span in options.spans
    ]
    whole = resident_model(options, longest)
    rows = []
    for tokens in options.tokens:
        rounds = stream_rounds(streamed, whole, drive, tokens, options.rounds)
        rows += [stream_row(rounds, i) for i in range(len(streamed))]
    print_table([stream_text(row) for row in rows])
    return {"share": options.share, "pool": pool, "rows": rows}


def resident_model(options: argparse.Namespace, tokens: int) -> Model | None:
    """Returns the model with every expert in memory, if that fits beside the models that are already loaded."""
    engine = open_for(options, tokens, expert_io="auto", expert_cache_bytes=1)
    if engine.plan.mode is IoMode.MMAP:
        return engine.model
    print(f"no run with everything resident: {engine.plan.reason or 'pread is forced'}")
    engine.experts.close()
    return None


def stream_rounds(
    streamed: list[Watched], whole: Model | None, drive: Drive, tokens: int, rounds: int
) -> list[list[dict]]:
    """Runs each of `streamed` once per round. Before the rounds, each runs once without counting."""
    results = []
    for i in range(-1, rounds):
        prompt = random_prompt(streamed[0].model, tokens, seed=i + 1)
        computing = None if whole is None else seconds_of(first_token(whole, prompt))
        runs = {one: stream_run(one, prompt, computing, drive) for one in turns(streamed, i)}
        for run in runs.values():
            print(
                f"{tokens} tokens, span {run['span']}: {run['seconds']:.3f} s" + ("" if i >= 0 else " (warm-up)"),
                flush=True,
            )
        results += [[runs[one] for one in streamed]] if i >= 0 else []
    return results


def stream_run(one: Watched, prompt: list[int], computing: float | None, drive: Drive) -> dict:
    """Runs one prompt. Returns its figures, the drive's rate just before and after, and the ratio to the bound of its
    time.
    """
    before = drive.rate()
    run = one.run(prompt)
    rates = [before, drive.rate()]
    reading = run["used_bytes"] / statistics.mean(rates)
    bound = max(reading, computing or 0.0)
    return {**run, "rates": rates, "reading": reading, "resident": computing, "ratio": run["seconds"] / bound}


def stream_row(rounds: list[list[dict]], which: int) -> dict:
    """Returns the results of all runs of one span. `gain` is the speed over that of the first span in those rounds."""
    runs = [every[which] for every in rounds]
    gains = [every[0]["seconds"] / every[which]["seconds"] for every in rounds]
    ratios = [run["ratio"] for run in runs]
    case = {"tokens": runs[0]["tokens"], "span": runs[0]["span"]}
    return {**case, "ratio": quartiles(ratios), "gain": quartiles(gains), "gains": gains, "runs": runs}


def stream_text(row: dict) -> dict[str, str]:
    runs = row["runs"]

    def middle(name: str, unit: float = 1e9) -> str:
        return f"{statistics.median(run[name] for run in runs) / unit:.3f}"

    computing = runs[0]["resident"] is not None
    return {
        "tokens": str(row["tokens"]),
        "span": str(row["span"]),
        "s": spread((run["seconds"] for run in runs), 3),
        "tok/s": f"{row['tokens'] / statistics.median(run['seconds'] for run in runs):.1f}",
        "loader GB": middle("loader_bytes"),
        "process GB": middle("process_bytes"),
        "used GB": middle("used_bytes"),
        "drive GB/s": spread(rate / 1e9 for run in runs for rate in run["rates"]),
        "reading s": middle("reading", 1),
        "resident s": middle("resident", 1) if computing else "-",
        "time / bound": spread(run["ratio"] for run in runs),
        "speed / first span": spread(row["gains"]),
    }


def io(options: argparse.Namespace) -> dict:
    """measures what a prompt reads from the drive, against the experts that it uses"""
    pool = int(options.pool_gb * 1e9)
    engine = open_for(options, options.tokens, options.span, expert_io="pread", expert_cache_bytes=pool)
    one = Watched(engine)
    one.run(random_prompt(one.model, 32, seed=1))  # reads the resident weights whose reading was deferred
    run = one.run(random_prompt(one.model, options.tokens, seed=0))
    ratio = run["process_bytes"] / run["used_bytes"]
    text = {"tokens": str(run["tokens"]), "span": str(run["span"]), "pool GB": f"{engine.plan.pool / 1e9:.3f}"}
    text |= {f"{name} GB": f"{run[f'{name}_bytes'] / 1e9:.3f}" for name in ("process", "loader", "used")}
    print_table([text | {"read / used": f"{ratio:.3f}", "s": f"{run['seconds']:.3f}"}])
    return {**run, "pool": engine.plan.pool, "ratio": ratio}


# Within a memory limit; each run is a process of its own.


def memory_limit(gigabytes: float) -> dict[str, str]:
    """Returns the file of the control group and what to write to it. If no group can be made, prints a line and returns
    nothing.
    """
    probe = GROUPS / "memory" / f"moeflux-probe-{os.getpid()}"
    setting = "memory.limit_in_bytes"
    try:
        probe.mkdir()
        has_groups = (probe / setting).exists()
        probe.rmdir()
    except OSError:
        has_groups = False
    if not has_groups:
        print(f"no limit: no version 1 memory control group can be made below {GROUPS}; peaks are the process's own")
    return {f"memory/{setting}": str(int(gigabytes * 1e9))} if has_groups else {}


def worker(options: argparse.Namespace, limit: dict[str, str], prompt: int, tokens: int, **more) -> dict:
    """Runs bench_stream.py's generation at a temperature at which the text does not repeat. `more` are its other
    options.
    """
    arguments = ["worker", "--model", options.model, "--expert-io", "auto", "--prefetch", "auto"]
    arguments += ["--prompt-tokens", prompt, "--max-tokens", tokens, "--temp", 5.0]
    for name, value in {"damping": 1.0, **more}.items():
        arguments += [f"--{name.replace('_', '-')}", value]
    return inside(arguments, limit)


def memory(options: argparse.Namespace) -> dict:
    """compares the peak memory of a long prompt and some tokens after it with the plan"""
    context = options.context or options.tokens + DECODED + 1
    limit = memory_limit(options.limit_gb)
    run = worker(options, limit, options.tokens, DECODED, context=context)
    off = run["peak"] / run["planned"] - 1
    text = {"tokens": str(options.tokens), "context": str(context), "prompt s": f"{run['prompt_seconds']:.2f}"}
    text |= {"decode tok/s": f"{1 / run['seconds_per_token']:.2f}"}
    text |= {f"{name} GB": f"{run[key] / 1e9:.3f}" for name, key in (("pool", "pool"), ("plan", "planned"))}
    text |= {f"{name} GB": f"{run[key] / 1e9:.3f}" for name, key in (("peak", "peak"), ("swap", "swapped"))}
    print_table([text | {"off by": f"{off:+.1%}"}])
    return {**run, "tokens": options.tokens, "context": context, "limited": bool(limit), "off_by": off}


def breathe(options: argparse.Namespace) -> dict:
    """compares decoding within memory limits with default options and with chosen contexts and steps"""
    cases: dict[str, dict[str, int]] = {"default": {}}
    for choice in options.choices:
        context, step = map(int, choice.split(":"))
        cases[choice] = {"context": context, "prefill_step_size": step}
    rows = []
    for gigabytes in options.limits:
        limit = memory_limit(gigabytes)
        rounds = [breathe_round(options, limit, cases, i) for i in range(options.rounds)]
        rows.append(breathe_report(gigabytes, rounds))
    return {"rows": rows}


def breathe_round(options: argparse.Namespace, limit: dict[str, str], cases: dict, i: int) -> dict[str, dict | None]:
    """Runs each case once; the result is None if it could not run."""
    runs: dict[str, dict | None] = {}
    prompt, tokens, damping = options.prompt_tokens, options.max_tokens, options.damping
    for case in turns(list(cases), i):
        try:
            runs[case] = worker(options, limit, prompt, tokens, damping=damping, **cases[case])
        except SystemExit as error:
            print(f"{case}: {error}")
            runs[case] = None
    return {case: runs[case] for case in cases}


def breathe_report(gigabytes: float, rounds: list[dict[str, dict | None]]) -> dict:
    """Prints the table of one limit. `ratio` is the speed with default options over that of the best choice in the
    round.
    """
    print(f"within {gigabytes} GB:")
    print_table([breathe_text(case, [runs[case] for runs in rounds]) for case in rounds[0]])
    ratios = []
    for default, *chosen in (list(runs.values()) for runs in rounds):
        others = [run["seconds_per_token"] for run in chosen if run]
        ratios += [min(others) / default["seconds_per_token"]] if default and others else []
    print(f"default / best choice: {spread(ratios, 3)}" if ratios else "default / best choice: one of them never ran")
    return {"limit_gb": gigabytes, "ratio": quartiles(ratios), "ratios": ratios, "rounds": rounds}


def breathe_text(case: str, runs: list[dict | None]) -> dict[str, str]:
    done = [run for run in runs if run]

    def middle(key: str, unit: float, digits: int) -> str:
        return f"{statistics.median(run[key] for run in done) / unit:.{digits}f}" if done else "-"

    return {
        "options": case,
        "runs": f"{len(done)} of {len(runs)}",
        "tok/s": spread(1 / run["seconds_per_token"] for run in done) if done else "-",
        "hits %": middle("hit_rate", 0.01, 1),
        "pool GB": middle("pool", 1e9, 3),
        "MB/token": middle("bytes_per_token", 1e6, 1),
        "peak GB": middle("peak", 1e9, 3),
        "plan GB": middle("planned", 1e9, 3),
    }


if __name__ == "__main__":
    main()
