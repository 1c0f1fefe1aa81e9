"""Decides whether expert files are mapped or read with `pread`: a pure function of three figures."""

import os
import sys
from enum import Enum

from .errors import RequestError


class IoMode(str, Enum):
    """`MMAP`: the system pages experts in. `PREAD`: we read them into memory that we own."""

    MMAP = "mmap"
    PREAD = "pread"


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
            raise RequestError(f"expert_io {override!r} is not one of auto, mmap, pread") from None
    return IoMode.MMAP if 4 * total_expert_bytes <= 3 * physical_ram_bytes else IoMode.PREAD


def physical_ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe(mode: IoMode, total_expert_bytes: int, ram_bytes: int, forced: bool) -> str:
    """One line with the figures behind the decision."""
    why = "forced" if forced else "auto"
    threshold = ram_bytes * 3 // 4
    return (
        f"expert I/O: {mode.value} ({why}): experts {total_expert_bytes / 2**30:.2f} GiB, "
        f"RAM {ram_bytes / 2**30:.2f} GiB, threshold {threshold / 2**30:.2f} GiB"
    )


def from_environment(option: str) -> str:
    """The command line's choice, else `MOEFLUX_EXPERT_IO`; an unknown value there warns and means auto."""
    if option != "auto":
        return option
    value = os.environ.get("MOEFLUX_EXPERT_IO", "auto")
    if value in ("auto", "mmap", "pread"):
        return value
    print(f"warning: MOEFLUX_EXPERT_IO={value!r} is not auto, mmap or pread; using auto", file=sys.stderr)
    return "auto"
