"""Gated DeltaNet between its projections (arXiv:2412.06464), as Qwen3-Next and Qwen3.5 use it.

First a short causal convolution; then for each value head a matrix that decays, forgets along the new key and learns
the new value; then a gated norm. The state is the convolution's last inputs and the matrices. If each channel of a key
has its own decay, the plain operations are those of `channel_delta`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...ops import backend, native
from ...ops.backend import Array, kernels_take, stack, view
from ...ops.elementwise import activate, float32, sigmoid, split
from ...ops.launch import (
    MOST_THREADS,
    SHARED_BYTES,
    ArrayPiece,
    Input,
    Kernel,
    Launch,
    Reason,
    Shape,
    ceildiv,
    count,
    in_turn,
    require,
)
from ...ops.norm import rms_norm
from ...ops.recurrent_state import STATE_ROWS, RecurrentState
from ...ops.rows import ALONE, RowSizes, StepRows, as_rows
from ...ops.tiles import MAX_TOKENS, lanes_of, planned, tile_of
from .channel_op import channel_delta, log_decays
from .spec import ChannelDecay, Delta

CONV_SILU = Kernel("conv_silu", "x state weight length", "out next")
GATED_DELTA = Kernel("gated_delta", "qkv a b A_log dt_bias state length", "out next")
DELTA_INPUTS = Kernel("delta_inputs", "qkv a b A_log dt_bias length", "qk gates")
GATED_DELTA_TOKENS = Kernel("gated_delta_tokens", "qkv qk gates state length", "out next")
GATED_NORM = Kernel("gated_norm", "x z weight eps length", "out")
DELTA_STEP = Kernel("delta_step", "qkv z b a A_log dt_bias taps weight eps conv state", "out next_conv next")
PARTS = ("qkv", "z", "b", "a", "out")  # inputs and outputs that hold the rows of a step in one array
SIMDGROUPS = 4  # per threadgroup: enough to hide latency, few enough to spread over every core of the GPU
THREADS = 256
PLANS = 512  # launches that are kept, one for each length of a chunk
NORM_EPS = 1e-6  # epsilon of the query/key L2 norm, fixed in the published model code

# Of an array [T, n] that is some columns of a wider one: what a kernel takes, and the distance of its rows in values.
Columns = tuple[Input, int]


@dataclass(frozen=True)
class DeltaWeights:
    """Parameters: the convolution [channels, taps, 1], `A_log` and `dt_bias` [value heads], the norm [value dim]; if
    channels decay, `dt_bias` is [key width]. `pieces`: the places of A_log, dt_bias, the convolution and the norm in
    one array, if they are joined.
    """

    conv: mx.array
    A_log: mx.array
    dt_bias: mx.array
    norm: mx.array
    eps: float
    pieces: list[ArrayPiece] | None = None

    @property
    def inputs(self) -> Sequence[Input]:
        """A kernel's inputs for A_log, dt_bias, the convolution and the norm."""
        return (self.A_log, self.dt_bias, self.conv, self.norm) if self.pieces is None else self.pieces


def delta(
    qkv: Array,
    z: Array,
    b: Array,
    a: Array,
    state: RecurrentState | StepRows,
    w: DeltaWeights,
    sizes: Delta,
    joined: Array | None = None,
) -> Array:
    """The mixer from its input projections to its output projection; updates `state`.

    Args:
        qkv: [B, L, channels], q and k of all key heads, then v of all value heads.
        z: [B, L, value width], the gate of the norm; `sizes.gate` names its function.
        state: of one text or a batch of them; or the states of the L rows of a step.
        b, a: [B, L, value heads]; beta = sigmoid(b), decay = exp(-exp(A_log) * softplus(a + dt_bias)). If channels
            decay, a is [B, L, key width], and `log_decays` computes the decays.
        joined: [B, L, ...], for each position qkv, z, b and a one after another, if there is such an array.

    Returns:
        [B, L, value width]
    """
    B, L = qkv.shape[:2]
    has_kernels = kernels_take(qkv, refusal, B, sizes)
    if isinstance(state, StepRows):
        compute = partial(_on_kernels if has_kernels else _of_row, w, sizes)
        return state.each((qkv, z, b, a, joined), compute, has_kernels, in_order=True)
    if isinstance(qkv, np.ndarray):
        return _delta_native(qkv, z, b, a, state, w, sizes)
    if not has_kernels:
        return _delta_ops(qkv, z, b, a, state, w, sizes)
    if L == 1:
        return _on_kernels(w, sizes, StepRows([state]), qkv, z, b, a, joined)
    return _many_on_kernels(qkv, z, b, a, state, w, sizes, joined)


