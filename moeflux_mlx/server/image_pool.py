"""Bounds the work on images, so that no other request waits for it: its threads, its requests and its pixels."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from ..errors import BadRequestError, RequestError
from .guard import BUSY

THREADS = 2  # one of them decodes at a time
REQUESTS = 32  # the most requests with images that are prepared or counted at a time
REQUEST_PIXELS = 1 << 29  # the most pixels of a request's images together: 16 of the largest, or 32 of 16 megapixels
T = TypeVar("T")


class ImagePool:
    """Threads of their own for requests with images; `count`: the requests under way. The end of the process waits for
    none of them.
    """

    def __init__(self) -> None:
        self._works: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._threads = [threading.Thread(target=self._main, name="image", daemon=True) for _ in range(THREADS)]
        self.count = 0

    async def run(self, make: Callable[[], T]) -> T:
        """Calls `make` in one of the threads.

        Raises:
            BadRequestError: too many requests with images are under way.
        """
        if self.count >= REQUESTS:
            raise _busy()
        self.count += 1
        for thread in self._threads:
            if thread.ident is None:
                thread.start()
        future: Future[T] = Future()
        self._works.put((make, future))
        try:
            return await asyncio.wrap_future(future)
        finally:
            self.count -= 1

    def _main(self) -> None:
        while True:
            make, future = self._works.get()
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(make())
            except BaseException as error:  # which the request is told
                future.set_exception(error)
            del make, future


class PixelBudget:
    """Counts the pixels of the images that are being decoded or wait to be decoded.

    Args:
        most: the most pixels, of all requests together.
    """

    def __init__(self, most: int = 2 * REQUEST_PIXELS):
        self._left, self._lock = most, threading.Lock()

    @contextmanager
    def hold(self, pixels: int) -> Iterator[None]:
        """A context manager in which a request's images of so many pixels are decoded.

        Raises:
            RequestError: these are more than a request may have. BadRequestError: other requests hold the rest.
        """
        if pixels > REQUEST_PIXELS:
            raise RequestError(f"the images have {pixels} pixels together; at most {REQUEST_PIXELS}: send fewer")
        self._take(pixels)
        try:
            yield
        finally:
            self._take(-pixels)

    def _take(self, pixels: int) -> None:
        with self._lock:
            if pixels > self._left:
                raise _busy()
            self._left -= pixels


def _busy() -> BadRequestError:
    return BadRequestError(BUSY, None, 503, "overloaded")
