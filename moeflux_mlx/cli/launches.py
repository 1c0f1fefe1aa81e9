"""Which kernels and native forms a model runs, by kind of layer and number of tokens, in lines for people."""

import argparse
from contextlib import closing

from ..engine.launches import TOKENS, PartLaunches, launches_of
from ..ops import backend, native
from ..ops.stand_ins import standing_in
from .tuning import shapes_of

BACKENDS = {"cpu": "ops", "metal": "metal", "cuda": "cuda"}


def run(options: argparse.Namespace) -> int:
    """Prints them for the options' model; returns 0."""
    target = backend.name() if options.backend is None else BACKENDS[options.backend]
    with standing_in(backend=target):
        shapes = shapes_of(options)
        title = next(name for name, value in BACKENDS.items() if value == target)
        print(f"{shapes.args.model_type} on {machine_of(title)}, in {str(shapes.dtype).removeprefix('mlx.core.')}")
        with closing(launches_of(shapes, target)) as steps:
            for step in steps:
                if step.tokens == TOKENS[0]:
                    print(title_of(step))
                print("\n".join(lines_of(step, "" if target == "ops" else "no kernel for ")))
    return 0


def machine_of(title: str) -> str:
    """The backend, and of a CPU the instruction set that the native kernels use."""
    is_native = title == "cpu" and native.available()
    return f"{title} ({native.instruction_paths()[0]})" if is_native else title


def title_of(step: PartLaunches) -> str:
    """The part and its layers."""
    if not step.layers:
        return step.part
    if len(step.layers) == 1:
        return f"{step.part}: layer {step.layers[0]}"
    return f"{step.part}: {len(step.layers)} layers, the first is {step.layers[0]}"


def lines_of(step: PartLaunches, refusal: str) -> list[str]:
    """The lines of what runs, each followed by the reasons (`refusal`) why no other form runs."""
    runs = ", ".join(name if count == 1 else f"{name} x{count}" for name, count in step.runs.items())
    lines = [f"  {step.tokens:>3} {'token ' if step.tokens == 1 else 'tokens'}  {runs or 'MLX operations only'}"]
    return lines + [f"              {refusal}{name}: {reason}" for name, reason in step.refused.items()]
