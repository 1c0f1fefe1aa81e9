"""Rotary position embedding: plain (arXiv:2104.09864), scaled by YaRN (arXiv:2309.00071) or as Llama 3.1's, and by
three axes (Qwen2-VL, arXiv:2409.12191, section 2.1).
"""

import math
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from ..kinds import Llama3, Rotation, Yarn
from . import native
from .backend import AnyArray, Array, library_of, stack


class Rope:
    """Rotates the first `rotation.dims` values of each head.

    `stride`: multiplies the positions; -1 rotates back. DeepSeek pairs neighbours (2i, 2i+1), the others pair (i, i +
    dims/2): `rotation.interleaved` chooses.
    """

    def __init__(self, rotation: Rotation, stride: int = 1):
        self.dims, self.interleaved, self.base, self.stride = (
            rotation.dims,
            rotation.interleaved,
            rotation.theta,
            stride,
        )
        self.magnitude = 1.0
        frequencies = self.base ** -(np.arange(0, self.dims, 2) / self.dims)
        if rotation.yarn is not None:
            frequencies = yarn_inv_freq(self.dims, self.base, rotation.yarn)
            self.magnitude = yarn_magnitude(rotation.yarn)
        if rotation.llama3 is not None:
            frequencies = llama3_inv_freq(frequencies, rotation.llama3)
        frequencies = stride * frequencies
        if rotation.pairs is not None:
            frequencies[rotation.pairs :] = 0.0
        self._as_configured = frequencies
        self.axes = rotation.axes or (0,) * (self.dims // 2)
        self._set(frequencies)

    def _set(self, frequencies: np.ndarray) -> None:
        self.frequencies = frequencies.tobytes()
        with np.errstate(divide="ignore"):  # a pair that does not turn has an infinite period
            periods = 1.0 / frequencies
        self.periods = mx.array(periods, mx.float32)
        axes = np.array(self.axes)
        self._periods_of_axes = {  # each turns the pairs of its axis
            axis: mx.array(np.where(axes == axis, periods, np.inf), mx.float32) for axis in sorted(set(self.axes))
        }

    def learn(self, alpha: mx.array) -> None:
        """Multiplies the frequencies of the configuration by exp(alpha), alpha [dims / 2]."""
        self._set(self._as_configured * np.exp(np.array(alpha.astype(mx.float32), np.float64)))

    def __call__(self, x: Array, offset: AnyArray) -> Array:
        """x at positions offset .. offset + L - 1, or of three axes, integers [3, L]; as `laid_out`."""
        if isinstance(x, np.ndarray):
            B, L = x.shape[:2]
            cosine, sine = self._angles(offset, L)
            rows = np.ascontiguousarray(x).reshape(B, L, -1, x.shape[-1])
            return stack([native.rope(row, cosine, sine, self.interleaved) for row in rows])
        if self.magnitude != 1.0:
            x = mx.concatenate([x[..., : self.dims] * self.magnitude, x[..., self.dims :]], axis=-1)
        if not has_axes(offset):
            return self._turned(x, offset, self.periods)
        B, heads, L, D = x.shape
        tokens = x.swapaxes(1, 2).reshape(B * L, heads, 1, D)  # MLX's kernel takes a position for each entry of a batch
        for axis, periods in self._periods_of_axes.items():
            tokens = self._turned(tokens, mx.array(np.tile(offset[axis], B).astype(np.int32)), periods)
        return tokens.reshape(B, L, heads, D).swapaxes(1, 2)

    def _turned(self, x: mx.array, offset: int | mx.array, periods: mx.array) -> mx.array:
        """x [B, heads, L, head_dim] by MLX's kernel, from one position on, or from those of the batch's entries."""
        return mx.fast.rope(
            x, self.dims, traditional=self.interleaved, base=None, scale=1.0, offset=offset, freqs=periods
        )

    def _angles(self, offset: Any, length: int) -> tuple[np.ndarray, np.ndarray]:
        """(cosine, sine) float32 [length, R/2]."""
        if has_axes(offset):
            return angles_of_axes(self.frequencies, self.magnitude, self.axes, offset.astype(np.int64).tobytes())
        return angles(self.frequencies, self.magnitude, offset, length)


def has_axes(position: int | AnyArray) -> bool:
    """Whether a rotary position is integers [3, L], because some of L tokens are rows of an image."""
    return isinstance(position, np.ndarray)


def laid_out(x: Array) -> Array:
    """x [B, L, heads, D] in attention's layout, which for MLX's arrays is [B, heads, L, D]; or the other way round."""
    return x if isinstance(x, np.ndarray) else x.transpose(0, 2, 1, 3)


def turned(x: Array, rope: Rope, position: int | mx.array) -> Array:
    """x [B, L, heads, D] of tokens from a rotary position on, the last values of each head rotated."""
    start = x.shape[-1] - rope.dims
    part = laid_out(rope(laid_out(x[..., start:]), position))
    return library_of(x).concatenate([x[..., :start], part], axis=-1)


@lru_cache(maxsize=16)
def angles(frequencies: bytes, magnitude: float, offset: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(cosine, sine) [length, R/2] of positions from `offset`; `frequencies` holds float64 radians per position.

    Kept for a while, because all layers ask for the same positions.
    """
    angle = np.arange(offset, offset + length)[:, None] * np.frombuffer(frequencies)
    return (magnitude * np.cos(angle)).astype(np.float32), (magnitude * np.sin(angle)).astype(np.float32)


@lru_cache(maxsize=4)
def angles_of_axes(
    frequencies: bytes, magnitude: float, axes: tuple[int, ...], positions: bytes
) -> tuple[np.ndarray, np.ndarray]:
    """(cosine, sine) [L, R/2] of positions int64 [3, L]; `axes` says which of the three turns each pair."""
    turned_by = np.ascontiguousarray(np.frombuffer(positions, np.int64).reshape(3, -1)[list(axes)].T)
    angle = turned_by * np.frombuffer(frequencies)
    return (magnitude * np.cos(angle)).astype(np.float32), (magnitude * np.sin(angle)).astype(np.float32)


def llama3_inv_freq(plain: np.ndarray, scaling: Llama3) -> np.ndarray:
    """float64 [dims/2] radians per position: `plain`, divided by the factor where at most `low_freq_factor` turns fit
    into the original context, kept where `high_freq_factor` do, and between them mixed by the number of turns.

    As in Hugging Face's `_compute_llama3_parameters`.
    """
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / max(high - low, 1e-9), 0, 1)  # Llama 4 Scout has no ramp
    return plain / scaling.factor * (1 - kept) + plain * kept


def yarn_inv_freq(dims: int, theta: float, yarn: Yarn) -> np.ndarray:
    """float64 [dims/2] radians per position: interpolated below `low`, unchanged above `high`.

    The ramp's ends are the dimensions that turn `beta_fast` and `beta_slow` times within the original
    context (section 3.2 of the paper, as in Hugging Face's `_compute_yarn_parameters`).
    """
    exponent = np.arange(0, dims, 2, dtype=np.float64) / dims
    plain = theta**-exponent
    ends = [
        _turning(beta, dims, theta, yarn.original_max_position_embeddings) for beta in (yarn.beta_fast, yarn.beta_slow)
    ]
    low, high = (math.floor(ends[0]), math.ceil(ends[1])) if yarn.truncate else ends
    low, high = max(low, 0), min(high, dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 1e-3), 0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def _turning(turns: float, dims: int, theta: float, context: int) -> float:
    """The (fractional) pair index whose angle makes `turns` full turns over `context` positions."""
    return dims * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))


def yarn_magnitude(yarn: Yarn) -> float:
    """The factor on cos and sin."""
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return mscale(yarn.factor, yarn.mscale) / mscale(yarn.factor, yarn.mscale_all_dim)
    return mscale(yarn.factor, 1.0)


def mscale(factor: float, weight: float) -> float:
    """0.1 * weight * ln(factor) + 1 for factor > 1, else 1 (YaRN, equation 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
