"""Mamba-2 between its projections (arXiv:2405.21060), as Nemotron-H uses it.

A short causal convolution, then for each head a matrix that decays and learns the product of the token's x and B; C
reads it. Then a gate, and a norm of each group of heads. Two pieces of state: the convolution's last inputs, and the
matrices. MLX's operations compute it on a GPU, and numpy's on the CPU, in float32.
"""

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..kinds import CHUNK, Mamba2
from .backend import Array, contiguous, leave, library_of, view
from .delta import State
from .elementwise import activate, float32, sigmoid, softplus, split
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
    library: Any = library_of(projected)
    stored = float32 if library is mx else view
    batch, length, _ = projected.shape
    z, inputs, dt = split(projected, sizes.width, sizes.width + sizes.channels)
    before = library.zeros((batch, *sizes.conv_shape), inputs.dtype) if state.conv is None else state.conv
    S = library.zeros((batch, *sizes.state_shape), library.float32) if state.recurrent is None else state.recurrent
    if library is np:
        before, S = np.asarray(before), np.asarray(S)
    padded = library.concatenate([before.astype(inputs.dtype), inputs], axis=1)
    with np.errstate(invalid="ignore"):  # damaged weights give NaN here and an error where logits are checked
        x, B, C = _heads(_convolved(padded, stored(w.conv), stored(w.conv_bias), length), sizes)
        dt = library.clip(softplus(float32(dt) + stored(w.dt_bias)), sizes.least_step, sizes.most_step)
        y, S = scan(x, B, C, dt, -library.exp(stored(w.A_log)), S)
        y = activate(float32(z), (y + stored(w.D)[:, None] * x).reshape(z.shape))
        y = y.reshape(batch, length, sizes.groups, -1)
    state.conv, state.recurrent = leave(contiguous(padded[:, length:])), leave(S)
    state.offset += length
    return (rms_norm(y, None, w.eps).reshape(z.shape) * stored(w.norm)).astype(projected.dtype)


def _convolved(padded: Any, weight: Any, bias: Any, length: int) -> Any:
    """silu(depthwise convolution + bias) [B, length, channels] float32: output t sees inputs t to t + taps - 1."""
    out = bias
    for i in range(weight.shape[1]):
        out = out + float32(padded[:, i : i + length]) * weight[:, i : i + 1].reshape(-1)
    return out * sigmoid(out)


def _heads(convolved: Any, sizes: Mamba2) -> list[Any]:
    """x [B, L, heads, head_dim], B and C [B, L, groups, state_dim] of them side by side."""
    parts = split(convolved, sizes.width, sizes.width + sizes.groups * sizes.state_dim)
    return [
        part.reshape(*convolved.shape[:2], -1, width)
        for part, width in zip(parts, (sizes.head_dim, sizes.state_dim, sizes.state_dim), strict=True)
    ]


def scan(x: Array, B: Array, C: Array, dt: Array, A: Array, state: Array) -> tuple[Array, Array]:
    """For each token S = exp(A dt) S + dt x B^T and y = S C, `CHUNK` tokens at a time (arXiv:2405.21060, section 6).

    Args:
        x: [B, L, heads, P].
        B, C: [B, L, groups, N]; a group is of heads next to each other.
        dt: [B, L, heads].
        A: [heads], negative.
        state: [B, heads, P, N].

    Returns:
        y [B, L, heads, P] and the next state, all of it float32.
    """
    (batch, L, heads, P), groups = x.shape, B.shape[2]
    S = state.reshape(batch, groups, -1, *state.shape[2:])
    x = (x * dt[..., None]).reshape(batch, L, groups, -1, P).transpose(0, 2, 3, 1, 4)  # [B, groups, H / groups, L, P]
    decay = (A * dt).reshape(batch, L, groups, -1).transpose(0, 2, 3, 1)  # [B, groups, H / groups, L], a logarithm
    B, C = (part.transpose(0, 2, 1, 3)[:, :, None] for part in (B, C))  # [B, groups, 1, L, N]
    parts = []
    for start in range(0, L, CHUNK):
        some = slice(start, start + CHUNK)
        y, S = _chunk(x[..., some, :], B[..., some, :], C[..., some, :], decay[..., some], S)
        parts.append(y)
    y = parts[0] if len(parts) == 1 else library_of(x).concatenate(parts, axis=3)
    return y.transpose(0, 3, 1, 2, 4).reshape(batch, L, heads, P), S.reshape(state.shape)


def _chunk(x: Any, B: Any, C: Any, decay: Any, S: Any) -> tuple[Any, Any]:
    """`scan` of a few tokens: what the state before them gives, and what each gives to those behind it."""
    T, library = x.shape[-2], library_of(x)
    if T == 1:
        S = library.exp(decay)[..., None] * S + x.swapaxes(-1, -2) * B
        return C @ S.swapaxes(-1, -2), S
    since = library.cumsum(decay, axis=-1)  # of the chunk's beginning
    lasting = library.tri(T, dtype=library.bool_)
    between = library.exp(library.where(lasting, since[..., :, None] - since[..., None, :], -math.inf))
    y = (between * (C @ B.swapaxes(-1, -2))) @ x + library.exp(since)[..., None] * (C @ S.swapaxes(-1, -2))
    left = library.exp(since[..., -1:] - since)
    return y, library.exp(since[..., -1:])[..., None] * S + (x * left[..., None]).swapaxes(-1, -2) @ B
