"""Where everything lies inside an expert's record, and where records lie in a layer's file. The only owner of offsets.

A record is gate, up and down, each as codes, scales and (in mode affine) biases, without gaps, as flash-moe and moeflux
write it: codes as `Quant` says, scales and biases in one floating dtype, one of each for a group of inputs. Layers may
differ. Kernels and C code are handed the offsets that stand here; how a file says them is `layout_file`'s.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from ..errors import ConfigError
from ..quant import EXPERTS, PARTS, Quant, Quantization
from ..spec import ModelArgs

LOAD_BYTES = 16  # kernels read a record in pieces of this size, so that is where one may begin
STRIDE_ALIGNMENT = 16384  # Apple Silicon's page: what adoption without copy and direct I/O both need
BLOCK_BYTES = 4096  # of a disk, for direct I/O: what a record in memory is rounded up to
SCALE_DTYPES = ("BF16", "F16", "F32")  # of scales and biases in mode affine
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
ITEM_BYTES = {"U32": 4, "BF16": 2, "F16": 2, "F32": 4, "U8": 1}  # of a value

Key = tuple[int, int]  # layer, expert
Quants = tuple[Quant, Quant, Quant]  # of gate, up and down
UNIFORM: Quants = (EXPERTS, EXPERTS, EXPERTS)


@dataclass(frozen=True)
class Field:
    """One tensor of a record; `offset` and `size` in bytes from the record's start."""

    name: str
    offset: int
    size: int
    dtype: str  # of ITEM_BYTES
    shape: tuple[int, int]

    @property
    def end(self) -> int:
        return self.offset + self.size

    @property
    def words(self) -> slice:
        """Where it lies in a record of uint32 words."""
        return slice(self.offset // 4, self.end // 4)


@dataclass(frozen=True)
class Projection:
    """One matrix [rows, columns] of a record: its codes, scales and, where its form has them, biases."""

    rows: int
    columns: int
    quant: Quant
    fields: tuple[Field, ...]

    @cached_property
    def words(self) -> tuple[int, ...]:
        """Where each field begins, in uint32 words from the record's start."""
        return tuple(field.offset // 4 for field in self.fields)


@dataclass(frozen=True)
class Record:
    """The geometry of one expert: three projections, and `stride` bytes from one record to the next."""

    gate: Projection
    up: Projection
    down: Projection
    stride: int

    @classmethod
    @cache  # equal ones are the same object, which is cheap to look up at every launch
    def make(
        cls,
        hidden_size: int,
        moe_intermediate_size: int,
        quants: Quants = UNIFORM,
        stride: int | None = None,
        dtype: str = "BF16",
    ) -> "Record":
        """Args:
        hidden_size, moe_intermediate_size: of the experts: gate and up are [I, H], down is [H, I].
        quants: of gate, up and down.
        stride: None for the size, rounded up to whole pages.
        dtype: of scales and biases in mode "affine"; the other modes say their own.
        """
        H, I = hidden_size, moe_intermediate_size
        made, end = [], 0
        for name, shape, quant in zip(PROJECTIONS, ((I, H), (I, H), (H, I)), quants, strict=True):
            made.append(_projection(name, *shape, quant, end, dtype))
            end = made[-1].fields[-1].end
        gate, up, down = made
        return cls(gate, up, down, rounded(end, STRIDE_ALIGNMENT) if stride is None else stride)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Looked up at every launch of a kernel."""
        return hash((self.gate, self.up, self.down, self.stride))

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """All tensors, in the order in which they lie."""
        return (*self.gate.fields, *self.up.fields, *self.down.fields)

    @property
    def quants(self) -> Quants:
        return self.gate.quant, self.up.quant, self.down.quant

    @cached_property
    def dtype(self) -> str:
        """Of scales and biases in mode affine; that of bfloat16 where there are none."""
        return next((field.dtype for field in self.fields if field.dtype in SCALE_DTYPES), "BF16")

    @property
    def hidden_size(self) -> int:
        return self.gate.columns

    @property
    def moe_intermediate_size(self) -> int:
        return self.gate.rows

    @cached_property
    def size(self) -> int:
        """Bytes, without what follows up to the stride."""
        return self.fields[-1].end

    @cached_property
    def held_bytes(self) -> int:
        """What a record takes in memory, and a read past the page cache brings: whole blocks of a disk."""
        return rounded(self.size, BLOCK_BYTES)

    def spaced(self, stride: int) -> "Record":
        """The same record, `stride` bytes from the next."""
        return Record.make(self.hidden_size, self.moe_intermediate_size, self.quants, stride, self.dtype)


def rounded(nbytes: int, alignment: int) -> int:
    """Up to a multiple of `alignment`."""
    return math.ceil(nbytes / alignment) * alignment


def _projection(name: str, rows: int, columns: int, quant: Quant, start: int, of_groups: str) -> Projection:
    groups = (rows, quant.groups(columns))
    shapes = [(rows, quant.words(columns)), groups, *([groups] if quant.has_biases else [])]
    fields, offset = [], start
    for part, shape in zip(PARTS, shapes, strict=False):
        dtype = "U32" if part == "weight" else quant.of_groups(of_groups)
        fields.append(Field(f"{name}.{part}", offset, math.prod(shape) * ITEM_BYTES[dtype], dtype, shape))
        offset = fields[-1].end
    return Projection(rows, columns, quant, tuple(fields))


@dataclass(frozen=True)
class ExpertLayout:
    """Geometry of `packed_experts/`: for each layer with experts a file of `num_experts` records.

    Args:
        records: by layer, ascending.
        num_experts: of a layer.
        num_layers: of the model, those without experts included.
    """

    records: Mapping[int, Record]
    num_experts: int
    num_layers: int

    @classmethod
    def from_args(
        cls,
        args: ModelArgs,
        quants: Mapping[int, Quants] | None = None,
        dtypes: str | Mapping[int, str] = "BF16",
    ) -> "ExpertLayout":
        """Args:
        args: of the model.
        quants: of gate, up and down by layer; None: what version 1 of the format has everywhere.
        dtypes: of scales and biases in mode affine, for all layers or by layer.

        Raises:
            ConfigError: a width is no multiple of a group.
        """
        H, I, records = args.hidden_size, args.moe_intermediate_size, {}
        for layer in args.moe_layers:
            stored = UNIFORM if quants is None else quants[layer]
            _check_groups(layer, H, I, stored)
            records[layer] = Record.make(H, I, stored, None, dtypes if isinstance(dtypes, str) else dtypes[layer])
        layout = cls(records, args.num_experts, args.num_hidden_layers)
        if layout.is_uniform:
            return layout
        return replace(layout, records={i: one.spaced(layout.spacing(one)) for i, one in records.items()})

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(self.records)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all layers have the geometry that version 1 of the format can say."""
        first = next(iter(self.records.values()))
        return first.quants == UNIFORM and first.dtype == "BF16" and set(self.records.values()) == {first}

    def spacing(self, record: Record) -> int:
        """Stride in files of version 2: whole disk blocks, for direct I/O.

        A file is whole pages, as Metal wants of what it adopts; where the number of experts does not see to that, a
        record is.
        """
        pages = self.num_experts * BLOCK_BYTES % STRIDE_ALIGNMENT == 0
        return rounded(record.size, BLOCK_BYTES if pages else STRIDE_ALIGNMENT)

    @cached_property
    def held_bytes(self) -> int:
        """Of memory, for a record of any layer."""
        return max(record.held_bytes for record in self.records.values())

    @cached_property
    def expert_stride(self) -> int:
        """Bytes from one record to the next, of the layer where that is most."""
        return max(record.stride for record in self.records.values())

    def start(self, layer: int, expert: int) -> int:
        """Bytes from the beginning of the layer's file to the expert's record."""
        return expert * self.records[layer].stride

    def layer_bytes(self, layer: int) -> int:
        """Of a layer's file."""
        return self.num_experts * self.records[layer].stride

    @cached_property
    def largest_layer(self) -> int:
        """Bytes of the largest file."""
        return max(map(self.layer_bytes, self.moe_layers))

    @cached_property
    def total_bytes(self) -> int:
        return sum(map(self.layer_bytes, self.moe_layers))

    def experts_within(self, nbytes: int, at_most: int) -> int:
        """How many records of any layer fit `nbytes` of memory: at least one, and no more than `at_most`.

        It depends on the records alone, not on how files space them.
        """
        return max(1, min(nbytes // self.held_bytes, at_most))

    def next_moe_layer(self, layer: int) -> int | None:
        """The first layer with experts after `layer`."""
        return next((i for i in self.moe_layers if i > layer), None)

    def file_name(self, layer: int) -> str:
        return f"layer_{layer:02d}.bin"

    @property
    def record(self) -> Record:
        """The geometry of every layer, where all have the same.

        Raises:
            ValueError: they have not.
        """
        (record,) = set(self.records.values())
        return record


def expert_path(layer: int, projection: str) -> str:
    """The module path that config.json knows a layer's experts by."""
    return f"model.layers.{layer}.mlp.switch_mlp.{projection}"


def stated_quants(quantization: Quantization, layer: int) -> tuple[Quant | None, ...]:
    """What config.json says of a layer's gate, up and down."""
    return tuple(quantization.of(expert_path(layer, projection)) for projection in PROJECTIONS)


def _check_groups(layer: int, hidden: int, inner: int, quants: Quants) -> None:
    for projection, columns, quant in zip(PROJECTIONS, (hidden, hidden, inner), quants, strict=True):
        if columns % quant.group_size:
            raise ConfigError(
                f"{expert_path(layer, projection)} has {quant}; its {columns} columns are no multiple of the group"
            )
