"""Multi-head latent attention between its projections (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Each position caches only a latent vector and one rotated key, shared by all heads. For few queries the key projection
is folded into the queries, which then attend over the latents; for many queries the latents are first expanded to keys
and values, which is less arithmetic. On a GPU a token takes three launches, which do not write to the cache (`attend`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ...kinds import QueryFactor
from ...ops import backend, gpu_time, native
from ...ops.attend_span import attend_span, takes_span
from ...ops.backend import AnyArray, Array, kernels_take, library_of, stack, view
from ...ops.causal_parts import in_parts
from ...ops.elementwise import split
from ...ops.forms import Form, StoredForm, is_read, stored_template
from ...ops.launch import (
    LEAST_ELEMENTS,
    SEVERAL,
    SHARED_BYTES,
    Kernel,
    Launch,
    Reason,
    ceildiv,
)
from ...ops.linear import by_head, linear, linear_by_head, multiply
from ...ops.matrix import Weights, inputs_of, part_of_heads, stored
from ...ops.norm import Norm
from ...ops.positions import RECENT, Steps
from ...ops.query_scale import scaled_queries, score_scale
from ...ops.rope import Rope, laid_out
from ...ops.rows import ALONE, RowArgument, RowSizes, StepRows
from ...ops.seen import SEEING_ALL, SeenBlocks, SeenSizes
from ...ops.tiles import planned
from ...quant import DEFAULT
from .spec import ABSORB_AT_MOST, heads_at_once

QUERY_INPUTS = "x kv q_norm kv_norm periods positions eps magnitude scale w_q q_scales q_biases w scales biases"
ATTEND = Kernel("latent_attend", "query token positions latents keys recent chosen", "parts stats next")
COMBINE = Kernel("latent_combine", "parts stats sinks positions w scales biases", "out")
# Of a threadgroup that has one head: its threads, and the lanes that share a row of the queries' matrix.
SHAPES = {"metal": (256, 8), "cuda": (512, 16)}
WIDEST = 8 * 256  # columns of the latents, of which each thread of latent_query has eight
PIECE, ATTENDING = 128, 128  # positions and threads of one that attends
HEADS = 8  # heads of a threadgroup, if its memory is large enough
AttentionMask = mx.array | str | None


@dataclass(frozen=True)
class HeadMatrices:
    """One matrix per head, in `weights` [heads, rows, columns], or in the `rows` of each head of a flat matrix.
    `transposed`: the stored matrices are transposed.
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
        """The matrices of some heads."""
        part = part_of_heads(self.weights, self.heads, self.rows or slice(None), some)
        return HeadMatrices(part, part.weight.shape[0], transposed=self.transposed)

    def stored(self) -> "StoredMatrices":
        """The kernels' inputs."""
        part = self.weights if self.rows is None else part_of_heads(self.weights, self.heads, self.rows)
        arrays, form = stored(part)
        transposed = self.transposed
        if not form[0]:
            weight, transposed = arrays[0], transposed and arrays[0].shape[-1] % 8 == 0
            arrays = [weight if transposed == self.transposed else weight.swapaxes(-1, -2)] * 3
        return StoredMatrices(arrays, form, transposed)

    def each(self) -> Iterator[np.ndarray]:
        """Yields the matrices in float32; the memory may be reused for the next one."""
        matrices = by_head(self.weights, self.heads, self.rows or slice(None))
        return (matrix.T for matrix in matrices) if self.transposed else matrices


class Matrices(NamedTuple):
    """What attention over latents multiplies: matrices of keys and of values, and the factor of scores; the sinks
    [heads], logits that are added to the softmax's sum only; and how many positions a query sees, None: all."""

    key: HeadMatrices
    value: HeadMatrices
    scale: float
    sinks: mx.array | None = None
    window: int | None = None

    def of(self, some: slice) -> "Matrices":
        """Those of some heads."""
        sinks = None if self.sinks is None else self.sinks[some]
        return Matrices(self.key.of(some), self.value.of(some), self.scale, sinks, self.window)


