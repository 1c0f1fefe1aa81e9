#!/usr/bin/env python3
"""Measures prompts whose experts are streamed: the time to the first token, and what the drive reads.

    scripts/bench/bench_prompt.py stream --model DIR --tokens 4096 16384 --share 0.25 [--spans 512 8192]
        [--behind 0]

Experts are read into a pool that is empty when a prompt of random tokens begins, or holds what the text before it left
there (`--behind`). The bound of its time is what the drive, measured just before and after by reads in random order,
needs for the experts that the prompt uses and the pool lacks, or what computing takes with everything resident,
whichever is longer. Beside medians stand quartiles, ratios are taken within a round, and the last line is JSON.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
from measuring import model_option, print_table, quartiles, random_prompt, run_command, spread, turns

from moeflux_mlx.cli.known_models import measure_disk
from moeflux_mlx.driving.generation import generate_step
from moeflux_mlx.experts.source import ExpertLoader, IoMode, Lease
from moeflux_mlx.formats.packed import PackedExperts, open_packed
from moeflux_mlx.formats.record import Key
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.opening.engine import Engine, open_engine
from moeflux_mlx.planning.settings import configure_mlx
from moeflux_mlx.spec import ModelArgs


def main() -> None:
    configure_mlx()  # as every command does
    run_command(parser())


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    added = made.add_subparsers(required=True).add_parser("stream", help=stream.__doc__)
    model_option(added, stream)
    added.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    added.add_argument("--rounds", type=int, default=3)
    added.add_argument("--share", type=float, default=0.25, help="of all experts that the pool holds")
    added.add_argument("--behind", type=int, default=0, help="tokens of a text before it (%(default)s)")
    added.add_argument("--spans", type=int, nargs="+", default=[None], help="in turn; default: as planned")
    return made


def seconds_of(call: Callable[[], object]) -> float:
    """Returns the seconds of `call`, after the memory of earlier calls is freed."""
    mx.synchronize()
    mx.clear_cache()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def text_of(model: Model, tokens: list[int]) -> list:
    """Returns the caches of a text."""
    text = model.make_cache()
    if tokens:
        next(generate_step(tokens, model, max_tokens=1, prompt_cache=text))
    return text


def first_token(model: Model, prompt: list[int], text: list) -> Callable[[], object]:
    """Computes the prompt behind a text, and one token after it."""
    return lambda: next(generate_step(prompt, model, max_tokens=1, prompt_cache=text))


def open_for(options: argparse.Namespace, tokens: int, span: int | None = None, **more) -> Engine:
    """Opens the model with room for `tokens` tokens and the one after them."""
    settings = {"context": tokens + 1, "warm_start": "off", **({} if span is None else {"set": {"span": span}})}
    return open_engine(options.model, **settings, **more)


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

    def run(self, prompt: list[int], before: list[int]) -> dict:
        """Computes one prompt behind the text `before`, which begins with an empty pool."""
        self.experts.invalidate()
        text = text_of(self.model, before)
        self.experts.drain()
        held = {key for pool in self.experts.pools for key in pool.records()}
        self.experts.reset_stats()
        self.used.clear()
        read = bytes_read()
        seconds = seconds_of(first_token(self.model, prompt, text))
        self.experts.drain()
        missing = self.used - held
        return {
            "tokens": len(prompt),
            "span": self.span,
            "seconds": seconds,
            "loader_bytes": self.experts.stats.bytes_read,
            "process_bytes": bytes_read() - read,
            "missing": len(missing),
            "missing_bytes": bytes_of(self.experts, missing),
            "waited": self.experts.stats.wait_seconds / seconds,
        }


def bytes_of(experts: ExpertLoader, records: set[Key]) -> int:
    return sum(experts.layout.records[layer].stride for layer, _ in records)


def bytes_read() -> int:
    """Returns the bytes that all threads of this process have read from storage."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def stream(options: argparse.Namespace) -> dict:
    """measures prompts whose experts are read into a pool, against what the drive and computing allow"""
    packed = open_packed(options.model, ModelArgs.from_file(options.model))
    pool, longest = int(options.share * packed.layout.total_bytes), options.behind + max(options.tokens)
    streamed = [
        Watched(open_for(options, longest, span, expert_io="pread", expert_cache_bytes=pool)) for span in options.spans
    ]
    whole = resident_model(options, longest)
    rows = []
    for tokens in options.tokens:
        rounds = stream_rounds(streamed, whole, packed, tokens, options)
        rows += [stream_row(rounds, i) for i in range(len(streamed))]
    print_table([stream_text(row) for row in rows])
    return {"bench": "stream", "model": str(options.model), "share": options.share, "pool": pool, "rows": rows}


def resident_model(options: argparse.Namespace, tokens: int) -> Model | None:
    """Returns the model with every expert in memory, if that fits beside the models that are already loaded."""
    engine = open_for(options, tokens, expert_io="auto", expert_cache_bytes=1)
    if engine.plan.mode is IoMode.MMAP:
        return engine.model
    print(f"no run with everything resident: {engine.plan.reason or 'pread is forced'}")
    engine.experts.close()
    return None


def stream_rounds(
    streamed: list[Watched], whole: Model | None, packed: PackedExperts, tokens: int, options: argparse.Namespace
) -> list[list[dict]]:
    """Runs each of `streamed` once per round. Before the rounds, each runs once without counting."""
    results = []
    for i in range(-1, options.rounds):
        drawn = random_prompt(streamed[0].model, options.behind + tokens, seed=i + 1)
        before, prompt = drawn[: options.behind], drawn[options.behind :]
        computing = None if whole is None else seconds_of(first_token(whole, prompt, text_of(whole, before)))
        runs = {one: stream_run(one, prompt, before, computing, packed) for one in turns(streamed, i)}
        for run in runs.values():
            print(
                f"{tokens} tokens, span {run['span']}: {run['seconds']:.3f} s" + ("" if i >= 0 else " (warm-up)"),
                flush=True,
            )
        results += [[runs[one] for one in streamed]] if i >= 0 else []
    return results


def stream_run(
    one: Watched, prompt: list[int], before: list[int], computing: float | None, packed: PackedExperts
) -> dict:
    """Runs one prompt. Returns its figures, the drive's rate just before and after, and the ratio to the bound of its
    time.
    """
    rate = measure_disk(packed)
    run = one.run(prompt, before)
    rates = [rate, measure_disk(packed)]
    reading = run["missing_bytes"] / statistics.mean(rates)
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
        "missing GB": middle("missing_bytes"),
        "drive GB/s": spread(rate / 1e9 for run in runs for rate in run["rates"]),
        "reading s": middle("reading", 1),
        "resident s": middle("resident", 1) if computing else "-",
        "time / bound": spread(run["ratio"] for run in runs),
        "speed / first span": spread(row["gains"]),
    }


if __name__ == "__main__":
    main()
