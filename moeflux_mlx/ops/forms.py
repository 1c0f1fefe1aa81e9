"""How stored matrices are read: the constants of a kernel's text, and MLX's own operations on the same matrices.

A `Form` is a `Quant` with the dtype of its scales. Kernels read a row in chunks of a few words of codes. A lane holds
one chunk at a time, so neighbouring lanes read neighbouring chunks.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from typing import cast

import mlx.core as mx

from ..formats.record import Projection
from ..quant import E2M1, E4M3, FLOAT, FLOAT16, GLOBAL_UNIT, INTEGER, MODES, TABLE, Quant
from . import backend
from .launch import Template
from .nested import HALF, group_scales, of_halves
from .table_values import block_scales, table_values
from .tiles import Tile

MULTIPLE = 64  # the kernels need a multiple of this number of columns, for any group
# Columns of a chunk by bits: 16 bytes where a load can be as wide, else as many whole words as 32 or 64 columns fill.
CHUNKS = {1: 64, 2: 64, 3: 64, 4: 32, 5: 32, 6: 32, 8: 16}
# Codes, or kinds of scales of GGUF's integers, and bits that a backend's kernels for experts multiply as integers: the
# latter by pairs of bytes, which have integers of 16 bits beside them, so not for float32.
INTEGERS: dict[str, tuple[tuple[str, int], ...]] = {
    "cuda": (
        *((INTEGER, 2), (INTEGER, 3), (E2M1, 4), *((TABLE, bits) for bits in (1, 2, 3, 4))),
        *(("q2_k", 2), ("q3_k", 3), ("q4_k", 4), ("q4_k", 5), ("q6_k", 6)),
    )
}
TABLE_BITS, TABLE_CHUNK = 8, 32  # bits of a code of a table when it has been loaded, columns of a chunk
# Forms of which a chunk has twice as many where they are multiplied as integers: others did not gain on an H200.
WIDE = ("iq2_xxs", "tq1_0", "tq2_0")
PLANES = {mx.float32: 3, mx.bfloat16: 2, mx.float16: 2}  # bytes of an x then
DTYPES = {"U32": mx.uint32, "BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32, "U8": mx.uint8}  # of a field
NAMES = {dtype: name for name, dtype in DTYPES.items()}


# Of metal/stored.h.metal: BITS, GROUP, KIND, and the types of scales and of what is behind them.
StoredForm = tuple[int, int, int, mx.Dtype | str, mx.Dtype | str]


def stored_template(form: StoredForm) -> Template:
    """The constants of a text that reads a matrix by metal/stored.h.metal."""
    return dict(zip(("BITS", "GROUP", "KIND", "S", "G"), form, strict=True))


@dataclass(frozen=True)
class Form:
    """The stored form of a matrix, as far as a kernel's text depends on it."""

    quant: Quant
    scales: mx.Dtype
    planes: int = 0  # bytes of an x, where codes are multiplied as integers

    def __str__(self) -> str:
        return f"{self.quant}, {self.scales}".replace("mlx.core.", "")

    @cached_property
    def header(self) -> str:
        """The text that unpacks its codes: `metal/{header}.h.metal`."""
        if self.quant.codes == TABLE:
            return "table_planes" if self.planes else "tables"
        if self.planes:
            return "pairs" if self.by_pairs else "planes"
        if self.quant.codes != INTEGER:
            return self.quant.codes
        return "affine4" if self.quant.bits == 4 else "affine"

    def header_of(self, tile: Tile) -> str:
        """`header`, or the one that a tile chooses instead."""
        return "affine4_halves" if tile.halves and self.header == "affine4" else self.header

    @cached_property
    def chunk(self) -> int:
        """Columns of a chunk."""
        if self.quant.codes == TABLE:
            return 2 * TABLE_CHUNK if self.planes and self.quant.mode in WIDE else TABLE_CHUNK
        return CHUNKS[self.quant.bits]

    @cached_property
    def template(self) -> Template:
        """The constants of the text."""
        quant = self.quant
        scale = scale_type(quant, self.scales)
        made: Template = {"S": scale, "G": third_type(quant, scale)}
        if self.header == "pairs" and quant.bits < 4:
            made["S"] = f"{scale}_bytes"
        bits = TABLE_BITS if quant.codes == TABLE else quant.bits
        made |= {"BITS": bits, "GROUP": quant.group_size, "CHUNK": self.chunk}
        return made | {"PLANES": self.planes} if self.planes else made

    @cached_property
    def record_template(self) -> Template:
        """The constants for a matrix in a record, where a global scale is one number instead of one per row."""
        return self.template | ({"G": "codes_whole"} if self.quant.has_global_scale else {})

    def for_experts(self, target: str, dtype: mx.Dtype) -> "Form":
        """The form as read by a backend's kernels for experts, with x of this dtype."""
        integers = INTEGERS.get(target, ())
        if self.by_pairs:
            is_integer = (self.quant.scale, self.quant.bits) in integers and PLANES[dtype] == 2
        else:
            is_integer = (self.quant.codes, self.quant.bits) in integers
        return replace(self, planes=PLANES[dtype]) if is_integer else self

    @cached_property
    def by_pairs(self) -> bool:
        """Whether codes, if they are multiplied as integers, are so by metal/pairs.h.metal."""
        return self.quant.codes == INTEGER and not self.quant.is_of_mlx

    @cached_property
    def near(self) -> int:
        """Bytes of a threadgroup's memory for the grid, `CODES_NEAR` of the text on CUDA."""
        return prod(self.quant.grid) if self.quant.grid else 0

    def room(self, columns: int) -> int:
        """Bytes of a threadgroup's memory for this number of columns of x, `CODES_PLANES` of the text."""
        return columns // 64 * 16 * (4 * self.planes + (2 if self.by_pairs else 1)) if self.planes else 0

    def chunks(self, columns: int) -> int:
        """Number of chunks of a row."""
        return columns // self.chunk

    def ahead(self, pieces: int) -> int:
        """Number of chunks with about as many bytes as `pieces` of 16: a power of two that divides a row."""
        near = max(1, round(pieces * 128 / (self.quant.bits * self.chunk)))
        return pieces if self.planes else 1 << (near.bit_length() - 1)