class StoredMatrices(NamedTuple):
    """Matrices for metal/stored.h.metal: codes, scales and biases, or values instead of all three."""

    arrays: list[mx.array]
    form: StoredForm
    transposed: bool

    @property
    def rows(self) -> int:
        """Number of rows of a matrix."""
        return self.arrays[0].shape[-2]


class Up(NamedTuple):
    """norm(x) @ W.T, of W [heads * (nope + R), columns]."""

    weights: Weights
    norm: Norm


def beside_normed(x: Array, norm: Norm) -> Array:
    """[..., 2 N] of x [..., N]: norm(x), and behind it x."""
    return library_of(x).concatenate([norm(x), x], axis=-1)


@dataclass(frozen=True)
class Queries:
    """Makes queries from x [..., columns].

    Args:
        heads: number of heads.
        up: makes queries from a latent; None: x already has all heads' queries.
        scale: scales them by position; None: no scale.
    """

    heads: int
    up: Up | None
    scale: QueryFactor | None = None

    def __call__(self, x: Array) -> Array:
        """[B, L, columns] -> [B, L, heads, nope + R], not scaled."""
        x = x if self.up is None else linear(x, *self.up)
        return x.reshape(*x.shape[:2], self.heads, -1)

    @property
    def form(self) -> Form | None:
        """The form of W, if kernels read it."""
        quant = self.up and self.up.weights.quant
        if self.up is None or quant is None or not is_read(quant, self.up.weights.shape[1]):
            return None
        return Form(quant, self.up.weights.second.dtype)

    def scaled(self, q: Array, offset: int | mx.array) -> Array:
        """q [B, L, heads, nope + R] of positions from `offset`, scaled."""
        return scaled_queries(q, offset, self.scale)


def attend_latent(
    q: Array,
    kv: Array,
    cache: Steps | StepRows,
    queries: Queries,
    key: HeadMatrices,
    value: HeadMatrices,
    *,
    norm: Norm,
    rope: Rope | None,
    scale: float,
    sinks: mx.array | None = None,
    seen: SeenBlocks | None = None,
    window: int | None = None,
) -> Array:
    """softmax(scale * (q_nope key latent + q_pe k_pe)) (value latent), causal, over all positions in `cache` and the
    new ones.

    Args:
        q: [B, L, columns], of which `queries` make q_nope and q_pe of each head.
        kv: [B, L, N + R], latent and k_pe. Both are appended to `cache`, the latent normed, k_pe rotated.
        cache: of one text or a batch of them; or the caches of the L rows of a step.
        key: matrices [nope, N]. value: matrices [v, N].
        norm: of the latent.
        rope: rotates q_pe and k_pe by their rotary positions; None: there are no such parts.
        sinks: [heads], logits that are added to the softmax's sum only; None: no sinks.
        seen: of one token that the kernels take, the positions that it attends to; None: all.
        window: how many positions a query sees, its own included; `cache` is of that window. None: all.

    Returns:
        [B, L, heads * v]
    """
    (B, L), rotated = q.shape[:2], rope.dims if rope else 0
    sizes = kv.shape[-1] - rotated, rotated
    if isinstance(cache, StepRows):
        has_kernels = kernels_take(q, refusal, True, *sizes)

        def compute(rows: StepRows, q: mx.array, kv: AnyArray) -> AnyArray:
            given = queries, key, value, norm, rope, scale
            if has_kernels:
                return _on_kernels(q, kv, rows, *given, sinks=sinks, window=window)
            own: Any = {"norm": norm, "rope": rope, "scale": scale, "sinks": sinks, "window": window}
            return attend_latent(q, kv, rows.cache, *given[:3], **own)

        return cache.each((q, kv), compute, has_kernels)
    if kernels_take(q, refusal, B * L == 1, *sizes):
        return _on_kernels(q, kv, StepRows([cache]), queries, key, value, norm, rope, scale, sinks, seen, window)
    q, matrices = queries.scaled(queries(q), cache.position), Matrices(key, value, scale, sinks, window)
    q_nope, q_pe, latent, k_pe = parts_of(q, kv, norm, rope, cache.position)
    if isinstance(q, np.ndarray):
        *appended, count = cache.append(mx.array(latent[:, None]), mx.array(k_pe.reshape(B, 1, L, rotated)))
        mx.eval(cache.keys, cache.values, *appended)  # one wait for all
        kept = [view(part)[:, 0, :count] for part in appended]
        native_form = expanded_native if native_refusal(L) else absorbed_native
        rows = [native_form(q_nope[i], q_pe[i], kept[0][i], kept[1][i], matrices) for i in range(B)]
        return stack(rows).reshape(B, L, -1)
    latent, k_pe = cache.update_and_fetch(latent[:, None], k_pe)
    form = absorbed_ops if L <= ABSORB_AT_MOST else expanded_ops
    out = form(q_nope, q_pe, latent, k_pe, cache.mask(L), matrices)
    return out.transpose(0, 2, 1, 3).reshape(B, L, -1)


