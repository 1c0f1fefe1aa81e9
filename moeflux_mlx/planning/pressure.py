"""Asks the machine how much memory it can spare while a model runs, and limits the pool of experts accordingly.

A source answers one question: how many bytes may be taken, or must be returned. It reads small files of the system or
asks the kernel, which takes microseconds. Sources do not know the pool. On an NVIDIA GPU the pool is in the GPU's
memory, which they do not measure; what stays in the host's memory follows them (`host_sources`).
`Breath` sets the size of the pool for each call of the model.
"""

import ctypes
import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import mlx.core as mx

from ..errors import DeviceError, MoefluxError, RequestError
from ..formats.record import ExpertLayout
from ..model.span import PromptSizes
from ..ops.tiles import MAX_TOKENS
from ..spec import ModelArgs
from .machine import Figures, in_gb, limit_of, memory_groups, numbers_in, text_of, used_memory
from .memory_plan import KV_STEP, MemoryPlan, activation_bytes, headroom_bytes, least_pool, room, state_bytes
from .settings import physical_ram_bytes, read_sysctl

EVERY = 0.125  # seconds between two checks of the sources
STEPS = 8  # steps in which the pool grows to its full size
WINDOW = 1.0  # seconds over which stalls are counted, and between two statements of a source
STALLED = 0.1  # share of a window in which some process waited for memory: more is pressure
CUT, DEEP_CUT = 1 / 8, 1 / 2  # shares of the pool that are given back at a warning, and at a critical one
MOST_FALL = 4  # at most 1/4 of what a limit leaves is expected to go before the next check
COMPRESSED_SHARE = 0.01  # growth of macOS's compressor per window, as a share of memory: more is pressure


class Pace(NamedTuple):
    """How fast the pool follows the machine.

    patience: seconds without pressure before the pool's first step of growth.
    between: seconds between two steps.
    pause: seconds between two cuts, unless the second is deeper.
    """

    patience: float
    between: float
    pause: float = 0.0


PACE = Pace(3.0, 0.0)
# On Metal each step adopts a buffer. The system takes its pages from other programs, and if these need them again, the
# records are lost: so a step must be rare, and the effect of the one before be known. macOS lowers its level some
# seconds after memory suffices, so a cut must wait for the effect of the one before.
PACE_OF_METAL = Pace(60.0, 60.0, pause=10.0)


class Spare(NamedTuple):
    """Bytes that may be taken; a negative number of bytes must be given back.

    `hard`: bytes that can be taken before the system ends the process, or infinity if unknown.
    `cut`: share of the pool that must be given back where the source cannot say how many bytes are missing.
    """

    nbytes: float = math.inf
    hard: float = math.inf
    cut: float = 0.0


class SpareSource(Protocol):
    def spare(self, pool: int) -> Spare:
        """Bytes that the machine can spare while the pool takes `pool` bytes; infinity if the source does not know."""


class ControlGroup:
    """The limit of one control group of Linux, version 1 or 2 (memory.max and memory.high, memory.limit_in_bytes).

    Half of the headroom that a plan leaves is kept free. Pages of files do not count as used: the kernel drops them.

    Args:
        folder: the group's directory; missing files are ignored.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def spare(self, pool: int) -> Spare:
        limit, used = limit_of(self._folder), self._used()
        if limit is None or used is None:
            return Spare()
        return Spare(limit - headroom_bytes(limit) // 2 - used, limit - used)

    def _used(self) -> int | None:
        counts = numbers_in(self._folder / "memory.stat")
        for name, prefix in (("memory.current", ""), ("memory.usage_in_bytes", "total_")):
            total = text_of(self._folder / name).strip()
            if total.isdigit():
                return int(total) - sum(counts.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
        return None


class Stalls:
    """Linux's pressure stall information: the time in which some process waited for memory.

    Args:
        file: /proc/pressure/memory, or memory.pressure of a control group of version 2.
        meminfo: /proc/meminfo, for the stalls of the whole machine. They are ignored while memory is free, because a
            group that is at its own limit causes them too.
    """

    def __init__(self, file: Path, meminfo: Path | None = None, clock: Callable[[], float] = time.monotonic):
        self._file, self._meminfo, self._clock = file, meminfo, clock
        self._since, self._before = clock(), self._total()

    def spare(self, pool: int) -> Spare:
        now, total = self._clock(), self._total()
        seconds = now - self._since
        if seconds < WINDOW:
            return Spare()
        stalled, self._since, self._before = (total - self._before) / 1e6 / seconds, now, total
        return Spare(cut=CUT) if stalled > STALLED and self._is_short() else Spare()

    def _total(self) -> int:
        """Microseconds of stalls since the system started; 0 if the system does not count them."""
        words = text_of(self._file).partition("\n")[0].split()  # some avg10=0.00 avg60=0.00 avg300=0.00 total=0
        return int(words[-1].removeprefix("total=")) if words[:1] == ["some"] else 0

    def _is_short(self) -> bool:
        if self._meminfo is None:
            return True
        kilobytes = numbers_in(self._meminfo)
        return kilobytes["MemAvailable:"] * 1024 < headroom_bytes(kilobytes["MemTotal:"] * 1024)


class MacOS:
    """The level that macOS gives memory pressure (1 normal, 2 warning, 4 critical), and its compressor's growth: a Mac
    ends programs when the compressor has no room left, however little of Metal's memory they use.

    Args:
        level, compressed: functions that return the pressure level and the compressor's bytes.
        memory: bytes of the machine.
    """

    def __init__(
        self,
        level: Callable[[], int],
        compressed: Callable[[], int],
        memory: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._level, self._compressed, self._memory, self._clock = level, compressed, memory, clock
        self._since, self._before = clock(), compressed()

    def spare(self, pool: int) -> Spare:
        now, level = self._clock(), self._level()
        if now - self._since < WINDOW:
            return Spare()
        held = self._compressed()
        grown, self._since, self._before = held - self._before, now, held
        if level >= 4:
            return Spare(cut=DEEP_CUT)
        return Spare(cut=CUT) if level >= 2 or grown > COMPRESSED_SHARE * self._memory else Spare()


class Process:
    """The user's limit for this process (`--memory-gb`)."""

    def __init__(self, limit: int, used: Callable[[], int] = used_memory):
        self._limit, self._used = limit, used

    def spare(self, pool: int) -> Spare:
        return Spare(self._limit - self._used())


