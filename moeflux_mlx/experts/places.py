"""The memory of a pool, as numbered places for records: which are free, and how memory is taken and given back.

`AddressRange` is memory that the CPU reads in place. Linux takes back its pages, but only whole large ones. So the
remaining records are moved together into the first rows (results.tsv, "pool resize").

`Buffers` is memory that Metal has adopted. A buffer can be returned only as a whole, and from macOS 15 on MLX asks for
the residency of all adopted memory, so its pages are taken even if nobody has touched them. So the memory is several
buffers: each is adopted when the others are full, and given back alone. MLX frees a buffer with the last array that
refers to it, so one that is given back in the middle of a wave lives until the wave ends.

MLX puts an allocation into its residency sets when it is made, if the limit leaves room, and commits a set at each
change. So a pool that was adopted whole (`take_all`) keeps the room of a buffer that is gone: another one that stays is
adopted a second time, which takes no memory, and is let go just before a buffer comes back. Otherwise temporaries would
come and go in that room, and the buffer would not find room again. llama.cpp puts buffers that overlap into one set,
too. Nothing of this has run on an Apple GPU.

Only the pool knows which record is where. It says which places are owned, and it moves records. After an interrupt it
calls `aim` or `find_free`, which set everything here anew except the list of buffers; that changes in one operation.
"""

import mmap
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from math import gcd, prod
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import ExpertIOError
from ..formats.record import STRIDE_ALIGNMENT, rounded
from ..ops.records import ROW_BITS, divided
from .memory import GIVES_BACK, adopt_again, give_back, private_pages

BUFFERS = 8  # of a pool; kernels are always given this many, so that they are compiled once
# Takes memory for a number of records of so many words: the host's array [rows, words] uint32, and MLX's.
Adopt = Callable[[int, int], tuple[np.ndarray, mx.array]]


class Places(ABC):
    """Attributes:
    memory: all of it, as `Records` has it.
    free: a heap of the free places. The first ones are used first.
    is_adopted: whether the memory is MLX's.
    is_settled: whether all memory that must go has been given back.
    """

    memory: Any
    free: list[int]
    is_adopted = False
    is_settled = True

    def take(self) -> int | None:
        """A place that is free, or None.

        Raises:
            ExpertIOError: the device refuses memory without which the pool is too small.
        """
        return heappop(self.free) if self.free else None

    def take_all(self) -> None:  # noqa: B027
        """Takes all memory from the device now that places may use.

        Raises:
            ExpertIOError: as `take`.
        """

    def find_free(self, owned: Collection[int]) -> None:
        """Rebuilds the heap: free are the places of `staying` that no record owns."""
        self.free = [place for place in self.staying() if place not in owned]  # ascending

    def queued(self, outputs: Sequence[mx.array]) -> None:  # noqa: B027
        """As `ExpertLoader.queued`."""

    @property
    def room(self) -> int:
        """The number of records that can be read before a place must be freed."""
        return len(self.free)

    @abstractmethod
    def row(self, place: int) -> np.ndarray:
        """The memory of one place, [words] uint32."""

    @abstractmethod
    def put(self, place: int) -> None:
        """Frees a place."""

    @abstractmethod
    def fit(self, slots: int) -> int:
        """The number of records that the memory can be made to hold, at most about `slots`."""

    @abstractmethod
    def held_bytes(self, records: int) -> int:
        """Bytes that are taken from the machine while there are `records` records."""

    @abstractmethod
    def aim(self, slots: int, owned: Mapping[int, bool]) -> None:
        """Determines which places stay, so that there is memory for `slots` records; then rebuilds the heap.

        Args:
            owned: the places that records own, and whether the record must stay in its place for now.
        """

    @abstractmethod
    def goes(self, place: int) -> bool:
        """Whether a record in this place should be moved to another."""

    @abstractmethod
    def staying(self) -> Iterable[int]:
        """The places that new records may take, ascending: of buffers, those that do not go; of a range of addresses,
        all, the first ones first.
        """

    @abstractmethod
    def release(self, owned: Collection[int]) -> None:
        """Gives back what goes and is not owned; then rebuilds the heap."""


