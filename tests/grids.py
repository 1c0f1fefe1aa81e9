"""Some cells of a grid instead of all: together they have every value of every axis. The others run with `--full`."""

import itertools
import random

import pytest


def drawn(*axes, turns=1, seed=0):
    """The grid of these axes for `parametrize`. All cells are marked `full` but as many as the longest axis has values,
    in each of the `turns`: one for each value of it, beside which the others' values take turns in an order that
    `seed` draws."""
    draw, axes = random.Random(seed), [list(axis) for axis in axes]
    longest = max(map(len, axes))

    def column(size):
        rounds = (draw.sample(range(size), size) for _ in range(-(-longest // size)))
        return itertools.islice(itertools.chain.from_iterable(rounds), longest)

    chosen = {cell for _ in range(turns) for cell in zip(*(column(len(axis)) for axis in axes), strict=True)}
    return [
        pytest.param(*(axis[i] for axis, i in zip(axes, cell, strict=True)), marks=marks(cell in chosen))
        for cell in itertools.product(*(range(len(axis)) for axis in axes))
    ]


def marks(runs_by_default):
    return () if runs_by_default else pytest.mark.full
