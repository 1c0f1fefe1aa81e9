"""Turns the errors of MLX and the system for exhausted memory or a GPU timeout into one error with a remedy.

MLX raises RuntimeError and distinguishes the causes only in its text (0.32.4: device.cpp and allocator.cpp of
backend/metal, allocator.cpp and utils.cpp of backend/cuda, scheduler.cpp). Its CPU backend does not notice that an
allocation failed, and the process ends by a signal: a plan must leave room for that (`planning.machine`).
"""

import errno
from contextlib import ContextDecorator

from ..errors import DeviceError

TIME = "give a smaller --prefill-step-size"
MEMORY = "give a shorter --context or a smaller --expert-cache-gb, or end other programs"
AGAIN = "the cause is not known; start the program again"
# From the narrower text to the wider one.
REMEDIES = {
    "kIOGPUCommandBufferCallbackErrorTimeout": TIME,
    "kIOGPUCommandBufferCallbackErrorImpactingInteractivity": TIME,
    "the launch timed out": TIME,
    "kIOGPUCommandBufferCallbackErrorOutOfMemory": MEMORY,
    "[METAL] Command buffer execution failed": AGAIN,
    "[malloc] Unable to allocate": MEMORY,
    "[metal::malloc]": MEMORY,
    "failed: out of memory": MEMORY,  # CUDA
    "std::bad_alloc": MEMORY,  # a thread of MLX's CPU backend
    "Resource temporarily unavailable": MEMORY,  # a thread that MLX could not start
    "can't start new thread": MEMORY,
}


class within_limits(ContextDecorator):  # noqa: N801 - used as a function is
    """A context manager that raises DeviceError if memory is exhausted or the GPU times out."""

    def __enter__(self) -> None:
        """Nothing is to be prepared."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        remedy = _remedy(error) if isinstance(error, (MemoryError, RuntimeError, OSError)) else None
        if remedy is not None:
            cause = str(error).partition("\n")[0] or "out of memory"
            raise DeviceError(f"computing failed: {cause.rstrip('.')}; {remedy}") from error


def _remedy(error: Exception) -> str | None:
    """None: the error is about something else."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return MEMORY
    return next((remedy for text, remedy in REMEDIES.items() if text in str(error)), None)