def _of_row(
    w: DeltaWeights, sizes: Delta, rows: StepRows, qkv: Array, z: Array, b: Array, a: Array, joined: Array | None
) -> Array:
    return delta(qkv, z, b, a, rows.cache, w, sizes, joined)


@planned("delta")
def refusal(target: str, sequences: int, sizes: Delta) -> Reason | None:
    """Why the kernels do not take this number of sequences with heads of these sizes."""
    if sizes.channel_decay is not None and sizes.key_heads != sizes.value_heads:
        return Reason(f"channels of {sizes.key_heads} keys decay by themselves for {sizes.value_heads} values")
    if sequences > 1:
        return Reason(f"there are {sequences} sequences; the kernels take one")
    return Reason(f"keys of {sizes.key_dim} values are not a multiple of 32") if sizes.key_dim % 32 else None


# ---- plain MLX operations


def _delta_ops(
    qkv: mx.array, z: mx.array, b: mx.array, a: mx.array, state: RecurrentState, w: DeltaWeights, sizes: Delta
) -> mx.array:
    B, L, _ = qkv.shape
    recurrent = state.recurrent
    if recurrent is None:
        recurrent = mx.zeros((B, sizes.value_heads, sizes.value_dim, sizes.key_dim), mx.float32)
    qkv, conv = _convolve(qkv, state, w, sizes)
    if sizes.channel_decay is None:
        out, recurrent = gated_delta_ops(qkv, a, b, w.A_log, w.dt_bias, recurrent, sizes.key_heads)
    else:
        q, k, v = _heads(float32(qkv), sizes)
        decays = log_decays(a, w.A_log, w.dt_bias, sizes.channel_decay)
        beta = mx.sigmoid(float32(b))
        is_bounded = sizes.channel_decay.floor is not None
        q, k = _unit(q) * sizes.key_dim**-0.5, _unit(k)
        made, recurrent = channel_delta(q, k, v, decays, beta, recurrent, is_bounded)
        out = made.astype(qkv.dtype)
    state.absorb([conv, recurrent], L)
    z = z.reshape(B, L, sizes.value_heads, sizes.value_dim).astype(mx.float32)
    gates = nn.silu(z) if sizes.gate == "silu" else mx.sigmoid(z)
    out = rms_norm(out, w.norm, w.eps) * gates.astype(out.dtype)
    return out.reshape(B, L, -1)


def _convolve(qkv: mx.array, state: RecurrentState, w: DeltaWeights, sizes: Delta) -> tuple[mx.array, mx.array]:
    """silu(causal depthwise convolution), whose output t sees inputs t - taps + 1 .. t, and its last inputs."""
    B, keep = qkv.shape[0], sizes.taps - 1
    before = mx.zeros((B, keep, sizes.channels), qkv.dtype) if state.conv is None else state.conv
    padded = mx.concatenate([before, qkv], axis=1)
    return nn.silu(mx.conv1d(padded, w.conv, groups=sizes.channels)), mx.contiguous(padded[:, -keep:])


def gated_delta_ops(
    qkv: mx.array, a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array, state: mx.array, key_heads: int
) -> tuple[mx.array, mx.array]:
    """`gated_delta` for a batch: every array but A_log and dt_bias has an axis [B] before those it has there."""
    B, L, _ = qkv.shape
    _, heads, v_dim, k_dim = state.shape
    q, k, v = split(qkv, key_heads * k_dim, 2 * key_heads * k_dim)
    q = _unit(q.reshape(B, L, key_heads, k_dim)) * k_dim**-0.5
    k = _unit(k.reshape(B, L, key_heads, k_dim))
    v = v.reshape(B, L, heads, v_dim)
    out, following = mx.fast.gated_delta_update(q, k, v, decay_rate(a, A_log, dt_bias), mx.sigmoid(b), state)
    return out, following


