"""Finds tiles on this GPU, shows what was found, and forgets it, in lines for people."""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import mlx.core as mx
from tqdm import tqdm

from ..engine.locate import resolve
from ..engine.machine import default_dtype
from ..engine.remote import Remote, is_remote
from ..engine.tiles import default_file, gpu_name, keep, read_found
from ..engine.tuning import QuantOf, Result, kept, samples, tune
from ..engine.weights import open_weights
from ..files import user_path
from ..formats.record import ExpertLayout
from ..model.tensors import stored_as
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
    """Searches every kernel at the shapes of the options' model, and keeps what is faster."""
    args, layout, quant_of = shapes_of(options)
    results: list[Result] = []
    with tqdm(total=100, unit="%", disable=not sys.stderr.isatty()) as bar:

        def report(share: float) -> None:
            bar.update(round(100 * share) - bar.n)

        for result in tune(samples(args, layout, quant_of, default_dtype(), report)):
            results.append(result)
            keep(file, kept([result]), [result.spot])  # at once: what is found outlives an interruption
            tqdm.write(line_of(result), file=sys.stdout)
        report(1.0)
    print(f"{len(kept(results))} of {len(results)} kernels and shapes have faster tiles on {gpu_name()}; see {file}")


def shapes_of(options: argparse.Namespace) -> tuple[ModelArgs, ExpertLayout, QuantOf]:
    """The model's sizes, the layout of its experts and how its matrices are stored; no tensor is read."""
    if options.variant is not None:
        args = ModelArgs.from_variant(options.variant)
        return args, ExpertLayout.from_args(args), lambda path, columns: stored_as(args, path, columns)
    shapes: Mapping[str, mx.array]
    if is_remote(options.model) and isinstance(found := Remote.look_up_or_cached(options.model), Remote):
        args, layout, shapes = found.figures()
    else:
        weights = open_weights(resolve(options.model))
        args, layout, shapes = weights.args, weights.experts.layout, weights.shapes
    stated = args.quantization or Quantization()
    stored = {name.removesuffix(".scales") for name in shapes if name.endswith(".scales")}
    return args, layout, lambda path, columns: stated.of(path) if path in stored else None


def line_of(result: Result) -> str:
    if result.best == result.code:
        return f"{result.spot}: {spelled(result.code)} of the code stays"
    return f"{result.spot}: {spelled(result.best)}, {result.gain:.2f} times as fast as {spelled(result.code)}"


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
    for found in read_found(file):
        state = ", found with another MLX or other kernels: not used" if found.is_stale else ""
        lines.append(f"{found.gpu}, MLX {found.mlx}{state}")
        lines += [f"  {spot}: {spelled(tile)}" for spot, tile in sorted(found.tiles.items())]
    return lines
