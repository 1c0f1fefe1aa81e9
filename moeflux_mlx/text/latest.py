"""A bounded store of the values used last."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Latest(Generic[K, V]):
    """The values that were kept or found last, by key. Any thread may use it.

    Args:
        max_count: the most values.
        max_chars: the most characters of all values; the oldest values are dropped first.
    """

    def __init__(self, max_count: int = 4096, max_chars: int = 1 << 25):
        self._max_count, self._max_chars = max_count, max_chars
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._chars = 0
        self._lock = threading.Lock()

    def keep(self, key: K, value: V, chars: int) -> None:
        """Stores `value`, which has `chars` characters, under the key."""
        with self._lock:
            self._drop(key)
            self._values[key] = value, chars
            self._chars += chars
            while len(self._values) > self._max_count or self._chars > self._max_chars:
                self._drop(next(iter(self._values)))

    def find(self, key: K) -> V | None:
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def _drop(self, key: K) -> None:
        if key in self._values:
            self._chars -= self._values.pop(key)[1]