@planned("latent")
def native_refusal(tokens: int) -> Reason | None:
    """Why the native kernels do not attend over these latents."""
    expanded = f"for more than {ABSORB_AT_MOST} tokens keys and values are made of the latents"
    return Reason(expanded) if tokens > ABSORB_AT_MOST else None


def parts_of(
    q: Array, kv: Array, norm: Norm, rope: Rope | None, offset: int | mx.array
) -> tuple[Array, Array, Array, Array]:
    """(q_nope, turned q_pe, normed latent [B, L, N], turned k_pe), all but the latent laid out as attention wants it of
    each kind of array (`Rope`); without a rope two of them have no values."""
    rotated = rope.dims if rope else 0
    latent, k_pe = split(kv, kv.shape[-1] - rotated)
    k_pe = k_pe[:, :, None]
    q_nope, q_pe = split(q, q.shape[-1] - rotated)
    q_nope, q_pe, k_pe = map(laid_out, (q_nope, q_pe, k_pe))
    if rope is not None:
        q_pe, k_pe = rope(q_pe, offset), rope(k_pe, offset)
    return q_nope, q_pe, norm(latent), k_pe


# ---- the kernels for the rows of a step


def takes_step(latent: int, rotated: int) -> bool:
    """Whether single tokens with latents and rotated keys of such widths take the kernels here."""
    return not refusal(backend.name(), True, latent, rotated)


@planned("latent")
def refusal(target: str, is_alone: bool, latent: int, rotated: int) -> Reason | None:
    """Why the kernels do not attend for a token alone, or for several, with latents and keys of such widths."""
    if not is_alone:
        return SEVERAL
    if latent > WIDEST or _abreast(1, latent + rotated) != 1:
        return Reason(f"latents of {latent} and keys of {rotated} values do not fit a threadgroup")
    return Reason(f"widths {latent} and {rotated} are not multiples of 8") if latent % 8 or rotated % 8 else None


def _abreast(heads: int, row: int) -> int:
    """Heads of a threadgroup, limited by the memory for their queries and weights."""
    room = SHARED_BYTES // (4 * (row + PIECE))
    return max((n for n in range(1, min(HEADS, room) + 1) if heads % n == 0), default=0)


def _on_kernels(
    q: mx.array,
    kv: AnyArray,
    rows: StepRows,
    queries: Queries,
    key: HeadMatrices,
    value: HeadMatrices,
    norm: Norm,
    rope: Rope | None,
    scale: float,
    sinks: mx.array | None = None,
    seen: SeenBlocks | None = None,
    window: int | None = None,
) -> AnyArray:
    """`attend_latent` for a row of each of several sequences: [1, R, heads * v]."""
    up, keys, values, form = queries.up, key.stored(), value.stored(), queries.form
    q_norm, sizes = (norm, (q.shape[-1], q.shape[-1])) if up is None else (up.norm, up.weights.shape)
    assert norm.eps == q_norm.eps
    made = [_nothing(), q, q] if form is None or up is None else inputs_of(up.weights)
    held = [one.held(kv.dtype) for one in rows.caches]
    positions = [one.positions for one in held]
    capacity = max(one.keys.shape[2] for one in held)
    x = queries(q) if form is None else q
    scales = score_scale(positions, scale, queries.scale)
    query, attend, combine = plan(
        rows.sizes((prod(x.shape[2:]), kv.shape[2], int(queries.scale is not None))),
        backend.name(),
        (queries.heads, *sizes, kv.shape[2], capacity),
        (q.dtype, norm.weight.dtype),
        form,
        (keys.form, values.form),
        (values.rows, keys.transposed, sinks is not None),
        (0, False) if rope is None else (rope.dims, rope.interleaved),
        None if seen is None else seen.sizes,
        window,
    )
    periods, magnitude = (norm.weight, 1.0) if rope is None else (rope.periods, rope.magnitude)
    norms = q_norm.weight, norm.weight
    made_queries, token = query(x, kv, *norms, periods, *positions, norm.eps, magnitude, scales, *made, *keys.arrays)
    # Without rotated keys their array is empty, and the latents stand for it.
    arrays = [getattr(one, name) for name in ("keys", "values" if rope else "keys", "recent") for one in held]
    chosen = positions[0] if seen is None else seen.chosen
    parts, stats, *recent = attend(made_queries, token, *positions, *arrays, chosen)
    for one, kept in zip(rows.absorbing(), recent, strict=True):
        one.advance(kept)
    return combine(parts, stats, stats if sinks is None else sinks, *positions, *values.arrays)[0]


