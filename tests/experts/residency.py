"""A stand-in for MLX's allocator on a Mac with its residency sets (mlx/backend/metal/resident.cpp, allocator.cpp of
version 0.32): a limit, allocations that go into a set when they are made if they fit, a resize that adds what fits in
any order, and a cache that keeps freed buffers inside their sets.
"""

import random
from types import SimpleNamespace

PAGE, HEAP = 16384, 1 << 20


def paged(nbytes):
    return -(-nbytes // PAGE) * PAGE


class Sets:
    """Attributes:
    commits: of residency sets.
    sizes: bytes of each tracked allocation, by its number; inside: those in a set.
    """

    def __init__(self, seed=0):
        self.limit, self.commits, self.sizes, self.inside = 0, 0, {}, set()
        self._random, self._next, self._cache, self._active = random.Random(seed), 0, [], {}
        self._insert(HEAP)

    @property
    def wired(self):
        return sum(self.sizes[one] for one in self.inside)

    def _insert(self, nbytes):
        number, self._next = self._next, self._next + 1
        self.sizes[number] = paged(nbytes)
        if self.wired + self.sizes[number] <= self.limit:
            self.inside.add(number)
            self.commits += 1
        return number

    def _erase(self, number):
        self.commits += number in self.inside
        self.inside.discard(number)
        del self.sizes[number]

    def adopt(self, nbytes):
        """As MLX's `make_buffer`."""
        number = self._insert(nbytes)
        self._active[number] = nbytes
        return number

    def release(self, number):
        del self._active[number]
        self._erase(number)

    def malloc(self, nbytes):
        for number in self._cache:
            if self.sizes[number] == paged(nbytes):
                self._cache.remove(number)
                self._active[number] = nbytes
                return number
        return self.adopt(nbytes)

    def free(self, number):
        del self._active[number]
        self._cache.append(number)

    def clear_cache(self):
        while self._cache:
            self._erase(self._cache.pop())

    def set_wired_limit(self, limit):
        if limit == self.limit:
            return
        self.limit, changed, every = limit, False, list(self.sizes)
        self._random.shuffle(every)
        if self.wired < limit:
            for one in every:
                if one not in self.inside and self.wired + self.sizes[one] <= limit:
                    self.inside.add(one)
                    changed = True
        else:
            for one in every:
                if self.wired > limit and one in self.inside:
                    self.inside.discard(one)
                    changed = True
        self.commits += changed

    @property
    def mx(self):
        """What `planning/wired.py` asks of MLX."""
        return SimpleNamespace(
            synchronize=lambda: None,
            clear_cache=self.clear_cache,
            get_active_memory=lambda: sum(self._active.values()),
            set_wired_limit=self.set_wired_limit,
        )
