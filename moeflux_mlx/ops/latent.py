"""Multi-head latent attention between its projections (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Only a latent vector and one rotated key, shared by all heads, are cached for each position. A short query folds the key
projection into itself and attends over the latents; a long one expands the latents to keys and values first, because
that is less arithmetic. On a GPU a token takes three launches, which write nothing to the cache (`attend`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..kinds import QueryScale
from ..quant import DEFAULT
from . import backend, gpu_time, native
from .attend import RECENT, SEVERAL, Held, Steps, in_parts
from .backend import Array, stack, view
from .elementwise import split
from .forms import Form, code_number, is_read
from .launch import LEAST_ELEMENTS, NO_KERNELS, SHARED_BYTES, Input, Kernel, Launch, Reason, ceildiv
from .linear import Weights, by_head, inputs_of, linear, multiply, part_of_heads
from .norm import Norm
from .rope import Rope
from .tiles import planned

QUERY_INPUTS = "x kv q_norm kv_norm periods positions eps magnitude scale w_q q_scales q_biases w scales biases"
ATTEND = Kernel("latent_attend", "query token positions latents keys recent", "parts stats next")
COMBINE = Kernel("latent_combine", "parts stats positions w scales biases", "out")
# Of a threadgroup that has one head: its threads, and the lanes that share a row of the queries' matrix.
SHAPES = {"metal": (256, 8), "cuda": (512, 16)}
WIDEST = 8 * 256  # columns of the latents, of which each thread of latent_query has eight
PIECE, ATTENDING = 128, 128  # positions and threads of one that attends
HEADS = 8  # that a threadgroup attends for, where its memory holds so many
ABSORB_AT_MOST = 8  # query rows; beyond, expanding costs fewer multiplications than attending over 512-wide latents
Mask = mx.array | str | None
StoredForm = tuple[int, int, int, mx.Dtype]  # of metal/stored.h.metal: BITS, GROUP, MX and the scales' dtype


@dataclass(frozen=True)
class HeadMatrices:
    """A matrix for each head, in `weights` [heads, rows, columns], or in the `rows` of each head of a flat matrix.

    `transposed`: the matrix of a head is the transpose of what is stored.
    """

    weights: Weights
    heads: int
    rows: slice | None = None
    transposed: bool = False

    @property
    def height(self) -> int:
        """Rows of a head's matrix, as it is stored."""
        rows = self.weights.shape[-2] if len(self.weights.shape) == 3 else self.weights.shape[0] // self.heads
        return len(range(rows)[self.rows or slice(None)])

    def multiply(self, x: mx.array, transpose: bool) -> mx.array:
        """x [B, heads, L, ...] @ M.T (`transpose`) or x @ M."""
        part = self.weights if self.rows is None else part_of_heads(self.weights, self.heads, self.rows)
        return multiply(x, part, transpose != self.transposed)

    def of(self, some: slice) -> "HeadMatrices":
        """Those of some heads."""
        part = part_of_heads(self.weights, self.heads, self.rows or slice(None), some)
        return HeadMatrices(part, part.weight.shape[0], transposed=self.transposed)

    def stored(self) -> "StoredMatrices":
        """What kernels take of them."""
        part = self.weights if self.rows is None else part_of_heads(self.weights, self.heads, self.rows)
        arrays: list[Any] = inputs_of(part)
        transposed, (bits, group) = self.transposed, (0, 1)
        if part.quant is not None:
            bits, group = part.quant.bits, part.quant.group_size
        else:
            weight, transposed = arrays[0], transposed and arrays[0].shape[-1] % 8 == 0
            arrays = [weight if transposed == self.transposed else weight.swapaxes(-1, -2)] * 3
        return StoredMatrices(arrays, (bits, group, code_number(part.quant), arrays[1].dtype), transposed)

    def each(self) -> Iterator[np.ndarray]:
        """In turn, in float32; the memory may be used again for the next."""
        matrices = by_head(self.weights, self.heads, self.rows or slice(None))
        return (matrix.T for matrix in matrices) if self.transposed else matrices