@cache
def _nothing() -> mx.array:
    """A placeholder for codes that are not read: a kernel needs every input."""
    return mx.array([0] * LEAST_ELEMENTS, mx.uint32)


@lru_cache(512)
def plan(rows: RowSizes, target: str, *given: RowArgument) -> tuple[Launch, ...]:
    """The launches for some rows: of queries and keys, over pieces of positions, and of their sum. `given`: as of
    `plan_row`.
    """
    launches = plan_row(target, *given)
    if rows == ALONE:
        return launches
    ((heads, row), _), _ = launches[0].outputs
    ((_, _, width), _), ((_, _, both), _), _ = launches[1].outputs
    # Of parts and stats a piece of every row, then the next piece: no constant depends on the capacity.
    of_row = {"x": rows.widths[0], "kv": rows.widths[1], "query": heads * row, "token": row}
    of_row |= {"parts": heads * width, "stats": heads * both, "out": launches[2].outputs[0][0][-1]}
    of_row |= {"scale": 1} if rows.widths[2] else {}
    own = {name: f"{name}+AT_{name.upper()}" for name in of_row}
    own |= {name: f"{name}@{rows.count}" for name in ("positions", "latents", "keys", "recent", "next")}
    return tuple(_of_rows(launch, rows.count, of_row, own) for launch in launches)


def _of_rows(launch: Launch, count: int, of_row: Mapping[str, int], own: dict[str, str]) -> Launch:
    """One of them; `of_row`: values from a row's to the next one's."""
    inputs, outputs = launch.kernel.inputs, launch.kernel.outputs
    sizes = {f"AT_{name.upper()}": of_row[name] for name in f"{inputs} {outputs}".split() if name in of_row}
    if "PIECE" in launch.template:
        sizes["PIECE"] = count * launch.template["PIECE"]
    made: list[AnyArray] = []
    for name, (shape, dtype) in zip(outputs.split(), launch.outputs, strict=True):
        made += [(shape, dtype)] * count if name == "next" else [((1, count, prod(shape)), dtype)]
    return launch.of_rows(own, count, sizes, made)


