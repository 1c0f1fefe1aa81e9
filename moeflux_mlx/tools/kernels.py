"""Compiles kernels with this machine's compiler and does not run them: how long that takes, and how many threads Metal
allows each.
"""

import os
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import mlx.core as mx

from ..opening.kernel_cache import CHECKED, SEQUENCES, compiler_here, threads_allowed
from ..opening.launches import TOKENS, launches_of
from ..opening.random_weights import Shapes
from ..ops.kernel_files import Program
from ..ops.tiles import CODE, TRIED, Tiles, merged

FEW_MODELS = 3  # whose texts with the tiles that are tried are compiled


@dataclass(frozen=True)
class Built:
    """What the compiler said of one kernel.

    Args:
        name: of the kernel's text, with its threads and a digest.
        seconds: that the compiler took.
        asked: threads of a threadgroup that the launch asks for.
        allowed: threads that the compiled kernel allows; None: unknown.
        fault: why it cannot be used; empty if it can.
    """

    name: str
    seconds: float
    asked: int
    allowed: int | None = None
    fault: str = ""


def built(program: Program, compiled: Callable[[Program], int | None]) -> Built:
    """Compiles one kernel with `compiled`, which returns the threads allowed or raises RuntimeError or ValueError."""
    name, start, allowed, fault = program.kernel.name, time.perf_counter(), None, ""
    try:
        allowed = compiled(program)
        if allowed is not None and allowed < program.threads:
            fault = f"its launch asks for {program.threads} threads, and {allowed} are allowed"
    except (RuntimeError, ValueError) as error:
        fault = str(error)
    return Built(name, time.perf_counter() - start, program.threads, allowed, fault)


def compiler_of(target: str) -> Callable[[Program], int | None]:
    """The function that compiles for the GPU `target`, "metal" or "cuda".

    Raises:
        RuntimeError: NVIDIA's compiler cannot be loaded.
    """
    if target == "metal":
        return threads_allowed
    nvrtc = compiler_here()
    if nvrtc is None:
        raise RuntimeError("NVIDIA's compiler or the headers of CUDA cannot be found")

    def compiled(program: Program) -> None:
        if nvrtc.compile(program) is None:
            raise RuntimeError("it does not compile")

    return compiled


def compiled_in_time(programs: Sequence[Program], target: str, budget: float) -> Generator[Built, None, None]:
    """Compiles programs for the GPU `target`, the first ones first, as many as `budget` seconds allow."""
    compiled, end = compiler_of(target), time.perf_counter() + budget

    def in_time(program: Program) -> Built | None:
        return built(program, compiled) if time.perf_counter() < end else None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # MLX compiles for Metal in this thread alone; NVIDIA's compiler runs in several at the same time.
        for one in (pool.map if target == "cuda" else map)(in_time, programs):
            if one is None:
                return
            yield one


def programs_of_variants(names: Sequence[str], target: str, dtype: mx.Dtype) -> list[Program]:
    """Every kernel that these known models run on `target`, identical ones once: first those of the first models that
    only `moeflux tune` chooses, then those of one text for all models, then those of several rows in a step.
    """
    one_text = (*TOKENS, 3), (), ()
    cases = (
        (names[:FEW_MODELS], Tiles(merged(TRIED[target])), one_text),
        (names, CODE, one_text),
        (names, CODE, ((1,), SEQUENCES, CHECKED)),
    )
    programs: dict[object, Program] = {}
    for some, tiles, counts in cases:
        for name in some:
            with closing(launches_of(Shapes.of_variant(name, dtype), target, tiles, *counts)) as steps:
                for program in (program for step in steps for program in step.programs):
                    programs.setdefault(program.key, program)
    return list(programs.values())
