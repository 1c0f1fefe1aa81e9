"""Packed records of experts in memory, and how kernels find them: in one array, in several buffers, or each in an array
of its own. Also which records kernels read, and where in a record they find its parts.

A slot is a record's place in memory. In buffers its lowest ROW_BITS bits are the row in a buffer, and the others are
the number of the buffer, so that a record may be in any row of any buffer (`codes_record` in metal/codes.h.metal).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..formats.record import Projection, Record
from . import backend, forms
from .backend import AnyArray
from .forms import DTYPES, form_of
from .launch import Kernel, Launch, Reason, Shape, Template, ceildiv, count, require
from .tiles import planned

MAX_ARRAYS = 16  # the most arrays of records in one kernel: Metal gives a kernel at most 31 arrays
ROW_BITS = 24
MISSING = 0xFFFFFFFF  # in place of a slot: the record is not in memory
THREADS = 128  # of a threadgroup that copies words


class RecordArrays(NamedTuple):
    """How a kernel's text takes the records.

    Args:
        number: how many arrays; 0: one array, which the text has by its name alone.
        row_bits: bits of a slot that are the row in an array; 0: each array is one record.
        is_tabled: a kernel that chooses finds the slot of an expert in a table.
    """

    number: int = 0
    row_bits: int = 0
    is_tabled: bool = False

    @property
    def names(self) -> str:
        """The input's name in a `Kernel`."""
        return f"blob*{self.number}" if self.number else "blob"


ONE_ARRAY = RecordArrays()
ADDRESSES = RecordArrays(row_bits=64)  # one array, of addresses; the number only makes the text another one


@dataclass(frozen=True)
class Records:
    """Records of uint32 words in memory, with the geometry `record`.

    Args:
        memory: an array [S, words] with one record in each row: numpy's if the CPU reads it in place, else MLX's. Or a
            tuple of MLX's arrays: buffers [rows, words], all of one shape, or records [words] that lie apart. Or a
            table [S] of their addresses (`with_record`).
        record: their geometry.
        lasting: the memory is never overwritten, so it may be read after the lease has ended.
        slots: uint32 [experts], of buffers: the slot of each expert's record, or MISSING.
    """

    memory: Any  # mx.array | np.ndarray | tuple[mx.array, ...]
    record: Record
    lasting: bool = False
    slots: mx.array | None = None

    @property
    def in_buffers(self) -> bool:
        return isinstance(self.memory, tuple) and self.memory[0].ndim == 2

    @cached_property
    def blob(self) -> AnyArray:
        """All of them as one array [S, words]. Buffers have none, because it would be a copy of the whole memory."""
        assert not self.in_buffers
        return mx.stack(list(self.memory)) if isinstance(self.memory, tuple) else self.memory

    def inputs(self, tokens: int = 0) -> tuple[tuple[AnyArray, ...], Shape, RecordArrays]:
        """A kernel's inputs for `tokens` tokens of a step, or for a prompt (0), the shape of an array of records, and
        how the text takes them.

        Records that lie apart are stacked for several tokens: a single token always has the same number of them, and
        each number has its own text.
        """
        if isinstance(self.memory, mx.array) and self.memory.dtype == mx.uint64:
            return (self.memory,), (len(self.memory), ceildiv(self.record.size, 16) * 4), ADDRESSES
        if self.in_buffers:
            how = RecordArrays(len(self.memory), ROW_BITS, self.slots is not None)
            return self.memory, self.memory[0].shape, how
        if isinstance(self.memory, tuple) and tokens == 1 and len(self.memory) <= MAX_ARRAYS:
            return self.memory, (len(self.memory), self.memory[0].size), RecordArrays(len(self.memory))
        return (self.blob,), self.blob.shape, ONE_ARRAY

    def slots_of(self, ids: mx.array) -> mx.array:
        """The slots of experts: their ids, unless there is a table."""
        return ids if self.slots is None else self.slots[ids]

    def for_mlx(self, slots: np.ndarray) -> "tuple[Records, np.ndarray]":
        """Records that MLX's operations can index, and the places of `slots` in them; records are copied if
        necessary.
        """
        if not isinstance(self.memory, np.ndarray):
            return self, slots
        used, local = np.unique(slots, return_inverse=True)
        return Records(mx.array(self.memory[used]), self.record, lasting=True), local.reshape(slots.shape)


def divided(slot: int) -> tuple[int, int]:
    """The number of the buffer, and the row in it."""
    return slot >> ROW_BITS, slot & ((1 << ROW_BITS) - 1)