def plan_row(
    target: str,
    sizes: tuple[int, int, int, int, int],
    types: tuple[mx.Dtype, mx.Dtype],
    form: Form | None,
    stored: tuple[StoredForm, StoredForm],
    matrices: tuple[int, bool, bool],
    rotation: tuple[int, bool],
    seen: SeenSizes | None,
    window: int | None,
) -> tuple[Launch, Launch, Launch]:
    """The launches for one row. `seen`: of the blocks that a token sees, or the `window`; None: all positions."""
    (heads, height, columns, row, capacity), (v, transposed, has_sinks), (dims, interleaved) = sizes, matrices, rotation
    blocks = seen or SEEING_ALL
    X, N, P = types[0], row - dims, ceildiv(window or blocks.most or capacity + RECENT, PIECE)
    read = form or Form(DEFAULT, X)
    common, (threads, lanes) = {"X": X, "H": heads, "N": N, "R": dims}, SHAPES[target]
    made = common | {"W": types[1], "COLS": columns, "NOPE": height // heads - dims, "T": threads, "L": lanes}
    made |= {"PRECOMPUTED": int(form is None), "INTERLEAVED": int(interleaved), "TRANSPOSED": int(transposed)}
    made |= {f"Q_{name}": value for name, value in read.template.items()} | stored_template(stored[0])
    out = [((heads, row), mx.float32), ((row,), X)]
    kernel = Kernel("latent_query", QUERY_INPUTS, "query token", read.header)
    query = Launch(target, kernel, made, (heads + 1, 1), threads, out)
    abreast = _abreast(heads, row)
    common |= blocks.template | {"WINDOW": window or 0}
    made = common | {"GH": abreast, "P": PIECE, "PIECE": heads, "T": ATTENDING}
    out = [((P, heads, N), mx.float32), ((P, heads, 2), mx.float32), ((RECENT, row), X)]
    attend = Launch(target, ATTEND, made, (P, heads // abreast), ATTENDING, out)
    made = common | {"V": v, "P": PIECE, "PIECE": heads, "T": threads} | stored_template(stored[1])
    made |= {"SINKS": int(has_sinks)}
    return query, attend, Launch(target, COMBINE, made, (heads, 1), threads, [((1, 1, heads * v), X)])


# ---- plain operations


def absorbed_ops(
    q_nope: mx.array,
    q_pe: mx.array,
    latent: mx.array,
    k_pe: mx.array,
    mask: AttentionMask,
    matrices: Matrices,
) -> mx.array:
    key, value, scale, sinks, window = matrices
    scores = products(key.multiply(q_nope, transpose=False), q_pe, latent, k_pe) * scale
    return value.multiply(softmax(scores, mask, sinks, window=window) @ latent, transpose=True)


def expanded_ops(
    q_nope: mx.array,
    q_pe: mx.array,
    latent: mx.array,
    k_pe: mx.array,
    mask: AttentionMask,
    matrices: Matrices,
) -> mx.array:
    """A few heads at a time: on Metal because one product would expand all latents to the keys of all heads, for
    `attend_span` because keys are copied beside their rotated parts.
    """
    (B, heads, L, nope), positions, V = q_nope.shape, latent.shape[2], matrices.value.height
    limited = not isinstance(mask, str) or matrices.window is not None or matrices.sinks is not None
    widths = nope + q_pe.shape[-1], V
    fused = takes_span(widths, q_nope.dtype, L, limited)
    most = gpu_time.rows_at_once(latent.shape[-1], positions * (nope + V))
    most = heads_at_once(heads, B * positions * sum(widths)) if fused else most or heads
    compute, parts = of_heads_fused if fused else of_heads_ops, list[mx.array]()
    for some in (slice(start, start + most) for start in range(0, heads, most)):
        own = matrices if most >= heads else matrices.of(some)
        parts.append(compute(q_nope[:, some], q_pe[:, some], latent, k_pe, mask, own))
        if fused:
            gpu_time.in_turn(L, parts)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def of_heads_fused(
    q_nope: mx.array, q_pe: mx.array, latent: mx.array, k_pe: mx.array, _: AttentionMask, matrices: Matrices
) -> mx.array:
    k, v = (one.multiply(latent, transpose=True) for one in (matrices.key, matrices.value))  # [B, heads, N, .]
    k = mx.concatenate([k, mx.broadcast_to(k_pe, (*k.shape[:3], k_pe.shape[-1]))], axis=-1)
    out = attend_span(mx.concatenate([q_nope, q_pe], axis=-1), k, v, k.shape[2], matrices.scale)
    return out.swapaxes(1, 2)


def of_heads_ops(
    q_nope: mx.array,
    q_pe: mx.array,
    latent: mx.array,
    k_pe: mx.array,
    mask: AttentionMask,
    matrices: Matrices,
) -> mx.array:
    key, value, scale, sinks, window = matrices
    k = key.multiply(latent, transpose=True)  # [B, heads, N, nope]
    v, parts = value.multiply(latent, transpose=True), []
    for rows, seen, part_mask in in_parts(2 * q_nope.shape[1], q_nope.shape[2], latent.shape[2], mask, window):
        scores = products(q_nope[:, :, rows], q_pe[:, :, rows], k[:, :, seen], k_pe[:, :, seen])
        parts.append(softmax(scores * scale, part_mask, sinks) @ v[:, :, seen])
        gpu_time.in_turn(q_nope.shape[2], parts)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def products(q: mx.array, q_pe: mx.array, keys: mx.array, k_pe: mx.array) -> mx.array:
    """Scores [..., L, P] of queries and keys [..., D], and of their rotated parts, if there are any."""
    scores = q @ keys.swapaxes(-1, -2)
    return scores + q_pe @ k_pe.swapaxes(-1, -2) if q_pe.shape[-1] else scores


def softmax(
    scores: mx.array, mask: AttentionMask, sinks: mx.array | None, heads: int = -3, window: int | None = None
) -> mx.array:
    """Of scores [B, heads, L, N], with the exponentials of sinks [heads] in the sum, if there are any. "causal": query
    row i is at position N - L + i and sees no later key, and of the others the last of the `window`. `heads`: the axis
    of the heads.
    """
    if isinstance(mask, str):
        L, N = scores.shape[-2:]
        age = mx.arange(N - L, N)[:, None] - mx.arange(N)
        mask = age >= 0 if window is None else (age >= 0) & (age < window)
    if mask is not None:
        scores = mx.where(mask, scores, mx.array(-mx.inf, scores.dtype))
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True)
    shape = [-1 if axis == scores.ndim + heads else 1 for axis in range(scores.ndim)]
    column = mx.broadcast_to(sinks.reshape(shape).astype(scores.dtype), (*scores.shape[:-1], 1))
    return mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1, precise=True)[..., :-1]


def absorbed_native(
    q_nope: np.ndarray,
    q_pe: np.ndarray,
    latent: np.ndarray,
    k_pe: np.ndarray,
    matrices: Matrices,
) -> np.ndarray:
    """q [L, heads, ...] over the latents [N, ...], which are keys and values of all heads alike."""
    key, value, scale, sinks, window = matrices
    q = absorb_native(q_nope, q_pe, latent.shape[1], key)
    entries = np.concatenate([latent, k_pe], axis=-1)[None]
    limits: Any = {"window": window, "sinks": None if sinks is None else view(sinks)}
    mixed = native.attend(q, entries, latent[None], len(latent), scale, **limits)
    return values_native(mixed, value)


def absorb_native(q_nope: np.ndarray, q_pe: np.ndarray, width: int, key: HeadMatrices) -> np.ndarray:
    """Queries [L, heads, width + R] over latents of `width` values, into which the key projection is folded."""
    q = np.empty((*q_nope.shape[:2], width + q_pe.shape[-1]), np.float32)
    for head, matrix in enumerate(key.each()):
        q[:, head, :width] = q_nope[:, head] @ matrix
    q[..., width:] = q_pe
    return q


def values_native(mixed: np.ndarray, value: HeadMatrices) -> np.ndarray:
    """[L, heads, v] of mixed latents [L, heads, N]."""
    made = None if value.transposed else linear_by_head(mixed, value.weights, value.heads, value.rows or slice(None))
    if made is not None:
        return made
    out = np.empty((*mixed.shape[:2], value.height), np.float32)
    for head, matrix in enumerate(value.each()):
        out[:, head] = mixed[:, head] @ matrix.T
    return out


def expanded_native(
    q_nope: np.ndarray,
    q_pe: np.ndarray,
    latent: np.ndarray,
    k_pe: np.ndarray,
    matrices: Matrices,
) -> np.ndarray:
    (heads, nope), (key, value, scale, sinks, window) = q_nope.shape[1:], matrices
    N = len(latent)
    k = np.empty((heads, N, nope + q_pe.shape[-1]), np.float32)
    v = np.empty((heads, N, value.height), np.float32)
    for head, (keys, values) in enumerate(zip(key.each(), value.each(), strict=True)):
        k[head, :, :nope] = latent @ keys.T
        v[head] = latent @ values.T
    k[..., nope:] = k_pe
    q = np.concatenate([q_nope, q_pe], axis=-1)
    return native.attend(q, k, v, N, scale, window=window, sinks=None if sinks is None else view(sinks))
