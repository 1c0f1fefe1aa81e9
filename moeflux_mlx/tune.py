"""`python -m moeflux_mlx.tune`: the best size of a pool, and faster tiles of the kernels on an Apple GPU."""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from .cli.run import Parser, main_of  # first: where MLX is missing, it says so

# isort: split
import mlx.core as mx

from .cli.opening import shapes_of
from .cli.options import add_variant
from .driving.generation import generate_step
from .driving.sampling import make_sampler
from .errors import RequestError
from .experts.source import IoMode
from .files import user_path
from .kept.measured import Row, gpu_name, keep_tiles, read_rows, tiles_file
from .kept.warm_start import usage_file
from .model.tensors import resident_bytes
from .opening.engine import open_engine
from .opening.load_settings import LoadSettings, locate
from .opening.random_weights import Shapes
from .opening.weights import open_weights
from .ops import backend
from .ops.tiles import TRIED, TileChanges, merged
from .planning.budget import plan_memory
from .planning.machine import default_dtype, machine_figures
from .planning.memory_plan import keeping, least_pool
from .planning.pool_sizes import best_of, keep_pool, pool_file, sizes_to_try
from .tools.tuning import WORTH, tune

PROMPT = "Once upon a time a lighthouse keeper wrote a letter about how ships, stars and mathematics belong together."
SECONDS = 180.0  # of the search for tiles, and of that for a pool, after which no measurement begins
ANSWER = 256  # tokens of an answer with which a pool is measured


# The files of what is kept for later runs, and how their rows are shown.
KEPT: dict[Callable[[], Path], Callable[[Row], str]] = {
    tiles_file: lambda row: f"{row['gpu']}, MLX {row['mlx']}: tiles {spelled(row['tiles'])}",
    pool_file: lambda row: f"{row['model']}: a pool of {row['pool'] / 1e9:.2f} GB",
    usage_file: lambda row: f"{row['model']}: experts used in {row['steps']:.0f} steps",
}


def run(options: argparse.Namespace) -> int:
    """Prints what was found; returns 0."""
    if (options.show or options.reset) and (options.model or options.variant):
        raise RequestError("--show and --reset are for the results of all models; leave --model and --variant out")
    if options.show or options.reset:
        for file_of, line_of in KEPT.items():
            (forget if options.reset else show)(file_of(), line_of)
        return 0
    shapes = shapes_of(options)  # a wrong model is refused where no GPU computes, too
    if TRIED.get(backend.name()):
        find_tiles(shapes)
    else:
        print("there are no tiles to tune: only on Apple GPUs others than the built-in ones may be faster")
    if options.model is not None and (path := user_path(options.model)).exists():
        find_pool(path)
    return 0


def show(file: Path, line_of: Callable[[Row], str]) -> None:
    print(f"{file}:" if file.exists() else f"there is no {file}")
    for row in read_rows(file):
        with suppress(KeyError, TypeError, ValueError, AttributeError):  # a damaged row
            print(line_of(row))


def forget(file: Path, _: object) -> None:
    print(f"removed {file}" if file.exists() else f"there is no {file}")
    file.unlink(missing_ok=True)


def find_tiles(shapes: Shapes) -> None:
    """Tries other tiles at these shapes, and keeps those that are right and faster."""
    kept: list[TileChanges] = []
    for changes, gain in tune(shapes, SECONDS):
        is_kept = gain >= WORTH
        kept += [changes] * is_kept
        verdict = f"{gain:.2f} times as fast" if gain else "wrong, or refused by the GPU"
        print(f"{spelled(changes)}: {verdict}{', kept' if is_kept else ''}", flush=True)
    found = merged(kept)
    keep_tiles(found)
    print(f"{len(found)} kernels have faster tiles on {gpu_name()}; see {tiles_file()}")


def spelled(changes: TileChanges) -> str:
    """The fields of the tiles, by kernel."""
    fields = {kernel: (f"{name} {value}" for name, value in values.items()) for kernel, values in changes.items()}
    return ", ".join(f"{kernel} {' '.join(each)}" for kernel, each in sorted(fields.items()))


def find_pool(path: Path) -> None:
    """Runs the model with pools of several sizes, if it is streamed, and keeps the smallest of the fastest."""
    weights = open_weights(locate(path), without_correction_bias=True)
    args, layout, dtype = keeping(weights.args, "auto", None), weights.experts.layout, default_dtype()
    resident, in_place = resident_bytes(weights.shapes, dtype), not weights.can_be_mapped
    demand = LoadSettings(path).demand(args, resident, dtype, in_place=in_place, vision=weights.vision())
    plan = plan_memory(args, layout, machine_figures(), demand)
    if plan.mode is not IoMode.PREAD:
        print(f"there is no pool to size: {path} fits memory")
        return
    speeds: dict[int, float] = {}
    sizes = sizes_to_try(plan.pool, least_pool(args, layout))
    for pool in sizes:
        speeds[pool] = speed_with(path, pool, SECONDS / len(sizes))
        print(f"expert pool of {pool / 1e9:.2f} GB: {speeds[pool]:.2f} tokens/s", flush=True)
    best = best_of(speeds)
    keep_pool(weights.path, layout.total_bytes, best)
    print(f"a pool of {best / 1e9:.2f} GB is best for {path}; see {pool_file()}")


def speed_with(path: Path, pool: int, seconds: float) -> float:
    """Tokens per second of an answer with a pool of `pool` bytes, after a first half that fills the pool.

    It has at most `ANSWER` tokens, and takes about `seconds` at most.
    """
    engine = open_engine(
        path,
        expert_io="pread",
        expert_cache_bytes=pool,
        warm_start="off",
        without_correction_bias=True,
    )
    with closing(engine.experts):
        start, times = time.perf_counter(), list[float]()
        prompt, sampler = engine.tokenizer.encode(PROMPT), make_sampler(1.0, key=mx.random.key(0))
        with closing(generate_step(prompt, engine.model, max_tokens=ANSWER, sampler=sampler)) as steps:
            for _ in steps:
                times.append(time.perf_counter())
                if times[-1] - start > seconds and len(times) > 2:
                    break
        half = len(times) // 2
        return (len(times) - 1 - half) / (times[-1] - times[half])


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "tune",
        "If --model is here and does not fit in memory, find the best size of its expert pool. On "
        "an Apple GPU also try other tiles of the kernels at the model's shapes and keep the faster ones; the last "
        "bits of outputs may change. The results are stored for all later runs. Takes one to three minutes.",
    )
    which = made.add_mutually_exclusive_group()
    which.add_argument("--model", help="directory, GGUF file, or Hub repo id (only shapes are read); default: demo")
    add_variant(which.add_argument)
    action = made.add_mutually_exclusive_group()
    action.add_argument("--show", action="store_true", help="show what is stored and measure nothing")
    action.add_argument(
        "--reset",
        action="store_true",
        help="forget everything that is stored: tiles, pools, and which experts were used",
    )
    return made


main = main_of(run, parser)


if __name__ == "__main__":
    sys.exit(main())
