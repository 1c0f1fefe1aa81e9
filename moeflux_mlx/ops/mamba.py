"""Mamba-2 between its projections (arXiv:2405.21060), as Nemotron-H uses it.

A short causal convolution, then for each head a matrix that decays and learns the product of the token's x and B; C
reads it. Then a gate, and a norm of each group of heads. Two pieces of state: the convolution's last inputs, and the
matrices. All of it is made of MLX's operations, in float32, on every backend.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..kinds import CHUNK, Mamba2
from .backend import Array, view
from .delta import State
from .elementwise import float32, softplus, split
from .norm import rms_norm
from .rows import RowCaches


@dataclass(frozen=True)
class MambaWeights:
    """Parameters: the convolution [channels, taps, 1] and what it adds [channels], `A_log`, `dt_bias` and `D` [heads],
    the norm [width]."""

    conv: mx.array
    conv_bias: mx.array
    A_log: mx.array
    dt_bias: mx.array
    D: mx.array
    norm: mx.array
    eps: float


def mamba(projected: Array, state: State | RowCaches, w: MambaWeights, sizes: Mamba2) -> Array:
    """The mixer from its input projection to its output projection; updates `state`.

    Args:
        projected: [B, L, sizes.projected], the gate, the convolution's inputs, which are x, B and C, and the step
            sizes of time.
        state: of one text or a batch of them; or the states of the L rows of a step.

    Returns:
        [B, L, width] in the dtype of `projected`.
    """
    if isinstance(state, RowCaches):
        return state.each(lambda row, one: mamba(projected[:, row], one, w, sizes))
    if isinstance(projected, np.ndarray):
        out = mamba(mx.array(projected), state, w, sizes)
        mx.eval(out, state.conv, state.recurrent)
        return view(out)
    z, inputs, dt = split(projected, sizes.width, sizes.width + sizes.channels)
    x, B, C = _heads(_convolve(inputs, state, w, sizes), sizes)
    dt = mx.clip(softplus(float32(dt) + float32(w.dt_bias)), sizes.least_step, sizes.most_step)
    y, state.recurrent = scan(x, B, C, dt, -mx.exp(float32(w.A_log)), state.recurrent)
    state.offset += projected.shape[1]
    y = (y + float32(w.D)[:, None] * x).reshape(z.shape) * nn.silu(float32(z))
    groups = rms_norm(y.reshape(*y.shape[:2], sizes.groups, -1), None, w.eps)
    return (groups.reshape(y.shape) * float32(w.norm)).astype(projected.dtype)


def _convolve(inputs: mx.array, state: State, w: MambaWeights, sizes: Mamba2) -> mx.array:
    """silu(causal depthwise convolution + bias) [B, L, channels] float32: output t sees inputs t - taps + 1 .. t."""
    keep, length = sizes.taps - 1, inputs.shape[1]
    before = mx.zeros((len(inputs), keep, sizes.channels), inputs.dtype) if state.conv is None else state.conv
    padded = mx.concatenate([before.astype(inputs.dtype), inputs], axis=1)
    state.conv = mx.contiguous(padded[:, length:])
    out = float32(w.conv_bias)
    for i in range(sizes.taps):
        out = out + float32(padded[:, i : i + length]) * float32(w.conv[:, i : i + 1].reshape(-1))
    return nn.silu(out)


def _heads(convolved: mx.array, sizes: Mamba2) -> list[mx.array]:
    """x [B, L, heads, head_dim], B and C [B, L, groups, state_dim] of them side by side."""
    parts = split(convolved, sizes.width, sizes.width + sizes.groups * sizes.state_dim)
    return [
        part.reshape(*convolved.shape[:2], -1, width)
        for part, width in zip(parts, (sizes.head_dim, sizes.state_dim, sizes.state_dim), strict=True)
    ]


def scan(
    x: mx.array, B: mx.array, C: mx.array, dt: mx.array, A: mx.array, state: mx.array | None
) -> tuple[mx.array, mx.array]:
    """For each token S = exp(A dt) S + dt x B^T and y = S C, `CHUNK` tokens at a time (arXiv:2405.21060, section 6).

    Args:
        x: [B, L, heads, P].
        B, C: [B, L, groups, N]; a group is of heads next to each other.
        dt: [B, L, heads].
        A: [heads], negative.
        state: [B, heads, P, N]; None: zeros.

    Returns:
        y [B, L, heads, P] and the next state, all of it float32.
    """
    (batch, L, heads, P), (groups, N) = x.shape, B.shape[2:]
    S = mx.zeros((batch, heads, P, N)) if state is None else state
    S = S.reshape(batch, groups, -1, P, N)
    x = (x * dt[..., None]).reshape(batch, L, groups, -1, P).transpose(0, 2, 3, 1, 4)  # [B, groups, H / groups, L, P]
    decay = (A * dt).reshape(batch, L, groups, -1).transpose(0, 2, 3, 1)  # [B, groups, H / groups, L], a logarithm
    B, C = (part.transpose(0, 2, 1, 3)[:, :, None] for part in (B, C))  # [B, groups, 1, L, N]
    parts = []
    for start in range(0, L, CHUNK):
        some = slice(start, start + CHUNK)
        y, S = _chunk(x[..., some, :], B[..., some, :], C[..., some, :], decay[..., some], S)
        parts.append(y)
    y = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=3)
    return y.transpose(0, 3, 1, 2, 4).reshape(batch, L, heads, P), S.reshape(batch, heads, P, N)


def _chunk(x: mx.array, B: mx.array, C: mx.array, decay: mx.array, S: mx.array) -> tuple[mx.array, mx.array]:
    """`scan` of a few tokens: what the state before them gives, and what each gives to those behind it."""
    T = x.shape[-2]
    if T == 1:
        S = mx.exp(decay)[..., None] * S + x.swapaxes(-1, -2) * B
        return (S * C).sum(-1)[..., None, :], S
    since = mx.cumsum(decay, axis=-1)  # of the chunk's beginning
    between = mx.where(mx.tri(T, dtype=mx.bool_), since[..., :, None] - since[..., None, :], -mx.inf)
    y = (mx.exp(between) * (C @ B.swapaxes(-1, -2))) @ x + mx.exp(since)[..., None] * (C @ S.swapaxes(-1, -2))
    left = mx.exp(since[..., -1:] - since)
    return y, mx.exp(since[..., -1:])[..., None] * S + (x * left[..., None]).swapaxes(-1, -2) @ B