class StoredMatrices(NamedTuple):
    """Matrices for metal/stored.h.metal: codes, scales and biases, or values in place of all three."""

    arrays: list[mx.array]
    form: StoredForm
    transposed: bool

    @property
    def rows(self) -> int:
        """Of a matrix."""
        return self.arrays[0].shape[-2]


class Up(NamedTuple):
    """norm(x) @ W.T, of W [heads * (nope + R), columns]."""

    weights: Weights
    norm: Norm


@dataclass(frozen=True)
class Queries:
    """What makes queries of x [..., columns].

    Args:
        heads: of queries.
        up: what makes them of a latent; None: x is all heads' queries already.
        scale: multiplies them by their positions; None: nothing does.
    """

    heads: int
    up: Up | None
    scale: QueryScale | None = None

    def __call__(self, x: Array) -> Array:
        """[B, L, columns] -> [B, L, heads, nope + R], not scaled."""
        x = x if self.up is None else linear(x, *self.up)
        return x.reshape(*x.shape[:2], self.heads, -1)

    @property
    def form(self) -> Form | None:
        """How W is stored, if kernels read it."""
        quant = self.up and self.up.weights.quant
        if self.up is None or quant is None or not is_read(quant, self.up.weights.shape[1]):
            return None
        return Form(quant, self.up.weights.scales.dtype)

    def scaled(self, q: Array, offset: int | mx.array) -> Array:
        """q [B, L, heads, nope + R] of positions from `offset`, scaled."""
        if self.scale is None:
            return q
        library = np if isinstance(q, np.ndarray) else mx
        factors = query_factors(library.arange(q.shape[1]) + offset, self.scale, library)
        return (q * factors[:, None, None]).astype(q.dtype)


def query_factors(positions: Any, scale: QueryScale, library: Any) -> Any:
    """What multiplies the queries at integer positions (`QueryScale`), by operations of numpy or MLX: float32."""
    stretches = positions // scale.original_max_position_embeddings
    return 1.0 + scale.beta * library.log1p(stretches.astype(library.float32))


def attend_latent(
    q: Array,
    kv: Array,
    cache: Steps,
    queries: Queries,
    key: HeadMatrices,
    value: HeadMatrices,
    *,
    norm: Norm,
    rope: Rope,
    scale: float,
) -> Array:
    """softmax(scale * (q_nope key latent + q_pe k_pe)) (value latent), causal, over all that `cache` has seen.

    Args:
        q: [B, L, columns], of which `queries` make q_nope and q_pe of each head.
        kv: [B, L, N + R], latent and k_pe. Both are appended to `cache`, the latent normed, k_pe turned.
        key: matrices [nope, N]. value: matrices [v, N].
        norm: of the latent.
        rope: turns q_pe and k_pe by their rotary positions.

    Returns:
        [B, L, heads * v]
    """
    B, L = q.shape[:2]
    if isinstance(q, mx.array) and not refusal(backend.name(), B * L == 1, kv.shape[-1] - rope.dims, rope.dims):
        return _step_kernel(q, kv, cache, queries, key, value, norm, rope, scale)
    q = queries.scaled(queries(q), cache.position)
    if isinstance(q, np.ndarray):
        q_nope, q_pe, latent, k_pe = _parts(q, kv, norm, rope, cache.position)
        cache.update_and_fetch(mx.array(latent[:, None]), mx.array(k_pe.reshape(B, 1, L, -1)))
        kept = [view(part)[:, 0, : cache.offset] for part in (cache.keys, cache.values)]
        native_form = _expanded_native if native_refusal(L) else _absorbed_native
        rows = [native_form(q_nope[i], q_pe[i], kept[0][i], kept[1][i], key, value, scale) for i in range(B)]
        return stack(rows).reshape(B, L, -1)
    q_nope, q_pe, latent, k_pe = _parts(q, kv, norm, rope, cache.position)
    latent, k_pe = cache.update_and_fetch(latent[:, None], k_pe)
    form = _absorbed_ops if L <= ABSORB_AT_MOST else _expanded_ops
    out = form(q_nope, q_pe, latent, k_pe, cache.mask(L), key, value, scale)
    return out.transpose(0, 2, 1, 3).reshape(B, L, -1)


