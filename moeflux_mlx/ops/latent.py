"""Multi-head latent attention between its projections (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Only a latent vector and one rotated key, shared by all heads, are cached for each position. A short query folds the key
projection into itself and attends over the latents; a long one expands the latents to keys and values first, because
that is less arithmetic.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import numpy as np

from . import backend, native
from .attend import Positions, in_parts
from .backend import Array, stack, view
from .elementwise import split
from .launch import Kernel, Launch, Shape, ceildiv
from .linear import Weights, by_head, multiply, part_of_heads
from .norm import Norm
from .rope import Rope

LATENT_STEP = Kernel("latent_step", "q kv weight periods offset eps magnitude", "q_nope q_pe latent k_pe")
SIMDGROUPS = 4  # of a threadgroup, each with a head
ABSORB_AT_MOST = 8  # query rows; beyond, expanding costs fewer multiplications than attending over 512-wide latents
Mask = mx.array | str | None


@dataclass(frozen=True)
class HeadMatrices:
    """A matrix for each head, in `weights` [heads, rows, columns], or in the `rows` of each head of a flat matrix.

    `turned`: the matrix of a head is the transpose of what is stored.
    """

    weights: Weights
    heads: int
    rows: slice | None = None
    turned: bool = False

    @property
    def height(self) -> int:
        """Rows of a head's matrix, as it is stored."""
        rows = self.weights.shape[-2] if len(self.weights.shape) == 3 else self.weights.shape[0] // self.heads
        return len(range(rows)[self.rows or slice(None)])

    def multiply(self, x: mx.array, transpose: bool) -> mx.array:
        """x [B, heads, L, ...] @ M.T (`transpose`) or x @ M."""
        part = self.weights if self.rows is None else part_of_heads(self.weights, self.heads, self.rows)
        return multiply(x, part, transpose != self.turned)

    def each(self) -> Iterator[np.ndarray]:
        """In turn, in float32; the memory may be used again for the next."""
        found = by_head(self.weights, self.heads, self.rows or slice(None))
        return (matrix.T for matrix in found) if self.turned else found


def attend_latent(
    q: Array,
    kv: Array,
    cache: Positions,
    key: HeadMatrices,
    value: HeadMatrices,
    *,
    norm: Norm,
    rope: Rope,
    scale: float,
) -> Array:
    """softmax(scale * (q_nope key latent + q_pe k_pe)) (value latent), causal, over all that `cache` has seen.

    Args:
        q: [B, L, heads, nope + R], q_nope and q_pe of each head.
        kv: [B, L, N + R], latent and k_pe. Both are appended to `cache`, the latent normed, k_pe turned.
        key: matrices [nope, N]. value: matrices [v, N].
        norm: of the latent.
        rope: turns q_pe and k_pe by their positions.

    Returns:
        [B, L, heads * v]
    """
    B, L = q.shape[:2]
    if isinstance(q, np.ndarray):
        q_nope, q_pe, latent, k_pe = _parts(q, kv, norm, rope, cache.offset)
        cache.update_and_fetch(mx.array(latent[:, None]), mx.array(k_pe.reshape(B, 1, L, -1)))
        kept = [view(part)[:, 0, : cache.offset] for part in (cache.keys, cache.values)]
        native_form = _absorbed_native if L <= ABSORB_AT_MOST else _expanded_native
        rows = [native_form(q_nope[i], q_pe[i], kept[0][i], kept[1][i], key, value, scale) for i in range(B)]
        return stack(rows).reshape(B, L, -1)
    parts = _step if B * L == 1 and backend.has_kernels() else _parts
    q_nope, q_pe, latent, k_pe = parts(q, kv, norm, rope, cache.offset)
    latent, k_pe = cache.update_and_fetch(latent[:, None], k_pe)
    form = _absorbed if L <= ABSORB_AT_MOST else _expanded
    out = form(q_nope, q_pe, latent, k_pe, cache.mask(L), key, value, scale)
    return out.transpose(0, 2, 1, 3).reshape(B, L, -1)


def _parts(q: Array, kv: Array, norm: Norm, rope: Rope, offset: int | mx.array) -> tuple[Array, Array, Array, Array]:
    """(q_nope, turned q_pe, normed latent [B, L, N], turned k_pe), all but the latent laid out as attention wants it of
    each kind of array (`Rope`)."""
    latent, k_pe = split(kv, kv.shape[-1] - rope.dims)
    k_pe = k_pe[:, :, None]
    q_nope, q_pe = split(q, q.shape[-1] - rope.dims)
    if isinstance(q, mx.array):
        q_nope, q_pe, k_pe = (part.transpose(0, 2, 1, 3) for part in (q_nope, q_pe, k_pe))
    return q_nope, rope(q_pe, offset), norm(latent), rope(k_pe, offset)


