"""The offsets of the fields in an expert's record, and of records in a layer's file. No other module knows offsets.

A record is an expert's matrices: gate, up and down, or up and down alone, or that of a value expert. Each has these
fields, in this order:

    weight        uint32 [rows, words]           codes, as `Quant` says
    scales        [rows, groups]                 one for a group of inputs: floating, or 8 bits
    biases        [rows, groups], floating       in mode affine
    supers, minima  float16                      in GGUF's modes that `Quant` says; there `scales` are bytes
    bias          [rows], floating               where the experts add biases to their products
    global_scale  float32 [1]                    where the form has a factor for a whole matrix
    grid          uint8 [entries, values]        where codes name values in a table

All floating fields have one dtype, but for the factor, `supers` and `minima`. Every field begins at the next multiple
of LOAD_BYTES after the one before it, and zeros fill the gap. In MLX's forms only a global scale leaves a gap: other
fields are whole multiples, since widths are multiples of 64. So records of gate, up and down without the last two
fields have no gaps, as flash-moe and moeflux write them.

Layers may differ. Kernels and C code are handed the offsets that stand here; how a file says them is `layout_file`'s.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from ..errors import ConfigError
from ..files import JsonValue
from ..kinds import SILU, Activation
from ..quant import EXPERTS, GLOBAL_SCALE, GRID, MINIMA, SUPERS, Quant, Quantization, fitting
from ..spec import ModelArgs

LOAD_BYTES = 16  # kernels read a record in pieces of this size, so that is where it and its fields may begin
STRIDE_ALIGNMENT = 16384  # Apple Silicon's page: what adoption without copy and direct I/O both need
BLOCK_BYTES = 4096  # a disk block for direct I/O; a record in memory is rounded up to it
SCALE_DTYPES = ("BF16", "F16", "F32")  # dtypes of floating scales and biases
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
VALUES = "v_proj"  # the only matrix of a value expert
FIXED = (GLOBAL_SCALE, SUPERS, MINIMA)  # floating fields whose dtype is that of their form
BIAS = "bias"  # the field that a matrix's product adds; `quant` names the others
ITEM_BYTES = {"U32": 4, "BF16": 2, "F16": 2, "F32": 4, "U8": 1}  # bytes of a value

Key = tuple[int, int]  # layer, expert
Quants = tuple[Quant, ...]  # forms of gate, up and down, or of up and down
UNIFORM: Quants = (EXPERTS, EXPERTS, EXPERTS)


@dataclass(frozen=True)
class Field:
    """One tensor of a record; `offset` and `size` in bytes from the record's start."""

    name: str
    offset: int
    size: int
    dtype: str  # a key of ITEM_BYTES
    shape: tuple[int, ...]

    @property
    def part(self) -> str:
        """The field's name without that of its matrix."""
        return self.name.rpartition(".")[2]

    @property
    def end(self) -> int:
        return self.offset + self.size

    @property
    def beside(self) -> tuple[int, ...]:
        """The field's shape if codes are [rows, words]; a global scale belongs to all rows."""
        return (1, 1) if self.part == GLOBAL_SCALE else self.shape

    @property
    def words(self) -> slice:
        """The field's slice in a record of uint32 words."""
        return slice(self.offset // 4, self.end // 4)


@dataclass(frozen=True)
class Projection:
    """One matrix [rows, columns] of a record, and its fields in the order in which they lie."""

    name: str  # one of PROJECTIONS, or VALUES
    rows: int
    columns: int
    quant: Quant
    fields: tuple[Field, ...]

    @cached_property
    def words(self) -> tuple[int, ...]:
        """Where each field begins, in uint32 words from the record's start."""
        return tuple(field.offset // 4 for field in self.fields)

    @cached_property
    def codes(self) -> tuple[Field, ...]:
        """Weight, scales and, where the form has them, biases or a global scale."""
        fields = {field.part: field for field in self.fields}
        return tuple(fields[part] for part in self.quant.parts)

    @cached_property
    def bias(self) -> Field | None:
        """The field of the product's bias, or None."""
        return next((field for field in self.fields if field.part == BIAS), None)


@dataclass(frozen=True)
class Record:
    """One expert: its projections, `stride` bytes from one record to the next, and what joins gate and up.

    `interleaved`: rows of gate and up alternate, gate's first, as a checkpoint has them in one matrix; the first half
    of them lies in gate's place and the second in up's. Packed records never are. Everything but this and the
    activation is geometry, which files state.
    """

    projections: tuple[Projection, ...]
    stride: int
    activation: Activation = SILU
    interleaved: bool = False

    @classmethod
    @cache  # equal ones are the same object, which is cheap to look up at every launch
    def make(
        cls,
        hidden_size: int,
        moe_intermediate_size: int,
        quants: Quants = UNIFORM,
        stride: int | None = None,
        dtype: str = "BF16",
        has_bias: bool = False,
        activation: Activation = SILU,
        interleaved: bool = False,
    ) -> "Record":
        """Args:
        hidden_size, moe_intermediate_size: of the experts: gate and up are [I, H], down and an only matrix are [H, I].
        quants: of gate, up and down, or of up and down alone, or of the only matrix.
        stride: None for the size, rounded up to whole pages.
        dtype: of floating scales and biases.
        has_bias: whether each matrix has a bias [rows].
        activation: what joins gate and up.
        interleaved: whether their rows alternate.
        """
        H, I = hidden_size, moe_intermediate_size
        made, end = list[Projection](), 0
        for name, quant in zip(projections_of(len(quants)), quants, strict=True):
            rows, columns = (I, H) if name in PROJECTIONS[:-1] else (H, I)
            made.append(_projection(name, rows, columns, quant, end, dtype, has_bias))
            end = made[-1].fields[-1].end
        spacing = rounded(end, STRIDE_ALIGNMENT) if stride is None else stride
        return cls(tuple(made), spacing, activation, interleaved)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Looked up at every launch of a kernel."""
        return hash((self.geometry, self.activation, self.interleaved))

    @property
    def geometry(self) -> tuple[tuple[Projection, ...], int]:
        """The part of a record that a file states."""
        return self.projections, self.stride

    @cached_property
    def gate(self) -> Projection:
        """The first: of a record of two matrices up, which takes gate's place too (`Activation`)."""
        return self.projections[0]

    @cached_property
    def up(self) -> Projection:
        """The last but one, or the only one."""
        return self.projections[-2:][0]

    @cached_property
    def down(self) -> Projection:
        """The last."""
        return self.projections[-1]

    @property
    def firsts(self) -> tuple[Projection, ...]:
        """All but the last: gate and up, or up alone."""
        return self.projections[:-1]

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """All tensors, in the order in which they lie."""
        return tuple(field for projection in self.projections for field in projection.fields)

    @property
    def quants(self) -> Quants:
        return tuple(projection.quant for projection in self.projections)

    @cached_property
    def dtype(self) -> str:
        """The dtype of floating scales and biases; bfloat16 if there are none."""
        return floating_dtype((field.name, field.dtype) for field in self.fields)

    @property
    def hidden_size(self) -> int:
        return self.down.rows

    @property
    def moe_intermediate_size(self) -> int:
        return self.down.columns

    @cached_property
    def size(self) -> int:
        """Bytes, without what follows up to the stride."""
        return self.fields[-1].end

    @cached_property
    def held_bytes(self) -> int:
        """Bytes of a record in memory and of a direct read: whole blocks of a disk."""
        return rounded(self.size, BLOCK_BYTES)

    def spaced(self, stride: int) -> "Record":
        """The same record, `stride` bytes from the next."""
        return self._made(stride, self.interleaved)

    def in_turns(self) -> "Record":
        """The same record with rows of gate and up that alternate."""
        return self._made(self.stride, True)

    def _made(self, stride: int, interleaved: bool) -> "Record":
        sizes, has_bias = (self.hidden_size, self.moe_intermediate_size), self.down.bias is not None
        return Record.make(*sizes, self.quants, stride, self.dtype, has_bias, self.activation, interleaved)


def rounded(nbytes: int, alignment: int) -> int:
    """`nbytes` rounded up to a multiple of `alignment`."""
    return math.ceil(nbytes / alignment) * alignment


def projections_of(matrices: int) -> tuple[str, ...]:
    """Names of an expert's matrices, of which there are three, two without a gate, or one of values."""
    return (VALUES,) if matrices == 1 else PROJECTIONS[-matrices:]


def floating_dtype(fields: Iterable[tuple[JsonValue, JsonValue]]) -> str:
    """The first dtype of scales and biases among `fields`, names and dtypes; that of bfloat16 where none is floating.

    A file may have brought them, so they can be anything.
    """
    kinds = (dtype for name, dtype in fields if not (isinstance(name, str) and name.endswith(FIXED)))
    return next((dtype for dtype in kinds if dtype in SCALE_DTYPES), "BF16")


def _projection(
    name: str, rows: int, columns: int, quant: Quant, start: int, floating: str, has_bias: bool
) -> Projection:
    fields, end = list[Field](), start
    for part, dtype, shape in _parts(rows, columns, quant, floating, has_bias):
        offset = rounded(end, LOAD_BYTES)
        fields.append(Field(f"{name}.{part}", offset, math.prod(shape) * ITEM_BYTES[dtype], dtype, shape))
        end = fields[-1].end
    return Projection(name, rows, columns, quant, tuple(fields))


def _parts(
    rows: int, columns: int, quant: Quant, floating: str, has_bias: bool
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of each of a matrix's fields, in the order in which they lie."""
    for part in (one for one in quant.parts if one not in (GLOBAL_SCALE, GRID)):
        values, dtype = quant.of_part(part, columns, floating)
        yield part, dtype, (rows, values)
    if has_bias:
        yield BIAS, floating, (rows,)
    if quant.has_global_scale:
        yield GLOBAL_SCALE, "F32", (1,)
    if quant.grid:
        yield GRID, "U8", quant.grid


@dataclass(frozen=True)
class ExpertLayout:
    """Geometry of `packed_experts/`: a file of records for each record set, which is the routed experts of a layer, or
    its value experts. A layer's number is that of its routed experts, and with `num_layers` added, of its value
    experts. Each set is treated like a layer by all that reads and keeps records.

    Args:
        records: by the number of the set, ascending.
        num_experts: routed experts of a layer.
        num_layers: of the model, those without experts included.
        num_values: value experts of a layer.
    """

    records: Mapping[int, Record]
    num_experts: int
    num_layers: int
    num_values: int = 0

    @classmethod
    def from_args(
        cls,
        args: ModelArgs,
        quants: Mapping[int, Quants] | None = None,
        dtypes: str | Mapping[int, str] = "BF16",
    ) -> "ExpertLayout":
        """Args:
        args: of the model.
        quants: of the experts' matrices by set; None: what version 1 of the format has everywhere.
        dtypes: of floating scales and biases, for all sets or by set.

        Raises:
            ConfigError: a width is no multiple of a group.
        """
        H, I, has_bias, values = args.expert_size, args.moe_intermediate_size, args.experts.biases, args.matrix_experts
        records, num_values = dict[int, Record](), 0 if values is None else values.router.experts
        for number in args.record_sets:
            stored = UNIFORM[-args.matrices_of(number) :] if quants is None else quants[number]
            dtype = dtypes if isinstance(dtypes, str) else dtypes[number]
            if number < args.num_hidden_layers:
                activation = args.experts_of(number).activation
                records[number] = Record.make(H, I, stored, None, dtype, has_bias, activation)
            elif values is not None:
                records[number] = Record.make(values.rows, args.hidden_size, stored, None, dtype)
            _check_groups(args, number, records[number])
        layout = cls(records, args.num_experts, args.num_hidden_layers, num_values)
        if layout.is_uniform:
            return layout
        return replace(layout, records={i: one.spaced(layout.spacing(i)) for i, one in records.items()})

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers with routed experts."""
        return tuple(number for number in self.records if number < self.num_layers)

    def count(self, number: int) -> int:
        """The experts of a set."""
        return self.num_experts if number < self.num_layers else self.num_values

    def named(self, key: Key) -> str:
        """An expert in messages."""
        number, expert = key
        return f"{'value ' * (number >= self.num_layers)}expert {expert} of layer {number % self.num_layers}"

    @property
    def most_experts(self) -> int:
        """The most experts of a set."""
        return max(self.num_experts, self.num_values)

    @cached_property
    def total_experts(self) -> int:
        """The experts of all sets."""
        return sum(map(self.count, self.records))

    def token_bytes(self, args: ModelArgs) -> int:
        """Bytes of the experts that one token goes through, in all visits of layers."""
        each = ((args.passes_of(number) * args.router_of(number).top_k, one) for number, one in self.records.items())
        return sum(count * record.held_bytes for count, record in each)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all layers have the geometry that version 1 of the format can say."""
        first = next(iter(self.records.values()))
        plain = Record.make(first.hidden_size, first.moe_intermediate_size, stride=first.stride)
        return {record.geometry for record in self.records.values()} == {plain.geometry}

    def spacing(self, number: int) -> int:
        """Stride in files of versions from 2 on: whole disk blocks, for direct I/O.

        A file is whole pages, as Metal wants of what it adopts; where the number of experts does not see to that, a
        record is.
        """
        pages = self.count(number) * BLOCK_BYTES % STRIDE_ALIGNMENT == 0
        return rounded(self.records[number].size, BLOCK_BYTES if pages else STRIDE_ALIGNMENT)

    @cached_property
    def held_bytes(self) -> int:
        """Bytes of memory for a record of any layer."""
        return max(record.held_bytes for record in self.records.values())

    def start(self, layer: int, expert: int) -> int:
        """Bytes from the beginning of the layer's file to the expert's record."""
        return expert * self.records[layer].stride

    def layer_bytes(self, layer: int) -> int:
        """Bytes of a set's file."""
        return self.count(layer) * self.records[layer].stride

    @cached_property
    def largest_layer(self) -> int:
        """Bytes of the largest file."""
        return max(map(self.layer_bytes, self.records))

    @cached_property
    def total_bytes(self) -> int:
        return sum(map(self.layer_bytes, self.records))

    def experts_within(self, nbytes: int, at_most: int) -> int:
        """How many records of any layer fit `nbytes` of memory: at least one, and no more than `at_most`.

        It depends on the records alone, not on how files space them.
        """
        return max(1, min(nbytes // self.held_bytes, at_most))

    def next_moe_layer(self, layer: int) -> int | None:
        """The first layer with experts after `layer`."""
        return next((i for i in self.moe_layers if i > layer), None)

    def file_name(self, layer: int) -> str:
        return f"layer_{layer:02d}.bin" if layer < self.num_layers else f"values_{layer - self.num_layers:02d}.bin"

    @property
    def record(self) -> Record:
        """The routed experts' in the first layer, where all layers have the same geometry.

        Raises:
            ValueError: they have not.
        """
        (_,) = {self.records[layer].geometry for layer in self.moe_layers}
        return next(iter(self.records.values()))


def expert_path(layer: int, projection: str) -> str:
    """The module path that config.json knows a layer's experts by."""
    return f"model.layers.{layer}.mlp.switch_mlp.{projection}"


def set_path(args: ModelArgs, number: int, projection: str) -> str:
    """The module path that config.json knows the experts of a record set by."""
    if number < args.num_hidden_layers:
        return expert_path(number, projection)
    layer = number - args.num_hidden_layers
    return f"model.layers.{layer}.{args.mixers[layer].module_name}.value_experts.{projection}"


def stated_quants(args: ModelArgs, quantization: Quantization, number: int) -> tuple[Quant | None, ...]:
    """The stored forms of the matrices of a set's experts in config.json."""
    return tuple(quantization.of(set_path(args, number, one)) for one in projections_of(args.matrices_of(number)))


def _check_groups(args: ModelArgs, number: int, record: Record) -> None:
    for one in record.projections:
        if one.columns % one.quant.multiple:
            faulty = f"{set_path(args, number, one.name)} has {one.quant}; its {one.columns} columns are not a multiple"
            fits = f"give smaller groups, or one of {', '.join(fitting(one.columns))}"
            raise ConfigError(f"{faulty} of {one.quant.multiple}; {fits}")
