"""Causal grouped-query attention (arXiv:2305.13245) over a cache of keys and values, with an optional output gate.

A window limits the positions that a query sees (arXiv:2004.05150), or a chunk does, in which it sees the positions
before its own (transformers, `create_chunked_causal_mask`). A sink is a learned logit per head that is added to
the sum of the softmax only (after arXiv:2309.17453).

On a GPU a token takes two launches. They do not write to the cache: the newest keys and values are in a small array,
which each token copies with its own row added. MLX's attention would take a dozen launches, and it copies the whole
cache if the previous token is still being computed. On the CPU a token takes one call, which writes its key and value
into such an array: appending them with MLX takes as long as reading a tenth of the layer's weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import prod

import mlx.core as mx
import numpy as np

from ...ops import backend, gpu_time, native
from ...ops.attend_span import attend_span, combine_launch, takes_span
from ...ops.backend import AnyArray, Array, kernels_take, native_takes, of_kind, stack, view
from ...ops.causal_parts import in_parts
from ...ops.elementwise import sigmoid, times_sigmoid
from ...ops.kv_rows import row_bytes
from ...ops.launch import (
    MOST_THREADS,
    SEVERAL,
    Input,
    Kernel,
    Launch,
    Reason,
    Shape,
    ceildiv,
    in_turn,
)
from ...ops.positions import RECENT, Steps
from ...ops.query_scale import query_factors, score_scale
from ...ops.rope import angles, has_axes
from ...ops.rows import ALONE, RowArgument, RowSizes, StepRows
from ...ops.seen import SEEING_ALL, SeenBlocks, SeenSizes
from ...ops.tiles import planned
from .terms import Terms

ATTEND_STEP = Kernel(
    "attend_step",
    "q k v q_weight k_weight periods eps magnitude scale positions keys values recent chosen biases",
    "parts next",
)
ATTEND_MATRIX = replace(ATTEND_STEP, name="attend_matrix", units="matrix")
ATTEND_APPEND = Kernel("attend_append", "k v k_weight periods eps magnitude positions recent", "next")
HEADS = 8  # queries in a threadgroup: with 256 values each they take 9 KB of its memory
WIDEST = 256
OTHERWISE = 6  # arrays like the scores that exist at once, where biases and sinks of tokens are added
MATRIX = {"cuda": (256, 132 * 256)}  # of the text for matrix units: threads, and D times the most threadgroups
MOST_PIECES = 1 << 20  # of the other text: any number
APPENDING = 128  # threads that add a key and its value
NO_TURN = (*np.zeros((2, 1, 0), np.float32), False)


def attend(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    cache: Steps | StepRows,
    terms: Terms,
    joined: mx.array | None = None,
    seen: SeenBlocks | None = None,
) -> AnyArray:
    """softmax(scale * q k) v over the positions in `cache` and the new positions up to each query's own.

    Args:
        q: [B, L, heads, D], or [B, L, heads, 2 D] with a gate behind each query; its sigmoid multiplies the result.
        k, v: [B, L, kv heads, D] and [B, L, kv heads, V], appended to `cache`, k normed and rotated, v normed.
        cache: of one text or a batch of them; or the caches of the L rows of a step.
        joined: [B, L, ...], for each position q, k and v one after another, if there is such an array.
        seen: of one token that the kernels take, the positions that it attends to; None: all.

    Returns:
        [B, L, heads * V]
    """
    B, L, _, D = k.shape
    if isinstance(cache, StepRows):
        has_kernels = kernels_take(q, refusal, True, D, v.shape[-1])
        compute = partial(_on_kernels if has_kernels else _of_row, terms)
        return cache.each((q, k, v, joined), compute, has_kernels, in_order=True)
    position, is_native = cache.position, isinstance(q, np.ndarray)
    is_alone = B * L == 1 and not has_axes(position)
    if native_takes(q, native_refusal, is_alone):
        return _step_native(q, k, terms.values(v), cache, terms)
    if kernels_take(q, refusal, is_alone, D, v.shape[-1]):
        return _on_kernels(terms, StepRows([cache]), q, k, v, joined, seen)
    v = terms.values(v)
    q, gate = (q, None) if q.shape[-1] == D else (q[..., :D], q[..., D:])
    q, k = terms.queries(q, position), terms.keys(k, position)
    out = (_span_native if is_native else attend_in_parts)(q, k, v, cache, terms)
    return out.reshape(B, L, -1) if gate is None else times_sigmoid(out, gate)


def _span_native(q: np.ndarray, k: np.ndarray, v: np.ndarray, cache: Steps, terms: Terms) -> np.ndarray:
    """[B, L, heads, V] of prepared queries and keys [B, L, heads, D], without the gate."""
    appended = cache.append(mx.array(k.transpose(0, 2, 1, 3)), mx.array(v.transpose(0, 2, 1, 3)))
    mx.eval(cache.keys, cache.values, *appended[:2])  # one wait for all
    keys, values = view(appended[0]), view(appended[1])
    sinks = None if terms.sinks is None else view(terms.sinks)
    if terms.chunked:
        first = cache.offset - q.shape[1]
        return stack([_chunks_native(view(one), keys[i], values[i], first, terms, sinks) for i, one in enumerate(q)])
    rows = ((view(one), keys[i], values[i], appended[2], terms.scale) for i, one in enumerate(q))
    return stack([native.attend(*row, window=terms.window, sinks=sinks) for row in rows])


def _chunks_native(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int, terms: Terms, sinks: np.ndarray | None
) -> np.ndarray:
    """[L, heads, V] of one text's queries [L, heads, D] from position `first` on, chunk by chunk."""
    out = np.empty((*q.shape[:2], values.shape[-1]), np.float32)
    for rows, seen, _ in in_parts(q.shape[1], len(q), keys.shape[1], "causal", terms.window, first):
        k, v = (np.ascontiguousarray(one[:, seen]) for one in (keys, values))
        native.attend(q[rows], k, v, k.shape[1], terms.scale, out[rows], sinks=sinks)
    return out


