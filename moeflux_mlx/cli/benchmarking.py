"""Measures how fast a model runs on this machine: prompts and answers of random tokens, a table, and optionally JSON.

Every length is measured in turn, so that a machine that slows down slows all of them; the table has medians.
"""

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ..engine.engine import Engine
from ..engine.generation import generate_step
from ..engine.locate import resolve
from ..engine.machine import machine_figures
from ..engine.weights import open_weights
from ..errors import RequestError
from ..files import JsonDict
from ..spec import ModelArgs
from .diagnosis import machine_lines
from .fetching import local_model
from .opening import note_idle_options, open_optional
from .parallel import Rates, check_numbers, parallel_rates, parallel_table
from .terminal import mapped_memory_gb, note, peak_memory_gb

StepsAfter = Callable[
    [list[int], int], Generator[Any, None, None]
]  # a prompt and how many tokens follow it -> their steps


OURS = "ours"
LENGTHS = (128, 512, 2048)  # tokens of prompts


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


Memory = dict[str, float | None]
Rounds = dict[int, list[PromptFigures]]  # by length of the prompt


def run(options: argparse.Namespace) -> int:
    """Prints the table and the line; returns 0."""
    if options.max_tokens < 2 or options.rounds < 1 or min(options.prompt_tokens or LENGTHS) < 1:
        raise RequestError("--max-tokens must be at least 2, --rounds and --prompt-tokens at least 1")
    model = local_model(options)
    options.prompt_tokens = fitting_lengths(
        options, open_weights(resolve(model, options.revision, tokenizer=options.tokenizer)).args
    )
    room = max(options.parallel or [1]) - 1  # tokens that the first of several says before the last begins
    options.context = options.context or max(options.prompt_tokens) + options.max_tokens + room
    # random tokens say nothing about what later sessions use
    engine = open_optional(options, model, warm_start="off")
    peer = None if options.against is None else mlx_lm_steps(engine)
    if options.parallel:
        check_numbers(options.parallel, engine)
    note_idle_options(options, engine.experts.mode)
    lines = machine_lines(machine_figures())
    print("\n".join([*lines, engine.experts.decision]))
    runners: dict[str, StepsAfter] = {OURS: own_steps(engine)}
    if peer is not None:
        runners[options.against] = peer
    runs = measured(options, engine, runners)
    print("\n".join(table(runs[OURS], runs.get("mlx-lm"))))
    rates: Rates = {}
    if options.parallel:
        sizes = options.prompt_tokens[0], options.max_tokens, options.rounds
        rates = parallel_rates(engine, options.parallel, *sizes)
        print("\n".join(parallel_table(rates)))
    memory = memory_of(engine)
    print(memory_line(memory))
    if options.json:
        print(json.dumps(report(options, engine, lines, memory, runs) | {"parallel": rates}))
    return 0


def memory_of(engine: Engine) -> Memory:
    """The planned memory, the peak, the mapped files at the end, and MLX's arrays, in units of 1e9 bytes."""
    return {
        "planned_gb": engine.plan.total / 1e9,
        "peak_gb": peak_memory_gb(),
        "mapped_gb": mapped_memory_gb(),
        "mlx_gb": mx.get_peak_memory() / 1e9,
    }


def memory_line(memory: Memory) -> str:
    """How the peak compares with the plan, which leaves mapped files out."""
    mapped = memory["mapped_gb"]
    at_end = "" if mapped is None else f" ({mapped:.2f} GB at the end)"
    return (
        f"memory: {memory['planned_gb']:.2f} GB planned, {memory['peak_gb']:.2f} GB at the peak with pages of mapped "
        f"files{at_end}, which the plan leaves out because the system can take them back"
    )


def fitting_lengths(options: argparse.Namespace, args: ModelArgs) -> list[int]:
    """The requested prompt lengths, or the default ones that fit the model.

    Raises:
        RequestError: one does not fit, or none does.
    """
    room = args.max_position_embeddings - options.max_tokens
    lengths: list[int] = options.prompt_tokens or [length for length in LENGTHS if length <= room]
    if not lengths or max(lengths) > room:
        raise RequestError(
            f"prompts of {max(lengths or LENGTHS)} tokens and {options.max_tokens} after them do not fit the model's "
            f"{args.max_position_embeddings}; give --prompt-tokens and --max-tokens that add up to no more"
        )
    return lengths


def own_steps(engine: Engine) -> StepsAfter:
    """This package's; where other ranks take part, each prompt is a session of all."""
    if engine.lead is None:
        return lambda prompt, count: generate_step(prompt, engine.model, max_tokens=count)
    return lambda prompt, count: engine.session().respond(prompt, max_tokens=count)


def mlx_lm_steps(engine: Engine) -> StepsAfter:
    """mlx-lm's model of the same files.

    Raises:
        RequestError: mlx-lm is not installed, or cannot read them.
    """
    try:
        load = importlib.import_module("mlx_lm.utils").load_model
        steps = importlib.import_module("mlx_lm.generate").generate_step
        model = load(engine.path)[0]
    except (ImportError, ValueError, FileNotFoundError) as error:
        raise RequestError(
            f"mlx-lm cannot run {engine.path}: {error}; it needs pip install mlx-lm and an MLX checkpoint, not a "
            "directory made by convert"
        ) from None
    return lambda prompt, count: steps(mx.array(prompt), model, max_tokens=count)


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


def report(
    options: argparse.Namespace,
    engine: Engine,
    machine: list[str],
    memory: Memory,
    runs: dict[str, Rounds],
) -> JsonDict:
    """The content of the JSON line: every round, not only medians."""
    args = engine.model.args
    rows = [
        {"prompt_tokens": length, **{name: [asdict(one) for one in rounds[length]] for name, rounds in runs.items()}}
        for length in options.prompt_tokens
    ]
    return {
        "machine": machine,
        "model_type": args.model_type,
        "layers": args.num_hidden_layers,
        "experts": [args.num_experts, args.num_experts_per_tok],
        "expert_io": engine.experts.decision,
        "tiles": len(engine.model.tiles.found),
        "max_tokens": options.max_tokens,
        "memory": memory,
        "rows": rows,
    }
