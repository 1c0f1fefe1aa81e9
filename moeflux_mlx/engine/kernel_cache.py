"""Compiles a model's CUDA kernels together while its weights are read, and keeps them for the next start.

Metal keeps compiled kernels by itself, and the CPU's are compiled at installation.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import mlx.core as mx

from ..ops import backend
from ..ops.kernel_files import Compiler, Program, keep
from ..ops.tiles import Tiles
from .launches import TOKENS, launches_of
from .random_weights import Shapes
from .tiles import kept_files, mlx_version

VARIABLE = "MLX_PTX_CACHE_DIR"  # MLX reads this variable once, before its first kernel
NVRTC = "libnvrtc.so.13"  # major version of the CUDA that MLX's build uses
SEQUENCES = (2, 4, 6, 8)  # row counts of a step; all other counts run the same kernels, except for 3
CHECKED = (2, 3)  # rows that check drafts; each number has kernels of its own, and more are compiled when first used


@contextmanager
def compiling(shapes: Shapes, tiles: Tiles, drafts: bool = False) -> Iterator[None]:
    """A context manager that compiles, in other threads, the kernels that no earlier start has compiled. If that is
    impossible, MLX compiles each kernel at its first use. `drafts`: whether the model may check drafts.
    """
    compiler = compiler_here() if backend.name() == "cuda" else None
    folder = None if compiler is None else folder_of(compiler)
    if compiler is None or folder is None:
        yield
        return
    thread = threading.Thread(target=keep, args=(compiler, programs_of(shapes, tiles, drafts), folder))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def programs_of(shapes: Shapes, tiles: Tiles, drafts: bool = False) -> list[Program]:
    """The kernels that the model's parts run for one token, for a few of one or several sequences, for many, and for
    checking `drafts`.
    """
    rows = CHECKED if drafts else ()
    with closing(launches_of(shapes, "cuda", tiles, (*TOKENS, 3), SEQUENCES, rows)) as steps:
        return list({program.text: program for step in steps for program in step.programs}.values())


def compiler_here() -> Compiler | None:
    """The compiler for this machine's GPU, with the headers that MLX would use; None if there is none."""
    info = mx.device_info()
    architecture = str(info["architecture"]) + ("a" if int(info["compute_capability_major"]) >= 9 else "")
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
