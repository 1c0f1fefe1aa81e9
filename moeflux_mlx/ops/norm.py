"""x / sqrt(mean(x^2) + eps) * weight, in float32 inside (arXiv:1910.07467); and the norm that also takes the mean away
(arXiv:1607.06450)."""

from dataclasses import dataclass
from math import prod
from typing import Protocol

import mlx.core as mx
import numpy as np

from . import backend, native
from .backend import AnyArray, Array, kernels_take, view
from .elementwise import scaled
from .launch import Kernel, Launch, Reason, Shape
from .tiles import MAX_TOKENS, planned

GROUP_NORM = Kernel("group_norm", "x weight eps", "out")
THREADS = 256  # of a threadgroup


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


def group_norm(x: Array, weight: mx.array, eps: float, groups: int) -> AnyArray:
    """The RMS norm of each of `groups` equal parts of the last axis, times `weight` [D]; of the rows of a step on a GPU
    in one launch.
    """
    if kernels_take(x, refusal, x.size // x.shape[-1]):
        return plan_group_norm(backend.name(), x.shape, x.dtype, groups)(x, weight, eps)[0]
    parts = rms_norm(x.reshape(*x.shape[:-1], groups, -1), None, eps)
    return scaled(parts.reshape(x.shape), weight)


@planned("group_norm")
def refusal(target: str, rows: int) -> Reason | None:
    """Why the kernel does not take this number of rows."""
    return Reason(f"there are more than {MAX_TOKENS} rows") if rows > MAX_TOKENS else None


@planned("group_norm")
def plan_group_norm(target: str, shape: Shape, dtype: mx.Dtype, groups: int) -> Launch:
    """The launch for rows of `shape` [..., D]."""
    *rows, width = shape
    template = {"X": dtype, "G": groups, "D": width // groups, "SG": THREADS // 32}
    return Launch(target, GROUP_NORM, template, (groups, prod(rows)), THREADS, [(shape, dtype)])
