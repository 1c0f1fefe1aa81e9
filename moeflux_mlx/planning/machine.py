"""The limits of this machine: its memory, or that of a control group (Linux), and the GPU's; and how experts are read
within them: mapped, streamed into a pool, or all at once, with the reason.

It reads the system's figures; all else is arithmetic on sizes and a few figures. Only `from_environment` reads the
environment, for the public functions and commands that call it.
"""

import contextlib
import os
import resource
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from ..errors import RequestError, warn
from ..experts.memory import TWICE
from ..experts.source import IoMode
from ..ops import backend, gpu_time, native
from .settings import MOST, BufferLimits, gathered, physical_ram_bytes

WORKING_SET_SHARE = 0.9  # share of Metal's limit; from 0.95 on, MLX empties its cache of buffers at every allocation
DTYPES = (mx.float32, mx.bfloat16, mx.float16)  # dtypes of activations
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
GROUP_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")  # files of a group, versions 2 and 1
# Address space of the threads that start with a model, MLX's and the readers': each has a stack of 8 MiB and an arena
# of 64 MiB. 965 MB on two cores if experts are read; with less, MLX hangs or the process ends silently.
THREADS_BYTES = 1 << 30
AUTO_BITS = 8  # bits of activations on the CPU: adds less than a tenth of the KL of 4-bit weights (docs/performance.md)


@dataclass(frozen=True)
class Figures:
    """The machine's limits in bytes; None means that there is no such limit.

    Args:
        memory: the memory that holds experts and everything else: RAM, or the GPU's own.
        working_set: Metal's max_recommended_working_set_size.
        buffer: Metal's max_buffer_length.
        name: the name of `memory`, for messages.
        copies: whether a mapped file takes `memory` (an NVIDIA GPU, address space) instead of page cache.
        others: bytes of MLX's arrays that were in use when `memory` was measured, and are not part of it.
        operations: the most floating-point operations of one command buffer (Metal).
        limit: the user's limit for the whole process; no headroom is subtracted from it.
        gathered: the most that MLX gathers in one command buffer.
        host: the host's memory, where that is another one; else 0.
    """

    memory: int
    working_set: int | None = None
    buffer: int | None = None
    name: str = "RAM"
    copies: bool = False
    others: int = 0
    operations: float | None = None
    limit: int | None = None
    gathered: BufferLimits = MOST
    host: int = 0

    @property
    def breathes(self) -> bool:
        """Whether a pool of experts follows what calls need. On Metal it only follows pressure, because a buffer that
        is adopted again must be filled again.
        """
        return self.working_set is None

    @property
    def usable_working_set(self) -> int | None:
        """Bytes of Metal's working set that weights, experts and temporaries may take."""
        return None if self.working_set is None else int(self.working_set * WORKING_SET_SHARE)


def in_gb(nbytes: float, digits: int = 2) -> str:
    """The text of a number of bytes for a message."""
    return f"{nbytes / 1e9:.{digits}f} GB"


def machine_figures(limit: int | None = None) -> Figures:
    """The figures of the default device: RAM and Metal's limits, or the free memory of an NVIDIA GPU.

    Args:
        limit: the user's limit of the process in bytes (on an NVIDIA GPU: of the GPU's memory).
    """
    return replace(_device_figures(), limit=limit)


def _device_figures() -> Figures:
    if not backend.has_kernels():
        return min([Figures(usable_ram_bytes()), *limited_address_space()], key=lambda figures: figures.memory)
    info = mx.device_info()
    if backend.name() == "cuda":
        available = numbers_in(Path("/proc/meminfo"))["MemAvailable:"] * 1024  # without what other programs use now
        free, host = int(info["free_memory"]), min(usable_ram_bytes(), available)
        return Figures(free, name="free GPU memory", copies=True, others=mx.get_active_memory(), host=host)
    working_set, buffer = int(info["max_recommended_working_set_size"]), int(info["max_buffer_length"])
    operations = gpu_time.SECONDS * gpu_time.rate(str(info["device_name"]))
    return Figures(usable_ram_bytes(), working_set, buffer, operations=operations, gathered=gathered())