def _step(q: mx.array, kv: mx.array, norm: Norm, rope: Rope, offset: int | mx.array) -> tuple[mx.array, ...]:
    """`_parts` of one token on a GPU in one launch."""
    position = offset[None] if isinstance(offset, mx.array) else mx.array([offset], mx.int32)
    launch = _plan(backend.name(), q.shape, kv.shape, q.dtype, norm.weight.dtype, rope.dims, rope.interleaved)
    return tuple(launch(q, kv, norm.weight, rope.periods, position, norm.eps, rope.magnitude))


@lru_cache(64)
def _plan(target: str, q: Shape, kv: Shape, dtype: mx.Dtype, weight: mx.Dtype, dims: int, interleaved: bool) -> Launch:
    heads, nope, latent = q[2], q[3] - dims, kv[2] - dims
    template = {"X": dtype, "W": weight, "H": heads, "NOPE": nope, "R": dims, "N": latent}
    template |= {"NEXT": int(interleaved), "SG": SIMDGROUPS}
    shapes = (1, heads, 1, nope), (1, heads, 1, dims), (1, 1, latent), (1, 1, 1, dims)
    outputs = [(shape, dtype) for shape in shapes]
    return Launch(target, LATENT_STEP, template, (ceildiv(heads + 1, SIMDGROUPS), 1), 32 * SIMDGROUPS, outputs)


def _absorbed(
    q_nope: mx.array,
    q_pe: mx.array,
    latent: mx.array,
    k_pe: mx.array,
    mask: Mask,
    key: HeadMatrices,
    value: HeadMatrices,
    scale: float,
) -> mx.array:
    q = key.multiply(q_nope, transpose=False)
    scores = (q @ latent.swapaxes(-1, -2) + q_pe @ k_pe.swapaxes(-1, -2)) * scale
    return value.multiply(_softmax(scores, mask) @ latent, transpose=True)


def _expanded(
    q_nope: mx.array,
    q_pe: mx.array,
    latent: mx.array,
    k_pe: mx.array,
    mask: Mask,
    key: HeadMatrices,
    value: HeadMatrices,
    scale: float,
) -> mx.array:
    k = key.multiply(latent, transpose=True).swapaxes(-1, -2)  # [B, heads, nope, N]
    v = value.multiply(latent, transpose=True)
    k_pe, parts = k_pe.swapaxes(-1, -2), []
    for rows, seen, part_mask in in_parts(2 * q_nope.shape[1], q_nope.shape[2], latent.shape[2], mask):
        scores = q_nope[:, :, rows] @ k[..., seen] + q_pe[:, :, rows] @ k_pe[..., seen]
        parts.append(_softmax(scores * scale, part_mask) @ v[:, :, seen])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _softmax(scores: mx.array, mask: Mask) -> mx.array:
    """scores [B, heads, L, N]; "causal": query row i is at position N - L + i and sees no later key."""
    if isinstance(mask, str):
        L, N = scores.shape[-2:]
        mask = mx.arange(N)[None] <= mx.arange(N - L, N)[:, None]
    if mask is not None:
        scores = mx.where(mask, scores, mx.array(-mx.inf, scores.dtype))
    return mx.softmax(scores, axis=-1, precise=True)


def _absorbed_native(
    q_nope: np.ndarray,
    q_pe: np.ndarray,
    latent: np.ndarray,
    k_pe: np.ndarray,
    key: HeadMatrices,
    value: HeadMatrices,
    scale: float,
) -> np.ndarray:
    """q [L, heads, ...] over the latents [N, ...], which are keys and values of all heads alike."""
    L, heads = q_nope.shape[:2]
    N, width = latent.shape
    q = np.empty((L, heads, width + q_pe.shape[-1]), np.float32)
    for head, matrix in enumerate(key.each()):
        q[:, head, :width] = q_nope[:, head] @ matrix
    q[..., width:] = q_pe
    mixed = native.attend(q, np.concatenate([latent, k_pe], axis=-1)[None], latent[None], N, scale)
    out = np.empty((L, heads, value.height), np.float32)
    for head, matrix in enumerate(value.each()):
        out[:, head] = mixed[:, head] @ matrix.T
    return out


def _expanded_native(
    q_nope: np.ndarray,
    q_pe: np.ndarray,
    latent: np.ndarray,
    k_pe: np.ndarray,
    key: HeadMatrices,
    value: HeadMatrices,
    scale: float,
) -> np.ndarray:
    heads, nope = q_nope.shape[1:]
    N = len(latent)
    k = np.empty((heads, N, nope + q_pe.shape[-1]), np.float32)
    v = np.empty((heads, N, value.height), np.float32)
    for head, (keys, values) in enumerate(zip(key.each(), value.each(), strict=True)):
        k[head, :, :nope] = latent @ keys.T
        v[head] = latent @ values.T
    k[..., nope:] = k_pe
    return native.attend(np.concatenate([q_nope, q_pe], axis=-1), k, v, N, scale)
