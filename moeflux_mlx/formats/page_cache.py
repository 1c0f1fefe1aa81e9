"""The system's cache of files: what is in it would be read instead of the disk. The way of macOS has not run there."""

import contextlib
import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterable

import numpy as np

# macOS <sys/mman.h>, where dirty pages are written before they go only with the second one.
MS_INVALIDATE, MS_SYNC = 0x0002, 0x0010


def drop_cached(descriptor: int) -> None:
    """Drops a file's pages from the cache, so that the next read comes from the disk.

    A Mac's F_NOCACHE keeps a read from filling the cache but serves pages that are there, as those of a file that was
    just written or downloaded. So the file is mapped and its pages are invalidated.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    elif hasattr(fcntl, "F_NOCACHE"):
        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
        with contextlib.suppress(OSError, ValueError):  # an empty file, or one that cannot be mapped
            _invalidate(descriptor)


def drop_files(paths: Iterable[os.PathLike[str]]) -> None:
    """`drop_cached` of files that are not open.

    Raises:
        OSError: one cannot be opened.
    """
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            drop_cached(file.fileno())


def _invalidate(descriptor: int) -> None:
    with mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapped:
        pages = np.frombuffer(mapped, np.uint8)
        try:
            _msync(pages.ctypes.data, pages.nbytes, MS_SYNC | MS_INVALIDATE)
        finally:
            del pages  # otherwise the mapping cannot be closed


def _msync(address: int, length: int, flags: int) -> None:
    """The system's msync. What it refuses stays in the cache."""
    ctypes.CDLL(None).msync(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(flags))