def check_blob(blob: Shape, record: Record) -> None:
    """Raises RequestError: the kernels do not take a blob of such a shape."""
    least = record.size // 4
    good = len(blob) == 2 and blob[1] >= least and blob[1] % 4 == 0
    require(good, f"blob is {blob}; expected [S, words], words a multiple of 4 and at least {least}")


def no_records(record: Record, slots: int) -> mx.array:
    """A table, as `Records.memory`, of records that lie apart, with no record yet."""
    on_cuda = backend.name() == "cuda"
    table = mx.zeros((slots,), mx.uint64) if on_cuda else mx.zeros((slots, record.held_bytes // 4), mx.uint32)
    mx.eval(table)  # a lazy array belongs to the thread that made it
    return table


def with_record(table: mx.array, slot: int, record: mx.array) -> mx.array:
    """The table with the record [words] in a slot: its address, which lasts as long as the array and until the host
    reads it; without kernels a copy.
    """
    if table.ndim > 1:
        return mx.slice_update(table, record[None], count(slot)[:1], axes=(0,))
    kernel = Kernel("record_address", "addresses place record", "out")
    launch = Launch(
        "cuda", kernel, {"N": len(table)}, (ceildiv(len(table), THREADS), 1), THREADS, [(table.shape, mx.uint64)]
    )
    return launch(table, count(slot), record)[0]


def words_of(records: Records, slots: mx.array, words: slice) -> mx.array:
    """The words `words` of the records in `slots`, uint32 [n, number of words]; other words are not read.

    Args:
        records: on MLX's side.
        slots: [n] uint32 or int32; they may repeat, and without kernels be MISSING, which gives zeros.
    """
    if not records.in_buffers:
        return mx.take(records.blob[:, words], slots, axis=0)
    arrays, blob, how = records.inputs()
    unit = 4 if words.start % 4 == words.stop % 4 == 0 else 1  # words that a thread copies
    units = (words.stop - words.start) // unit
    launch = plan_words(backend.name(), blob, slots.shape, unit, units, how)
    if isinstance(launch, Reason):
        return _taken(arrays, slots, words)
    return launch(*arrays, slots, *map(count, (len(slots), words.start, units)))[0]


def _taken(arrays: Sequence[mx.array], slots: mx.array, words: slice) -> mx.array:
    """`words_of` buffers by operations that can be traced."""
    number, row = slots >> ROW_BITS, mx.minimum(slots & ((1 << ROW_BITS) - 1), len(arrays[0]) - 1)
    taken = mx.zeros((slots.size, words.stop - words.start), mx.uint32)
    for i, array in enumerate(arrays):
        taken = mx.where((number == i)[:, None], mx.take(array[:, words], row, axis=0), taken)
    return taken


@planned("records", 256)
def plan_words(target: str, blob: Shape, slots: Shape, unit: int, units: int, arrays: RecordArrays) -> Launch | Reason:
    """MLX's operations would copy a buffer for each of them, or take each record by itself."""
    template = {"UNIT": "uint4" if unit == 4 else "uint", "WORDS": blob[1], "ROW_BITS": arrays.row_bits}
    kernel = Kernel("expert_words", f"{arrays.names} slots count first units", "out")
    outputs = [((slots[0], units * unit), mx.uint32)]
    return Launch(target, kernel, template, (ceildiv(slots[0] * units, THREADS), 1), THREADS, outputs)


@cache
def is_read(record: Record) -> bool:
    """Whether the GPU kernels and the native ones read such records; the twins read all. One kernel reads both gate
    and up.
    """
    alike = form_of(record.gate) == form_of(record.up)
    return alike and all(forms.is_read(part.quant, part.columns) for part in (record.gate, record.down))


def unread_reason(record: Record) -> Reason:
    """Why kernels do not take records for which `is_read` is false."""
    stored = (f"{part.name} has rows of {part.columns} columns in {part.quant}" for part in record.projections)
    return Reason(f"no kernel reads the records: {'; '.join(stored)}")


def places_of(name: str, projection: Projection) -> dict[str, int]:
    """The place of a matrix in a record, as constants of the text: words to its codes, scales and biases, or global
    scale. If it has neither of these two, the constant is that of the scales and is not used.
    """
    words = [field.words.start for field in projection.codes]
    return {f"{name}_W": words[0], f"{name}_S": words[1], f"{name}_B": words[-1]}


def biases_of(**projections: Projection) -> Template:
    """The text's constants about biases of products: whether there are any, their type, and words to them in a
    record.
    """
    fields = {name: projection.bias for name, projection in projections.items()}
    kinds = {DTYPES[field.dtype] for field in fields.values() if field is not None}
    template = {"BIASED": len(kinds), "B": kinds.pop() if kinds else mx.float32}
    return template | {f"{name}_BIAS": field.words.start if field else 0 for name, field in fields.items()}
