"""The delta rule with a decay for each value of a key (Kimi Delta Attention, arXiv:2510.26692, section 3).

A single token is one step. Many tokens are computed in chunks: the updates of a chunk's tokens solve a triangular
system, of which only the right side needs the state. These are the plain operations; kernels take the steps one by one
(`delta`).
"""

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from ...ops import gpu_time
from ...ops.backend import Array, library_of, of_kind
from ...ops.elementwise import float32, sigmoid, softplus
from .spec import ChannelDecay

# Tokens of a chunk. Bounded decays within it are products of two factors, one to the chunk's middle and one from there:
# with logarithms from LEAST_FLOOR on both are within exp(+-40), and their product is within float32 wherever they meet.
CHUNK = 16
DELTA_TOKENS = 512  # tokens whose chunks are made at once


def log_decays(a: Array, A_log: mx.array, dt_bias: mx.array, rule: ChannelDecay) -> Array:
    """The logarithms of `ChannelDecay`, float32 [B, L, heads, key dim].

    Args:
        a: [B, L, heads * key dim]. A_log: [heads]. dt_bias: [heads * key dim].
    """
    library = library_of(a)
    rates, bias = of_kind(A_log, a), of_kind(dt_bias, a)
    logits = (float32(a) + bias).reshape(*a.shape[:2], rates.shape[0], -1)
    rates = library.exp(rates)[:, None]
    decays: Array = -rates * softplus(logits) if rule.floor is None else rule.floor * sigmoid(rates * logits)
    return decays


def channel_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    decays: mx.array,
    beta: mx.array,
    state: mx.array,
    is_bounded: bool = True,
) -> tuple[mx.array, mx.array]:
    """Steps of the delta rule in float32: S *= exp(decays); S += outer((v - S k) * beta, k); o = S q.

    Args:
        q, k: [B, L, heads, key dim], of unit length but for the query's scale. v: [B, L, heads, value dim].
        decays: logarithms, at most 0, [B, L, heads, key dim]. beta: [B, L, heads].
        state: [B, heads, value dim, key dim].
        is_bounded: whether all decays are at least `LEAST_FLOOR`.

    Returns (out [B, L, heads, value dim], the next state).
    """
    parts, count = [], q.shape[1]
    compute: Callable[..., tuple[mx.array, mx.array]] = _step if count == 1 else partial(_chunks, is_bounded)
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
    is_bounded: bool, q: mx.array, k: mx.array, v: mx.array, decays: mx.array, beta: mx.array, state: mx.array
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
    end, meet = since[..., -1:, :], _meet_bounded if is_bounded else _meet
    met, seen = meet(q, k, since)
    met, seen = mx.tril(met * beta, -1), mx.tril(seen)
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


def _meet_bounded(q: mx.array, k: mx.array, since: mx.array) -> tuple[mx.array, mx.array]:
    """For tokens t and s <= t of a chunk [..., size, D], the sums over channels of k_t exp(since_t - since_s) k_s, and
    the same with q_t; [..., size, size], of which other places have no meaning.
    """
    middle = since[..., k.shape[-2] // 2 - 1 : k.shape[-2] // 2, :]
    to, earlier = mx.exp(since - middle), (k * mx.exp(middle - since)).swapaxes(-1, -2)
    return (k * to) @ earlier, (q * to) @ earlier


def _meet(q: mx.array, k: mx.array, since: mx.array) -> tuple[mx.array, mx.array]:
    """The same for decays without a bound: each pair of tokens has its own factors, which are at most 1."""
    factors = mx.exp(mx.minimum(since[..., :, None, :] - since[..., None, :, :], 0.0))
    keys = factors * k[..., None, :, :]  # [..., size, size, D]
    made = keys @ mx.stack([k, q], axis=-1)
    return made[..., 0], made[..., 1]


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
