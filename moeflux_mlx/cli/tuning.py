"""Finds tiles on this GPU, shows what was found, and forgets it, in lines for people."""

import argparse
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import mlx.core as mx
from tqdm import tqdm

from ..engine.locate import resolve
from ..engine.machine import default_dtype
from ..engine.random_weights import Shapes
from ..engine.remote import Remote, is_remote
from ..engine.tiles import default_file, gpu_name, keep, read_entries
from ..engine.tuning import Result, crew, kept, samples
from ..engine.weights import open_weights
from ..errors import RequestError
from ..files import user_path
from ..formats.record import ExpertLayout
from ..model.tensors import needed, stored_as
from ..ops import backend
from ..ops.tiles import Tile
from ..quant import Quantization
from ..spec import ModelArgs


def run(options: argparse.Namespace) -> int:
    """Prints what was found; returns 0."""
    file = default_file() if options.file is None else user_path(options.file)
    if options.show:
        print("\n".join(shown(file)))
    elif options.reset:
        print(f"removed {file}" if file.exists() else f"there is no {file}")
        file.unlink(missing_ok=True)
    elif not backend.has_kernels():
        print("there is nothing to tune: no GPU computes here, and the CPU's kernels have no tiles")
    else:
        find(options, file)
    return 0


def find(options: argparse.Namespace, file: Path) -> None:
    """Searches every kernel at the shapes of the options' model, and keeps what is faster at once."""
    if options.minutes <= 0:
        raise RequestError(f"--minutes is {options.minutes}; it must be positive")
    shapes = shapes_of(options)
    spots, results = list(samples(shapes)), list[Result]()
    with (
        tqdm(total=len(spots), unit="kernel", disable=not sys.stderr.isatty()) as bar,
        closing(crew(shapes, spots, 60 * options.minutes)) as search,
    ):
        for result in search:
            results.append(result)
            keep(file, kept([result]), [result.spot])
            tqdm.write(line_of(result), file=sys.stdout)
            bar.update()
    if len(results) < len(spots):
        print(f"{len(spots) - len(results)} were not tried: the time was over; --minutes gives more")
    print(f"{len(kept(results))} of {len(results)} kernels and shapes have faster tiles on {gpu_name()}; see {file}")


def shapes_of(options: argparse.Namespace) -> Shapes:
    """The model's sizes, the layout of its experts and how its matrices are stored; no tensor is read."""
    dtype = default_dtype()
    if options.variant is not None:
        args = ModelArgs.from_variant(options.variant)
        quants = {path: stored_as(args, path, shape[-1]) for path, shape in needed(args)[0].items()}
        return Shapes(args, ExpertLayout.from_args(args), quants, dtype)
    tensors: Mapping[str, mx.array]
    if is_remote(options.model) and isinstance(remote := Remote.look_up_or_cached(options.model), Remote):
        args, layout, tensors = remote.figures()
    else:
        weights = open_weights(resolve(options.model))
        args, layout, tensors = weights.args, weights.experts.layout, weights.shapes
    stated = args.quantization or Quantization()
    stored = (name.removesuffix(".scales") for name in tensors if name.endswith(".scales"))
    return Shapes(args, layout, {path: stated.of(path) for path in stored}, dtype)


def line_of(result: Result) -> str:
    if result.best == result.code:
        verdict = f"{spelled(result.code)} of the code stays"
    else:
        verdict = f"{spelled(result.best)}, {result.gain:.2f} times as fast as {spelled(result.code)}"
    return f"{result.spot}: {1e6 * result.seconds:.1f} us a launch; {verdict}"


def spelled(tile: Tile) -> str:
    """What of it is not 0."""
    values = ((one.name, getattr(tile, one.name)) for one in fields(tile))
    return " ".join(f"{name} {value}" for name, value in values if value)


def shown(file: Path) -> list[str]:
    """Everything in the file.

    Raises:
        ModelFileError: it is damaged.
    """
    if not file.exists():
        return [f"there is no {file}; moeflux tune writes it"]
    lines = [f"{file}:"]
    for entry in read_entries(file):
        state = ", found with another MLX or other kernels: not used" if entry.is_stale else ""
        lines.append(f"{entry.gpu}, MLX {entry.mlx}{state}")
        lines += [f"  {spot}: {spelled(tile)}" for spot, tile in sorted(entry.tiles.items())]
    return lines
