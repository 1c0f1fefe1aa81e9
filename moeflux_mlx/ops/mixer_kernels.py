"""GPU kernels for what stands between the big products of a token: Gated DeltaNet's small steps and the router.

Each replaces a chain of MLX operations whose launches cost more than their arithmetic. The twins are those chains,
beside the callers that choose: `gated_delta.GatedDeltaNet` and `router`. Sources under `metal/`, as in `kernels`.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from .kernels import backend, build

FAMILIES = {
    "conv_silu": (["x", "state", "weight", "length"], ["out", "next"]),
    "gated_delta": (["qkv", "a", "b", "A_log", "dt_bias", "state", "length"], ["out", "next"]),
    "gated_norm": (["x", "z", "weight", "eps", "length"], ["out"]),
    "softmax_topk": (["logits"], ["ids", "weights"]),
}
SIMDGROUPS = 4  # of a threadgroup: enough to hide latency, few enough to spread over every core of the GPU
STATE_ROWS = 4  # rows of a head's state in one simdgroup's registers: 4 x 4 floats a lane at 128 columns
THREADS = 256


@cache
def _kernel(target: str, family: str) -> Any:
    return build(target, family, *FAMILIES[family])


def _launch(
    family: str,
    inputs: list[mx.array],
    template: dict[str, Any],
    groups: tuple[int, int],
    threads: int,
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
) -> list[mx.array]:
    return _kernel(backend(), family)(
        inputs=inputs,
        template=list(template.items()),
        grid=(groups[0] * threads, groups[1], 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )


@cache
def _length(count: int) -> mx.array:
    """The number of steps or rows as an array: not a template argument, or each length would be compiled.

    Made from values, not by an operation: what is not evaluated yet belongs to the thread that made it.
    """
    return mx.array([count] * 8, mx.int32)


def conv_silu(x: mx.array, state: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
    """silu of the causal depthwise convolution of x [T, C] after state [taps - 1, C]; weight [C, taps].

    Returns (out [T, C], the next state).
    """
    T, C = x.shape
    taps = weight.shape[1]
    template = {"X": x.dtype, "W": weight.dtype, "C": C, "TAPS": taps}
    outputs = [((T, C), x.dtype), ((taps - 1, C), x.dtype)]
    inputs = [x, state.astype(x.dtype), weight, _length(T)]
    out, following = _launch("conv_silu", inputs, template, (-(-C // THREADS), T), THREADS, outputs)
    return out, following


def gated_delta(
    qkv: mx.array, a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array, state: mx.array, key_heads: int
) -> tuple[mx.array, mx.array]:
    """T steps of the gated delta rule (arXiv:2412.06464) on raw queries and keys, which it normalises.

    Args:
        qkv: [T, C], q and k of `key_heads` heads, then v of all value heads.
        a, b: [T, value heads]; decay = exp(-exp(A_log) * softplus(a + dt_bias)), beta = sigmoid(b).
        A_log, dt_bias: [value heads] float32.
        state: [value heads, value dim, key dim] float32, key dim a multiple of 32.

    Returns (out [T, value heads, value dim] in qkv's dtype, the next state).
    """
    T = qkv.shape[0]
    heads, v_dim, k_dim = state.shape
    template = {"X": qkv.dtype, "NK": key_heads, "NV": heads, "DK": k_dim, "DV": v_dim}
    template |= {"R": STATE_ROWS, "SG": SIMDGROUPS}
    groups = (-(-v_dim // (STATE_ROWS * SIMDGROUPS)), heads)
    outputs = [((T, heads, v_dim), qkv.dtype), (state.shape, mx.float32)]
    inputs = [qkv, a, b, A_log, dt_bias, state, _length(T)]
    out, following = _launch("gated_delta", inputs, template, groups, 32 * SIMDGROUPS, outputs)
    return out, following


@cache
def _epsilon(eps: float) -> mx.array:
    return mx.array([eps] * 8, mx.float32)


def gated_norm(x: mx.array, z: mx.array, weight: mx.array, eps: float) -> mx.array:
    """rms_norm(x) * weight * silu(z), over the last axis; x, z [..., D], weight [D]."""
    D = x.shape[-1]
    rows = x.size // D
    template = {"X": x.dtype, "W": weight.dtype, "D": D, "SG": SIMDGROUPS}
    groups = (-(-rows // SIMDGROUPS), 1)
    inputs = [x, z, weight, _epsilon(eps), _length(rows)]
    return _launch("gated_norm", inputs, template, groups, 32 * SIMDGROUPS, [(x.shape, x.dtype)])[0]


def softmax_topk(logits: mx.array, k: int, norm_topk_prob: bool) -> tuple[mx.array, mx.array]:
    """As `router.softmax_topk`; logits [T, E] float32."""
    T, E = logits.shape
    template = {"E": E, "K": k, "NORM": int(norm_topk_prob)}
    outputs = [((T, k), mx.uint32), ((T, k), mx.float32)]
    ids, weights = _launch("softmax_topk", [logits], template, (1, T), 32, outputs)
    return ids, weights
