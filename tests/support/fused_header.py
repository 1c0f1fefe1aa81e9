"""The header of the texts that MLX's CPU build compiles for fused operations, precompiled once for a machine.

MLX calls g++ for each new text and keeps what it makes in a folder of the system's temporary one. g++ takes 0.7 s, most
of it for this header; it looks for a precompiled one beside the text first, and ignores one that does not fit it.
"""

import os
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx

HEADER = "mlx/backend/cpu/compiled_preamble.h"
FLAGS = ("-std=c++17", "-O3", "-Wall", "-fPIC")  # MLX's own, without which the header does not fit


def precompile():
    """Begins to make the header, if there is none and there is g++. Returns the process, or None."""
    include = Path(mx.__file__).parent / "include"
    made = Path(tempfile.gettempdir(), "mlx", mx.__version__, "cpu", f"{HEADER}.gch")
    if made.exists() or not (include / HEADER).exists():
        return None
    made.parent.mkdir(parents=True, exist_ok=True)
    partial = made.with_suffix(f".{os.getpid()}")
    command = 'g++ "$@" && mv "$OUT" "$MADE" || rm -f "$OUT"'
    given = [*FLAGS, "-I", include, "-x", "c++-header", include / HEADER, "-o", partial]
    environment = {**os.environ, "OUT": str(partial), "MADE": str(made)}
    return subprocess.Popen(
        ["sh", "-c", command, "sh", *given], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
