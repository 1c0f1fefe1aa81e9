"""Chooses some cells of a grid, and some examples of a property, instead of all.

The chosen cells have every value of every axis. The others run with `--full`.
"""

import itertools
import random

import pytest
from hypothesis import settings


def drawn(*axes, turns=1, seed=0):
    """Returns some cells of the grid of these axes for `parametrize`, with `--full` all of them. In each of `turns`
    rounds one cell is chosen for each value of the longest axis, while the values of the other axes take turns in an
    order that `seed` draws."""
    axes = [list(axis) for axis in axes]
    if is_full():
        return [*itertools.product(*axes)]
    draw = random.Random(seed)
    longest = max(map(len, axes)) if all(axes) else 0  # an axis is empty without the native extension

    def column(size):
        rounds = (draw.sample(range(size), size) for _ in range(-(-longest // max(size, 1))))
        return itertools.islice(itertools.chain.from_iterable(rounds), longest)

    chosen = {cell for _ in range(turns) for cell in zip(*(column(len(axis)) for axis in axes), strict=True)}
    return [tuple(axis[i] for axis, i in zip(axes, cell, strict=True)) for cell in sorted(chosen)]


def examples(count):
    """Returns the number of examples of a property: `count` with `--full`, by default a fifth of it."""
    return count if is_full() else -(-count // 5)


def taking_turns(cases, ways, first=0):
    """Returns pairs (case, way): all with `--full`, by default one for each case, where the ways take turns from
    number `first` on."""
    if is_full():
        return [*itertools.product(cases, ways)]
    return [(case, ways[(first + i) % len(ways)]) for i, case in enumerate(cases)]


def is_full():
    return settings.get_current_profile_name() == "full"


def marks(runs_by_default):
    return () if runs_by_default else pytest.mark.full


def one_in_three(names):
    """Marks all but every third of these cases `full`: each compiles a kernel of its own."""
    return [pytest.param(name, marks=marks(i % 3 == 0)) for i, name in enumerate(names)]
