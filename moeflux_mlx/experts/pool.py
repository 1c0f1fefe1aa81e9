"""Memory for experts' records: which lies in which slot, who still reads it, and which gives way next.

The CPU and Metal read a slot's memory in place; Metal adopts it once. CUDA gets every record in an array of
its own in device memory, because updating an array that others refer to would copy all of it; there the
host's memory is only a landing place that the GPU reads over the bus. It knows neither files nor threads, only futures.

A pool that breathes is resized while the model runs. On the CPU its rows are address space for the largest size. A
system gives a large page back only as a whole, whatever it says of the parts, so the records that stay are moved
together, into the first rows (results.tsv, "pool resize").
"""

import math
import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from heapq import heappop, heappush

import mlx.core as mx
import numpy as np

from ..formats.record import STRIDE_ALIGNMENT, Key, rounded
from ..ops import backend
from .memory import GIVES_BACK, adopt, as_result, give_back, landing_memory, on_device, private_pages


@dataclass
class Slot:
    """One record in memory or on its way: in row `row` of the memory, or copied to `device`.

    `guard` must be evaluated before the memory is used again.
    """

    row: int
    future: "Future[int] | None" = None
    guard: mx.array | None = None
    device: mx.array | None = None
    speculative: bool = False


def whole_pages(rows: int, nbytes: int) -> int:
    """As many rows of `nbytes`, or a few more, as fill whole pages."""
    step = STRIDE_ALIGNMENT // math.gcd(nbytes, STRIDE_ALIGNMENT)
    return rounded(rows, step)


def can_breathe(copied: bool) -> bool:
    """Whether a pool can be resized here: memory that Metal has adopted stays as it is."""
    return backend.name() != "metal" and (copied or GIVES_BACK)