class PoolLimit:
    """Computes how large the pool may be beside everything else on the machine. Any thread may call it at any time.

    The pool shrinks at once. It leaves room for what the current call may still take, and for the amount by which a
    control group's limit has fallen since the last check, because it may fall as much again while a layer is computed.
    The pool grows again in steps, after some time without pressure.

    A cut lowers the limit by a share of the full pool, however little of it is filled; a critical one leaves half of
    what is filled.

    Args:
        sources: the one with the least to spare decides.
        most: bytes of the pool if there is no pressure.
        used: returns the bytes that this process holds.
        pace: how fast the pool shrinks and grows.

    Attributes:
        sources, clock: as given.
        room: bytes that pool and computation together could take at the last check before the system ends the process.
    """

    def __init__(
        self,
        sources: Sequence[SpareSource],
        most: int,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], int] = used_memory,
        pace: Pace = PACE,
    ):
        self.sources, self._most, self.clock, self._used, self._pace = sources, most, clock, used, pace
        self._limit, self._now, self.room = float(most), float(most), math.inf
        self._looked = self._grows = -math.inf  # the time of the last look, and the earliest of the next step
        self._cut, self._cut_at = 0.0, -math.inf  # the last cut, and its time
        self._left = math.inf  # bytes that the system's limit left to the pool at the last check
        self._pool = self._need = self._others = 0  # bytes of the pool, of the call, and of the rest before the call

    def begin(self, need: int) -> None:
        """Begins a call that takes up to `need` bytes; the pool leaves room for them until the next call begins."""
        if need > self._need:
            self._looked = -math.inf
        others = self._used() - self._pool if self.sources else 0  # a file of the system is read for it
        self._need, self._others, self._left = need, others, math.inf

    def __call__(self, pool: int) -> int:
        """Bytes that the pool may take; it now takes `pool` bytes."""
        self._pool, now = pool, self.clock()
        if now - self._looked >= EVERY:
            self._look(now)
        return int(self._now)

    def _look(self, now: float) -> None:
        spares = [source.spare(self._pool) for source in self.sources]
        spare = min((one.nbytes for one in spares), default=math.inf)
        taken = self._used() - self._pool - self._others
        cut = max((one.cut for one in spares), default=0.0)
        if cut and (now - self._cut_at >= self._pace.pause or cut > self._cut):
            self._cut, self._cut_at = cut, now
            deep = min(self._limit, self._pool) * (1 - cut)
            self._limit = deep if cut >= DEEP_CUT else self._limit - cut * self._most
        if spare < 0 or cut:
            self._grows = now + self._pace.patience
        elif now >= self._grows:
            self._limit, self._grows = self._limit + self._most / STEPS, now + self._pace.between
        self._limit = max(min(self._limit, self._pool + spare, self._most), 0)
        self.room = self._pool + min((one.hard for one in spares), default=math.inf)
        left = self.room + taken  # the limit minus what others take
        falls = min(max(self._left - left, 0), max(left, 0) / MOST_FALL) if math.isfinite(self._left) else 0
        self._left = left
        self._now = max(min(self._limit, self._pool + spare - max(self._need - max(taken, 0), 0) - falls), 0)
        self._looked = now


def sources(figures: Figures) -> list[SpareSource]:
    """All sources of this machine; none on an NVIDIA GPU."""
    given: list[SpareSource] = [] if figures.limit is None else [Process(figures.limit)]
    if figures.name == "free GPU memory":
        return []
    if sys.platform == "darwin":
        return [*given, MacOS(_pressure_level, _compressed_bytes, physical_ram_bytes())]
    return [*given, *host_sources()]


