"""How often a package calls a higher one while a model is opened.

Imports point down (tests/test_imports.py), so such a call goes through an object or a function that was handed down: a
method that a mixer's class overrides, a limit of the memory, a callback. Each pair of functions counts once.
"""

import sys
from pathlib import Path

import pytest
from test_imports import NAMES, PACKAGE, height
from tiny_models import tiny_directory

from moeflux_mlx.cli.terminal import ProgressLine
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import backend

MOST = 8


def module_of(frame):
    """Returns the name of the package's module that a frame runs, or None."""
    path = Path(frame.f_code.co_filename)
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts) if path.is_relative_to(PACKAGE) else None
    return name if name in NAMES else None


def calls_up(run):
    """Returns pairs of functions of which the first, in a lower package, calls the second while `run` runs; frames of
    other packages between them do not count."""
    pairs, before, places = set(), sys.getprofile(), {}

    def place(frame):
        if frame.f_code not in places:
            places[frame.f_code] = module_of(frame)
        return places[frame.f_code]

    def watch(frame, event, _):
        if event != "call" or (called := place(frame)) is None:
            return
        back = frame.f_back
        while back is not None and place(back) is None:
            back = back.f_back
        if back is not None and height(place(back)) < height(called):
            pairs.add(tuple(f"{place(one)}.{one.f_code.co_name}" for one in (back, frame)))

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(before)
    return pairs


@pytest.mark.skipif(backend.has_kernels(), reason="loading lists the kernels of a step there, so it runs the model")
@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
@pytest.mark.parametrize("mode", ["mmap", "pread", "resident"])
def test_a_model_is_opened_with_few_calls_into_higher_packages(family, mode):
    directory = tiny_directory(family)
    pairs = calls_up(lambda: load_model(directory, expert_io=mode).experts.close())
    assert 0 < len(pairs) <= MOST, sorted(pairs)


def test_a_callback_counts():
    directory = tiny_directory("qwen3_next")
    with ProgressLine("loading", of_bytes=True) as line:
        pairs = calls_up(lambda: load_model(directory, expert_io="resident", progress=line.update).experts.close())
    assert ("experts.whole._read", "cli.terminal.update") in pairs