def _heads(qkv: mx.array, sizes: Delta) -> list[mx.array]:
    """q, k and v [B, L, heads, .] of them side by side."""
    parts = split(qkv, sizes.key_width, 2 * sizes.key_width)
    return [
        part.reshape(*qkv.shape[:2], -1, width)
        for part, width in zip(parts, (sizes.key_dim, sizes.key_dim, sizes.value_dim), strict=True)
    ]


def _unit(x: mx.array) -> mx.array:
    """x / sqrt(sum(x^2) + eps) over the head, as an RMS norm: sum = dim * mean."""
    dim = x.shape[-1]
    return rms_norm(x, None, NORM_EPS / dim) * dim**-0.5


def decay_rate(a: mx.array, A_log: mx.array, dt_bias: mx.array) -> mx.array:
    """exp(-exp(A_log) * softplus(a + dt_bias)), float32 [B, L, value_heads]; softplus cannot overflow."""
    softplus = mx.logaddexp(a.astype(mx.float32) + dt_bias.astype(mx.float32), 0.0)
    return mx.exp(-mx.exp(A_log.astype(mx.float32)) * softplus)


# ---- native kernels on the CPU


def _delta_native(
    qkv: np.ndarray, z: np.ndarray, b: np.ndarray, a: np.ndarray, state: RecurrentState, w: DeltaWeights, sizes: Delta
) -> np.ndarray:
    B, L, _ = qkv.shape
    if state.conv is None or state.recurrent is None:
        conv = np.zeros((B, sizes.taps - 1, sizes.channels), np.float32)
        recurrent = np.zeros((B, sizes.value_heads, sizes.value_dim, sizes.key_dim), np.float32)
    else:
        conv, recurrent = view(state.conv), view(state.recurrent)
    with np.errstate(invalid="ignore"):  # damaged weights give NaN here and an error where logits are checked
        if sizes.channel_decay is None:
            softplus = np.logaddexp(a + view(w.dt_bias), np.float32(0))
            decay = np.exp(-np.exp(view(w.A_log)) * softplus)
        else:
            decay = np.exp(log_decays(a, w.A_log, w.dt_bias, sizes.channel_decay))
    beta = sigmoid(b)
    taps = np.ascontiguousarray(view(w.conv).reshape(sizes.channels, -1).T)
    steps = [_recur(qkv[i], decay[i], beta[i], conv[i], recurrent[i], taps, sizes) for i in range(B)]
    out, conv, recurrent = (stack(list(part)) for part in zip(*steps, strict=True))
    state.absorb([mx.array(conv), mx.array(recurrent)], L)
    out, z = rms_norm(out, w.norm, w.eps), z.reshape(out.shape)
    return (activate(z, out) if sizes.gate == "silu" else sigmoid(z) * out).reshape(B, L, -1)


