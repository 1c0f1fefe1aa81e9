"""Rounds blocks of values to eight or four bits and back to floats, as models compute that were trained so
(DeepSeek-V4.1; the formulas are those of mlx-vlm 0.7.10, `deepseek_v41/fakequant.py`).

One form serves MLX's arrays and numpy's. Ties go to the even code.
"""

from typing import Any

import mlx.core as mx

from .arrays import AnyArray
from .backend import Array, library_of
from .elementwise import float32

E4M3_MOST, E2M1_MOST = 448.0, 6.0
ONE = 127  # the exponent of 1 in a float32, whose mantissa has MANTISSA bits
MANTISSA = 23


def to_e4m3(x: Array, block: int) -> AnyArray:
    """x with each block of its last axis rounded to E4M3 (OCP 8-bit floats) times a power of two, the least with which
    no value exceeds the largest code.
    """
    return _rounded(x, block, 1e-4, lambda most: _power_above(most * (1 / E4M3_MOST)), E4M3_MOST, 3, -6)


def to_e2m1(x: Array, block: int, has_e4m3_scale: bool = False) -> AnyArray:
    """x with each block of its last axis rounded to E2M1 (OCP microscaling floats) times a power of two as in
    `to_e4m3`; or times a sixth of the block's largest value, which is rounded to E4M3 itself.
    """
    least = E2M1_MOST * (2.0**-9 if has_e4m3_scale else 2.0**-126)

    def scale_of(most: AnyArray) -> AnyArray:
        if not has_e4m3_scale:
            return _power_above(most * (1 / E2M1_MOST))
        return _nearest(library_of(most).minimum(most / E2M1_MOST, E4M3_MOST), 3, -6)

    return _rounded(x, block, least, scale_of, E2M1_MOST, 1, 0)


def _rounded(x: AnyArray, block: int, least: float, scale_of: Any, largest: float, bits: int, lowest: int) -> AnyArray:
    library = library_of(x)
    blocks = float32(x).reshape(*x.shape[:-1], -1, block)
    most = library.maximum(abs(blocks).max(axis=-1, keepdims=True), library.array(least, library.float32))
    scale = scale_of(most)
    codes = _nearest(library.clip(blocks / scale, -largest, largest), bits, lowest)
    return (codes * scale).reshape(x.shape).astype(x.dtype)


def _nearest(x: AnyArray, bits: int, lowest: int) -> AnyArray:
    """The nearest values with so many bits behind the first one, and exponents from `lowest` on."""
    library = library_of(x)
    exponent = library.maximum(_bits(x) >> MANTISSA & 0xFF, ONE + lowest) - bits
    step = (exponent << MANTISSA).view(library.float32)
    scaled = x / step
    return (mx.round(scaled) if library is mx else library.rint(scaled)) * step


def _power_above(x: AnyArray) -> AnyArray:
    """The least power of two that is not below positive x."""
    bits = _bits(x)
    exponent = (bits >> MANTISSA) + ((bits & (1 << MANTISSA) - 1) != 0)
    return (exponent << MANTISSA).view(library_of(x).float32)


def _bits(x: AnyArray) -> AnyArray:
    return x.view(library_of(x).int32)
