"""Elementwise operations, and others that need no kernel of their own; norms are in `norm`."""

import math
from collections.abc import Callable, Hashable
from functools import cache, partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..kinds import SILU, Activation
from . import native
from .backend import AnyArray, Array, as_dtype, has_kernels, library_of, of_kind, view
from .tiles import MAX_TOKENS


def float32(x: Array) -> Array:
    """x in float32."""
    return as_dtype(x, mx.float32)


def split(x: Array, *ends: int) -> list[Array]:
    """Views of the last axis, cut at `ends`."""
    if isinstance(x, np.ndarray):  # np.split takes ten times as long
        return [x[..., start:end] for start, end in zip((0, *ends), (*ends, x.shape[-1]), strict=True)]
    return list(mx.split(x, list(ends), axis=-1))


def activate(
    gate: Array, up: Array, activation: Activation = SILU, scale: Array | None = None, squashed: bool = False
) -> Array:
    """Applies `activation` to gate and up, which have one shape, and multiplies by `scale` [..., 1] if it is given, or
    by its sigmoid if that is `squashed`; the result has gate's dtype. For a prompt on a GPU it is one launch.
    """
    more = () if scale is None else (scale,)
    if isinstance(gate, mx.array):
        compute = _joined if _are_prompts(gate.size // gate.shape[-1]) else partial
        return compute(_activated, activation, squashed)(gate, up, *more)
    rows = [np.ascontiguousarray(a).reshape(-1, a.shape[-1]) for a in (gate, up)]
    act: np.ndarray = native.activate(rows[0], rows[1], activation).reshape(gate.shape)
    return weighted(act, scale, squashed)


def _are_prompts(rows: int) -> bool:
    """Whether so many rows are those of prompts on a GPU, where several operations are compiled as one."""
    return has_kernels() and rows > MAX_TOKENS


@cache
def _joined(compute: Callable[..., mx.array], *given: Hashable) -> Callable[..., mx.array]:
    """`compute` behind what is `given`, as one operation."""
    return mx.compile(partial(compute, *given), shapeless=True)


def _activated(
    activation: Activation, squashed: bool, gate: mx.array, up: mx.array, scale: mx.array | None = None
) -> mx.array:
    return weighted(_of_form(activation, gate, up), scale, squashed)


def weighted(act: Array, scale: Array | None, squashed: bool) -> Array:
    """act times `scale` [..., 1], or times its sigmoid if that is `squashed`, in act's dtype; act without a scale."""
    if scale is None:
        return act
    made: Array = (act * (sigmoid(scale) if squashed else scale)).astype(act.dtype)
    return made


def times_sigmoid(x: Array, gates: Array) -> AnyArray:
    """x * sigmoid(gates) [B, L, heads * D], both [B, L, heads, D]; for a prompt on a GPU it is one launch."""
    shape = *x.shape[:2], -1
    if _are_prompts(x.shape[0] * x.shape[1]):
        return _joined(_times_sigmoid)(x, gates).reshape(shape)
    return _times_sigmoid(x.reshape(shape), gates.reshape(shape))


def _times_sigmoid(x: Array, gates: Array) -> Array:
    return x * sigmoid(gates)


def _of_form(activation: Activation, gate: mx.array, up: mx.array) -> mx.array:
    limit = math.inf if activation.limit is None else activation.limit
    match activation.form:
        case "silu":
            return nn.silu(gate) * up
        case "gelu":
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            return 0.5 * gate * (1 + mx.tanh(inner)) * up
        case "clip then silu":
            return nn.silu(mx.minimum(gate, limit)) * mx.clip(up, -limit, limit)
        case "silu then clip":
            return mx.minimum(nn.silu(gate), limit) * mx.clip(up, -limit, limit)
        case "clip then swish":
            gate = mx.minimum(gate, limit)
            return gate * mx.sigmoid(1.702 * gate) * (mx.clip(up, -limit, limit) + 1)
        case "relu":
            return mx.maximum(gate, 0) * up
        case "situ":
            g, u = float32(gate), float32(up)
            u = u if activation.limit is None else softcap(u, activation.limit)
            return (softcap(g, activation.gate_limit) * mx.sigmoid(g) * u).astype(gate.dtype)


def plus(x: Array, bias: mx.array) -> Array:
    """x [..., D] + bias [D], or [..., D, 1] + bias [D, 1]."""
    return x + of_kind(bias, x)


def scaled(x: Array, factor: mx.array) -> Array:
    """x * factor; factor is [1] or as long as x's last axis."""
    return x * of_kind(factor, x)


def softcap(x: Array, cap: float | None) -> Array:
    """cap * tanh(x / cap), or x if there is no cap."""
    if cap is None:
        return x
    library = library_of(x)
    return cap * library.tanh(x / cap)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)); on numpy arrays by tanh, which cannot overflow."""
    if isinstance(x, np.ndarray):
        return np.float32(0.5) * np.tanh(np.float32(0.5) * x) + np.float32(0.5)
    return mx.sigmoid(x)


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), in float32."""
    return library_of(x).logaddexp(float32(x), 0.0)


def softplus2(x: Array) -> Array:
    """log2(1 + 2^x), in float32."""
    return softplus(float32(x) * math.log(2)) / math.log(2)


# The functions of gates from a projection of their own, by the names of `GroupedQuery.gate`.
GATES = {"sigmoid": sigmoid, "sigmoid head": sigmoid, "softplus head": softplus, "softplus2": softplus2}


def gated(x: Array, gates: Array, kind: str, bias: mx.array | None = None) -> Array:
    """x [..., heads * width], each head times GATES[kind] of its value in `gates` [..., heads], or each value of its
    own if there are as many. `bias` [gates, 1] is added to the gates; None: nothing is.
    """
    gates = gates[..., None]  # a compiled step joins what comes after the axis is added
    factors = GATES[kind](gates if bias is None else plus(gates, bias))
    return (x.reshape(*gates.shape[:-1], -1) * factors.astype(x.dtype)).reshape(x.shape)


def softmax(x: Array) -> Array:
    """Over the last axis, in float32."""
    if isinstance(x, np.ndarray):
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)
    return mx.softmax(x, axis=-1, precise=True)


def pick(x: Array, ids: Array) -> Array:
    """x[t, ids[t, k]] of x [T, E] and ids [T, K]."""
    if isinstance(x, np.ndarray):
        return x[np.arange(len(x))[:, None], ids]
    return mx.take_along_axis(x, ids, axis=-1)


def log_softmax(logits: mx.array) -> mx.array:
    """logits - logsumexp(logits) over the last axis; by numpy on the CPU, where MLX's reduction is slow."""
    if logits.dtype != mx.float32 or mx.default_device() != mx.cpu:
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    x = view(logits)
    shifted = x - x.max(axis=-1, keepdims=True)
    return mx.array(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
