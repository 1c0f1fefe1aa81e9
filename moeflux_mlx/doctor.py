"""`python -m moeflux_mlx.doctor`: describes this machine, checks its values, and lists what it can run."""

import argparse
import sys
from contextlib import closing
from itertools import groupby
from pathlib import Path

from .cli.run import Parser, main_of  # first: where MLX is missing, it says so

# isort: split
from .cli import reporting, soak
from .cli.diagnosis import Facts
from .cli.opening import shapes_of
from .cli.options import add_variant
from .errors import RequestError
from .opening.launches import PartLaunches, launches_of
from .ops import backend, native
from .ops.stand_ins import standing_in
from .planning.wired import MODES as WIRED

BACKENDS = {"cpu": "ops", "metal": "metal", "cuda": "cuda"}


def run(options: argparse.Namespace) -> int:
    """Prints what the options ask for; returns 1 if something is wrong.

    Raises:
        RequestError: options exclude each other.
    """
    if options.launches and options.report is not None:
        raise RequestError("--report and --launches exclude each other; give one of them")
    if options.launches:
        return print_launches(options)
    if options.soak is not None:
        return soak.run(options)
    for name in ("model", "variant", "backend"):
        if getattr(options, name) is not None:
            raise RequestError(f"--{name} is for --launches; give both")
    facts, with_disk = Facts(options.directory), not options.no_disk
    if options.report is None:
        return reporting.print_screen(facts, with_disk)
    return reporting.write_report(facts, with_disk, options.report, {"pools": soak.compared})


def print_launches(options: argparse.Namespace) -> int:
    """Prints them for the options' model; returns 0."""
    target = backend.name() if options.backend is None else BACKENDS[options.backend]
    with standing_in(backend=target):
        shapes = shapes_of(options)
        title = next(name for name, value in BACKENDS.items() if value == target)
        print(f"{shapes.args.model_type} on {backend_of(title)}, in {str(shapes.dtype).removeprefix('mlx.core.')}")
        with closing(launches_of(shapes, target)) as steps:
            for part, of_part in groupby(steps, title_of):
                print(part)
                for step in of_part:
                    print("\n".join(lines_of(step, "" if target == "ops" else "no kernel for ")))
    return 0


def backend_of(title: str) -> str:
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


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "doctor",
        "Describe this machine, check that its kernels compute correctly, measure the disk, and list the models that "
        "fit. Takes a few seconds, on a GPU half a minute the first time, and needs no model; the exit code is 1 if a "
        "check fails.",
    )
    disk = made.add_mutually_exclusive_group()
    disk.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="measure the disk of this directory, with a temporary file of 512 MB; "
        "default: the Hugging Face cache, or its parent",
    )
    disk.add_argument("--no-disk", action="store_true", help="do not measure the disk")
    disk.add_argument(
        "--launches",
        action="store_true",
        help="show only which kernels a model runs for one, a few and many tokens, and why others do not run",
    )
    made.add_argument(
        "--report",
        nargs="?",
        const=reporting.FILE,
        metavar="FILE",
        help="also compile as many kernels of the known models as 120 s allow and run the demo model, and save "
        "everything in a file to send, without names, paths or keys (%(const)s)",
    )
    which = made.add_mutually_exclusive_group()
    which.add_argument(
        "--model",
        help="with --launches or --soak: directory or Hugging Face repo id (no weights are read); default: demo",
    )
    add_variant(which.add_argument, "with --launches: ")
    made.add_argument(
        "--soak",
        type=float,
        metavar="MINUTES",
        help="instead, run --model (default: demo) with three clients while the pool of experts is cut and grows, and "
        f"save what is seen in {soak.FILE}, to send",
    )
    made.add_argument("--sleep", action="store_true", help="with --soak on a Mac: then sleep, and go on after waking")
    made.add_argument("--wired", choices=WIRED, default="pool", help="with --soak: as of the other commands")
    made.add_argument("--backend", choices=BACKENDS, help="with --launches: the backend; default: this machine's")
    return made


main = main_of(run, parser)


if __name__ == "__main__":
    sys.exit(main())