def is_read(quant: Quant, columns: int) -> bool:
    """Whether the GPU kernels and the native ones read matrices of this form with rows of `columns` columns."""
    return quant.is_known and columns % MULTIPLE == 0 and columns % quant.multiple == 0


def scale_type(quant: Quant | None, floating: mx.Dtype) -> mx.Dtype | str:
    """The type of a scale in the kernels' texts."""
    if quant is None or quant.scale == FLOAT:
        return floating
    return mx.float16 if quant.scale == FLOAT16 else f"codes_{quant.scale}"


def third_type(quant: Quant, scale: mx.Dtype | str) -> mx.Dtype | str:
    """The type of what is behind the scales, of the type `scale`, in the kernels' texts."""
    if quant.has_global_scale:
        return mx.float32
    if quant.codes == TABLE:
        return "codes_grid"
    return f"codes_super{MODES[quant.mode].supers}" if quant.is_nested and quant.has_supers else scale


def code_number(quant: Quant | None) -> int:
    """`KIND` of the kernels' texts that are compiled for any code: 0 for integers and plain values."""
    return 0 if quant is None else (INTEGER, E2M1, E4M3).index(quant.codes)


@cache
def form_of(projection: Projection) -> Form:
    """The form of a matrix in a record."""
    return Form(projection.quant, DTYPES[projection.fields[1].dtype])


# ---- MLX's own operations


