"""The memory for expert records: which record is in which slot, who still reads it, and which one is evicted next.

The CPU and Metal read a slot's memory in place; Metal adopts the memory once. On CUDA each record is copied to its own
array in device memory, because updating a part of a shared array would copy all of it; the host's memory is only for
staging. The pool knows neither files nor threads, only reads.

A pool can be resized while the model runs. With CPUs on Linux its rows are address space for the largest size. The
system takes back only whole large pages, so the remaining records are moved together into the first rows (results.tsv,
"pool resize"). Memory that Metal has adopted, and memory on systems that keep the pages of a mapping, can be returned
only as a whole. There a pool gets new memory of the wanted size while nobody reads its records, and the records are
read again. MLX frees the old buffer with the last array that refers to it; this has not run on an Apple GPU.

A caller may be interrupted between any two bytecodes. The table of records is authoritative: it says who owns a row and
which reads are in progress, and each change to it is one operation. The other attributes are for speed; `reconcile`
rebuilds them from the table.
"""

import math
import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain

import mlx.core as mx
import numpy as np

from ..formats.record import STRIDE_ALIGNMENT, Key, rounded
from ..ops import backend
from .memory import GIVES_BACK, adopt, as_result, give_back, on_device, private_pages, staging_memory
from .reader import Read, as_they_end

NOWHERE = -1


@dataclass(eq=False)
class Slot:
    """A record in memory, or being read by `read`: in row `row` of the memory, or copied to `device`. The record owns
    its row until the copy has been computed; then `row` is NOWHERE. `guard` must be evaluated before the memory is used
    again.
    """

    row: int
    read: Read | None = None
    guard: mx.array | None = None
    device: mx.array | None = None
    speculative: bool = False


def whole_pages(rows: int, nbytes: int) -> int:
    """`rows` rows of `nbytes` bytes, or a few more, so that they fill whole pages."""
    step = STRIDE_ALIGNMENT // math.gcd(nbytes, STRIDE_ALIGNMENT)
    return rounded(rows, step)


def can_breathe(copied: bool) -> bool:
    """Whether a pool on this device keeps its records when it is resized; memory adopted by Metal is replaced."""
    return backend.name() != "metal" and (copied or GIVES_BACK)


