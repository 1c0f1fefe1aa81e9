"""`python -m moeflux_mlx.benchmark`: how fast a model runs on this machine."""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from .cli.run import Parser, main_of  # first: where MLX is missing, it says so

# isort: split
import mlx.core as mx

from .cli.benchmarking import (
    OURS,
    PromptFigures,
    Rounds,
    StepsAfter,
    measured,
    medians,
    own_steps,
    table,
)
from .cli.diagnosis import machine_lines
from .cli.known_models import forecast_of
from .cli.opening import add_rank_options, local_model, note_idle_options, open_optional, together
from .cli.options import add_model_options
from .cli.terminal import mapped_memory_gb, peak_memory_gb
from .errors import RequestError
from .files import JsonDict
from .opening.engine import Engine
from .planning.forecast import Forecast
from .planning.machine import machine_figures
from .spec import ModelArgs

LENGTHS = (128, 512, 2048)  # tokens of prompts
Memory = dict[str, float | None]
Forecasts = dict[str, Forecast]  # by what they assume


def run(options: argparse.Namespace) -> int:
    """Prints the table and the line; returns 0."""
    if options.max_tokens < 2 or options.rounds < 1 or min(options.prompt_tokens or LENGTHS) < 1:
        raise RequestError("--max-tokens must be at least 2, --rounds and --prompt-tokens at least 1")
    located = local_model(options)
    options.prompt_tokens = fitting_lengths(options, located.args)
    options.context = options.context or max(options.prompt_tokens) + options.max_tokens
    # random tokens say nothing about what later sessions use
    engine = open_optional(options, located, warm_start="off")
    peer = None if options.against is None else mlx_lm_steps(engine)
    note_idle_options(options, engine.experts.mode)
    lines = machine_lines(machine_figures())
    print("\n".join([*lines, engine.experts.decision]))
    runners: dict[str, StepsAfter] = {OURS: own_steps(engine)}
    if peer is not None:
        runners[options.against] = peer
    runs = measured(options, engine, runners)
    expected = {
        length: forecasts(engine, length + options.max_tokens // 2, runs[OURS][length]) for length in runs[OURS]
    }
    print("\n".join([*forecast_lines(expected, runs[OURS]), *table(runs[OURS], runs.get("mlx-lm"))]))
    memory = memory_of(engine)
    print(memory_line(memory))
    if options.json:
        print(json.dumps(report(options, engine, lines, memory, runs, expected)))
    return 0


def forecasts(engine: Engine, positions: int, rounds: Sequence[PromptFigures]) -> Forecasts:
    """What was to be expected: of a text, and with the measured hits if experts are read. Empty: doctor has not
    measured this machine.
    """
    hits = medians(rounds).hits
    made = {"of a text": forecast_of(engine, positions)}
    made |= {} if hits is None else {"with these hits": forecast_of(engine, positions, hits)}
    return {name: one for name, one in made.items() if one is not None}


def forecast_lines(expected: dict[int, Forecasts], ours: Rounds) -> list[str]:
    """A line for each length with the forecasts, beside what was measured."""
    if not all(expected.values()):
        return ["forecast: moeflux doctor measures this machine first"]
    return [
        f"forecast after {length} tokens: {', '.join(f'{one} {name}' for name, one in made.items())}; measured "
        f"{medians(ours[length]).decode:.1f}"
        for length, made in expected.items()
    ]


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


def report(
    options: argparse.Namespace,
    engine: Engine,
    machine: list[str],
    memory: Memory,
    runs: dict[str, Rounds],
    expected: dict[int, Forecasts],
) -> JsonDict:
    """The content of the JSON line: every round, not only medians."""
    args = engine.model.args
    rows = [
        {
            "prompt_tokens": length,
            "forecast": {name: asdict(one) for name, one in expected[length].items()},
            **{name: [asdict(one) for one in rounds[length]] for name, rounds in runs.items()},
        }
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


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "benchmark",
        "Measure prompt and decode rates with random tokens of a few lengths. Also show the machine, the hits and "
        "bytes of streamed experts, and the used and planned memory. Nothing is read that earlier sessions used, and "
        "nothing is noted for later ones.",
    )
    add = made.add_argument_group("measurement").add_argument
    add(
        "--prompt-tokens",
        type=int,
        nargs="+",
        metavar="N",
        help=f"lengths of prompts; default: those of {LENGTHS} that fit the model".replace(",", ""),
    )
    add("--max-tokens", "-m", type=int, default=64, metavar="N", help="tokens after each prompt (%(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="rounds, whose medians the table shows (%(default)s)")
    add("--against", choices=["mlx-lm"], help="also run the checkpoint in mlx-lm, in turns; it must fit in memory")
    add("--json", action="store_true", help="also print the results as a last line of JSON")
    add_model_options(made, answers=False)
    add_rank_options(made)
    return made


main = main_of(together(run), parser)


if __name__ == "__main__":
    sys.exit(main())
