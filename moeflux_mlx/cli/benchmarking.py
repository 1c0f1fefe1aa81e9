"""Measures how fast a model runs on this machine: prompts and answers of random tokens, and a table.

Every length is measured in turn, so that a machine that slows down slows all of them; the table has medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..driving.generation import generate_step
from ..files import JsonDict
from ..opening.engine import Engine
from .terminal import note

# A prompt and how many tokens follow it -> their steps.
StepsAfter = Callable[[list[int], int], Generator[Any, None, None]]

OURS = "ours"


@dataclass(frozen=True)
class PromptFigures:
    """One prompt and the tokens after it.

    Args:
        first_token: seconds to the first token.
        decode: tokens per second after it; 0 where there are none.
        hits: share of requested experts that were in memory, for the tokens after the first; None if none is read.
        megabytes: experts read per such token, in units of 1e6 bytes.
        gb_per_second: rate while the drive was reading them.
    """

    first_token: float
    decode: float
    hits: float | None = None
    megabytes: float | None = None
    gb_per_second: float | None = None


Rounds = dict[int, list[PromptFigures]]  # by length of the prompt


def own_steps(engine: Engine) -> StepsAfter:
    """This package's; where other ranks take part, each prompt is a session of all."""
    if engine.lead is None:
        return lambda prompt, count: generate_step(prompt, engine.model, max_tokens=count)
    return lambda prompt, count: engine.session().respond(prompt, max_tokens=count)


def measured(options: argparse.Namespace, engine: Engine, runners: dict[str, StepsAfter]) -> dict[str, Rounds]:
    """Every round of each length, all runners in turn, after one short round of each that warms up."""
    random, vocabulary = np.random.default_rng(0), engine.model.args.vocab_size
    runs: dict[str, Rounds] = {name: {length: [] for length in options.prompt_tokens} for name in runners}
    for name, steps in runners.items():
        one(engine, steps, random.integers(0, vocabulary, 16).tolist(), 4, name == OURS)
    for _ in range(options.rounds):
        for length in options.prompt_tokens:
            prompt = random.integers(0, vocabulary, length).tolist()
            for name, steps in runners.items():
                made = one(engine, steps, prompt, options.max_tokens, name == OURS)
                runs[name][length].append(made)
                note(f"{name}, {length} tokens: first after {made.first_token:.2f} s, then {made.decode:.1f} a second")
    return runs


def one(engine: Engine, steps: StepsAfter, prompt: list[int], count: int, counted: bool) -> PromptFigures:
    start = time.perf_counter()
    with closing(steps(prompt, count)) as running:
        next(running)
        first, before = time.perf_counter(), replace(engine.experts.stats)
        generated = sum(1 for _ in running)
    decode = generated / (time.perf_counter() - first)
    if not counted or engine.experts.slots == 0:
        return PromptFigures(first - start, decode)
    since = engine.experts.stats.since(before)
    return PromptFigures(first - start, decode, since.hit_rate, since.bytes_read / generated / 1e6, since.gb_per_second)


def medians(rounds: Sequence[PromptFigures]) -> PromptFigures:
    """The median of each figure."""
    columns: dict[str, list[Any]] = {name: [asdict(one)[name] for one in rounds] for name in asdict(rounds[0])}
    middle: JsonDict = {name: None if None in column else statistics.median(column) for name, column in columns.items()}
    return PromptFigures(**middle)


def table(ours: Rounds, theirs: Rounds | None) -> list[str]:
    """A line for each length."""
    head = f"{'prompt':>7}{'tokens/s':>10}{'first token':>13}{'decode/s':>10}{'hits':>7}{'MB/token':>10}{'GB/s':>7}"
    lines = [head + (f"{'mlx-lm: tokens/s':>18}{'decode/s':>10}" if theirs else "")]
    for length, rounds in ours.items():
        own = medians(rounds)
        line = f"{length:7}{length / own.first_token:10.1f}{own.first_token:11.2f} s{own.decode:10.1f}"
        if own.hits is None:
            line += f"{'-':>7}{'-':>10}{'-':>7}"
        else:
            line += f"{own.hits:7.0%}{own.megabytes:10.1f}{own.gb_per_second:7.2f}"
        if theirs:
            peer = medians(theirs[length])
            line += f"{length / peer.first_token:18.1f}{peer.decode:10.1f}"
        lines.append(line)
    return lines