@planned()
def native_refusal(tokens: int) -> Reason | None:
    """Why heads do not attend over latents as they are on the CPU."""
    expanded = f"for more than {ABSORB_AT_MOST} tokens keys and values are made of the latents"
    return Reason(expanded) if tokens > ABSORB_AT_MOST else None


def _parts(q: Array, kv: Array, norm: Norm, rope: Rope, offset: int | mx.array) -> tuple[Array, Array, Array, Array]:
    """(q_nope, turned q_pe, normed latent [B, L, N], turned k_pe), all but the latent laid out as attention wants it of
    each kind of array (`Rope`)."""
    latent, k_pe = split(kv, kv.shape[-1] - rope.dims)
    k_pe = k_pe[:, :, None]
    q_nope, q_pe = split(q, q.shape[-1] - rope.dims)
    if isinstance(q, mx.array):
        q_nope, q_pe, k_pe = (part.transpose(0, 2, 1, 3) for part in (q_nope, q_pe, k_pe))
    return q_nope, rope(q_pe, offset), norm(latent), rope(k_pe, offset)


# ---- the kernels for one token


def takes_step(latent: int, rotated: int) -> bool:
    """Whether single tokens with latents and rotated keys of such widths take the kernels here."""
    return not refusal(backend.name(), True, latent, rotated)


@planned()
def refusal(target: str, is_alone: bool, latent: int, rotated: int) -> Reason | None:
    """Why the kernels do not attend for a token alone, or for several, with latents and keys of such widths."""
    if target == "ops":
        return NO_KERNELS
    if not is_alone:
        return SEVERAL
    if latent > WIDEST or _abreast(1, latent + rotated) != 1:
        return Reason(f"latents of {latent} and keys of {rotated} values do not fit a threadgroup")
    return Reason(f"widths {latent} and {rotated} are no multiples of 8") if latent % 8 or rotated % 8 else None


def _abreast(heads: int, row: int) -> int:
    """Heads of a threadgroup: their queries and weights lie in its memory."""
    room = SHARED_BYTES // (4 * (row + PIECE))
    return max((n for n in range(1, min(HEADS, room) + 1) if heads % n == 0), default=0)


def _step_kernel(
    q: mx.array,
    kv: mx.array,
    cache: Steps,
    queries: Queries,
    key: HeadMatrices,
    value: HeadMatrices,
    norm: Norm,
    rope: Rope,
    scale: float,
) -> mx.array:
    """`attend_latent` for one token: [1, 1, heads * v]."""
    up, keys, values, form = queries.up, key.stored(), value.stored(), queries.form
    q_norm, sizes = (norm, (q.shape[-1], q.shape[-1])) if up is None else (up.norm, up.weights.shape)
    assert norm.eps == q_norm.eps
    made = [_nothing(), q, q] if form is None or up is None else inputs_of(up.weights)
    held = cache.held(kv.dtype)
    query, attend, combine = plan(
        backend.name(),
        (queries.heads, *sizes, kv.shape[2], held.keys.shape[2]),
        (q.dtype, norm.weight.dtype),
        form,
        (keys.form, values.form),
        (values.rows, keys.transposed),
        (rope.dims, rope.interleaved),
    )
    x = queries(q) if form is None else q
    numbers = norm.eps, rope.magnitude, _scale_of(held, scale, queries.scale)
    norms = q_norm.weight, norm.weight
    rows, token = query(x, kv, *norms, rope.periods, held.positions, *numbers, *made, *keys.arrays)
    parts, stats, recent = attend(rows, token, held.positions, held.keys, held.values, held.recent)
    cache.advance(recent)
    return combine(parts, stats, held.positions, *values.arrays)[0]


