"""Where everything lies inside an expert's record, and where records lie in a layer's file. The only owner of offsets.

A record is gate, up and down, each as codes, scales and biases, without gaps, as flash-moe and moeflux write it: codes
as `Quant` says, scales and biases in bfloat16, one for each group of inputs. Kernels and C code are handed the offsets
that stand here. `layout.json` version 1 can say one geometry for all layers, the one that is computed (`quant`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from ..errors import ModelFileError
from ..quant import EXPERTS, PARTS, Quant
from ..spec import ModelArgs

FORMAT_VERSION = 1
LOAD_BYTES = 16  # kernels read a record in pieces of this size, so that is where one may begin
STRIDE_ALIGNMENT = 16384  # Apple Silicon's page: what adoption without copy and direct I/O both need
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
ITEM_BYTES = {"U32": 4, "BF16": 2, "F16": 2, "F32": 4, "U8": 1}  # of a value

Key = tuple[int, int]  # layer, expert


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
        quants: tuple[Quant, Quant, Quant] = (EXPERTS,) * 3,
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
        pages = math.ceil(end / STRIDE_ALIGNMENT) * STRIDE_ALIGNMENT
        return cls(gate, up, down, pages if stride is None else stride)

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
    def words(self) -> int:
        """uint32 words from one record to the next."""
        return self.stride // 4


def _projection(name: str, rows: int, columns: int, quant: Quant, start: int, of_groups: str) -> Projection:
    groups = (rows, quant.groups(columns))
    shapes = [(rows, quant.words(columns)), groups, *([groups] if quant.has_biases else [])]
    fields, offset = [], start
    for part, shape in zip(PARTS, shapes, strict=False):
        dtype = "U32" if part == "weight" else of_groups if quant.mode == "affine" else "U8"
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
    def from_args(cls, args: ModelArgs) -> "ExpertLayout":
        record = Record.make(args.hidden_size, args.moe_intermediate_size)
        return cls(dict.fromkeys(args.moe_layers, record), args.num_experts, args.num_hidden_layers)

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(self.records)

    @cached_property
    def expert_stride(self) -> int:
        """Bytes that hold a record of any layer."""
        return max(record.stride for record in self.records.values())

    @property
    def words(self) -> int:
        """uint32 words that hold a record of any layer."""
        return self.expert_stride // 4

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
        """How many records fit `nbytes`: at least one, and no more than `at_most`."""
        return max(1, min(nbytes // self.expert_stride, at_most))

    def next_moe_layer(self, layer: int) -> int | None:
        """The first layer with experts after `layer`."""
        return next((i for i in self.moe_layers if i > layer), None)

    def file_name(self, layer: int) -> str:
        return f"layer_{layer:02d}.bin"

    def to_json(self) -> dict[str, Any]:
        """The contents of `layout.json`, version 1: moeflux's keys, then ours."""
        record = self.record
        return {
            "expert_size": record.size,
            "num_layers": self.num_layers,
            "num_experts": self.num_experts,
            "components": [
                {"name": f.name, "offset": f.offset, "size": f.size, "dtype": f.dtype, "shape": list(f.shape)}
                for f in record.fields
            ],
            "moe_layers": list(self.moe_layers),
            "expert_stride": record.stride,
            "format_version": FORMAT_VERSION,
            "group_size": record.gate.quant.group_size,
            "bits": record.gate.quant.bits,
        }

    @property
    def record(self) -> Record:
        """The geometry of every layer, where all have the same, as version 1 of the format demands.

        Raises:
            ValueError: they have not.
        """
        (record,) = set(self.records.values())
        return record

    def _spaced(self, stride: int) -> Record:
        """The record of all layers, `stride` bytes apart."""
        record = self.record
        quants = record.gate.quant, record.up.quant, record.down.quant
        return Record.make(record.hidden_size, record.moe_intermediate_size, quants, stride)

    def check_json(self, found: Mapping[str, Any], where: object) -> "ExpertLayout":
        """This layout with the stride that `found` (a layout.json) states, once everything else agrees.

        Files of flash-moe and moeflux lack our keys: no stride means records back to back.

        Raises:
            ModelFileError: any value contradicts the model's configuration.
        """
        version = found.get("format_version", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise ModelFileError(f"{where}: format_version {version!r} is not {FORMAT_VERSION}")
        record = self.record
        stride = found.get("expert_stride", record.size)
        if type(stride) is not int or stride < record.size or stride % LOAD_BYTES:
            raise ModelFileError(
                f"{where}: expert_stride {stride!r} does not hold {record.size}-byte experts "
                f"at multiples of {LOAD_BYTES}"
            )
        checked = replace(self, records=dict.fromkeys(self.records, self._spaced(stride)))
        for key, wanted in checked.to_json().items():
            value = found.get(key, wanted if key not in ("expert_size", "num_experts", "components") else None)
            if key == "components":
                value = _same_components(value, wanted)
            if value != wanted:
                raise ModelFileError(f"{where}: {key} is {value!r}; the model's config.json gives {wanted!r}")
        return checked


def _same_components(value: Any, wanted: list[dict[str, Any]]) -> Any:
    """`value` with only the keys that are compared, so that extra ones in another tool's file do no harm."""
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        return value
    return [{key: one.get(key) for key in wanted[0]} for one in value]
