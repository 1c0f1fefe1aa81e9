"""The public figures of Apple's chips, by the name that Metal gives the GPU.

Memory bandwidth and GPU cores: Apple's technical specifications (support.apple.com/en-us/111902, 117736, 121553,
126318 and others); the M5 Ultra's bandwidth from mlx's discussion 4504, the M6's figures from rlindsey2/sunkcost
(data/hardware.json), where it has 170 GB/s with 24 GB. Float32 operations: huggingface.co/hardware; an Ultra is two of
the Max. Matrix units of the M5: "over 4x the peak GPU compute for AI" of the M4 (Apple's announcement, March 2026);
an M6 counts as an M5. Drives: what reviewers measured with 1 TB or more; smaller drives may be half as fast, and those
of the M5 Ultra and the M6 count as those of the other M5. Each chip has all of its cores here; it is also sold with
fewer, and a Max then with less bandwidth and less memory.
"""

import re
from typing import NamedTuple

FAMILY = "Apple "
M5_GENERATION = 17  # of a GPU, in MLX's name of it; from here on they have matrix units
LARGE = 36  # GiB: macOS 14 and 15 let the GPU use two thirds of less memory, and three quarters from here on


class Chip(NamedTuple):
    """One chip.

    Args:
        bandwidth: of the memory, in units of 1e9 bytes a second.
        cores: of the GPU.
        tflops: float32 operations of the GPU, in units of 1e12 a second.
        disk: in units of 1e9 bytes a second, about.
        memory: of the smallest Mac with all of its cores that has 16 GiB or more, in GiB.
        matrix_tflops: 16-bit operations of the matrix units, in units of 1e12 a second; None: it has none.
    """

    bandwidth: float
    cores: int
    tflops: float
    disk: float
    memory: int
    matrix_tflops: float | None = None


CHIPS = {
    "Apple M1": Chip(68, 8, 2.6, 3, 16),
    "Apple M1 Pro": Chip(200, 16, 5.2, 5, 16),
    "Apple M1 Max": Chip(400, 32, 10.4, 5, 32),
    "Apple M1 Ultra": Chip(800, 64, 20.8, 5, 64),
    "Apple M2": Chip(100, 10, 3.6, 3, 16),
    "Apple M2 Pro": Chip(200, 19, 6.8, 5, 16),
    "Apple M2 Max": Chip(400, 38, 13.5, 5, 32),
    "Apple M2 Ultra": Chip(800, 76, 27.0, 5, 64),
    "Apple M3": Chip(100, 10, 4.1, 3, 16),
    "Apple M3 Pro": Chip(150, 18, 6.4, 5, 18),
    "Apple M3 Max": Chip(400, 40, 14.2, 5, 48),
    "Apple M3 Ultra": Chip(819, 80, 28.4, 7, 96),
    "Apple M4": Chip(120, 10, 4.6, 3, 16),
    "Apple M4 Pro": Chip(273, 20, 9.2, 5, 24),
    "Apple M4 Max": Chip(546, 40, 18.4, 7, 48),
    "Apple M5": Chip(153, 10, 5.7, 6, 16, 18.4),
    "Apple M5 Pro": Chip(307, 20, 11.4, 13, 24, 36.8),
    "Apple M5 Max": Chip(614, 40, 22.8, 13, 48, 73.6),
    "Apple M5 Ultra": Chip(1200, 80, 45.6, 13, 96, 147.2),
    "Apple M6": Chip(153, 12, 6.2, 6, 16, 18.4),
}


def gpu_limits(memory: int) -> tuple[int, int]:
    """The bytes that macOS 14 and 15 recommend for the GPU of a Mac with `memory` bytes, and those of the largest
    buffer: three quarters of the first. macOS 26 recommends more: 107.5 of 128 GiB (antirez/ds4, pull request 893).
    """
    working_set = memory * 2 // 3 if memory < LARGE << 30 else memory * 3 // 4
    return working_set, working_set * 3 // 4


def generation_of(architecture: str) -> int:
    """The number of a GPU's generation in MLX's name of it, as 17 in "applegpu_g17s"; 0: it has none."""
    found = re.search(r"(\d\d)[a-z]$", architecture)
    return int(found[1]) if found else 0
