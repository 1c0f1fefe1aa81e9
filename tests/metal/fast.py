"""Rotations with the fast sine and cosine of an Apple GPU, as wrong as msl_host.h makes them.

MLX's kernel rotates a prompt by them, so the harness gives a prompt's rotation these errors too: what a step adds to a
cache must agree with what a prompt left there.
"""

import sys
from typing import Any

import mlx.core as mx
import numpy as np

from moeflux_mlx.ops import backend

ERROR = 2.0**-13
exact_rope = mx.fast.rope


def cosine_and_sine(angle: mx.array) -> tuple[mx.array, mx.array]:
    """Returns what metal::fast::cos and metal::fast::sin make of float32 angles in the harness."""
    odd = angle.view(mx.uint32)
    for shift in (16, 8, 4, 2, 1):
        odd = odd ^ (odd >> shift)
    error = mx.where((odd & 1) != 0, -ERROR, ERROR)
    return mx.cos(angle) + error, mx.sin(angle) + error


def angles(position: Any, periods: mx.array) -> mx.array:
    """Returns the float32 angles of pairs at a position, or at positions [..., 1]."""
    return mx.array(position).astype(mx.float32) * (1.0 / periods)


def turns(position: Any, rope: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the (cosines, sines) by which a `Rope` turns pairs at positions, as in `angles`, for an oracle: those of
    the harness if it has taken the place of a GPU, else exact ones."""
    if sys.platform == "linux" and backend.name() == "metal":
        cosine, sine = (np.array(part, np.float64) for part in cosine_and_sine(angles(position, rope.periods)))
    else:
        angle = position * np.frombuffer(rope.frequencies)
        cosine, sine = np.cos(angle), np.sin(angle)
    return rope.magnitude * cosine, rope.magnitude * sine


def rope(x: mx.array, dims: int, *, traditional: bool, offset: Any, freqs: Any = None, **more: Any) -> mx.array:
    """Replaces mx.fast.rope, for rotations whose periods are given."""
    if freqs is None:
        return exact_rope(x, dims, traditional=traditional, offset=offset, **more)
    start = mx.array(offset).reshape(-1, *[1] * (x.ndim - 1))
    cosine, sine = cosine_and_sine(angles(start + mx.arange(x.shape[-2])[:, None], freqs))
    wide = x[..., :dims].astype(mx.float32)
    first, second = (wide[..., ::2], wide[..., 1::2]) if traditional else mx.split(wide, 2, axis=-1)
    pair = first * cosine - second * sine, first * sine + second * cosine
    turned = mx.stack(pair, axis=-1).flatten(-2) if traditional else mx.concatenate(pair, axis=-1)
    return mx.concatenate([turned.astype(x.dtype), x[..., dims:]], axis=-1)