class SlotPool:
    """At most `slots` records of one size in least-recently-used order.

    Args:
        nbytes: bytes of memory for a record.
        slots: number of records to keep, until `resize`.
        staging: None keeps records where they were read to. With a number, each record is copied to its own array on
            arrival, and this many records may be read at once.
        most: the most slots that `resize` may set; equal to `slots` if the pool does not breathe.

    Attributes:
        breathes: whether records stay when the pool is resized, so that its size can follow the free memory.
        rows: the memory, one record per row.
        free_rows: the rows that no record owns.
        adopted: the memory as an MLX array on Metal.
        has_been_full: whether a record had no free memory since the pool last grew.
    """

    def __init__(self, nbytes: int, slots: int, staging: int | None = None, most: int | None = None):
        self.nbytes = nbytes
        self.copied = staging is not None
        self.breathes = can_breathe(self.copied)
        self.slots = slots
        self.most = slots if most is None or not self.breathes else most
        self._pages: mmap.mmap | None = None
        self.copying: list[Slot] = []  # slots whose rows the device may still read
        self._staging: mx.array | None = None
        self.adopted: mx.array | None = None
        self.rows: np.ndarray
        self.free_rows: list[int]  # a heap: the first rows are used first
        if staging is not None and backend.name() == "cuda":
            self.rows, self._staging = staging_memory(staging, nbytes // 4)
            self.free_rows = list(range(staging))
        else:
            self._take_memory(self.most if staging is None else staging)
        self._used: OrderedDict[Key, Slot] = OrderedDict()
        self._leased: dict[int, Sequence[Key]] = {}  # by the identity of the keys
        self._arriving: set[Key] = set()
        self.intended: set[Key] = set()  # records that are wanted soon
        self.has_been_full = False

    def _take_memory(self, count: int) -> None:
        """Replaces the memory by new memory for `count` records, in one step."""
        rows = whole_pages(count, self.nbytes) if backend.name() == "metal" else count  # Metal adopts only whole pages
        pages = private_pages(rows * self.nbytes)
        memory = np.frombuffer(pages, np.uint32).reshape(rows, -1)
        adopted = adopt(memory, "the expert pool") if backend.name() == "metal" else None
        self.__dict__.update(_pages=pages, rows=memory, adopted=adopted, free_rows=list(range(rows)))

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
        return slot

    def put(self, key: Key, slot: Slot) -> None:
        """Enters a claimed slot whose read is prepared. If the read is never submitted, `reconcile` finds the slot."""
        self._used[key] = slot
        self._arriving.add(key)

    def victim(self, for_guess: bool) -> Key | None:
        """The record to evict before `take` can succeed: the least recently used one that is not pinned.

        A record that is intended or still arriving is chosen only if there is no other, and never for a guess.
        """
        row_wanted, last = self.copied and not self.free_rows, None
        for key, slot in self._used.items():
            if self.pinned(key):
                continue
            if slot.read is None and not row_wanted and key not in self.intended:
                return key
            if last is None and (slot.read is not None or not row_wanted):
                last = key
        return None if for_guess else last

    def take(self) -> Slot | None:
        """A free slot, if there is one."""
        if not self.free_rows:
            self.finish_copies()
        self.has_been_full |= len(self._used) >= self.slots
        return Slot(heappop(self.free_rows)) if self.free_rows and len(self._used) < self.slots else None

    def memory(self, slot: Slot) -> memoryview:
        return memoryview(self.rows[slot.row]).cast("B")

    def arrived(self, key: Key) -> None:
        """Marks the record as complete."""
        slot = self._used[key]
        if self.copied and slot.device is None:  # first, because without memory for the copy the record has not arrived
            slot.device = self._copy(slot.row)
            self.copying.append(slot)
        slot.read = None
        self._arriving.discard(key)

    def finish_copies(self) -> None:
        while self.copying:
            mx.eval(self.copying[-1].device)
            slot = self.copying.pop()
            row, slot.row = slot.row, NOWHERE
            heappush(self.free_rows, row)

    def _copy(self, row: int) -> mx.array:
        """An array [words] in device memory; the copy is being computed."""
        if self._staging is None:
            return on_device(self.rows[row])
        copy = as_result(self._staging[row : row + 1]).reshape(-1)
        mx.async_eval(copy)
        return copy

    def locate(self, keys: list[Key]) -> tuple[np.ndarray | mx.array | tuple[mx.array, ...], np.ndarray]:
        """(memory of S records, as `Records` has it, row of each key int32)."""
        slots = [self._used[key] for key in keys]
        if self.copied:
            copies = tuple(slot.device for slot in slots if slot.device is not None)
            assert len(copies) == len(keys)  # the caller has waited for them
            return copies, np.arange(len(keys), dtype=np.int32)
        blob = self.rows if self.adopted is None else self.adopted
        return blob, np.array([slot.row for slot in slots], np.int32)

    def pin(self, keys: Sequence[Key]) -> list[Slot | None]:
        """Keeps these records until `unpin` is called with the same list; returns their slots."""
        if keys:  # `unpin` is called only for pools with keys
            self._leased[id(keys)] = keys
        return [self.find(key) for key in keys]

    def unpin(self, keys: Sequence[Key], guard: mx.array | None = None) -> None:
        """Ends `pin`; does nothing if these keys no longer hold anything."""
        if guard is not None and id(keys) in self._leased:
            for slot in filter(None, map(self._used.get, keys)):
                self._guard(slot, guard)
        self._leased.pop(id(keys), None)  # last, in one step: if interrupted before, the records stay pinned

    @staticmethod
    def _guard(slot: Slot, guard: mx.array) -> None:
        if slot.guard is not None and slot.guard is not guard:
            mx.eval(slot.guard)  # usually done long ago; if another computation reads the record too, both must end
        slot.guard = guard

    @property
    def is_leased(self) -> bool:
        """Whether somebody may still read a record."""
        return bool(self._leased)

    def pinned(self, key: Key) -> bool:
        return any(key in keys for keys in list(self._leased.values()))

    def pinned_besides(self, keys: Sequence[Key]) -> int:
        return len(set().union(*list(self._leased.values())).difference(keys))

    def demote(self, key: Key) -> None:
        """Makes the record the first to be evicted."""
        if key in self._used:
            self._used.move_to_end(key, last=False)

    def drop(self, key: Key) -> None:
        """Removes a record that nobody reads and whose read has ended."""
        slot = self._used[key]
        if slot.guard is not None:
            mx.eval(slot.guard)
        if slot.device is not None and slot.row != NOWHERE:
            self.finish_copies()  # they keep the record's array
        del self._used[key]
        self._arriving.discard(key)
        if slot.row != NOWHERE:
            heappush(self.free_rows, slot.row)
            if slot.row >= self.slots and not self.copied:  # the row could not be moved when the pool shrank
                self._give_back(slot.row, slot.row + 1)

    def reconcile(self, abandoned: Sequence[mx.array] = ()) -> None:
        """After an interrupted call: releases everything, and rebuilds the other attributes from the table of records.

        Args:
            abandoned: guards that will never be evaluated.
        """
        self._leased.clear()
        self.intended = set()
        for key, slot in list(self._used.items()):
            if any(slot.guard is guard for guard in abandoned):
                slot.guard = None
            if slot.read is not None and (slot.read.is_cancelled or not slot.read.is_queued and slot.read.cancel()):
                self.drop(key)
        self._arriving = {key for key, slot in self._used.items() if slot.read is not None}
        self.copying = [slot for slot in self._used.values() if slot.device is not None and slot.row != NOWHERE]
        self._find_free()

    def _find_free(self) -> None:
        taken = {slot.row for slot in self._used.values()}
        self.free_rows = [row for row in range(len(self.rows)) if row not in taken]  # ascending: a heap

    def resize(self, slots: int, evict: Callable[[Key], object]) -> int:
        """Keeps at most `slots` records and their memory from now on; returns the resulting number of slots.

        The result is larger if more records are pinned. It is unchanged if records in adopted memory are pinned.

        Args:
            evict: removes a record after its read is cancelled or over.
        """
        assert 0 < slots <= self.most
        self.has_been_full &= slots <= self.slots
        if not self.breathes:
            return self._replace(slots, evict)
        if len(self._used) > slots:
            self.finish_copies()  # otherwise `victim` would look for a record that frees a staging row
        while len(self._used) > slots and (key := self.victim(for_guess=False)) is not None:
            evict(key)
        reached = max(slots, len(self._used))
        if reached < self.slots and not self.copied:
            self._compact(reached)
        self.slots = reached
        return reached

    def _replace(self, slots: int, evict: Callable[[Key], object]) -> int:
        """Replaces the memory by that of `slots` records and drops all records. Does nothing while somebody reads a
        record.
        """
        if slots != self.slots and not self._leased:
            for key in self.records():
                evict(key)
            if not self._used:
                self._take_memory(slots)
                self.slots = slots
        return self.slots

    def _compact(self, slots: int) -> None:
        """Moves records from behind the first `slots` rows into free rows among these, and returns the memory of all
        free rows.

        A record that is pinned or arriving stays where it is.
        """
        self._find_free()
        for key, slot in self._used.items():
            if slot.row >= slots and slot.read is None and not self.pinned(key):
                self._move(slot)
        self.free_rows.sort()  # it remains a heap
        for first, stop in _runs(self.free_rows):
            self._give_back(first, stop)

    def _move(self, slot: Slot) -> None:
        """Moves a record to the first free row."""
        if slot.guard is not None:
            mx.eval(slot.guard)
        old, new = slot.row, self.free_rows[0]
        self.rows[new] = self.rows[old]
        heappop(self.free_rows)
        slot.row = new
        heappush(self.free_rows, old)

    def _give_back(self, first: int, stop: int) -> None:
        if self._pages is not None:
            stride = self.rows.strides[0]
            give_back(self._pages, first * stride, stop * stride)

    def in_turn(self, keys: list[Key]) -> Iterable[Key]:
        """The slots in the order in which to wait for them. Records that are copied come as they arrive, so that copies
        overlap with reads.
        """
        if not self.copied:
            return keys
        reads = {slot.read: key for key in keys if (slot := self.get(key)) and slot.read}
        present = [key for key in keys if key not in reads.values()]
        return chain(present, (reads[read] for read in as_they_end(reads)))

    def records(self) -> list[Key]:
        return list(self._used)

    def in_flight(self) -> list[Key]:
        """Records whose read is in progress, or has ended without a call of `arrived`."""
        return list(self._arriving)


def _runs(rows: list[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers in ascending `rows`: the first of each run, and its end (exclusive)."""
    cuts = [i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1]
    for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        if stop > start:
            yield rows[start], rows[stop - 1] + 1