class AddressRange(Places):
    """One range of addresses, a row for each place.

    Args:
        rows: [places, words] uint32.
        pages: what can be given back, or None.
    """

    def __init__(self, rows: np.ndarray, pages: mmap.mmap | None = None):
        self.rows = self.memory = rows
        self._pages = pages
        self._end = len(rows)  # places from here on go
        self.find_free(())

    @classmethod
    def of_pages(cls, rows: int, nbytes: int) -> "AddressRange":
        """New memory that takes no physical pages until it is touched."""
        pages = private_pages(rows * nbytes)
        return cls(np.frombuffer(pages, np.uint32).reshape(rows, -1), pages)

    def row(self, place: int) -> np.ndarray:
        row: np.ndarray = self.rows[place]
        return row

    def put(self, place: int) -> None:
        heappush(self.free, place)
        if place >= self._end:  # its record could not be moved when the pool shrank
            self._give_back(place, place + 1)

    def fit(self, slots: int) -> int:
        return slots if GIVES_BACK else len(self.rows)

    def held_bytes(self, records: int) -> int:
        return records * self.rows.strides[0]

    def aim(self, slots: int, owned: Mapping[int, bool]) -> None:
        self._end = slots
        self.find_free(owned)

    def goes(self, place: int) -> bool:
        return place >= self._end

    def staying(self) -> Iterable[int]:
        return range(len(self.rows))

    def release(self, owned: Collection[int]) -> None:
        self.find_free(owned)
        for first, stop in _runs(self.free):
            self._give_back(first, stop)

    def _give_back(self, first: int, stop: int) -> None:
        if self._pages is not None:
            stride = self.rows.strides[0]
            give_back(self._pages, first * stride, stop * stride)


