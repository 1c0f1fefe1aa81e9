"""Memory for expert records: private pages that a device adopts or copies."""

import contextlib
import ctypes
import mmap
import sys
import weakref
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..errors import ExpertIOError

GIVES_BACK = sys.platform == "linux"  # on other systems MADV_DONTNEED is a hint, and pages stay
TWICE: list[int] = []  # bytes of each array of `adopt_again` that lives
PREFERRED_LOCATION, ACCESSED_BY, HOST = 3, 5, -1  # CU_MEM_ADVISE_SET_..., CU_DEVICE_CPU of <cuda.h>


def page_aligned(rows: int, words: int) -> np.ndarray:
    """Zeroed private memory [rows, words] uint32 that direct I/O can fill and Metal can adopt."""
    return np.frombuffer(private_pages(rows * words * 4), np.uint32).reshape(rows, words)


def private_pages(size: int) -> mmap.mmap:
    """Zeroed memory that takes no physical pages until it is touched, or adopted by Metal.

    A forked child does not inherit it, because the parent's reads could otherwise write to the child's copies. Uses
    large pages, where available, because they make direct I/O cheaper.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):
                memory.madvise(getattr(mmap, advice))
    return memory


def give_back(pages: mmap.mmap, start: int, stop: int) -> None:
    """Returns the whole pages in bytes [start, stop) to the system; they read as zeros afterwards."""
    start, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start:
        pages.madvise(mmap.MADV_DONTNEED, start, stop - start)


def adopt(
    rows: np.ndarray, what: str, advice: str = "give --expert-io pread or a smaller --expert-cache-gb"
) -> mx.array:
    """The same memory as an MLX array; raises ExpertIOError with this advice if Metal refuses it."""
    try:
        return mx.from_dlpack(rows, copy=False)
    except (ValueError, RuntimeError) as error:
        raise ExpertIOError(f"Metal refuses {what}, {rows.nbytes / 1e9:.2f} GB ({error}); {advice}") from None


def adopted_pages(rows: int, words: int) -> tuple[np.ndarray, mx.array]:
    """Zeroed memory [rows, words] uint32 that direct I/O can fill and Metal reads: the host's array and MLX's.

    Raises:
        ExpertIOError: Metal refuses it.
    """
    memory = page_aligned(rows, words)
    return memory, adopt(
        memory, "a part of the expert pool", "give a smaller --expert-cache-gb or --context, or end other programs"
    )


def adopt_again(rows: np.ndarray) -> mx.array:
    """Adopted memory as one more array, with a buffer of its own; while it lives, MLX counts the bytes twice (`TWICE`).

    Raises:
        ExpertIOError: Metal refuses it.
    """
    view = rows[:]
    array = adopt(view, "a second view of a part of the expert pool")
    TWICE.append(view.nbytes)
    weakref.finalize(view, TWICE.remove, view.nbytes)
    return array


def staging_memory(rows: int, words: int) -> tuple[np.ndarray, mx.array]:
    """Zeroed memory [rows, words] uint32 that direct I/O can fill and CUDA can read: the host's array and MLX's.

    MLX moves an array to managed memory when Python reads it. With advice to stay on the host and to be mapped for the
        GPU, its pages do not migrate at every use: on an H200 copying a record of 7 MB takes 0.2 ms instead of 4.4.
    """
    return _on_host(mx.zeros((rows, words), mx.uint32))


def host_memory(rows: int, words: int) -> tuple[np.ndarray, mx.array]:
    """As `staging_memory`, without a moment in the device's memory, which may be smaller: made on MLX's CPU stream, it
    is managed memory from the start. It counts as MLX's (`AllowedMemory`).

    Raises:
        ExpertIOError: the system refuses it.
    """
    try:
        return _on_host(mx.zeros((rows, words), mx.uint32, stream=mx.cpu))
    except (RuntimeError, MemoryError) as error:
        raise ExpertIOError(f"the system refuses {rows * words * 4 / 1e9:.2f} GB of host memory ({error})") from None


class AllowedMemory:
    """Raises MLX's limit, from which on it empties its cache of buffers at every allocation, by memory that is not the
    device's: `nbytes`.
    """

    def __init__(self) -> None:
        self.nbytes = 0

    def follow(self, nbytes: int) -> None:
        """There are so many bytes now."""
        if nbytes != self.nbytes:
            before = mx.set_memory_limit(1 << 62)
            mx.set_memory_limit(max(before + nbytes - self.nbytes, 0))
            self.nbytes = nbytes


def _on_host(array: mx.array) -> tuple[np.ndarray, mx.array]:
    """The host's view of an array [rows, words] uint32, and the array, which stays in the host's memory."""
    rows, words = array.shape
    mx.eval(array)
    view = np.frombuffer(memoryview(cast(Any, array)), np.uint32).reshape(rows, words)
    with contextlib.suppress(OSError, AttributeError):  # without this advice it works too, but slower
        advise = ctypes.CDLL("libcuda.so.1").cuMemAdvise
        for advice, device in ((PREFERRED_LOCATION, HOST), (ACCESSED_BY, 0)):
            advise(ctypes.c_uint64(view.ctypes.data), ctypes.c_size_t(view.nbytes), advice, ctypes.c_int(device))
    view[:] = 0  # moves the pages to the host
    return view, array


def on_device(rows: np.ndarray) -> mx.array:
    """A copy in the default device's memory. On CUDA an array made from numpy is in managed memory, which would migrate
    page by page at its first use; the result of an operation is in device memory.
    """
    host = mx.array(rows)
    copy = as_result(host)
    mx.eval(copy)  # while `host` is still referenced, so that its memory is not reused for the result
    return copy


def as_result(array: mx.array) -> mx.array:
    """The same uint32 values as the result of an operation, and so in device memory."""
    return mx.bitwise_or(array, mx.array(0, mx.uint32))
