"""Mamba-2 between its projections (arXiv:2405.21060), as Nemotron-H uses it.

A short causal convolution, then for each head a matrix that decays and learns the product of the token's x and B; C
reads it. Then a gate, and a norm of each group of heads. Two pieces of state: the convolution's last inputs, and the
matrices. Everything is float32 inside. On a GPU a single token takes two kernels and more tokens MLX's operations; on
the CPU numpy computes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ...ops import backend, gpu_time
from ...ops.backend import AnyArray, Array, contiguous, kernels_take, leave, library_of, of_kind
from ...ops.elementwise import activate, float32, sigmoid, softplus, split
from ...ops.launch import (
    MOST_THREADS,
    SEVERAL,
    SHARED_BYTES,
    ArrayPiece,
    Input,
    Kernel,
    Launch,
    Reason,
    Shape,
    ceildiv,
)
from ...ops.norm import plan_group_norm, rms_norm
from ...ops.recurrent_state import STATE_ROWS, RecurrentState
from ...ops.rows import RowSizes, StepRows, as_rows
from ...ops.tiles import planned
from .spec import CHUNK, Mamba2

MAMBA_STEP = Kernel("mamba_step", "projected conv state taps bias A_log dt_bias skip", "out next_conv next")
PIECE = 8 * CHUNK  # tokens of a prompt whose temporaries exist together
UNLIMITED = float(np.finfo(np.float32).max)  # a step size that none exceeds


@dataclass(frozen=True)
class MambaWeights:
    """Parameters in float32: the convolution [channels, taps, 1] and what it adds [channels], `A_log`, `dt_bias` and
    `D` [heads], the norm [width]. `pieces`: the places of all of them in one array, if they are joined.
    """

    conv: mx.array
    conv_bias: mx.array
    A_log: mx.array
    dt_bias: mx.array
    D: mx.array
    norm: mx.array
    eps: float
    pieces: list[ArrayPiece] | None = None

    @property
    def inputs(self) -> Sequence[Input]:
        """The kernels' inputs for all of them."""
        given = self.conv, self.conv_bias, self.A_log, self.dt_bias, self.D, self.norm
        return given if self.pieces is None else self.pieces


def mamba(projected: Array, state: RecurrentState | StepRows, w: MambaWeights, sizes: Mamba2) -> Array:
    """The mixer from its input projection to its output projection; updates `state`.

    Args:
        projected: [B, L, sizes.projected], the gate, the convolution's inputs, which are x, B and C, and the step
            sizes of time.
        state: of one text or a batch of them; or the states of the L rows of a step.

    Returns:
        [B, L, width] in the dtype of `projected`.
    """
    batch, length, _ = projected.shape
    if isinstance(state, StepRows):
        has_kernels = kernels_take(projected, refusal, batch, 1, sizes)

        def compute(rows: StepRows, own: Any) -> AnyArray:
            return _on_kernels(own, rows, w, sizes) if has_kernels else mamba(own, rows.cache, w, sizes)

        return state.each((projected,), compute, has_kernels)
    if kernels_take(projected, refusal, batch, length, sizes):
        return _on_kernels(projected, StepRows([state]), w, sizes)
    parts: list[AnyArray] = []
    for start in range(0, length, PIECE):
        parts.append(_on_operations(projected[:, start : start + PIECE], state, w, sizes))
        gpu_time.in_turn(length, parts)
    whole: Array = parts[0] if len(parts) == 1 else library_of(projected).concatenate(parts, axis=1)
    return whole


def _on_operations(projected: Array, state: RecurrentState, w: MambaWeights, sizes: Mamba2) -> Array:
    """`mamba` of the next tokens of one text or of a batch."""
    batch, length, _ = projected.shape
    library: Any = library_of(projected)
    z, inputs, dt = split(projected, sizes.width, sizes.width + sizes.channels)
    conv, conv_bias, A_log, dt_bias, D, norm = (
        of_kind(one, projected) for one in (w.conv, w.conv_bias, w.A_log, w.dt_bias, w.D, w.norm)
    )
    before = library.zeros((batch, *sizes.conv_shape), inputs.dtype) if state.conv is None else state.conv
    S = library.zeros((batch, *sizes.state_shape), library.float32) if state.recurrent is None else state.recurrent
    before, S = of_kind(before, projected), of_kind(S, projected)
    padded = library.concatenate([before.astype(inputs.dtype), inputs], axis=1)
    with np.errstate(invalid="ignore"):  # damaged weights give NaN here and an error where logits are checked
        x, B, C = _heads(_convolved(padded, conv, conv_bias, length), sizes)
        dt = library.clip(softplus(float32(dt) + dt_bias), sizes.least_step, sizes.most_step)
        y, S = scan(x, B, C, dt, -library.exp(A_log), S)
        y = activate(float32(z), (y + D[:, None] * x).reshape(z.shape))
        y = y.reshape(batch, length, sizes.groups, -1)
    state.absorb([leave(contiguous(padded[:, length:])), leave(S)], length)
    return (rms_norm(y, None, w.eps).reshape(z.shape) * norm).astype(projected.dtype)


