"""Rounds blocks of values to eight or four bits and back to floats, as models compute that were trained so
(DeepSeek-V4.1; the formulas are those of mlx-vlm 0.7.10, `deepseek_v41/fakequant.py`).

One form serves MLX's arrays and numpy's; on a GPU a kernel does the same. Ties go to the even code.
"""

from math import prod
from typing import NamedTuple

import mlx.core as mx

from . import backend
from .backend import AnyArray, Array, kernels_take, library_of
from .elementwise import float32
from .launch import Kernel, Launch, Reason, Shape, ceildiv
from .tiles import planned

E4M3_MOST, E2M1_MOST = 448.0, 6.0
ONE = 127  # the exponent of 1 in a float32, whose mantissa has MANTISSA bits
MANTISSA = 23
ROUND, THREADS = Kernel("block_round", "x", "y"), 256


def to_e4m3(x: Array, block: int, first: int | None = None) -> Array:
    """x with each block of its last axis rounded to E4M3 (OCP 8-bit floats) times a power of two, the least with which
    no value exceeds the largest code. `first`: of a single row only so many values, the others stay as they are.
    """
    return _rounded(x, RoundingRule(block, 1e-4, E4M3_MOST, 3, -6), first)


def to_e2m1(x: Array, block: int, has_e4m3_scale: bool = False) -> Array:
    """x with each block of its last axis rounded to E2M1 (OCP microscaling floats) times a power of two as in
    `to_e4m3`; or times a sixth of the block's largest value, which is rounded to E4M3 itself.
    """
    least = E2M1_MOST * (2.0**-9 if has_e4m3_scale else 2.0**-126)
    return _rounded(x, RoundingRule(block, least, E2M1_MOST, 1, 0, has_e4m3_scale))


class RoundingRule(NamedTuple):
    """Blocks, whose largest value counts as `least` if it is less; and their codes: the `largest`, the bits behind the
    first one, and the lowest exponent. `has_e4m3_scale`: scales are not powers of two.
    """

    block: int
    least: float
    largest: float
    bits: int
    lowest: int
    has_e4m3_scale: bool = False


def _rounded(x: Array, rule: RoundingRule, first: int | None = None) -> AnyArray:
    library = library_of(x)
    if kernels_take(x, refusal, rule.block):
        return plan(backend.name(), x.dtype, x.shape, first, rule)(x)[0]
    if first is not None:
        return library.concatenate([_rounded(x[..., :first], rule), x[..., first:]], axis=-1)
    blocks = float32(x).reshape(*x.shape[:-1], -1, rule.block)
    most = library.maximum(abs(blocks).max(axis=-1, keepdims=True), library.array(rule.least, library.float32))
    if rule.has_e4m3_scale:
        scale = _nearest(library.minimum(most / rule.largest, E4M3_MOST), 3, -6)
    else:
        scale = _power_above(most * (1 / rule.largest))
    codes = _nearest(library.clip(blocks / scale, -rule.largest, rule.largest), rule.bits, rule.lowest)
    return (codes * scale).reshape(x.shape).astype(x.dtype)


@planned("block_rounding")
def refusal(target: str, block: int) -> Reason | None:
    """Why no kernel rounds blocks of so many values."""
    return None if block in (16, 32) else Reason(f"blocks of {block} values do not lie in one simdgroup")


@planned("block_rounding")
def plan(target: str, dtype: mx.Dtype, shape: Shape, first: int | None, rule: RoundingRule) -> Launch:
    count = prod(shape)
    template = {"X": dtype, "ALL": count, "N": count if first is None else first, "T": THREADS, "BLOCK": rule.block}
    template |= {"LEAST": rule.least, "LARGEST": rule.largest, "INVERSE": 1 / rule.largest, "BITS": rule.bits}
    template |= {"LOWEST": rule.lowest, "NESTED": int(rule.has_e4m3_scale)}
    return Launch(target, ROUND, template, (ceildiv(count, THREADS), 1), THREADS, [(shape, dtype)])


def _nearest(x: Array, bits: int, lowest: int) -> Array:
    """The nearest values with so many bits behind the first one, and exponents from `lowest` on."""
    library = library_of(x)
    exponent = library.maximum(_bits(x) >> MANTISSA & 0xFF, ONE + lowest) - bits
    step = (exponent << MANTISSA).view(library.float32)
    scaled = x / step
    return library.round(scaled) * step


def _power_above(x: Array) -> Array:
    """The least power of two that is not below positive x."""
    bits = _bits(x)
    exponent = (bits >> MANTISSA) + ((bits & (1 << MANTISSA) - 1) != 0)
    return (exponent << MANTISSA).view(library_of(x).float32)


def _bits(x: Array) -> Array:
    return x.view(library_of(x).int32)