def attend_in_parts(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    cache: Steps,
    terms: Terms,
    part_of: Callable[..., mx.array] | None = None,
) -> mx.array:
    """[B, L, heads, V] of prepared queries [B, heads, L, D] and keys, without the gate, in MLX's operations or by
    `attend_span`. `part_of`: computes a part [B, heads, R, V] otherwise than MLX's attention, in up to `OTHERWISE`
    times the memory of its scores, of its q, k and v, its rows, places and mask, as `in_parts` yields them, and the
    number of positions.
    """
    B, _, L, D = q.shape
    limited, widths = terms.window is not None or terms.sinks is not None, (D, v.shape[-1])
    if part_of is None and takes_span(widths, q.dtype, L, limited):
        return attend_span(q, *cache.append(k, v.transpose(0, 2, 1, 3)), terms.scale)
    k, v = cache.update_and_fetch(k, v.transpose(0, 2, 1, 3))  # [B, heads, L, D]
    parts: list[mx.array] = []
    sinks = None if terms.sinks is None else terms.sinks.astype(q.dtype)
    first = cache.offset - L if terms.chunked else None
    at_once = q.shape[1] * (1 if part_of is None else OTHERWISE)
    for rows, places, mask in in_parts(at_once, L, k.shape[2], cache.mask(L), terms.window, first):
        own = q[:, :, rows], k[:, :, places], v[:, :, places]
        if part_of is None:
            part = mx.fast.scaled_dot_product_attention(*own, scale=terms.scale, mask=mask, sinks=sinks)
        else:
            part = part_of(*own, rows, places, mask, k.shape[2])
        parts.append(part.transpose(0, 2, 1, 3))
        if part.shape[2] == L:  # the only one
            continue
        if terms.window is None:  # with scores of all positions
            gpu_time.in_turn(L, parts)
        else:
            gpu_time.commit(L, parts[-1])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def _of_row(terms: Terms, rows: StepRows, q: Array, k: Array, v: Array, joined: Array | None) -> Array:
    return attend(q, k, v, rows.cache, terms)


@planned("attend")
def native_refusal(is_alone: bool) -> Reason | None:
    """Why norms, rotation and attention are separate native calls instead of the joint one for a single token."""
    return None if is_alone else Reason("attend_step takes a single token")


def _step_native(q: np.ndarray, k: np.ndarray, v: np.ndarray, cache: Steps, terms: Terms) -> np.ndarray:
    """`attend` for one token on the CPU: [1, 1, heads * V]."""
    q_norm, k_norm, rope, sinks = terms.q_norm, terms.k_norm, terms.rope, terms.sinks
    held, D = cache.held(mx.float32, here=True), k.shape[-1]
    offset, begun, _, position = held.positions
    factor = 1.0 if terms.query_scale is None else float(query_factors(np.asarray(position), terms.query_scale, np))
    queries = q[0, 0] if q.shape[-1] == D else np.ascontiguousarray(q[0, 0, :, :D])
    out = native.attend_step(
        queries,
        k[0, 0],
        v[0, 0],
        (q_norm.weight, k_norm.weight, q_norm.eps) if q_norm and k_norm else None,
        (*angles(rope.frequencies, rope.magnitude, position, 1), rope.interleaved) if rope else NO_TURN,
        (held.keys[0], held.values[0], begun),
        held.recent,
        offset + 1,
        factor * terms.scale,
        window=offset % terms.window + 1 if terms.chunked and terms.window else terms.window,
        sinks=None if sinks is None else of_kind(sinks, q),
        rotates_first=terms.rotates_first,
        biases=terms.biases,
    )
    cache.advance(held.recent)
    if q.shape[-1] > D:
        out *= sigmoid(q[0, 0, :, D:])
    return out.reshape(1, 1, -1)