def _recur(
    qkv: np.ndarray,
    decay: np.ndarray,
    beta: np.ndarray,
    conv: np.ndarray,
    recurrent: np.ndarray,
    taps: np.ndarray,
    sizes: Delta,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One sequence [L, channels] -> (out [L, value heads, value dim], next conv, next recurrent state)."""
    L, dim = len(qkv), sizes.key_dim
    mixed, conv = native.conv_silu(conv, np.ascontiguousarray(qkv), taps)
    q, k, v = split(mixed, sizes.key_width, 2 * sizes.key_width)
    # Unit length is an RMS norm over sqrt(dim); the query's own scale is another.
    q = rms_norm(q.reshape(L, -1, dim), np.full(dim, 1 / dim, np.float32), NORM_EPS / dim)
    k = rms_norm(k.reshape(L, -1, dim), np.full(dim, dim**-0.5, np.float32), NORM_EPS / dim)
    v = np.ascontiguousarray(v).reshape(L, sizes.value_heads, -1)
    out, recurrent = native.gated_delta(recurrent, q, k, v, np.ascontiguousarray(decay), np.ascontiguousarray(beta))
    return out, conv, recurrent


# ---- the kernels, for the rows of a step or for many tokens of one sequence on a GPU


def _on_kernels(
    w: DeltaWeights,
    sizes: Delta,
    rows: StepRows,
    qkv: mx.array,
    z: mx.array,
    b: mx.array,
    a: mx.array,
    joined: mx.array | None,
) -> mx.array:
    """`delta` for a row of each of several sequences, or for several of one sequence, in one launch: [1, R, value
    width]. A row has the bits that `_many_on_kernels` gives it."""
    parts = qkv, z, b, a
    widths = [part.shape[-1] if joined is None else joined.shape[-1] for part in parts]
    launch = plan(rows.sizes(widths), backend.name(), qkv.dtype, w.conv.dtype, w.norm.dtype, sizes)
    before = as_rows([_begun(state, qkv.dtype, sizes) for state in rows.sequences])
    inputs: Sequence[Input] = parts if joined is None else in_turn(joined, *parts)
    out, *made = launch(*inputs, *w.inputs, w.eps, *before)
    if not rows.in_order:
        rows.absorb(made)
        return out
    count = len(rows.caches)
    for state, conv, recurrent in zip(rows.absorbing(), made[:count], made[count:], strict=True):
        state.absorb([conv, recurrent], 1)
    return out


def _begun(state: RecurrentState, dtype: mx.Dtype, sizes: Delta) -> tuple[mx.array, mx.array]:
    """A sequence's two arrays, zeros before its first token."""
    if state.conv is not None and state.recurrent is not None:
        return state.conv.astype(dtype), state.recurrent
    return backend.zeros((1, *sizes.conv_shape), dtype), backend.zeros((1, *sizes.state_shape), mx.float32)


@planned("delta", PLANS)
def plan(rows: RowSizes, target: str, dtype: mx.Dtype, taps: mx.Dtype, norm: mx.Dtype, sizes: Delta) -> Launch:
    """The launch for some rows; `taps` and `norm`: dtypes of the convolution and of the norm."""
    heads, v_dim, k_dim, count = sizes.value_heads, sizes.value_dim, sizes.key_dim, rows.count
    own_rows = tile_of(target, "delta_step").rows
    simdgroups = min(ceildiv(v_dim, own_rows), MOST_THREADS[target] // 32)
    template = {"X": dtype, "W": taps, "V": norm, "NK": sizes.key_heads, "NV": heads, "DK": k_dim, "DV": v_dim}
    template |= {"TAPS": sizes.taps, "R": own_rows, "SG": simdgroups, "SIGMOID": int(sizes.gate == "sigmoid")}
    template |= {**_decay(sizes.channel_decay), "STEPS": count if rows.in_order else 1}
    widths = (*(rows.widths or (0,) * 4), sizes.value_width)
    template |= {f"AT_{name.upper()}": n for name, n in zip(PARTS, widths, strict=True)}
    outputs: list[tuple[Shape, mx.Dtype]] = [((1, count, sizes.value_width), dtype)]
    each, times = (1, count) if rows.in_order else (count, 1)  # rows of several sequences share arrays
    outputs += [((each, *sizes.conv_shape), dtype)] * times + [((each, *sizes.state_shape), mx.float32)] * times
    launch = Launch(target, DELTA_STEP, template, (heads, 1), 32 * simdgroups, outputs)
    if rows == ALONE:
        return launch
    if rows.in_order:
        return launch.with_arrays({name: f"{name}*{count}" for name in ("next_conv", "next")}, {}, outputs)
    own = {name: f"{name}+AT_{name.upper()}" for name in PARTS}
    own |= {"conv": "conv+CONV", "next_conv": "next_conv+CONV", "state": "state+STATE", "next": "next+STATE"}
    places = {"CONV": prod(sizes.conv_shape), "STATE": prod(sizes.state_shape)}
    return launch.of_rows(own, count, places, outputs)


def _many_on_kernels(
    qkv: mx.array,
    z: mx.array,
    b: mx.array,
    a: mx.array,
    state: RecurrentState,
    w: DeltaWeights,
    sizes: Delta,
    joined: mx.array | None,
) -> mx.array:
    """`delta` for several tokens of one sequence: [1, L, value width]."""
    L = qkv.shape[1]
    conv, recurrent = _begun(state, qkv.dtype, sizes)
    parts = qkv, z, b, a
    where: list[Columns | None] = [None] * len(parts)
    if joined is not None:
        where = [(piece, joined.shape[-1]) for piece in in_turn(joined, *parts)]
    qkv, conv = conv_silu(qkv, conv, w.conv, where[0])
    given = qkv, a, b, w.A_log, w.dt_bias, recurrent, sizes.key_heads, sizes.channel_decay
    out, recurrent = gated_delta(*given) if L <= MAX_TOKENS else gated_delta_tokens(*given, where[3], where[2])
    state.absorb([conv, recurrent], L)
    return gated_norm(out, z, w.norm, w.eps, sizes.gate, where[1])


def conv_silu(
    x: mx.array, state: mx.array, weight: mx.array, where: Columns | None = None
) -> tuple[mx.array, mx.array]:
    """silu of the causal depthwise convolution of x [T, C] after state [taps - 1, C]; weight [C, taps]. `where`: of x.
    More axes of length 1 are kept.

    Returns (out [T, C], the next state).
    """
    given, stride = where or (x, x.shape[-1])
    launch = plan_conv(backend.name(), x.shape, x.dtype, state.shape, weight.dtype, stride)
    out, following = launch(given, state.astype(x.dtype), weight, count(x.shape[-2]))
    return out, following


@lru_cache(PLANS)
def plan_conv(target: str, x: Shape, dtype: mx.Dtype, state: Shape, weight_dtype: mx.Dtype, stride: int) -> Launch:
    *_, T, C = x
    template = {"X": dtype, "W": weight_dtype, "C": C, "TAPS": state[-2] + 1, "AT_X": stride}
    return Launch(target, CONV_SILU, template, (ceildiv(C, THREADS), T), THREADS, [(x, dtype), (state, dtype)])


def _decay(rule: ChannelDecay | None) -> dict[str, int | float]:
    """How the state decays, as constants of the texts."""
    return {"EACH": int(rule is not None), "FLOOR": 0.0 if rule is None or rule.floor is None else rule.floor}


def gated_delta(
    qkv: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array,
    key_heads: int,
    rule: ChannelDecay | None = None,
) -> tuple[mx.array, mx.array]:
    """T steps of the gated delta rule (arXiv:2412.06464) on raw queries and keys, which it normalises.

    Args:
        qkv: [T, C], q and k of `key_heads` heads, then v of all value heads.
        a, b: [T, value heads]; decay = exp(-exp(A_log) * softplus(a + dt_bias)), beta = sigmoid(b).
        A_log, dt_bias: [value heads] float32.
        state: [value heads, value dim, key dim] float32, key dim a multiple of 32.
        rule: the decay per channel, with a [T, key width] and dt_bias [key width]; None: one decay per head.

    The arrays may have more axes of length 1 before these, which the next state keeps.

    Returns (out [T, value heads, value dim] in qkv's dtype, the next state).
    """
    T = qkv.shape[-2]
    launch = plan_delta(backend.name(), T, qkv.dtype, state.shape, key_heads, rule)
    out, following = launch(qkv, a, b, A_log, dt_bias, state, count(T))
    return out, following


@lru_cache(PLANS)
def plan_delta(target: str, T: int, dtype: mx.Dtype, state: Shape, key_heads: int, rule: ChannelDecay | None) -> Launch:
    *_, heads, v_dim, k_dim = state
    template = {"X": dtype, "NK": key_heads, "NV": heads, "DK": k_dim, "DV": v_dim} | _decay(rule)
    template |= {"R": STATE_ROWS, "SG": SIMDGROUPS}
    groups = (ceildiv(v_dim, STATE_ROWS * SIMDGROUPS), heads)
    outputs = [((T, heads, v_dim), dtype), (state, mx.float32)]
    return Launch(target, GATED_DELTA, template, groups, 32 * SIMDGROUPS, outputs)


def gated_delta_tokens(
    qkv: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array,
    key_heads: int,
    rule: ChannelDecay | None = None,
    where_a: Columns | None = None,
    where_b: Columns | None = None,
) -> tuple[mx.array, mx.array]:
    """`gated_delta` for more than a few tokens, in two launches: the same values but for float32's rounding.

    The steps are computed one by one, so the bits do not depend on how a text is cut into calls.
    """
    T = qkv.shape[-2]
    target = backend.name()
    (own_a, a_stride), (own_b, b_stride) = where_a or (a, a.shape[-1]), where_b or (b, b.shape[-1])
    prepare, steps = plan_tokens(target, T, qkv.dtype, state.shape, key_heads, rule, a_stride, b_stride)
    qk, gates = prepare(qkv, own_a, own_b, A_log, dt_bias, count(T))
    out, following = steps(qkv, qk, gates, state, count(T))
    return out, following


@planned("delta", PLANS)
def plan_tokens(
    target: str,
    T: int,
    dtype: mx.Dtype,
    state: Shape,
    key_heads: int,
    rule: ChannelDecay | None,
    a_stride: int,
    b_stride: int,
) -> tuple[Launch, Launch]:
    """The launch that prepares the inputs of the steps, and that of the steps."""
    *_, heads, v_dim, k_dim = state
    tile = tile_of(target, "gated_delta_tokens")
    template = {"X": dtype, "NK": key_heads, "NV": heads, "DK": k_dim} | _decay(rule)
    vectors = 2 if rule is None else 3
    inputs = template | {"C": 2 * key_heads * k_dim + heads * v_dim, "SG": SIMDGROUPS}
    inputs |= {"AT_A": a_stride, "AT_B": b_stride}
    shapes = (T, vectors, key_heads, k_dim), (T, 2, heads)
    prepared = [(shape, mx.float32) for shape in shapes]
    groups = (ceildiv(T * key_heads, SIMDGROUPS), 1)
    prepare = Launch(target, DELTA_INPUTS, inputs, groups, 32 * SIMDGROUPS, prepared)

    lanes = lanes_of(k_dim // 4, tile.lanes)
    rows = tile.rows * tile.simdgroups * 32 // lanes
    shared = 32 * tile.ahead * (vectors * k_dim // 4 + rows)  # bytes, as the text declares them
    require(shared <= SHARED_BYTES, f"{tile} takes {shared} bytes of threadgroup memory; there are {SHARED_BYTES}")
    template |= {"DV": v_dim, "L": lanes, "R": tile.rows, "SG": tile.simdgroups, "B": tile.ahead}
    groups = (ceildiv(v_dim * lanes, 32 * tile.rows * tile.simdgroups), heads)
    outputs = [((T, heads, v_dim), dtype), (state, mx.float32)]
    return prepare, Launch(target, GATED_DELTA_TOKENS, template, groups, 32 * tile.simdgroups, outputs)


def gated_norm(
    x: mx.array, z: mx.array, weight: mx.array, eps: float, gate: str = "silu", where: Columns | None = None
) -> mx.array:
    """rms_norm(x) * weight * silu(z), or sigmoid(z) as `gate` says, over the last axis; x, z [..., heads, D], weight
    [D]. `where`: of z's rows of all heads. The result has z's shape, in which heads may be one axis with D.
    """
    given, stride = where or (z, x.shape[-2] * x.shape[-1])
    launch = plan_norm(backend.name(), x.shape, z.shape, x.dtype, weight.dtype, gate, stride)
    return launch(x, given, weight, eps, count(x.size // x.shape[-1]))[0]


@lru_cache(PLANS)
def plan_norm(
    target: str, x: Shape, out: Shape, dtype: mx.Dtype, weight_dtype: mx.Dtype, gate: str, stride: int
) -> Launch:
    *lead, heads, D = x
    template = {"X": dtype, "W": weight_dtype, "D": D, "SG": SIMDGROUPS, "SIGMOID": int(gate == "sigmoid")}
    template |= {"HEADS": heads, "AT_Z": stride}
    groups = ceildiv(prod(lead) * heads, SIMDGROUPS), 1
    return Launch(target, GATED_NORM, template, groups, 32 * SIMDGROUPS, [(out, dtype)])
