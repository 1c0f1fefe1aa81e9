"""Keys and values in 8 bits: how a cache keeps the row of one head as bytes.

A row of `width` values is `width` codes, a byte each, and behind them a float32 scale for each group of
`group_of(width)` values. A value is (code - 128) * scale, where the scale is a 127th of the group's largest magnitude:
symmetric quantisation to the nearest code (arXiv:2004.09602, section 3). A row is rounded only once, when it enters the
cache, so no bit depends on where a prompt was cut, saved or taken back.

Here are the plain operations. The kernels' texts are in `metal/kv_rows.h.metal`, the native ones in `native/kernels.h`.
"""

from math import gcd
from typing import Literal

import mlx.core as mx

BITS: Literal[8] = 8
GROUP = 64  # values that share a scale, or the largest divisor of it that the width has
SCALE_BYTES = 4
TINY = 1e-30  # a group without a larger magnitude is all zeros; 127 divided by less might be infinite


def group_of(width: int) -> int:
    """Values of a row that share a scale."""
    return gcd(width, GROUP)


def row_bytes(width: int) -> int:
    """Bytes of a row of `width` values."""
    return width + SCALE_BYTES * (width // group_of(width))


def encode(x: mx.array) -> mx.array:
    """Rows [..., width] of any float dtype as bytes [..., row_bytes(width)], uint8."""
    *lead, width = x.shape
    groups = x.astype(mx.float32).reshape(*lead, -1, group_of(width))
    largest = mx.abs(groups).max(-1, keepdims=True)
    inverse = mx.where(largest > TINY, 127.0 / largest, 0.0)
    codes = (mx.round(groups * inverse) + 128.0).astype(mx.uint8)
    scales = (largest * (1 / 127)).reshape(*lead, -1).view(mx.uint8)
    return mx.concatenate([codes.reshape(*lead, width), scales], axis=-1)


def decode(rows: mx.array, width: int, dtype: mx.Dtype) -> mx.array:
    """The inverse of `encode` for rows of `width` values: [..., width] of `dtype`."""
    lead = rows.shape[:-1]
    codes = rows[..., :width].astype(mx.float32).reshape(*lead, -1, group_of(width))
    scales = mx.contiguous(rows[..., width:]).view(mx.float32)
    return ((codes - 128.0) * scales[..., None]).reshape(*lead, width).astype(dtype)