class Buffers(Places):
    """Up to BUFFERS buffers of equal size, whose number is in the high bits of a place (`ops/records.py`).

    Args:
        nbytes: bytes of a record.
        most: the most records.
        least: the fewest records, for which there is always memory.
        largest: bytes of the largest buffer that the device allows; None: no limit.
        adopt: takes the memory of one buffer.
        buffers: the most buffers.

    Attributes:
        most: the same, or fewer if so many do not fill whole buffers, or if the device refused a further buffer.
        rows: records of a buffer.
    """

    is_adopted = True

    def __init__(self, nbytes: int, most: int, least: int, largest: int | None, adopt: Adopt, buffers: int = BUFFERS):
        self.rows, count = _sizes(nbytes, most, least, largest, buffers)
        self.most = min(most, count * self.rows)
        self._nbytes, self._least, self._adopt = nbytes, -(-least // self.rows), adopt
        self._numbers = range(count)
        self._buffers: dict[int, tuple[np.ndarray, mx.array]] = {}  # those that exist, by number
        self._wanted, self._leaving = count, frozenset[int]()
        self._set_buffers({})
        self.free = []
        self._readers: Sequence[mx.array] = ()
        self._left = deque[tuple[mx.array, int]]()  # places, and the newest of the readers when each was put here
        self._keeps_room = False
        self._rooms: list[tuple[int, mx.array]] = []  # a buffer's number, and the same memory adopted again

    def _set_buffers(self, buffers: dict[int, tuple[np.ndarray, mx.array]]) -> None:
        """Replaces the buffers, in one step. In `memory` the first one stands for those that do not exist."""
        arrays = {number: array for number, (_, array) in buffers.items()}
        first = next(iter(arrays.values()), None)
        memory = tuple(arrays.get(number, first) for number in range(BUFFERS))
        self.__dict__.update(_buffers=buffers, memory=memory)

    @property
    def is_settled(self) -> bool:  # type: ignore[override]
        return len(self._buffers) <= self._wanted

    def take(self) -> int | None:
        if not self.free and len(self._buffers) < self._wanted:
            self._add()
        while not self.free and self._left:
            self._free_until(self._left[0][0])
        return super().take()

    def queued(self, outputs: Sequence[mx.array]) -> None:
        """The places that readers which are no longer among the outputs may have read are free."""
        self._readers = outputs
        while self._left and all(self._left[0][0] is not output for output in outputs):
            self._free_first()

    def _free_until(self, reader: mx.array) -> None:
        """Waits for one of the readers, and frees the places that it and earlier ones may read."""
        mx.eval(reader)
        while self._left and self._left[0][0] is reader:
            self._free_first()

    def _free_first(self) -> None:
        place = self._left.popleft()[1]
        if not self.goes(place):
            heappush(self.free, place)

    def take_all(self) -> None:
        self._keeps_room = True
        while len(self._buffers) < self._wanted:
            self._add()

    def _add(self) -> None:
        """Adopts one more buffer; if the device refuses it, the pool keeps those that it has."""
        number = next(number for number in self._numbers if number not in self._buffers)
        room = self._rooms.pop() if self._rooms else None
        del room  # before the new buffer is adopted
        try:
            buffer = self._adopt(self.rows, self._nbytes // 4)
        except ExpertIOError:
            if len(self._buffers) < self._least:
                raise
            self._wanted, self.most = len(self._buffers), len(self._buffers) * self.rows
            return
        self._set_buffers({**self._buffers, number: buffer})
        self.free = sorted([*self.free, *self._places(number)])

    def row(self, place: int) -> np.ndarray:
        number, row = divided(place)
        words: np.ndarray = self._buffers[number][0][row]
        return words

    def array(self, place: int) -> mx.array:
        """The same memory as `row`, as a view [1, words] of MLX's array."""
        number, row = divided(place)
        return self._buffers[number][1][row : row + 1]

    @property
    def room(self) -> int:
        return len(self.free) + max(self._wanted - len(self._buffers), 0) * self.rows

    def put(self, place: int) -> None:
        """Frees a place, as soon as nothing that is queued may read it."""
        if self._readers:
            self._left.append((self._readers[-1], place))
        elif not self.goes(place):
            heappush(self.free, place)

    def fit(self, slots: int) -> int:
        if slots >= self.most:
            return self.most
        return min(max(slots // self.rows, self._least) * self.rows, self.most)

    def held_bytes(self, records: int) -> int:
        return len(self._buffers) * self.rows * self._nbytes

    def aim(self, slots: int, owned: Mapping[int, bool]) -> None:
        """Those buffers go that are soonest empty: first those with no record that must stay, then with the fewest.
        Waits for what reads places.
        """
        mx.eval(self._readers)
        self.queued(())
        self._wanted, cost = -(-slots // self.rows), Counter[int]()
        for place, stays in owned.items():
            cost[divided(place)[0]] += self.rows + 1 if stays else 1
        surplus = max(len(self._buffers) - self._wanted, 0)
        self._leaving = frozenset(sorted(self._buffers, key=cost.__getitem__)[:surplus])
        self.find_free(owned)

    def goes(self, place: int) -> bool:
        return divided(place)[0] in self._leaving

    def staying(self) -> Iterable[int]:
        return (place for number in sorted(self._buffers.keys() - self._leaving) for place in self._places(number))

    def release(self, owned: Collection[int]) -> None:
        gone = self._leaving - {divided(place)[0] for place in owned}
        if self._keeps_room:
            for number in gone:  # as soon as MLX has freed it
                weakref.finalize(self._buffers[number][0], self._keep_room).atexit = False
        self._set_buffers({number: buffer for number, buffer in self._buffers.items() if number not in gone})
        count = len(self._rooms)
        self._rooms = [one for one in self._rooms if one[0] not in gone]
        for _ in range(len(self._rooms), count):
            self._keep_room()
        self.find_free(owned)

    def _keep_room(self) -> None:
        """Keeps the room of one buffer in MLX's residency sets. Metal may refuse it: then it is left to others."""
        with suppress(ExpertIOError):
            for number, (memory, _) in list(self._buffers.items())[:1]:
                self._rooms.append((number, adopt_again(memory)))

    def _places(self, number: int) -> range:
        return range(number << ROW_BITS, (number << ROW_BITS) + self.rows)


def _sizes(nbytes: int, most: int, least: int, largest: int | None, buffers: int) -> tuple[int, int]:
    """Records of a buffer, and the number of buffers: they fill whole pages, and hold as many of `most` records as they
    can without more memory, but at least `least`, if need be in buffers that are larger than `largest`.
    """
    page = STRIDE_ALIGNMENT // gcd(nbytes, STRIDE_ALIGNMENT)  # records that fill whole pages
    limit = most if largest is None else largest // nbytes
    near = most // buffers // page * page, rounded(-(-most // buffers), page)
    fitting = [max(min(rows, limit // page * page), page) for rows in near]
    rows, count = max(((rows, min(most // rows, buffers)) for rows in fitting), key=prod)
    if rows * count < least:
        rows = rounded(-(-least // buffers), page)
        count = -(-least // rows)
    return rows, count


def _runs(places: list[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers in ascending `places`: the first of each run, and its end (exclusive)."""
    cuts = [i for i in range(1, len(places)) if places[i] != places[i - 1] + 1]
    for start, stop in zip([0, *cuts], [*cuts, len(places)], strict=True):
        if stop > start:
            yield places[start], places[stop - 1] + 1