# ---- the kernels for the rows of a step


def takes_step(width: int, value_width: int) -> bool:
    """Whether the kernels here take single tokens with heads of these widths."""
    return not refusal(backend.name(), True, width, value_width)


@planned("attend")
def refusal(target: str, is_alone: bool, width: int, value_width: int) -> Reason | None:
    """Why the kernels do not attend for a token alone, or for several, with keys and values of these widths."""
    if not is_alone:
        return SEVERAL
    if width > WIDEST:
        return Reason(f"head width {width} is above {WIDEST}")
    if value_width > width:
        return Reason(f"values of {value_width} are wider than keys of {width}")
    return next((Reason(f"head width {n} is not a multiple of 32") for n in (width, value_width) if n % 32), None)


def _on_kernels(
    terms: Terms,
    rows: StepRows,
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    joined: mx.array | None,
    seen: SeenBlocks | None = None,
) -> AnyArray:
    """`attend` for a row of each of several sequences in two launches, or for several of one sequence in three, of
    which the first appends them all: [1, R, heads * V]."""
    count, rope, q_norm = len(rows.caches), terms.rope, terms.q_norm
    held = [one.held(k.dtype, n=count if rows.in_order else 1) for one in rows.sequences]
    widths = [prod(part.shape[2:]) if joined is None else joined.shape[-1] for part in (q, k, v)]
    append, step, combine = plan(
        rows.sizes(widths if terms.query_scale is None else [*widths, 1]),
        backend.name(),
        tuple(part.shape[2:] for part in (q, k, v)),
        (q.dtype, None if q_norm is None else q_norm.weight.dtype, held[0].keys.dtype),
        max(one.keys.shape[2] for one in held),
        (0, False) if rope is None else (rope.dims, rope.interleaved),
        terms.limits,
        SEEING_ALL if seen is None else seen.sizes,
    )
    inputs: Sequence[Input] = (q, k, v) if joined is None else in_turn(joined, q, k, v)
    constants = _constants(terms, k)
    names = "positions", "keys", "values", "recent"
    positions, keys, values, recent = ([getattr(one, name) for one in held] for name in names)
    if append is not None:
        recent = append(*inputs[1:], *constants[1:], *positions, *recent)
        positions = []
        for cache in rows.absorbing():
            positions.append(cache.held(k.dtype).positions)
            cache.advance(recent[0])
    chosen = positions[0] if seen is None else seen.chosen
    scale = score_scale(positions, terms.scale, terms.query_scale)
    biases = k if terms.biases is None else terms.biases
    parts, *made = step(*inputs, *constants, scale, *positions, *keys, *values, *recent, chosen, biases)
    if append is None:
        for cache, own in zip(rows.absorbing(), made, strict=True):
            cache.advance(own)
    return combine(parts, inputs[0], parts if terms.sinks is None else terms.sinks, *positions)[0]


def _constants(terms: Terms, k: mx.array) -> list[Input]:
    """The kernel's weights, and its numbers before the scale. It needs an array for every input; k stands for those
    that it does not read.
    """
    rope, norms = terms.rope, (terms.q_norm, terms.k_norm)
    weights: Sequence[Input] = [*(k if norm is None else norm.weight for norm in norms), rope.periods if rope else k]
    weights = weights if terms.pieces is None else terms.pieces
    magnitude = rope.magnitude if rope else 1.0
    if terms.rotates_first:  # the norm behind the rotation cancels it
        return [*weights, terms.eps / magnitude**2, 1.0]
    return [*weights, terms.eps, magnitude]


@lru_cache(512)
def plan(rows: RowSizes, target: str, *given: RowArgument) -> tuple[Launch | None, Launch, Launch]:
    """The launches for some rows: of several of one sequence the one that appends them, else None; that over pieces of
    positions; that of their sum. `given`: as of `plan_row`.
    """
    step, combine = plan_row(target, *given)
    if rows == ALONE:
        return None, step, combine
    count, recent = rows.count, step.outputs[1]
    if not rows.in_order:
        own = {name: f"{name}@{count}" for name in ("positions", "keys", "values", "recent", "next")}
        return None, *_several(step, combine, rows, own, [recent] * count)
    names = "X", "D", "V", "K", "KV", "W", "NORM", "DIMS", "INTERLEAVED", "RECENT", "VNORM"
    sizes = {name: step.template[name] for name in names} | {"COUNT": count, "THREADS": APPENDING}
    sizes |= {"AT_K": rows.widths[1], "AT_V": rows.widths[2]}
    groups = step.template["KV"], count
    append = Launch(target, ATTEND_APPEND, sizes, groups, APPENDING, [recent])
    step = replace(step, template=step.template | {"APPENDED": 1})
    own = {"positions": f"positions@{count}"}
    return append, *_several(step, combine, rows, own, [((1,), recent[1])])


