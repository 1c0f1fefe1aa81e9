"""The delta rule with a decay for each value of a key (Kimi Delta Attention, arXiv:2510.26692, section 3).

A single token is one step. Many tokens are computed in chunks: the updates of a chunk's tokens solve a triangular
system, of which only the right side needs the state. These are the plain operations; kernels take the steps one by one
(`delta`).
"""

from collections.abc import Callable

import mlx.core as mx

from ...ops import gpu_time
from ...ops.backend import Array, library_of, view
from ...ops.elementwise import float32, sigmoid
from .spec import ChannelDecay

# Tokens of a chunk. Decays within it are products of two factors, one to the chunk's middle and one from there: with
# logarithms from LEAST_FLOOR on both are within exp(+-40), and their product is within float32 wherever they meet.
CHUNK = 16
DELTA_TOKENS = 512  # tokens whose chunks are made at once


def log_decays(a: Array, A_log: mx.array, dt_bias: mx.array, rule: ChannelDecay) -> Array:
    """floor * sigmoid(exp(A_log) * (a + dt_bias)), float32 [B, L, heads, key dim].

    Args:
        a: [B, L, heads * key dim]. A_log: [heads]. dt_bias: [heads * key dim].
    """
    library = library_of(a)
    rates, bias = (part if library is mx else view(part) for part in (A_log, dt_bias))
    logits = (float32(a) + bias).reshape(*a.shape[:2], rates.shape[0], -1)
    decays: Array = rule.floor * sigmoid(library.exp(rates)[:, None] * logits)
    return decays


def channel_delta(
    q: mx.array, k: mx.array, v: mx.array, decays: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Steps of the delta rule in float32: S *= exp(decays); S += outer((v - S k) * beta, k); o = S q.

    Args:
        q, k: [B, L, heads, key dim], of unit length but for the query's scale. v: [B, L, heads, value dim].
        decays: logarithms, from `LEAST_FLOOR` to 0, [B, L, heads, key dim]. beta: [B, L, heads].
        state: [B, heads, value dim, key dim].

    Returns (out [B, L, heads, value dim], the next state).
    """
    parts, count = [], q.shape[1]
    compute: Callable[..., tuple[mx.array, mx.array]] = _step if count == 1 else _chunks
    for start in range(0, count, DELTA_TOKENS):
        some = [part[:, start : start + DELTA_TOKENS] for part in (q, k, v, decays, beta[..., None])]
        out, state = compute(*some, state)
        parts.append(out)
        gpu_time.commit(count, out)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1), state


def _step(
    q: mx.array, k: mx.array, v: mx.array, decays: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """One step for a single token."""
    q, k, v, decays, beta = (part.swapaxes(1, 2) for part in (q, k, v, decays, beta))  # [B, heads, 1, D]
    state = state * mx.exp(decays)
    learned = (v - k @ state.swapaxes(-1, -2)) * beta
    state = state + learned.swapaxes(-1, -2) * k
    return (q @ state.swapaxes(-1, -2)).swapaxes(1, 2), state


def _chunks(
    q: mx.array, k: mx.array, v: mx.array, decays: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Several tokens. Tokens that pad the last chunk have no effect: no update and no decay."""
    B, L, heads, _ = k.shape
    size = min(CHUNK, 1 << (L - 1).bit_length())
    count = -(-L // size)

    def parted(part: mx.array) -> mx.array:
        """[B, L, heads, D] -> [B, heads, chunks, tokens, D]."""
        padded = mx.pad(part, [(0, 0), (0, count * size - L), (0, 0), (0, 0)])
        return padded.reshape(B, count, size, heads, -1).transpose(0, 3, 1, 2, 4)

    q, k, v, decays, beta = map(parted, (q, k, v, decays, beta))
    since = mx.cumsum(decays, axis=-2)  # the beginning of the chunk
    middle, end = since[..., size // 2 - 1 : size // 2, :], since[..., -1:, :]
    to, back = mx.exp(since - middle), mx.exp(middle - since)
    earlier = (k * back).swapaxes(-1, -2)
    met = mx.tril((k * to) @ earlier * beta, -1)
    seen = mx.tril((q * to) @ earlier)
    solved = inverse(met)
    begun = mx.exp(since)
    values, keys, queries = solved @ (v * beta), solved @ (k * begun * beta), q * begun
    kept, end, outs = k * mx.exp(end - since), mx.exp(end), []
    for i in range(count):
        before = state.swapaxes(-1, -2)
        learned = values[:, :, i] - keys[:, :, i] @ before
        outs.append(queries[:, :, i] @ before + seen[:, :, i] @ learned)
        state = state * end[:, :, i] + learned.swapaxes(-1, -2) @ kept[:, :, i]
    out = mx.stack(outs, axis=2).reshape(B, heads, count * size, -1)
    return out[:, :, :L].swapaxes(1, 2), state


def inverse(lower: mx.array) -> mx.array:
    """(1 + lower)^-1 [..., n, n] of strictly lower triangular matrices, n a power of two: made of the inverses of both
    diagonal halves, whose values stay as small as the result's."""
    half = lower.shape[-1] // 2
    if not half:
        return mx.ones_like(lower)
    both = inverse(mx.stack([lower[..., :half, :half], lower[..., half:, half:]], axis=-3))
    first, last = both[..., 0, :, :], both[..., 1, :, :]
    corner = -(last @ lower[..., half:, :half] @ first)
    above = mx.concatenate([first, mx.zeros_like(corner)], axis=-1)
    return mx.concatenate([above, mx.concatenate([corner, last], axis=-1)], axis=-2)
