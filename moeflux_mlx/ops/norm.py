"""x / sqrt(mean(x^2) + eps) * weight, in float32 inside (arXiv:1910.07467); and the norm that also takes the mean away
(arXiv:1607.06450)."""

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from . import native
from .backend import AnyArray, Array, view


class Norm(Protocol):
    """An RMS norm over the last axis (`rms_norm`)."""

    weight: AnyArray
    eps: float

    def __call__(self, x: Array) -> Array: ...


class CentredNorm(Protocol):
    """A norm over the last axis that also takes the mean away (`layer_norm`)."""

    weight: mx.array
    bias: mx.array
    eps: float

    def __call__(self, x: Array) -> Array: ...


@dataclass
class ConstantNorm:
    """One whose weight [D] is no parameter, but made of some."""

    weight: mx.array
    eps: float

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.weight, self.eps)


@dataclass
class UnitNorm:
    """One without a weight; `weight` [D] is ones, for kernels that read it."""

    weight: mx.array
    eps: float

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, None, self.eps)


def rms_norm(x: Array, weight: AnyArray, eps: float) -> Array:
    """The RMS norm over the last axis, times `weight` [D]; None: times 1."""
    if isinstance(x, np.ndarray):
        return native.rms_norm(np.ascontiguousarray(x).reshape(-1, x.shape[-1]), weight, eps).reshape(x.shape)
    return mx.fast.rms_norm(x, weight, eps)


def layer_norm(x: Array, weight: mx.array, bias: mx.array | None, eps: float) -> Array:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis, in float32 inside; None: no bias."""
    if not isinstance(x, np.ndarray):
        return mx.fast.layer_norm(x, weight, bias, eps)
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    normed: np.ndarray = centred / np.sqrt(variance + np.float32(eps)) * view(weight)
    return normed if bias is None else normed + view(bias)