class SlotPool:
    """At most `slots` records of one size in least-recently-used order.

    Args:
        nbytes: of memory, for a record.
        slots: records that are kept, until `resize`.
        landing: None keeps records where they were read to. A number copies each into an array of its own
            as it arrives, and that many records may be on their way at once.
        most: what `resize` may grow to; as many as `slots` if the pool does not breathe.

    Attributes:
        breathes: whether `resize` is offered.
    """

    def __init__(self, nbytes: int, slots: int, landing: int | None = None, most: int | None = None):
        self.nbytes = nbytes
        self.copied = landing is not None
        self.breathes = can_breathe(self.copied)
        self.slots = slots
        self.most = slots if most is None or not self.breathes else most
        self._pages: mmap.mmap | None = None
        self._copying: list[tuple[int, mx.array]] = []  # rows that the device still reads, and their copies
        self._landing: mx.array | None = None
        if landing is not None and backend.name() == "cuda":
            self.rows, self._landing = landing_memory(landing, nbytes // 4)
        else:
            rows = self.most if landing is None else landing
            if backend.name() == "metal":  # it adopts whole pages only
                rows = whole_pages(rows, nbytes)
            self._pages = private_pages(rows * nbytes)
            self.rows = np.frombuffer(self._pages, np.uint32).reshape(rows, -1)
        self._adopted = adopt(self.rows, "the expert pool") if backend.name() == "metal" else None
        self._free = list(range(len(self.rows)))  # a heap: the first rows are used first
        self._used: OrderedDict[Key, Slot] = OrderedDict()
        self._pins: dict[Key, int] = {}  # how many leases hold a record, while any does
        self._arriving: set[Key] = set()
        self.intended: set[Key] = set()  # records that are wanted soon
        self._guests: OrderedDict[Key, None] = OrderedDict()  # records of whoever interrupts, in order of use
        self._most_guests: int | None = None  # how many of them replace others; None: nobody interrupts

    def __contains__(self, key: Key) -> bool:
        return key in self._used

    def __len__(self) -> int:
        return len(self._used)

    def __getitem__(self, key: Key) -> Slot:
        return self._used[key]

    def get(self, key: Key) -> Slot | None:
        return self._used.get(key)

    def holds(self, keys: Iterable[Key]) -> bool:
        """Whether all these records have arrived."""
        return self._arriving.isdisjoint(keys) and all(map(self._used.__contains__, keys))

    def find(self, key: Key) -> Slot | None:
        """Like `get`, and counts as a use."""
        slot = self._used.get(key)
        if slot is not None:
            self._used.move_to_end(key)
        if key in self._guests:
            self._guests.move_to_end(key)
        return slot

    def put(self, key: Key, slot: Slot) -> None:
        """Files a claimed slot, its read submitted."""
        self._used[key] = slot
        self._arriving.add(key)
        if self._most_guests is not None:
            self._guests[key] = None

    def begin_guest(self, most: int) -> None:
        """From now on records are read for somebody who interrupts: `most` of them may replace others', then one
        another.
        """
        self._most_guests = most

    def end_guest(self) -> None:
        """What was read for him is the first to give way."""
        for key in reversed(self._guests):
            self._used.move_to_end(key, last=False)
        self._guests.clear()
        self._most_guests = None

    def victim(self, for_guess: bool) -> Key | None:
        """The record to evict before `take` can succeed: the least recently used one that is not pinned.

        One that is intended or still arriving only if there is no other, and not for a guess.
        """
        if self._most_guests is not None and len(self._guests) >= self._most_guests:
            key = self._first_of(self._guests, for_guess)
            if key is not None or for_guess:
                return key
        return self._first_of(self._used, for_guess)

    def _first_of(self, keys: Iterable[Key], for_guess: bool) -> Key | None:
        row_wanted, last = self.copied and not self._free, None
        for key in keys:
            slot = self._used[key]
            if key in self._pins:
                continue
            if slot.future is None and not row_wanted and key not in self.intended:
                return key
            if last is None and (slot.future is not None or not row_wanted):
                last = key
        return None if for_guess else last

    def take(self) -> Slot | None:
        """A free slot, if there is one."""
        if not self._free:
            self._finish_copies()
        return Slot(heappop(self._free)) if self._free and len(self._used) < self.slots else None

    def memory(self, slot: Slot) -> memoryview:
        return memoryview(self.rows[slot.row]).cast("B")

    def arrived(self, key: Key) -> None:
        """The record's bytes are there."""
        slot = self._used[key]
        if self.copied:  # first: should there be no memory for it, the record has not arrived
            slot.device = self._copy(slot.row)
            self._copying.append((slot.row, slot.device))
        slot.future = None
        self._arriving.discard(key)

    def _finish_copies(self) -> None:
        while self._copying:
            row, copy = self._copying[-1]
            mx.eval(copy)
            self._copying.pop()  # before the row is free: whoever interrupts this must not find it twice
            heappush(self._free, row)

    def _copy(self, row: int) -> mx.array:
        """[words] in device memory, soon."""
        if self._landing is None:
            return on_device(self.rows[row])
        copy = as_result(self._landing[row : row + 1]).reshape(-1)
        mx.async_eval(copy)
        return copy

    def locate(self, keys: list[Key]) -> tuple[np.ndarray | mx.array | tuple[mx.array, ...], np.ndarray]:
        """(memory of S records, as `Records` has it, row of each key int32)."""
        slots = [self._used[key] for key in keys]
        if self.copied:
            copies = tuple(slot.device for slot in slots if slot.device is not None)
            assert len(copies) == len(keys)  # they were waited for
            return copies, np.arange(len(keys), dtype=np.int32)
        blob = self.rows if self._adopted is None else self._adopted
        return blob, np.array([slot.row for slot in slots], np.int32)

    def pin(self, keys: Sequence[Key]) -> list[Slot | None]:
        """Holds on to these records until `unpin`; `find`s them."""
        slots = []
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1
            slots.append(self.find(key))
        return slots

    def unpin(self, keys: Sequence[Key], guard: mx.array | None = None) -> None:
        for key in keys:
            left = self._pins.pop(key) - 1
            if left:
                self._pins[key] = left
            slot = self._used.get(key)
            if slot is not None and guard is not None:
                self._guard(slot, guard)

    @staticmethod
    def _guard(slot: Slot, guard: mx.array) -> None:
        if slot.guard is not None and slot.guard is not guard:
            mx.eval(slot.guard)  # usually long done; if another computation reads it too, both must end
        slot.guard = guard

    def pinned(self, key: Key) -> bool:
        return key in self._pins

    def pinned_besides(self, keys: list[Key]) -> int:
        return len(self._pins.keys() - keys) if self._pins else 0

    def demote(self, key: Key) -> None:
        """The record becomes the first to give way; while somebody interrupts, only one of his own does."""
        if key in self._guests:
            self._guests.move_to_end(key, last=False)
        elif key in self._used and self._most_guests is None:
            self._used.move_to_end(key, last=False)

    def drop(self, key: Key) -> None:
        """Forgets a record that nobody reads and whose read is over."""
        slot = self._used[key]
        if slot.guard is not None:
            mx.eval(slot.guard)
        del self._used[key]
        self._guests.pop(key, None)
        self._arriving.discard(key)
        if slot.device is None:
            heappush(self._free, slot.row)
            if slot.row >= self.slots and not self.copied:  # it could not be moved when the pool shrank
                self._give_back(slot.row, slot.row + 1)
        elif any(copy is slot.device for _, copy in self._copying):
            self._finish_copies()  # they hold on to the record

    def resize(self, slots: int, evict: Callable[[Key], object]) -> int:
        """Keeps at most `slots` records from now on, and no memory for more; returns how many it came to.

        That is more only where more records are pinned.

        Args:
            evict: drops a record, its read being cancelled or over.
        """
        assert self.breathes and 0 < slots <= self.most
        if len(self._used) > slots:
            self._finish_copies()  # else `victim` would look for one that leaves its landing place
        while len(self._used) > slots and (key := self.victim(for_guess=False)) is not None:
            evict(key)
        reached = max(slots, len(self._used))
        if reached < self.slots and not self.copied:
            self._compact(reached)
        self.slots = reached
        return reached

    def _compact(self, slots: int) -> None:
        """Moves what lies behind the first `slots` rows into them, and gives back the memory of all that are free.

        A record that is pinned or arriving stays where it is.
        """
        self._free = sorted(set(range(len(self.rows))) - {slot.row for slot in self._used.values()})
        for key, slot in self._used.items():
            if slot.row >= slots and slot.future is None and key not in self._pins:
                self._move(slot)
        self._free.sort()  # it is still a heap
        for first, stop in _runs(self._free):
            self._give_back(first, stop)

    def _move(self, slot: Slot) -> None:
        """To the first free row."""
        if slot.guard is not None:
            mx.eval(slot.guard)
        old, new = slot.row, self._free[0]
        self.rows[new] = self.rows[old]
        heappop(self._free)  # whoever interrupts this leaves a row without an owner until `_compact`, none with two
        slot.row = new
        heappush(self._free, old)

    def _give_back(self, first: int, stop: int) -> None:
        if self._pages is not None:
            stride = self.rows.strides[0]
            give_back(self._pages, first * stride, stop * stride)

    def records(self) -> list[Key]:
        return list(self._used)

    def in_flight(self) -> list[Key]:
        """Blocks whose read is under way, or over without `arrived` having been told."""
        return list(self._arriving)


def _runs(rows: list[int]) -> Iterator[tuple[int, int]]:
    """Neighbours among ascending `rows`: the first of each run, and the one behind its last."""
    cuts = [i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1]
    for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        if stop > start:
            yield rows[start], rows[stop - 1] + 1