def default_dtype() -> mx.Dtype:
    """bfloat16 on a GPU; float32 on CPU, where MLX's bfloat16 arithmetic is several times slower."""
    return mx.bfloat16 if backend.has_kernels() else mx.float32


def checked_dtype(asked: object) -> mx.Dtype:
    """The dtype of activations: the requested one, or the default if that is None.

    Raises:
        RequestError: it is not a dtype for activations.
    """
    if asked is None:
        return default_dtype()
    if isinstance(asked, mx.Dtype) and asked in DTYPES:
        return asked
    raise RequestError(f"dtype is {asked!r}; give mlx.core.float32, bfloat16 or float16, or None for the default")


def activation_bits(asked: int | str, dtype: mx.Dtype | None) -> int:
    """The number of bits to which the native products round activations.

    Args:
        asked: "auto", or 8, 16 or 24 as a number or in digits.
        dtype: the dtype that the user gave, or None.

    Raises:
        RequestError: `asked` is none of them, or would round although the user gave float32.
    """
    known = {"auto": AUTO_BITS if dtype is None else native.EXACT, **{str(bits): bits for bits in native.ACTIVATIONS}}
    bits = known.get(str(asked))
    if bits is None:
        raise RequestError(f"cpu_activations {asked!r} is not one of {', '.join(known)}")
    if dtype is not None and dtype == mx.float32 and bits != native.EXACT:
        raise RequestError(f"dtype float32 is computed exactly, cpu_activations {bits} is not; leave one of them out")
    native_here = backend.computes_natively(default_dtype() if dtype is None else dtype)
    return bits if native_here else native.EXACT


def usable_ram_bytes() -> int:
    """Physical memory, or the limit of this process's control group where that is smaller."""
    return min([physical_ram_bytes(), *group_limits()])


def numbers_in(file: Path) -> dict[str, int]:
    """The first two words of each line of a small file of the system: a name and a number."""
    pairs = (line.split()[:2] for line in text_of(file).splitlines() if line)
    return {name: int(number) for name, number in pairs}


def text_of(file: Path) -> str:
    """What is in a small file of the system; nothing if it is not there."""
    try:
        return file.read_text()
    except OSError:
        return ""


def limited_address_space() -> list[Figures]:
    """The bytes that `ulimit -v` leaves for a model, mapped files included; an empty list if there is no such limit
    (Linux).
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY or sys.platform != "linux":
        return []
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + THREADS_BYTES
    name = f"address space (ulimit -v less {used / 1e9:.2f} GB for the program)"
    return [Figures(max(limit - used, 0), name=name, copies=True)]


def group_limits(groups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> list[int]:
    """Limits in bytes of this process's memory group and of those above it, versions 1 and 2."""
    return [limit for folder in memory_groups(groups, membership) if (limit := limit_of(folder)) is not None]


