"""A model's CUDA kernels: they are compiled together while its weights are read, and kept for the next start.

Metal's own service keeps compiled kernels, and the CPU's are compiled at installation: both need nothing here.
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
from .launches import launches_of
from .random_weights import Shapes
from .tiles import kept_files, mlx_version

VARIABLE = "MLX_PTX_CACHE_DIR"  # MLX reads it once, before it compiles or loads its first kernel
NVRTC = "libnvrtc.so.13"  # of the CUDA that MLX's build uses
SEQUENCES = (2, 4, 6, 8)  # of the rows of a step: every other number runs the same texts


@contextmanager
def compiling(shapes: Shapes, tiles: Tiles) -> Iterator[None]:
    """Compiles in other threads, while the inside runs, the kernels that no earlier start has compiled.

    Where that cannot be, MLX compiles each at its first use.
    """
    compiler = compiler_here() if backend.name() == "cuda" else None
    folder = None if compiler is None else folder_of(compiler)
    if compiler is None or folder is None:
        yield
        return
    thread = threading.Thread(target=keep, args=(compiler, programs_of(shapes, tiles), folder))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def programs_of(shapes: Shapes, tiles: Tiles) -> list[Program]:
    """Those that the model's parts run for one token, a few of one sequence or of several, and many."""
    with closing(launches_of(shapes, "cuda", tiles, SEQUENCES)) as steps:
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
    """The directory in which MLX looks: the one that the user names, or our own, which MLX is told of; None if it
    cannot be made."""
    name = f"mlx-{mlx_version()}-{compiler.architecture}-nvrtc-{compiler.version}"
    folder = Path(os.environ.get(VARIABLE) or kept_files() / "kernels" / name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    os.environ[VARIABLE] = str(folder)
    return folder
