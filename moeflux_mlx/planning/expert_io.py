"""Decides how experts are read, and gives the reason: mapped, streamed into a pool, or all at once.

This is arithmetic on sizes and a few figures. Only `from_environment` reads the environment, for the public functions
and commands that call it.
"""

import os

from ..errors import RequestError, warn
from ..experts.source import IoMode
from .machine import WORKING_SET_SHARE, Figures, in_gb

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