def _several(
    step: Launch,
    combine: Launch,
    rows: RowSizes,
    own: dict[str, str],
    recent: Sequence[tuple[Shape, mx.Dtype]],
) -> tuple[Launch, Launch]:
    """The launches for several rows, with the arrays `own` of each; `recent`: shapes and dtypes of outputs."""
    count = rows.count
    ((pieces, heads, values), _), ((out, dtype),) = step.outputs[0], combine.outputs
    # The first piece of every row, then the second, and so on: then the distance between rows does not depend on
    # the capacity. Each constant would compile another text.
    sizes = dict(zip(("AT_Q", "AT_K", "AT_V", "AT_SCALE"), rows.widths, strict=False)) | {"AT_OUT": out[-1]}
    sizes |= {"PIECE": count * heads, "AT_PARTS": heads * values}
    own = own | {"q": "q+AT_Q", "k": "k+AT_K", "v": "v+AT_V", "gate": "gate+AT_Q", "parts": "parts+AT_PARTS"}
    own["out"] = "out+AT_OUT"
    if "AT_SCALE" in sizes:
        own["scale"] = "scale+AT_SCALE"
    made = [((pieces, count * heads, values), mx.float32), *recent]
    return step.of_rows(own, count, sizes, made), combine.of_rows(own, count, sizes, [((1, count, out[-1]), dtype)])


def plan_row(
    target: str,
    shapes: tuple[Shape, Shape, Shape],
    types: tuple[mx.Dtype, mx.Dtype | None, mx.Dtype],
    capacity: int,
    turn: tuple[int, bool],
    limits: tuple[int | None, bool, bool, bool, bool, int],
    seen: SeenSizes,
) -> tuple[Launch, Launch]:
    """The launch over pieces of positions and that of their sum, for one row. `shapes`: [heads, width] of q, k and v;
    `types`: of q, of norms if there are any, of keys; `turn`: how many values are rotated, and whether pairs are
    neighbours.
    """
    (heads, stride), (kv_heads, width), (_, value_width) = shapes
    window, has_sinks, norms_values, chunked, rotates_first, extent = limits
    shared = heads // kv_heads
    abreast = max(n for n in range(1, HEADS + 1) if shared % n == 0)
    longest = 128 if width <= 128 or target == "cuda" else 64
    positions = longest // types[0].size  # of a piece: keys of up to 16 KB, on CUDA of 32 KB
    has_units = types[0].size == 2 and (types[2] != mx.uint8 or value_width % 64 == 0)
    matrix = MATRIX.get(target) if has_units else None
    most_pieces = MOST_PIECES
    if matrix:
        positions = matrix[0] // 2
        most_pieces = max(1, matrix[1] // width * abreast // heads)
    sizes = {"X": types[0], "H": heads, "D": width, "V": value_width, "P": positions, "WINDOW": window or 0}
    sizes |= {"CHUNKED": int(chunked), "MOST": most_pieces, "PIECE": heads, **seen.template}
    template = sizes | {"K": types[2], "W": types[1] or types[0], "STRIDE": stride, "KV": kv_heads, "GH": abreast}
    template |= {"NORM": (1 + rotates_first) * (types[1] is not None), "DIMS": turn[0], "INTERLEAVED": int(turn[1])}
    template |= {"VNORM": int(norms_values), "LISTS": seen.lists, "APPENDED": 0, "RECENT": RECENT}
    template["EXTENT"] = extent
    pieces = min(most_pieces, ceildiv(window or seen.most or capacity + RECENT, positions))
    template["SHARES"] = shares = 2 if 2 * width <= MOST_THREADS[target] else 1
    elements = row_bytes if types[2] == mx.uint8 else int
    kept = kv_heads * RECENT * (elements(width) + elements(value_width))
    outputs = [((pieces, heads, value_width + 2), mx.float32), ((kept,), types[2])]
    step = Launch(target, ATTEND_STEP, template, (pieces, heads // abreast), shares * width, outputs)
    if matrix:
        template |= {"THREADS": matrix[0]}
        step = Launch(target, ATTEND_MATRIX, template, (1 + pieces, heads // abreast), matrix[0], outputs)
    sizes |= {"GATE": int(stride > width), "SINKS": int(has_sinks), "EACH": 1}
    return step, combine_launch(target, sizes, heads, ((1, 1, heads * value_width), types[0]))
