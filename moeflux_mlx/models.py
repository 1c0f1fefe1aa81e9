"""`python -m moeflux_mlx.models`: which of the known models suit this machine."""

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from .cli.known_models import ASSUMED_DISK, COMFORTABLE, Fit, Machine, figures, known_models, machine_of, table
from .cli.options import gigabytes
from .cli.run import Parser, main_of
from .errors import RequestError

WIDTH = 100  # columns
AFFINE_BITS = 4.5  # of a weight in 4 bits in groups of 64, as in most of the table
# Bits of a weight of routed experts in llama.cpp's standard mixes, by `llama_tensor_get_type_impl` of its
# llama-quant.cpp: of gate and up, and of down on an average of the layers, some of which have more.
MIXES = {
    "Q2_K": (2.625, 3.4375),
    "Q3_K_M": (3.4375, 4.5625),
    "Q4_K_M": (4.5, 5.53125),
    "Q5_K_M": (5.5, 6.03125),
    "Q6_K": (6.5625, 6.5625),
    "Q8_0": (8.5, 8.5),
}
MORE = "moeflux models --gguf lists models whose GGUF files run, by llama.cpp's architecture, with about their sizes."


def run(options: argparse.Namespace) -> int:
    """Prints the table, or with --json one object, or with --gguf another table."""
    if options.context is not None and options.context < 1:
        raise RequestError(f"--context is {options.context}; it must be at least 1")
    here = machine(options)
    fits = known_models(here, options.context)
    if options.json:
        print(json.dumps(report(here, fits)))
        return 0
    if options.gguf:
        print("\n".join(by_architecture(fits)))
        return 0
    named = [fit for fit in fits if fit.memory_bytes is not None and fit.repository is not None]
    commands = ["", "to try one (moeflux prints its size first; moeflux plan --model NAME downloads no weights):"]
    commands += [f"  {fit.command}" for fit in named]
    print("\n".join([*table(here, fits), *(commands if named else []), "", *gguf_lines(MORE)]))
    return 0


def factor(mix: str) -> float:
    """The size of a GGUF file of this mix, about, as a multiple of the model's in 4 bits in groups of 64."""
    first, down = MIXES[mix]
    return (2 * first + down) / 3 / AFFINE_BITS


def by_architecture(fits: Sequence[Fit]) -> list[str]:
    """Lines of at most 100 columns: the models whose GGUF files are read, and about how large these are."""
    read = sorted((fit.architecture, fit.disk_bytes, fit.name) for fit in fits if fit.architecture)
    first, second = max(len(row[0]) for row in read) + 2, max(len(row[2]) for row in read) + 2
    lines = [f"{'architecture':{first}}{'GB, about:':{second}}" + "".join(f"{mix:>8}" for mix in MIXES)]
    for architecture, size, name in read:
        sizes = (f"{size * factor(mix) / 1e9:8.1f}" for mix in MIXES)
        lines.append(f"{architecture:{first}}{name:{second}}{''.join(sizes)}")
    return [*lines, "", *gguf_lines("Sizes are those of llama.cpp's standard mixes; publishers' own mixes differ.")]


def gguf_lines(first: str) -> list[str]:
    """The commands that say more about GGUF files, behind a first sentence."""
    text = (
        f"{first} With the package gguf installed, moeflux plan --model ORG/NAME lists the quants of a repository with "
        "their sizes, and moeflux chat --model ORG/NAME:QUANT prints the size first."
    )
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False)


def machine(options: argparse.Namespace) -> Machine:
    """This machine, or the one that the options describe.

    Raises:
        RequestError: a number is out of range.
    """
    disk = gigabytes("--disk-gb-per-s", options.disk_gb_per_s)
    products = gigabytes("--products-gb-per-s", options.products_gb_per_s)
    return machine_of(figures(options.ram_gb), disk, products)


def report(here: Machine, fits: Sequence[Fit]) -> dict[str, object]:
    """What --json prints: bytes, bytes per second, tokens per second."""
    return {
        "memory_bytes": here.figures.memory,
        "products_bytes_per_second": here.products,
        "disk_bytes_per_second": here.disk,
        "disk_is_measured": here.is_measured,
        "models": [{**asdict(fit), "command": fit.command} for fit in fits],
    }


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "models",
        "List the known models: how much disk and memory each one needs here, its expected tokens/s, and the commands "
        f"to run it. The largest model above {COMFORTABLE:g} tokens/s comes first. Downloads nothing.",
    )
    add = made.add_argument
    add("--ram-gb", type=float, metavar="GB", help="memory in units of 1e9 bytes; default: this machine's")
    add(
        "--disk-gb-per-s",
        type=float,
        metavar="GB",
        help=f"read speed of the disk, which moeflux doctor measures ({ASSUMED_DISK / 1e9:g})",
    )
    add(
        "--products-gb-per-s",
        type=float,
        metavar="GB",
        help="speed at which the products of one token read weights; default: measured here, in about a second",
    )
    add(
        "--context",
        type=int,
        metavar="TOKENS",
        help="plan memory for this many tokens; default: 8192, or as many as fit",
    )
    add("--gguf", action="store_true", help="list the architectures of GGUF files, and sizes of their models instead")
    add("--json", action="store_true", help="print one JSON object instead, in bytes and seconds")
    return made


main = main_of(run, parser)


if __name__ == "__main__":
    sys.exit(main())
