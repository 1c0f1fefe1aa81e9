"""x / sqrt(mean(x^2) + eps) * weight, in float32 inside (arXiv:1910.07467)."""

from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from . import native
from .backend import Array


class Norm(Protocol):
    """An RMS norm over the last axis (`rms_norm`)."""

    weight: Any
    eps: float

    def __call__(self, x: Array) -> Array: ...


def rms_norm(x: Array, weight: mx.array | np.ndarray | None, eps: float) -> Array:
    """The RMS norm over the last axis, times `weight` [D]; None: times 1."""
    if isinstance(x, np.ndarray):
        return native.rms_norm(np.ascontiguousarray(x).reshape(-1, x.shape[-1]), weight, eps).reshape(x.shape)
    assert weight is None or isinstance(weight, mx.array)
    return mx.fast.rms_norm(x, weight, eps)