def host_sources() -> list[SpareSource]:
    """The sources of Linux for the host's memory."""
    groups = memory_groups()
    stalls = [Stalls(groups[0] / "memory.pressure")] if groups else []
    return [*map(ControlGroup, groups), *stalls, Stalls(Path("/proc/pressure/memory"), Path("/proc/meminfo"))]


def _pressure_level() -> int:
    """sysctl kern.memorystatus_vm_pressure_level; 1 if the system refuses."""
    level = ctypes.c_int(1)
    read_sysctl(b"kern.memorystatus_vm_pressure_level", ctypes.byref(level), ctypes.sizeof(level))
    return level.value


class VMStatistics(ctypes.Structure):
    """`vm_statistics64` of <mach/vm_statistics.h>."""

    _fields_ = (
        ("free_active_inactive_wire", ctypes.c_uint32 * 4),
        ("faults", ctypes.c_uint64 * 9),
        ("purgeable_speculative", ctypes.c_uint32 * 2),
        ("compressions_swaps", ctypes.c_uint64 * 4),
        ("compressor_page_count", ctypes.c_uint32),
        ("throttled_external_internal", ctypes.c_uint32 * 3),
        ("total_uncompressed_pages", ctypes.c_uint64),
    )


HOST_VM_INFO64 = 4  # from <mach/host_info.h>


def _compressed_bytes() -> int:
    """Memory that macOS's compressor takes: from `host_statistics64`; 0 if the system refuses."""
    library, statistics = ctypes.CDLL(None), VMStatistics()
    count = ctypes.c_uint32(ctypes.sizeof(statistics) // 4)
    library.host_statistics64(library.mach_host_self(), HOST_VM_INFO64, ctypes.byref(statistics), ctypes.byref(count))
    return int(statistics.compressor_page_count) * resource.getpagesize()


class Breath:
    """Computes the bytes that the pool of experts may take: what nothing else in this process needs.

    Args:
        args, layout, plan: of the model.
        limit: how much memory the machine leaves to the pool.
    """

    def __init__(self, args: ModelArgs, layout: ExpertLayout, plan: MemoryPlan, limit: PoolLimit):
        self.args, self.layout, self.plan, self.limit = args, layout, plan, limit
        self._least = least_pool(args, layout)
        self._needs: dict[int, int] = {}

    def __call__(self, tokens: int, held: int) -> int:
        """Bytes of the pool during a call of `tokens` tokens; `held` is how many bytes of MLX's arrays belong to the
        pool.

        Raises:
            DeviceError: the machine has too little memory for the call, even with the smallest pool.
        """
        needed = self._needed(tokens)
        self._check(tokens, needed, DeviceError)
        self.limit.begin(needed)
        if self.plan.most == self.plan.pool:
            return self.plan.pool
        used, cached = mx.get_active_memory() - self.plan.figures.others - held, mx.get_cache_memory()
        left = room(self.plan.figures) - self.plan.runtime - self.plan.demand.beside - used - max(needed, cached)
        return max(min(left, self.plan.most), self._least)

    def check_prompt(self, tokens: int) -> None:
        """Raises RequestError: not even the smallest pool leaves a prompt of so many new tokens its memory."""
        span, itemsize = min(tokens, self.plan.sizes.span), self.plan.demand.itemsize
        behind = state_bytes(self.args, tokens, itemsize) - state_bytes(self.args, span, itemsize)
        self._check(tokens, self._needed(span) + behind, RequestError)

    def _needed(self, tokens: int) -> int:
        """Bytes of a call of so many tokens, beside the pool."""
        rounded = -(-tokens // KV_STEP) * KV_STEP if tokens > MAX_TOKENS else MAX_TOKENS
        if rounded not in self._needs:
            self._needs[rounded] = self._need(rounded)
        return self._needs[rounded]

    def _check(self, tokens: int, needed: int, kind: type[MoefluxError]) -> None:
        """Refuses a call if the system would end the process for its memory."""
        need = needed + self._least
        if need > self.limit.room:
            raise kind(
                f"{tokens} tokens need {in_gb(need)} for computing and the smallest pool of experts, and the memory "
                f"limit of this process leaves {in_gb(max(self.limit.room, 0))}; raise the limit, end other programs, "
                "or give a smaller --set span=TOKENS or a shorter prompt"
            )

    def _need(self, tokens: int) -> int:
        """Bytes of temporaries and of the caches' growth."""
        demand, sizes = self.plan.demand, PromptSizes(tokens, min(self.plan.sizes.block, tokens))
        if tokens <= MAX_TOKENS:  # no image is encoded
            demand = replace(demand, encoding=0)
        growth = state_bytes(self.args, tokens + KV_STEP, demand.itemsize)
        context = max(self.plan.context, tokens)
        return growth + activation_bytes(self.args, self.layout, demand, context, sizes)
