#!/usr/bin/env python3
"""Compares the tokens per second of several sequences that decode together with those of one, in alternating rounds.

    scripts/bench/bench_batch.py [--variant qwen3.6-35b-a3b] [--layers N] [--parallel 1 2 4 8] [--against mlx-lm]
    scripts/bench/bench_batch.py --model DIR [--expert-io pread] [--expert-cache-gb G] [--drive-mbps M] [--trace FILE]

A variant gets random weights, drawn on MLX's device, with all experts in memory; a directory is loaded. Each number of
sequences has its own prompts of different lengths, which continue from round to round. Prints a line for each round,
and ends with one JSON line: for each number of sequences the median of their tokens per second in total, and the
median, lowest and highest ratio to a single sequence in the same round.

Random weights route rows independently. With `--trace` (routing_trace.py synthesize --sequences) the rows of a step
request the experts of the trace instead. Nothing is read ahead, and the timed steps follow equally many untimed ones,
which fill the pool. The report then has the experts read per token, `read`, and how many of the trace a pool of that
size misses in the loader's order of eviction, `missed`. `--drive-mbps` slows the drive down (streamed.py).
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import numpy as np
from bench_decode import add_variant, ours, theirs, variant_config
from routing_trace import Traced, missed, steps_of
from streamed import add_options, add_trace, held_drive, settings, trace_of

from moeflux_mlx import load_model
from moeflux_mlx.driving.decoding import Decoding
from moeflux_mlx.driving.loop import Text, advance_together
from moeflux_mlx.driving.prompt import checked_prompt
from moeflux_mlx.planning.settings import configure_mlx
from moeflux_mlx.spec import ModelArgs

WARMUP = 8  # steps before the first round
Advance = Callable[[], Any]  # advances every sequence by one token


def main() -> None:
    options = parser().parse_args()
    configure_mlx()
    runs = dict(makers(options))
    for advance in runs.values():
        steps(advance, WARMUP)
    with held_drive(options):
        rounds = [one_round(runs, options, number) for number in range(options.rounds)]
    print(json.dumps(report(options, rounds, runs)))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_variant(made)
    made.add_argument("--model", help="a directory to load in place of a variant")
    add_options(made)
    add_trace(made)
    made.add_argument("--parallel", type=int, nargs="+", default=[1, 2, 4, 8], help="sequences (%(default)s)")
    made.add_argument("--prompt", type=int, default=512, help="tokens of the longest prompt (%(default)s)")
    made.add_argument("--tokens", type=int, default=32, help="of each sequence in a round (%(default)s)")
    made.add_argument("--rounds", type=int, default=9, help="(%(default)s)")
    made.add_argument("--against", choices=["mlx-lm"], help="run its batches of the same shape by turns too")
    return made


class Together:
    """Sequences that decode together. The routers choose the experts, or a trace does.

    Attributes:
        read: experts that were read in the steps that were timed.
    """

    def __init__(self, model: Any, decodings: list[Decoding], traced: Traced | None):
        self.model, self.decodings, self.traced = model, decodings, traced
        self.at, self.read = 0, 0

    def __call__(self) -> None:
        if self.traced is None:
            advance_together(self.decodings)
            return
        rows = len(self.decodings)
        with self.traced.requesting(np.arange(rows), np.full(rows, self.at)):
            advance_together(self.decodings)
        self.at += 1

    def timed(self, count: int) -> float:
        """Returns the seconds of `count` steps. If experts are read as a trace says, the same number of steps fills the
        pool first.
        """
        if self.traced is not None:
            steps(self, count)
        before = self.model.experts.stats.misses
        seconds = steps(self, count)
        self.read += self.model.experts.stats.misses - before
        return seconds


def makers(options: argparse.Namespace) -> Any:
    """Yields a name and the function that advances the sequences, for each case."""
    config, model = None, None
    if options.model is None:
        config = variant_config(options)
        model = ours(ModelArgs.from_dict(config))
    else:
        model = load_model(options.model, **settings(options))
    vocabulary, traced = model.args.vocab_size, None
    if options.trace is not None:
        traced = Traced(model, trace_of(options, max(options.parallel)))
    for count in options.parallel:
        decodings = [decoding(model, prompt) for prompt in prompts(options, count, vocabulary)]
        yield ("ours", count), Together(model, decodings, traced)
    if options.against is None:
        return
    from mlx_lm.generate import BatchGenerator

    peer = theirs(config)
    for count in options.parallel:
        generator = BatchGenerator(peer, max_tokens=1 << 20, completion_batch_size=count, prefill_batch_size=count)
        generator.insert(prompts(options, count, vocabulary))
        while len(generator.next_generated()) < count:
            pass
        yield ("mlx-lm", count), generator.next_generated


def prompts(options: argparse.Namespace, count: int, vocabulary: int) -> list[list[int]]:
    """Returns random prompts, each a little shorter than the one before."""
    lengths = [max(options.prompt - 37 * i, 1) for i in range(count)]
    return [mx.random.randint(0, min(vocabulary, 10000), (length,)).tolist() for length in lengths]


def decoding(model: Any, prompt: list[int]) -> Decoding:
    text = Text(model, model.make_cache(), checked_prompt(prompt, model))
    while text.advance_prompt() is not None:
        pass
    return cast(Decoding, text.decoding)


def steps(advance: Advance, count: int) -> float:
    """Returns the seconds that `count` steps take."""
    start = time.perf_counter()
    for _ in range(count):
        advance()
    return time.perf_counter() - start


def one_round(runs: dict, options: argparse.Namespace, number: int) -> dict:
    """Returns the tokens per second of each case. Every second round runs backwards, so that a drift affects all cases
    alike.
    """
    order = list(runs.items())[:: -1 if number % 2 else 1]
    rates = {}
    for name, advance in order:
        seconds = advance.timed(options.tokens) if isinstance(advance, Together) else steps(advance, options.tokens)
        rates[name] = name[1] * options.tokens / seconds
    line = ", ".join(f"{who} {count}: {rates[who, count]:.1f}" for who, count in runs)
    print(f"round {number + 1}: {line} tokens/s", flush=True)
    return rates


def report(options: argparse.Namespace, rounds: list[dict], runs: dict) -> dict:
    rows = {}
    for who, count in rounds[0]:
        alone = (who, min(options.parallel))
        ratios = sorted(one[who, count] / one[alone] for one in rounds)
        rows[f"{who} {count}"] = {
            "tokens_per_second": round(statistics.median(one[who, count] for one in rounds), 2),
            "ratio": round(statistics.median(ratios), 3),
            "lowest": round(ratios[0], 3),
            "highest": round(ratios[-1], 3),
        }
        if options.trace is not None and runs[who, count].model.experts.slots:
            tokens = count * options.tokens * len(rounds)
            rows[f"{who} {count}"] |= reads(runs[who, count], trace_of(options, count), tokens)
    case = {"variant": options.variant, "layers": options.layers, "model": options.model, "rounds": len(rounds)}
    return case | {"prompt": options.prompt, "load": os.getloadavg()[0], "rows": rows}


def reads(run: Together, trace: np.ndarray, tokens: int) -> dict:
    """Returns, per token, how many experts were read, and how many the pool misses according to the trace."""
    of_trace = trace[: len(run.decodings)]
    most = missed(steps_of(of_trace), run.model.experts.slots) / (len(of_trace) * trace.shape[1])
    return {"read": round(run.read / tokens, 3), "missed": round(most, 3)}


if __name__ == "__main__":
    main()