def _scale_of(held: Held, scale: float, by: QueryScale | None) -> Input:
    """What multiplies the scores of a token: a number, or an array of one."""
    return scale if by is None else _scaling(scale, by)(held.positions[3:])


@lru_cache(16)
def _scaling(scale: float, by: QueryScale) -> Any:
    """A function of the token's position; compiled it is one launch."""
    return mx.compile(lambda position: scale * query_factors(position, by, mx))


@cache
def _nothing() -> mx.array:
    """In place of codes that nobody reads: an input cannot be left out."""
    return mx.array([0] * LEAST_ELEMENTS, mx.uint32)


@lru_cache(512)
def plan(
    target: str,
    sizes: tuple[int, int, int, int, int],
    types: tuple[mx.Dtype, mx.Dtype],
    form: Form | None,
    stored: tuple[StoredForm, StoredForm],
    matrices: tuple[int, bool],
    rotation: tuple[int, bool],
) -> tuple[Launch, Launch, Launch]:
    (heads, height, columns, row, capacity), (v, transposed), (dims, interleaved) = sizes, matrices, rotation
    X, N, P = types[0], row - dims, ceildiv(capacity + RECENT, PIECE)
    read = form or Form(DEFAULT, X)
    common, (threads, lanes) = {"X": X, "H": heads, "N": N, "R": dims}, SHAPES[target]
    made = common | {"W": types[1], "COLS": columns, "NOPE": height // heads - dims, "T": threads, "L": lanes}
    made |= {"PRECOMPUTED": int(form is None), "INTERLEAVED": int(interleaved), "TRANSPOSED": int(transposed)}
    made |= {f"Q_{name}": value for name, value in read.template.items()} | _template(stored[0])
    out = [((heads, row), mx.float32), ((row,), X)]
    kernel = Kernel("latent_query", QUERY_INPUTS, "query token", read.header)
    query = Launch(target, kernel, made, (heads + 1, 1), threads, out)
    abreast = _abreast(heads, row)
    made = common | {"GH": abreast, "P": PIECE, "T": ATTENDING}
    out = [((P, heads, N), mx.float32), ((P, heads, 2), mx.float32), ((RECENT, row), X)]
    attend = Launch(target, ATTEND, made, (P, heads // abreast), ATTENDING, out)
    made = common | {"V": v, "P": PIECE, "T": threads} | _template(stored[1])
    return query, attend, Launch(target, COMBINE, made, (heads, 1), threads, [((1, 1, heads * v), X)])


def _template(form: StoredForm) -> dict[str, Any]:
    return dict(zip(("BITS", "GROUP", "MX", "S"), form, strict=True))


# ---- plain operations


def _absorbed_ops(
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


def _expanded_ops(
    q_nope: mx.array,
    q_pe: mx.array,
    latent: mx.array,
    k_pe: mx.array,
    mask: Mask,
    key: HeadMatrices,
    value: HeadMatrices,
    scale: float,
) -> mx.array:
    """On Metal a few heads at a time: one product would expand all latents to the keys of all heads."""
    heads, positions = q_nope.shape[1], latent.shape[2]
    most = gpu_time.rows_at_once(latent.shape[-1], positions * (q_nope.shape[-1] + value.height))
    if most is None or most >= heads:
        return _of_heads_ops(q_nope, q_pe, latent, k_pe, mask, key, value, scale)
    parts = []
    for some in (slice(start, start + most) for start in range(0, heads, most)):
        queries, matrices = (q_nope[:, some], q_pe[:, some]), (key.of(some), value.of(some))
        parts.append(_of_heads_ops(*queries, latent, k_pe, mask, *matrices, scale))
    return mx.concatenate(parts, axis=1)


def _of_heads_ops(
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
        gpu_time.commit(parts[-1])
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
