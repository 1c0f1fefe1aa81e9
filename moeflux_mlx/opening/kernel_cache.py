"""Compiles a model's kernels while its weights are read. CUDA's are kept for the next start; macOS keeps Metal's by
itself, and the CPU's are compiled at installation.
"""

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..files import kept_files
from ..kept.measured import mlx_version
from ..ops import backend
from ..ops.kernel_files import Compiler, Program, keep
from ..ops.launch import LEAST_ELEMENTS
from ..ops.tiles import Tiles
from .launches import TOKENS, launches_of
from .random_weights import Shapes

VARIABLE = "MLX_PTX_CACHE_DIR"  # MLX reads this variable once, before its first kernel
NVRTC = "libnvrtc.so.13"  # major version of the CUDA that MLX's build uses
SEQUENCES = (2, 4, 6, 8)  # row counts of a step; all other counts run the same kernels, except for 3
TOO_MANY = 1 << 20  # threads of a threadgroup; no GPU allows more than 1,024
REFUSAL = re.compile(r"allowed threads per threadgroup \((\d+)\)")
CHECKED = (2, 3)  # rows that check drafts; each number has kernels of its own, and more are compiled when first used


@contextmanager
def compiling(shapes: Shapes, tiles: Tiles, drafts: bool = False) -> Iterator[None]:
    """A context manager that compiles, in other threads, the kernels that no earlier start has compiled. If that is
    impossible, and on Metal what is not done at the end, MLX compiles at first use. `drafts`: whether the model may
    check drafts.
    """
    is_over = threading.Event()
    work = _work(shapes, tiles, drafts, is_over)
    if work is None:
        yield
        return
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _work(shapes: Shapes, tiles: Tiles, drafts: bool, is_over: threading.Event) -> Callable[[], None] | None:
    """What the thread does; None: nothing."""
    if backend.name() == "metal":
        return lambda: build_each(partial(programs_of, shapes, tiles, drafts, "metal"), is_over)
    compiler = compiler_here() if backend.name() == "cuda" else None
    folder = None if compiler is None else folder_of(compiler)
    if compiler is None or folder is None:
        return None
    return partial(keep, compiler, programs_of(shapes, tiles, drafts), folder)


def programs_of(shapes: Shapes, tiles: Tiles, drafts: bool = False, target: str = "cuda") -> list[Program]:
    """The kernels that the model's parts run for one token and for many, which come first, for a few of one or several
    sequences, and for checking `drafts`.
    """
    rows = CHECKED if drafts else ()
    with closing(launches_of(shapes, target, tiles, (*TOKENS, 3), SEQUENCES, rows)) as steps:
        listed = [(step.tokens not in (1, TOKENS[-1]), program) for step in steps for program in step.programs]
    return list({program.key: program for _, program in sorted(listed, key=itemgetter(0))}.values())


def build_each(list_programs: Callable[[], list[Program]], is_over: threading.Event) -> None:
    """Has MLX build Metal kernels until `is_over`. What fails is left to the first use, which reports it."""
    with suppress(Exception):
        for program in list_programs():
            if is_over.is_set():
                return
            with suppress(RuntimeError, ValueError):
                threads_allowed(program)


def threads_allowed(program: Program) -> int:
    """Has MLX build a Metal kernel, which it keeps by name for later launches, and returns the most threads that the
    kernel allows in a threadgroup.

    Nothing is launched: MLX compares the threads of a threadgroup with what the built kernel allows before it encodes
    the launch (`CustomKernel::eval_gpu` of mlx/backend/metal/custom_kernel.cpp, version 0.32), and names the number
    that is allowed when it refuses. So a launch that asks for more threads than any GPU has is built and never encoded,
    and its arrays need not have the sizes that the kernel would read. Its text depends on dtypes, and on which arrays
    have fewer than `LEAST_ELEMENTS` elements.

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
                inputs=[mx.array([0] * size, dtype) for size, dtype in zip(sizes, program.inputs, strict=True)],
                output_shapes=[(LEAST_ELEMENTS,)] * len(program.outputs),
                output_dtypes=list(program.outputs),
                grid=(1, 1, 1),
                threadgroup=(TOO_MANY, 1, 1),
            )
        )
    except ValueError as error:
        if (refused := REFUSAL.search(str(error))) is None:
            raise
        return int(refused[1])
    raise RuntimeError(f"MLX did not refuse {TOO_MANY} threads in a threadgroup")


def compiler_here() -> Compiler | None:
    """The compiler for this machine's GPU, with the headers that MLX would use; None if there is none."""
    architecture = str(mx.device_info()["architecture"]) + ("a" if backend.capability() >= 9 else "")
    package = Path(mx.__file__).parent
    roots = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    toolkits = [package.parent / "nvidia" / "cu13", *(Path(root) for root in roots if root), Path("/usr/local/cuda")]
    include = next((root / "include" for root in toolkits if (root / "include").is_dir()), None)
    if include is None:
        return None
    try:
        return Compiler(architecture, NVRTC, [package / "include" / "cccl", include])
    except OSError:
        return None


def folder_of(compiler: Compiler) -> Path | None:
    """The directory in which MLX looks for kernels: the user's, or our own, which is then set for MLX; None if it
    cannot be created.
    """
    name = f"mlx-{mlx_version()}-{compiler.architecture}-nvrtc-{compiler.version}"
    folder = Path(os.environ.get(VARIABLE) or kept_files() / "kernels" / name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    os.environ[VARIABLE] = str(folder)
    return folder
