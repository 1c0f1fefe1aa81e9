"""What benchmarks have in common: prompts, rounds in turns, quartiles, tables and the last line of JSON."""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from moeflux_mlx.driving.generation import generate_step
from moeflux_mlx.driving.sampling import make_sampler
from moeflux_mlx.errors import MoefluxError
from moeflux_mlx.experts.stats import LoaderStats
from moeflux_mlx.model.decoder import Model


def run_command(parser: argparse.ArgumentParser) -> None:
    """Runs what the arguments choose (`run`), and prints its report as one line of JSON after the machine's load."""
    options, load = parser.parse_args(), os.getloadavg()[0]
    print(f"load average {load:.1f}, {os.cpu_count()} CPUs, {mx.default_device()}")
    try:
        report = options.run(options)
    except MoefluxError as error:
        raise SystemExit(f"error: {error}") from None
    print(json.dumps({"load_average": load, **report}))


def random_prompt(model: Model, tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, model.args.vocab_size, tokens).tolist()


def turns(cases: list, i: int) -> list:
    """Returns the cases in the order of round `i`."""
    return cases[i % len(cases) :] + cases[: i % len(cases)]


def rounds_within(count: int, seconds: float) -> Iterator[int]:
    """Yields -1, for a round that does not count, then up to `count` numbers of rounds, but none after the seconds."""
    yield -1
    begin = time.perf_counter()
    for i in range(count):
        yield i
        if time.perf_counter() - begin > seconds:
            break


def in_turns(cases: Mapping[str, Callable[[int], Any]], rounds: int) -> dict[str, list]:
    """Calls each case with the number of the round, in each round in another order, and returns what they returned.
    One round before the others does not count.
    """
    runs: dict[str, list] = {name: [] for name in cases}
    for i in range(-1, rounds):
        for name in turns(list(cases), i):
            run = cases[name](i + 1)
            runs[name] += [run] if i >= 0 else []
    return runs


def decoded(model: Model, options: argparse.Namespace, seed: int) -> tuple[float, LoaderStats]:
    """Generates `options.max_tokens` tokens at `options.temp`. Returns their seconds and what the source of experts did
    for them; the prompt and the first token are not counted.
    """
    mx.random.seed(seed)
    prompt = np.random.default_rng(seed).integers(0, 256, 4).tolist()
    start, sampler = 0.0, make_sampler(temp=options.temp)
    for i, _ in enumerate(generate_step(prompt, model, max_tokens=options.max_tokens + 1, sampler=sampler)):
        if i == 0:
            model.experts.drain()
            model.experts.reset_stats()
            start = time.perf_counter()
    return time.perf_counter() - start, model.experts.stats


def quartiles(values: Iterable[float]) -> list[float]:
    """Returns [lower quartile, median, upper quartile]."""
    sample = list(values)
    return statistics.quantiles(sample, n=4, method="inclusive") if len(sample) > 1 else sample * 3


def ratios(ones: Iterable[float], others: Iterable[float]) -> list[float]:
    """Returns the quartiles of the ratios of pairs."""
    return quartiles(one / other for one, other in zip(ones, others, strict=True))


def medians(rows: list[dict]) -> dict:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def shown(three: Iterable[float], digits: int = 2) -> str:
    """Returns the text of `quartiles`."""
    low, middle, high = three
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def spread(values: Iterable[float], digits: int = 2) -> str:
    return shown(quartiles(values), digits)


def print_table(rows: list[dict[str, str]]) -> None:
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    for row in ({name: name for name in widths}, *rows):
        print("  ".join(f"{row[name]:>{width}}" for name, width in widths.items()))


def print_figures(rows: dict[str, dict[str, float]]) -> None:
    """Prints one line of numbers for each name."""
    for name, row in rows.items():
        print(f"{name:10} " + "  ".join(f"{key} {value:.3f}" for key, value in row.items()))


def model_option(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], dict]) -> None:
    """Adds the directory of a model, and what to run."""
    parser.add_argument("--model", type=Path, required=True)
    parser.set_defaults(run=run)
