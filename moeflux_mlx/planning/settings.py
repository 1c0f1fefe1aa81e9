"""Settings of this process before a model is opened: how much work MLX gathers before it gives it to the GPU, and how
many files may be open.

MLX reads its variables once, when its device is made, so the chip is asked of the system and not of MLX, which this
module does not import. Nothing here has run on an Apple GPU.
"""

import ctypes
import os
import re
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from ..errors import RequestError, warn

OPERATIONS, WORDS = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"
SPINNING = "MLX_METAL_FAST_SYNCH"  # kernels then spin on the GPU until the host writes
OPEN_FILES = 4096  # of a checkpoint that is used in place, each shard is open, and MLX opens it again
# MLX counts the elements of whole input arrays, in Mi, and commits above 40 or 50; a layer of experts of a 35B model
# has 108 Mi words. What a command buffer uses stays in memory until the GPU has done it, so small Macs get a limit. A
# kernel is given all buffers of the pool, so each command buffer counts the whole pool, and a pool above the limit is a
# commit after each launch: with 16 GiB that of a 35B model has about 1,500 Mi words, with 24 GiB 2,700.
UNLIMITED, SMALL_LIMIT, SMALL_MAC = 1_000_000, 2_000, 16 << 30
# To hand over a CUDA graph costs about as much as ten launches in it, and what comes after the first runs beside the
# GPU: on an H200 a token of Qwen3-30B-A3B's shapes takes 2.96 ms with 40 launches in one, 2.56 with 130, 2.55 with 400.
CUDA_OPERATIONS = 130
# CUDA's build keeps what it made for the last 256 shapes of attention. Unless this is 0 it refuses the 513th shape that
# a thread computes (`LRUCache` of mlx/backend/cuda/lru_cache.h, version 0.32), and each turn of a chat has new ones.
SHAPES_CHECK = "MLX_ENABLE_CACHE_THRASHING_CHECK"
# Each further command buffer of a token costs an Apple GPU about 20 us (mlx#4521). Others measured a gain from 300
# operations on M1 to M4, and a loss on M5 (mlxcel#353, #360).
METAL_OPERATIONS, RAISED = 300, re.compile(r"Apple M[1-4]\b")


class BufferLimits(NamedTuple):
    """The most that MLX gathers in one command buffer: operations, and Mi elements of their inputs."""

    operations: int
    words: int


OWN = BufferLimits(50, 50)  # MLX's own limits for a Max or an Ultra; 40 for other Macs
MOST = BufferLimits(METAL_OPERATIONS, UNLIMITED)


def configure_mlx() -> None:
    """Sets how much work MLX gathers before it gives it to the GPU, for this machine's chip, as `load` does.

    Variables that the user has set stay. MLX reads them when its device is first used; a program that uses MLX before
    it loads a model calls this first. It gives a `MoefluxWarning` if MLX has already made arrays.
    """
    if set_variables() and _has_begun():
        warn(
            f"MLX was used before moeflux_mlx could set {WORDS} and {OPERATIONS}, so a GPU may take longer for each "
            "token; call moeflux_mlx.configure_mlx() before the first array"
        )


def set_variables() -> bool:
    """`configure_mlx` without the question whether it comes too late; returns whether a variable was set.

    Raises:
        RequestError: a variable is set that has stopped GPUs.
    """
    here = chip()
    if here is not None and os.environ.get(SPINNING, "0") != "0":
        raise RequestError(
            f"{SPINNING} is {os.environ[SPINNING]}: with it Macs' GPUs have stopped until a restart (mlx#3142, "
            f"mlx#3830); unset {SPINNING}"
        )
    wanted = variables_for(here, physical_ram_bytes())
    missing = wanted.keys() - os.environ.keys()
    os.environ.update({name: str(wanted[name]) for name in missing})
    return bool(missing)


def variables_for(chip: str | None, memory: int) -> Mapping[str, int]:
    """The values for a Mac with this chip and these bytes of memory; None: no Mac."""
    if chip is None:
        return {WORDS: UNLIMITED, OPERATIONS: CUDA_OPERATIONS, SHAPES_CHECK: 0}
    words = SMALL_LIMIT if memory <= SMALL_MAC else UNLIMITED
    return {WORDS: words} | ({OPERATIONS: METAL_OPERATIONS} if RAISED.match(chip) else {})


def gathered() -> BufferLimits:
    """What the variables say, if MLX reads them; its own values for those that are not set."""
    texts = [os.environ.get(name, "") for name in (OPERATIONS, WORDS)]
    return BufferLimits(*(int(text) if text.isdigit() else own for text, own in zip(texts, OWN, strict=True)))


def physical_ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def chip() -> str | None:
    """The name of a Mac's chip, as "Apple M3 Pro"; None elsewhere."""
    if sys.platform != "darwin":
        return None
    name = ctypes.create_string_buffer(128)
    return name.value.decode(errors="replace") if read_sysctl(b"machdep.cpu.brand_string", name, 128) else ""


def read_sysctl(name: bytes, place: object, size: int) -> bool:
    """Reads a value of a Mac's system into `place`, a buffer or reference of ctypes of `size` bytes; returns whether
    the system gave it.
    """
    sysctl, length = ctypes.CDLL(None).sysctlbyname, ctypes.c_size_t(size)
    return bool(sysctl(name, place, ctypes.byref(length), None, ctypes.c_size_t(0)) == 0)


def _has_begun() -> bool:
    """Whether MLX has made an array on a GPU. Its device may exist without one, which cannot be known."""
    core = sys.modules.get("mlx.core")
    if core is None or core.default_device() != core.gpu:
        return False
    return max(core.get_peak_memory(), core.get_cache_memory()) > 0


def allow_open_files() -> None:
    """Raises the number of files that this process may open to 4,096, or to the system's limit if that is less. macOS
    begins with 256. If it must not, as in a sandbox, the number stays.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
