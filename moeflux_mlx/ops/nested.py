"""Nested scales, the forms of GGUF's K types: how they are to lie in memory, and their values by MLX's operations.

256 weights of a row share a float16 d, and m if the form has minima. Groups of 16 or 32 of them have scale codes S, and
M. A weight of code q is, in float32 and in this order,

    (d * (S - scale_zero)) * (q - zero) - m * M

| type | bits of q | group | bits of S, M | scale_zero | zero | minima | bytes of 256 weights: q, S, M, d and m |
|---|---|---|---|---|---|---|---|
| Q2_K | 2 | 16 | 4 | 0 | 0 | yes | 64 + 8 + 8 + 4 = 84 |
| Q3_K | 3 | 16 | 6 | 32 | 4 | no | 96 + 12 + 0 + 2 = 110 |
| Q4_K | 4 | 32 | 6 | 0 | 0 | yes | 128 + 6 + 6 + 4 = 144 |
| Q5_K | 5 | 32 | 6 | 0 | 0 | yes | 160 + 6 + 6 + 4 = 176 |
| Q6_K | 6 | 16 | 8 | 128 | 32 | no | 192 + 16 + 0 + 2 = 210 |

Each of q, S, M, d and m is an array of its own (a plane), in which a row is one stream of bits, first code in the
lowest bits: the codes lie as those of affine forms do, so a kernel for affine codes reads them in the same words and
differs only in where a group's scale and bias come from: d * (S - scale_zero), and -m * M less `zero` times the scale.
No type takes more bytes than in its file. The file's own blocks would need no rearranging, but most of them begin at
odd multiples of 2 bytes, which wide loads of a GPU cannot read. No kernel reads these forms yet.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx

SUPER = 256  # weights that share d and m


@dataclass(frozen=True)
class Nested:
    """A form with nested scales; the columns of the table above."""

    bits: int
    group: int
    scale_bits: int
    scale_zero: int = 0
    zero: int = 0
    has_minima: bool = False

    @cached_property
    def groups(self) -> int:
        """Groups of 256 weights."""
        return SUPER // self.group


NESTED = {
    "Q2_K": Nested(2, 16, 4, has_minima=True),
    "Q3_K": Nested(3, 16, 6, scale_zero=32, zero=4),
    "Q4_K": Nested(4, 32, 6, has_minima=True),
    "Q5_K": Nested(5, 32, 6, has_minima=True),
    "Q6_K": Nested(6, 16, 8, scale_zero=128, zero=32),
}


class Planes(NamedTuple):
    """A matrix of `columns` columns: streams of bits, uint8 [..., bytes], and float16 [..., columns / 256]."""

    codes: mx.array
    scales: mx.array
    d: mx.array
    minima: mx.array | None = None
    m: mx.array | None = None


def nested_values(form: Nested, planes: Planes) -> mx.array:
    """The weights [..., columns] in float32."""
    codes = stream(planes.codes, form.bits).astype(mx.float32) - form.zero
    scales = stream(planes.scales, form.scale_bits).astype(mx.float32) - form.scale_zero
    weights = codes.reshape(*scales.shape, form.group) * (_repeated(planes.d, form) * scales)[..., None]
    if planes.minima is not None and planes.m is not None:
        minima = stream(planes.minima, form.scale_bits).astype(mx.float32)
        weights = weights - (_repeated(planes.m, form) * minima)[..., None]
    return weights.reshape(codes.shape)


def stream(data: mx.array, bits: int) -> mx.array:
    """The codes of `bits` bits, at most 8, in rows of bytes [..., bytes]; uint16 [..., bytes * 8 / bits]."""
    first = mx.arange(data.shape[-1] * 8 // bits) * bits
    wide = mx.concatenate([data, mx.zeros_like(data[..., :1])], axis=-1).astype(mx.uint16)
    low, high = (mx.take(wide, first // 8 + i, axis=-1) for i in (0, 1))
    return (low | high << 8) >> (first % 8).astype(mx.uint16) & ((1 << bits) - 1)


def _repeated(supers: mx.array, form: Nested) -> mx.array:
    """For each group the float32 that its 256 weights share."""
    return mx.repeat(supers.astype(mx.float32), form.groups, axis=-1)