def settings(quant: Quant) -> Template:
    """The form's arguments for MLX's operations, which take GGUF's forms as affine ones with the scales and biases of
    `group_scales`.
    """
    if quant.is_of_mlx:
        return {"group_size": quant.group_size, "bits": quant.bits, "mode": quant.mode}
    return {"group_size": max(quant.group_size, 2 * HALF), "bits": quant.bits, "mode": "affine"}


def unpacked(quant: Quant, codes: mx.array, scales: mx.array, third: mx.array | None = None) -> mx.array:
    """The weights in the dtype of float scales; for 8-bit scales in bfloat16, or with a global scale or in GGUF's forms
    in float32.

    `third`: biases, or a global scale, [..., rows or 1, 1].
    """
    if quant.has_global_scale or not quant.is_of_mlx:
        return unpacked_float32(quant, codes, scales, third)
    return _dequantized(quant, codes, scales, third)


def is_computed(target: str, quant: Quant) -> bool:
    """Whether MLX's operations compute this form: its CUDA build 0.32.4 computes nothing for 1 bit, and reports no
    error.
    """
    return quant.bits != 1 or target != "cuda"


def _dequantized(quant: Quant, codes: mx.array, scales: mx.array, biases: mx.array | None) -> mx.array:
    if quant.group_size == HALF and biases is not None:
        return of_halves(lambda *of_pairs: mx.dequantize(codes, *of_pairs, **settings(quant)), scales, biases)
    if is_computed(backend.name(), quant):
        return mx.dequantize(codes, scales, biases, **settings(quant))
    bits = (codes.view(mx.uint8)[..., None] >> mx.arange(8, dtype=mx.uint8)) & 1
    groups = bits.reshape(*scales.shape, quant.group_size).astype(scales.dtype)
    weights = groups * scales[..., None] + cast(mx.array, biases)[..., None]
    return weights.reshape(*codes.shape[:-1], -1)


def unpacked_float32(quant: Quant, codes: mx.array, scales: mx.array, third: mx.array | None = None) -> mx.array:
    """The weights in float32, for scales of any dtype."""
    if quant.codes == TABLE:
        return table_values(quant, codes, scales, third)
    scales, biases = _wide(quant, scales, third)
    weights = _dequantized(quant, codes, scales, biases).astype(mx.float32)
    return weights if third is None or not quant.has_global_scale else weights * factors(third)


def matmul_float32(
    x: mx.array, quant: Quant, codes: mx.array, scales: mx.array, third: mx.array | None = None
) -> mx.array:
    """x @ W.T in float32: MLX's CPU build sums bfloat16 in bfloat16, at an eighth of the speed."""
    x = x.astype(mx.float32)
    if quant.codes == TABLE or not quant.is_of_mlx and quant.group_size == HALF:
        return x @ unpacked_float32(quant, codes, scales, third).swapaxes(-1, -2)
    scales, biases = _wide(quant, scales, third)
    product = mx.quantized_matmul(x, codes, scales, biases, transpose=True, **settings(quant))
    return product if third is None or not quant.has_global_scale else product * factors(third).swapaxes(-1, -2)


def float_scales(quant: Quant, *parts: mx.array) -> tuple[mx.array, ...]:
    """The floats that a matrix's parts beside the codes stand for, which must be finite."""
    if quant.is_of_mlx:
        return parts
    return (block_scales(quant, parts[0]),) if quant.codes == TABLE else group_scales(quant, *parts)


def factors(global_scale: mx.array) -> mx.array:
    """The factors of the scales."""
    return global_scale * (1 / GLOBAL_UNIT)


def _wide(quant: Quant, scales: mx.array, third: mx.array | None) -> tuple[mx.array, mx.array | None]:
    """Scales and biases as MLX's operations take them, in float32 if they are floats."""
    if not quant.is_of_mlx:
        return group_scales(quant, scales, third)
    if quant.scale != FLOAT:
        return scales, None
    return scales.astype(mx.float32), None if third is None else third.astype(mx.float32)
