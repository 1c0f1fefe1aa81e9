"""Decides whether expert files are mapped or read with `pread`: a pure function of a few figures."""

import os
import warnings
from dataclasses import dataclass
from enum import Enum

from ..errors import MoefluxWarning, RequestError

MODES = ("auto", "mmap", "pread")
WORKING_SET_SHARE = 0.9  # of Metal's limit; from 0.95 on, MLX empties its cache of buffers at every allocation


class IoMode(str, Enum):
    """`MMAP`: the system pages experts in. `PREAD`: we read them into memory that we own."""

    MMAP = "mmap"
    PREAD = "pread"


@dataclass(frozen=True)
class Figures:
    """What the machine allows, in bytes; None where there is no such limit.

    Args:
        memory: that experts must share: RAM, or the GPU's where it has its own.
        working_set: Metal's max_recommended_working_set_size.
        buffer: Metal's max_buffer_length.
        name: of `memory`, for messages.
        copies: mapping a file copies it into `memory` (an NVIDIA GPU); elsewhere the page cache holds it.
    """

    memory: int
    working_set: int | None = None
    buffer: int | None = None
    name: str = "RAM"
    copies: bool = False

    @property
    def usable_working_set(self) -> int | None:
        """What weights, experts and temporaries may take of Metal's working set."""
        return None if self.working_set is None else int(self.working_set * WORKING_SET_SHARE)


def select_io_mode(total_expert_bytes: int, physical_ram_bytes: int, override: str | None = None) -> IoMode:
    """MMAP while the experts fit in three quarters of memory (4 * total <= 3 * ram, exact in integers).

    Args:
        total_expert_bytes: bytes of all packed expert files.
        physical_ram_bytes: bytes of physical memory.
        override: "mmap" or "pread" to force a mode; None or "auto" to decide.

    Raises:
        RequestError: `override` is anything else.
    """
    if override not in (None, "auto"):
        try:
            return IoMode(override)
        except ValueError:
            raise RequestError(f"expert_io {override!r} is not one of {', '.join(MODES)}") from None
    return IoMode.MMAP if 4 * total_expert_bytes <= 3 * physical_ram_bytes else IoMode.PREAD


def reason_to_read(total: int, layer_bytes: int, fixed: int, figures: Figures, headroom: int = 0) -> str:
    """Why files must not be mapped, with the figure that decides; empty if they may be.

    Args:
        total: bytes of all expert files.
        layer_bytes: of one of them.
        fixed: of everything else that is in memory.
        headroom: to be left alone where mapping copies.
    """
    if select_io_mode(total, figures.memory) is IoMode.PREAD:
        return f"experts exceed three quarters of {figures.name}"
    if figures.copies and fixed + total + headroom > figures.memory:
        rest = f"{_gb(fixed)} of resident weights and state"
        return f"experts and {rest} leave less than {_gb(headroom)} of {figures.name}"
    usable = figures.usable_working_set
    if usable is not None and fixed + total > usable:
        return (
            f"experts and {_gb(fixed)} of resident weights and state exceed {_gb(usable)}, "
            f"{WORKING_SET_SHARE:.0%} of max_recommended_working_set_size"
        )
    if figures.buffer is not None and layer_bytes > figures.buffer:
        return f"a layer file of {_gb(layer_bytes)} exceeds max_buffer_length {_gb(figures.buffer)}"
    return ""


def describe(mode: IoMode, total: int, figures: Figures, forced: bool, reason: str) -> str:
    """One line with the three figures behind the decision, and the one that decided if it is another."""
    why = "forced" if forced else "auto"
    text = (
        f"expert I/O: {mode.value} ({why}): experts {_gb(total)}, {figures.name} {_gb(figures.memory)} "
        f"({figures.memory / 2**30:.1f} GiB), threshold {_gb(figures.memory * 3 // 4)}"
    )
    if forced and mode is IoMode.MMAP and reason:
        return f"{text}; warning: {reason}, so this will page and may run many times slower; --expert-io pread fits"
    return f"{text}; {reason}" if reason and not forced else text


def from_environment(option: str) -> str:
    """`option`, or if that is "auto", what `MOEFLUX_EXPERT_IO` says; an unknown value there warns and means auto."""
    value = os.environ.get("MOEFLUX_EXPERT_IO") or "auto"
    if option != "auto" or value in MODES:
        return value if option == "auto" else option
    message = f"MOEFLUX_EXPERT_IO={value!r} is not {', '.join(MODES[:-1])} or {MODES[-1]}; using auto"
    warnings.warn(message, MoefluxWarning, stacklevel=2)
    return "auto"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