def memory_groups(groups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> list[Path]:
    """Folders of this process's memory group and of those above it, versions 1 and 2.

    Inside a container the group's own path may not be visible; then the root that is visible counts.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folders += _upwards(groups, path)
        elif "memory" in controllers.split(","):
            folders += _upwards(groups / "memory", path)
    return folders


def _upwards(root: Path, path: str) -> list[Path]:
    folder = root / path.lstrip("/")
    return [place for place in [folder, *folder.parents] if place == root or root in place.parents]


def limit_of(folder: Path) -> int | None:
    """Bytes that a memory group may take; None if the group does not exist or has no limit ("max")."""
    limits = []
    for name in GROUP_LIMITS:
        with contextlib.suppress(OSError):
            limits.append((folder / name).read_text().strip())
    return min((int(text) for text in limits if text.isdigit()), default=None)


def used_memory() -> int:
    """Bytes that this process holds, or if the system does not say, those of MLX's arrays."""
    with contextlib.suppress(OSError):  # another system, or no more files may be opened
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return mx.get_active_memory() + mx.get_cache_memory() - sum(TWICE)


MODES = ("auto", "mmap", "pread", "resident")


def select_io_mode(total_expert_bytes: int, physical_ram_bytes: int, override: str | None = None) -> IoMode:
    """MMAP while the experts fit in three quarters of memory (4 * total <= 3 * ram, exact in integers).

    Args:
        total_expert_bytes: bytes of all packed expert files.
        physical_ram_bytes: bytes of physical memory.
        override: "mmap", "pread" or "resident" to force a mode; None or "auto" to decide.

    Raises:
        RequestError: `override` is anything else.
    """
    if override not in (None, "auto"):
        try:
            return IoMode(override)
        except ValueError:
            raise RequestError(f"expert_io {override!r} is not one of {', '.join(MODES)}") from None
    return IoMode.MMAP if 4 * total_expert_bytes <= 3 * physical_ram_bytes else IoMode.PREAD


def reason_to_read(
    total: int, layer_bytes: int, fixed: int, figures: Figures, headroom: int = 0, in_place: bool = False
) -> str:
    """Why the experts cannot all be in memory (mapped or read once), with the deciding figure; empty if they can.

    Args:
        total: bytes of all expert files.
        layer_bytes: of one of them.
        fixed: of everything else that is in memory.
        headroom: bytes to keep free if mapping copies or nothing is mapped.
        in_place: whether the files are a checkpoint's, which are read once instead of mapped.
    """
    if not in_place and select_io_mode(total, figures.memory) is IoMode.PREAD:
        return f"experts exceed three quarters of {figures.name}"
    if (figures.copies or in_place) and fixed + total + headroom > figures.memory:
        rest = f"{in_gb(fixed)} of resident weights and state"
        return f"experts and {rest} leave less than {in_gb(headroom)} of {figures.name}"
    if figures.limit is not None and fixed + total > figures.limit:
        return f"experts and {in_gb(fixed)} of resident weights and state exceed --memory-gb {figures.limit / 1e9:g}"
    usable = figures.usable_working_set
    if usable is not None and fixed + total > usable:
        return (
            f"experts and {in_gb(fixed)} of resident weights and state exceed {in_gb(usable)}, "
            f"{WORKING_SET_SHARE:.0%} of max_recommended_working_set_size"
        )
    if figures.buffer is not None and layer_bytes > figures.buffer:
        return f"a layer file of {in_gb(layer_bytes)} exceeds max_buffer_length {in_gb(figures.buffer)}"
    return ""


def describe(mode: IoMode, total: int, figures: Figures, forced: bool, reason: str, in_place: bool = False) -> str:
    """One line with the figures behind the decision, and the reason if it is another one."""
    why = "forced" if forced else "auto"
    text = (
        f"expert I/O: {mode.value} ({why}): experts {in_gb(total)}{' in place' if in_place else ''}, "
        f"{figures.name} {in_gb(figures.memory)} ({figures.memory / 2**30:.1f} GiB)"
    )
    if not in_place and mode is not IoMode.RESIDENT:
        text += f", threshold {in_gb(figures.memory * 3 // 4)}"
    if forced and mode is IoMode.MMAP and reason:
        return f"{text}; warning: {reason}, so this will page and may run many times slower; --expert-io pread fits"
    return f"{text}; {reason}" if reason and not forced else text


def from_environment(option: str) -> str:
    """`option`, or if that is "auto", what `MOEFLUX_EXPERT_IO` says; an unknown value there warns and means auto."""
    value = os.environ.get("MOEFLUX_EXPERT_IO") or "auto"
    if option != "auto" or value in MODES:
        return value if option == "auto" else option
    warn(f"MOEFLUX_EXPERT_IO={value!r} is not {', '.join(MODES[:-1])} or {MODES[-1]}; using auto")
    return "auto"