def _convolved(padded: Array, weight: Array, bias: Array, length: int) -> Array:
    """silu(depthwise convolution + bias) [B, length, channels] float32: output t sees inputs t to t + taps - 1."""
    out = bias
    for i in range(weight.shape[1]):
        out = out + float32(padded[:, i : i + length]) * weight[:, i : i + 1].reshape(-1)
    return out * sigmoid(out)


def _heads(convolved: Array, sizes: Mamba2) -> list[Array]:
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
        y, S = chunk(x[..., some, :], B[..., some, :], C[..., some, :], decay[..., some], S)
        parts.append(y)
    y = parts[0] if len(parts) == 1 else library_of(x).concatenate(parts, axis=3)
    return y.transpose(0, 3, 1, 2, 4).reshape(batch, L, heads, P), S.reshape(state.shape)


def chunk(x: Array, B: Array, C: Array, decay: Array, S: Array) -> tuple[Array, Array]:
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


# ---- the kernels, for the rows of a step on a GPU


@planned("mamba")
def refusal(target: str, sequences: int, tokens: int, sizes: Mamba2) -> Reason | None:
    """Why the kernels do not take this number of sequences in one array, with this number of tokens of each, or states
    of these sizes.
    """
    if tokens > 1:
        return SEVERAL
    if sequences > 1:
        return Reason(f"there are {sequences} sequences; the kernels take one")
    width = sizes.head_dim + 2 * sizes.state_dim
    return Reason(f"{width} values of a head do not fit a threadgroup") if 4 * width > SHARED_BYTES else None


def _on_kernels(projected: mx.array, rows: StepRows, w: MambaWeights, sizes: Mamba2) -> AnyArray:
    """`mamba` for a row of each of several sequences, of projected [1, R, sizes.projected]."""
    dtype = projected.dtype
    step, norm = plan(rows.sizes((sizes.projected,)), backend.name(), dtype, sizes)
    before = [_begun(state, dtype, sizes) for state in rows.sequences]
    *parameters, weight = w.inputs
    out, *after = step(projected, *as_rows(before), *parameters)
    rows.absorb(after)
    return norm(out, weight, w.eps)[0]


def _begun(state: RecurrentState, dtype: mx.Dtype, sizes: Mamba2) -> tuple[mx.array, mx.array]:
    """A sequence's two arrays, zeros before its first token."""
    if state.conv is not None and state.recurrent is not None:
        return state.conv.astype(dtype), state.recurrent
    return mx.zeros((1, *sizes.conv_shape), dtype), mx.zeros((1, *sizes.state_shape), mx.float32)


@planned("mamba")
def plan(rows: RowSizes, target: str, dtype: mx.Dtype, sizes: Mamba2) -> tuple[Launch, Launch]:
    """The launch up to the gate for some rows, and that of the norm."""
    count = rows.count
    simdgroups = min(ceildiv(sizes.head_dim, STATE_ROWS), MOST_THREADS[target] // 32)
    template = {"X": dtype, "NK": sizes.groups, "NV": sizes.heads, "DK": sizes.state_dim, "DV": sizes.head_dim}
    template |= {"TAPS": sizes.taps, "R": STATE_ROWS, "SG": simdgroups, "LEAST": float(sizes.least_step)}
    template |= {"MOST": UNLIMITED if sizes.most_step is None else float(sizes.most_step)}
    alone = Launch(target, MAMBA_STEP, template, (sizes.heads, 1), 32 * simdgroups, [])
    own = {"projected": "projected+PROJECTED", "out": "out+WIDTH_OF_OUT", "conv": "conv+CONV", "state": "state+STATE"}
    own |= {"next_conv": "next_conv+CONV", "next": "next+STATE"}
    widths = {"PROJECTED": sizes.projected, "WIDTH_OF_OUT": sizes.width}
    widths |= {"CONV": math.prod(sizes.conv_shape), "STATE": math.prod(sizes.state_shape)}
    outputs: list[tuple[Shape, mx.Dtype]] = [((1, count, sizes.width), mx.float32)]
    outputs += [((count, *sizes.conv_shape), dtype), ((count, *sizes.state_shape), mx.float32)]
    step = alone.of_rows(own, count, widths, outputs)
    return step, plan_group_norm(target, (1, count, sizes.width), dtype, sizes.groups)
