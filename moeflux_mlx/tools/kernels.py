"""Compiles kernels with this machine's compiler and does not run them: how long that takes, and how many threads Metal
allows each.

MLX compiles a custom kernel when it is evaluated. On Metal, MLX compares the threads of a threadgroup with what the
compiled kernel allows before it encodes the launch (`CustomKernel::eval_gpu` of mlx/backend/metal/custom_kernel.cpp,
version 0.32), and names the number that is allowed when it refuses. A launch that asks for more threads than any GPU
has is therefore compiled and never encoded. Its arrays need not have the sizes that the kernel would read.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from ..engine.kernel_cache import CHECKED, SEQUENCES, compiler_here
from ..engine.launches import TOKENS, launches_of
from ..engine.random_weights import Shapes
from ..ops.kernel_files import Program
from ..ops.launch import LEAST_ELEMENTS
from ..ops.tiles import CODE

TOO_MANY = 1 << 20  # threads of a threadgroup; no GPU allows more than 1,024
REFUSAL = re.compile(r"allowed threads per threadgroup \((\d+)\)")


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


def threads_allowed(program: Program) -> int:
    """Compiles a kernel with Metal's compiler, and returns the most threads that it allows in a threadgroup.

    Raises:
        RuntimeError: it does not compile, or MLX accepts any number of threads.
        ValueError: MLX refuses the call for another reason.
    """
    few = program.few or [False] * len(program.inputs)
    sizes = [LEAST_ELEMENTS - 1 if is_small else LEAST_ELEMENTS for is_small in few]
    make: Any = mx.fast.metal_kernel
    kernel = make(**asdict(program.kernel))
    try:
        mx.eval(
            kernel(
                inputs=[mx.zeros((size,), dtype) for size, dtype in zip(sizes, program.inputs, strict=True)],
                grid=(1, 1, 1),
                threadgroup=(TOO_MANY, 1, 1),
                output_shapes=[(LEAST_ELEMENTS,)] * len(program.outputs),
                output_dtypes=list(program.outputs),
            )
        )
    except ValueError as error:
        if (refused := REFUSAL.search(str(error))) is None:
            raise
        return int(refused[1])
    raise RuntimeError(f"MLX did not refuse {TOO_MANY} threads in a threadgroup")


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


def programs_of_variants(names: Sequence[str], target: str, dtype: mx.Dtype) -> Iterator[Program]:
    """Every kernel that these known models run on `target`, identical ones once: first those of one text for all
    models, then those of several rows in a step.
    """
    seen = set[object]()
    for tokens, sequences, rows in (((*TOKENS, 3), (), ()), ((1,), SEQUENCES, CHECKED)):
        for name in names:
            shapes = Shapes.of_variant(name, dtype)
            with closing(launches_of(shapes, target, CODE, tokens, sequences, rows)) as steps:
                for program in (program for step in steps for program in step.programs):
                    key = program.kernel.name, *map(tuple, (program.inputs, program.outputs, program.few))
                    if key not in seen:
                        seen.add(key)
                        yield program
