#!/usr/bin/env python3
"""Checks the shape of the package: where ways of mixing tokens are named, and how long modules and functions are.

    scripts/structure.py [--list]

A way of mixing tokens is known to its own modules and to the readers of configurations; everything else asks it. Prints
each count beside its limit, with `--list` also every place. Fails if a count is above its limit, and also if it is
below, so that no limit stays higher than necessary. A module of more than 400 lines needs a reason in `LONG`.
tests/test_imports.py checks that imports point down without cycles.
"""

import argparse
import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

PACKAGE = Path(__file__).resolve().parent.parent / "moeflux_mlx"
KINDS = {"GroupedQuery", "Latent", "Compressed", "Delta", "ChannelDecay", "Mamba2", "ShortConv"}
ROOMS = ("mixers", "families")  # packages that may name a kind
MODULE_LINES, FUNCTION_LINES = 400, 60
LONG = {  # module: why it is longer
    "mixers/delta/op.py": "one mixer's operation: kernels, twin, native form and chooser",
    "mixers/grouped/op.py": "one mixer's operation: kernels, twin, native form and chooser",
    "mixers/latent/op.py": "one mixer's operation: kernels, twin, native form and chooser",
    "ops/experts.py": "the two kernels of a step's experts, one after the other: twins, native forms and choosers",
    "ops/native.py": "one function for each kernel of the one C extension, with the shapes that it takes",
}
LIMITS = {
    "lines that name a way of mixing tokens": 0,
    "long modules without a reason, or reasons without a long module": 0,
    "long functions": 0,
}


def lines_that_name(module: PurePath, tree: ast.Module) -> Iterator[str]:
    """Lines that name a kind outside of its own modules; comments, docstrings and messages do not count."""
    if module.parts[0] in ROOMS:
        return
    lines = {
        node.lineno for node in ast.walk(tree) if KINDS & {getattr(node, key, 0) for key in ("id", "attr", "name")}
    }
    yield from (f"{module}:{line}" for line in sorted(lines))


def long_modules(lengths: dict[str, int], reasons: Iterable[str]) -> list[str]:
    """Modules of too many lines that have no reason, and reasons of other modules."""
    long = {module for module, lines in lengths.items() if lines > MODULE_LINES}
    return [
        *(f"{module} has {lengths[module]} lines" for module in sorted(long - set(reasons))),
        *(f"{module} needs no reason" for module in sorted(set(reasons) - long)),
    ]


def long_functions(module: PurePath, tree: ast.Module) -> Iterator[str]:
    """Functions of too many lines; their docstrings do not count."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            length = (node.end_lineno or 0) - node.lineno + 1 - (text.count("\n") + 1 if text else 0)
            if length > FUNCTION_LINES:
                yield f"{module}:{node.lineno} {node.name} has {length} lines"


def places(package: Path, reasons: Iterable[str] = LONG) -> list[list[str]]:
    """What each limit counts, in their order."""
    naming: list[str] = []
    functions: list[str] = []
    lengths = {}
    for file in sorted(package.rglob("*.py")):
        module, text = file.relative_to(package), file.read_text("utf-8")
        tree = ast.parse(text)
        naming += lines_that_name(module, tree)
        functions += long_functions(module, tree)
        lengths[module.as_posix()] = len(text.splitlines())
    return [naming, long_modules(lengths, reasons), functions]


def verdict(count: int, limit: int) -> str:
    """What to do about a count; empty if it is at its limit."""
    if count == limit:
        return ""
    return ": too many" if count > limit else f": lower the limit to {count}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print every place")
    options, is_right = parser.parse_args(), True
    for (name, limit), found in zip(LIMITS.items(), places(PACKAGE), strict=True):
        fault = verdict(len(found), limit)
        print(f"{len(found):4} {name} (limit {limit}){fault}")
        if options.list or len(found) > limit:
            print("".join(f"       {place}\n" for place in found), end="")
        is_right &= not fault
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
