"""Causal grouped-query attention (arXiv:2305.13245) over a cache of keys and values, with an optional output gate.

A window limits the positions that a query sees (arXiv:2004.05150). A sink is a learned logit per head that is added to
the sum of the softmax only (after arXiv:2309.17453).

On a GPU a token takes two launches. They do not write to the cache: the newest keys and values are in a small array,
which each token copies with its own row added. MLX's attention would take a dozen launches, and it copies the whole
cache if the previous token is still being computed. On the CPU a token takes one call, which writes its key and value
into such an array: appending them with MLX takes as long as reading a tenth of the layer's weights.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ...ops import backend, gpu_time, native
from ...ops.backend import Array, stack, view
from ...ops.causal_parts import in_parts
from ...ops.elementwise import sigmoid
from ...ops.kv_rows import row_bytes
from ...ops.launch import (
    MOST_THREADS,
    NO_KERNELS,
    SEVERAL,
    TOGETHER,
    ArrayPiece,
    Input,
    Kernel,
    Launch,
    Reason,
    Shape,
    ceildiv,
    in_turn,
)
from ...ops.norm import Norm, rms_norm
from ...ops.positions import RECENT, Held, Steps
from ...ops.rope import Rope, angles
from ...ops.rows import Begin, RowCaches
from ...ops.seen import SEEING_ALL, SeenBlocks, SeenSizes
from ...ops.tiles import planned

ATTEND_STEP = Kernel(
    "attend_step",
    "q k v q_weight k_weight periods eps magnitude scale positions keys values recent chosen",
    "parts next",
)
ATTEND_APPEND = Kernel("attend_append", "k v k_weight periods eps magnitude positions recent", "next")
ATTEND_COMBINE = Kernel("attend_combine", "parts gate sinks positions", "out")
HEADS = 8  # queries in a threadgroup: with 256 values each they take 9 KB of its memory
WIDEST = 256
APPENDING = 128  # threads that add a key and its value
NO_TURN = (*np.zeros((2, 1, 0), np.float32), False)


class Whole(NamedTuple):
    """Arrays that a token's kernels take joined into one.

    joined: q, k and v one after another. weights: the pieces of q_norm's weight, k_norm's and rope.periods, as far as
    they exist.
    """

    joined: mx.array
    weights: list[ArrayPiece]


class Terms(NamedTuple):
    """The parameters of `attend`. Both norms have the same eps, or there are none."""

    q_norm: Norm | None
    k_norm: Norm | None
    rope: Rope | None
    scale: float
    window: int | None
    sinks: mx.array | None
    value_norm: float | None

    def values(self, v: Array) -> Array:
        """The stored form of keys and values."""
        return v if self.value_norm is None else rms_norm(v, None, self.value_norm)

    @property
    def eps(self) -> float:
        """The epsilon of all norms."""
        return self.q_norm.eps if self.q_norm else self.value_norm or 0.0

    @property
    def limits(self) -> tuple[int | None, bool, bool]:
        """The parameters on which a kernel's text depends."""
        return self.window, self.sinks is not None, self.value_norm is not None


def attend(
    q: Array,
    k: Array,
    v: Array,
    cache: Steps | RowCaches,
    *,
    q_norm: Norm | None,
    k_norm: Norm | None,
    rope: Rope | None,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    value_norm: float | None = None,
    whole: Whole | None = None,
    seen: SeenBlocks | None = None,
) -> Array:
    """softmax(scale * q k) v over the positions in `cache` and the new positions up to each query's own.

    Args:
        q: [B, L, heads, D], or [B, L, heads, 2 D] with a gate behind each query; its sigmoid multiplies the result.
        k, v: [B, L, kv heads, D] and [B, L, kv heads, V], appended to `cache`, k normed and rotated, v normed.
        cache: of one text or a batch of them; or the caches of the L rows of a step.
        q_norm, k_norm: norms of each head of q and k; None: no norm, or q and k are normed already.
        rope: rotates q and k by their rotary positions; None: no rotation.
        window: how many positions a query sees, its own included; None: all. With a window, `cache` must be one of that
            window.
        sinks: [heads], logits that are added to the softmax's sum only; None: no sinks.
        value_norm: epsilon of a norm without weight of each head of v, equal to that of the other norms; None: no norm.
        whole: the same inputs joined, for kernels.
        seen: of one token that the kernels take, the positions that it attends to; None: all.

    Returns:
        [B, L, heads * V]
    """
    B, L, _, D = k.shape
    terms = Terms(q_norm, k_norm, rope, scale, window, sinks, value_norm)
    if isinstance(cache, RowCaches):
        if isinstance(q, np.ndarray) or refusal(backend.name(), True, D, v.shape[-1]):
            return cache.each(lambda row, one: _of_row(row, q, k, v, one, terms, whole))
        more: Any = (q, k, v), terms, whole
        return cache.each(
            lambda row, one: _of_row(row, q, k, v, one, terms, whole),
            lambda rows, some: _rows_kernel(rows, some, *more),
            TOGETHER[backend.name()],
            lambda rows, one, begin: _steps_kernel(rows, one, begin, *more),
        )
    position = cache.position
    is_alone = B * L == 1 and not isinstance(position, np.ndarray)  # a row of an image has three positions
    if isinstance(q, np.ndarray) and not native_refusal(is_alone):
        return _step_native(q, k, terms.values(v), cache, terms)
    if isinstance(q, mx.array) and not refusal(backend.name(), is_alone, D, v.shape[-1]):
        return _step_kernel(q, k, v, cache, terms, whole, seen)
    v = terms.values(v)
    q, gate = (q, None) if q.shape[-1] == D else (q[..., :D], q[..., D:])
    q, k = prepared(q, q_norm, rope, position), prepared(k, k_norm, rope, position)
    if isinstance(q, np.ndarray):
        out = _span_native(q, k, v, cache, terms)
        if gate is not None:
            out *= sigmoid(gate)
        return out.reshape(B, L, -1)
    out = _span_ops(q, k, v, cache, terms)
    return out if gate is None else out * sigmoid(gate.reshape(B, L, -1))


def _span_native(q: np.ndarray, k: np.ndarray, v: np.ndarray, cache: Steps, terms: Terms) -> np.ndarray:
    """[B, L, heads, V] of prepared queries and keys [B, L, heads, D], without the gate."""
    appended = cache.append(mx.array(k.transpose(0, 2, 1, 3)), mx.array(v.transpose(0, 2, 1, 3)))
    mx.eval(cache.keys, cache.values, *appended[:2])  # one wait for all
    keys, values = view(appended[0]), view(appended[1])
    sinks = None if terms.sinks is None else view(terms.sinks)
    rows = ((view(one), keys[i], values[i], appended[2], terms.scale) for i, one in enumerate(q))
    return stack([native.attend(*row, window=terms.window, sinks=sinks) for row in rows])


def _span_ops(q: mx.array, k: mx.array, v: mx.array, cache: Steps, terms: Terms) -> mx.array:
    """[B, L, heads * V] of prepared queries [B, heads, L, D] and keys, without the gate, in MLX's operations."""
    B, _, L, _ = q.shape
    k, v = cache.update_and_fetch(k, v.transpose(0, 2, 1, 3))  # [B, heads, L, D]
    parts: list[mx.array] = []
    sinks = None if terms.sinks is None else terms.sinks.astype(q.dtype)
    for rows, places, mask in in_parts(q.shape[1], L, k.shape[2], cache.mask(L), terms.window):
        part = mx.fast.scaled_dot_product_attention(
            q[:, :, rows], k[:, :, places], v[:, :, places], scale=terms.scale, mask=mask, sinks=sinks
        )
        parts.append(part.transpose(0, 2, 1, 3))
        if part.shape[2] == L:  # the only one
            continue
        if terms.window is None:  # with scores of all positions
            gpu_time.in_turn(L, parts)
        else:
            gpu_time.commit(L, parts[-1])
    return (parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)).reshape(B, L, -1)


def _of_row(row: slice, q: Array, k: Array, v: Array, cache: Steps, terms: Terms, whole: Whole | None) -> Array:
    """`attend` of one of several rows."""
    own = None if whole is None else Whole(whole.joined[:, row], whole.weights)
    return attend(q[:, row], k[:, row], v[:, row], cache, whole=own, **terms._asdict())


def prepared(x: Array, norm: Norm | None, rope: Rope | None, position: Any) -> Array:
    """Queries or keys [B, L, heads, D] normed and rotated, in attention's layout: [B, heads, L, D] for MLX."""
    x = x if norm is None else norm(x)
    if isinstance(x, mx.array):
        x = x.transpose(0, 2, 1, 3)
    return x if rope is None else rope(x, position)


@planned("attend")
def native_refusal(is_alone: bool) -> Reason | None:
    """Why norms, rotation and attention are separate native calls instead of the joint one for a single token."""
    return None if is_alone else Reason("attend_step takes a single token")


def _step_native(q: np.ndarray, k: np.ndarray, v: np.ndarray, cache: Steps, terms: Terms) -> np.ndarray:
    """`attend` for one token on the CPU: [1, 1, heads * V]."""
    q_norm, k_norm, rope, sinks = terms.q_norm, terms.k_norm, terms.rope, terms.sinks
    held, D = cache.held(mx.float32, here=True), k.shape[-1]
    offset, begun, _, position = held.positions
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
        terms.scale,
        window=terms.window,
        sinks=None if sinks is None else view(sinks),
    )
    cache.advance(held.recent)
    if q.shape[-1] > D:
        out *= sigmoid(q[0, 0, :, D:])
    return out.reshape(1, 1, -1)


# ---- the kernels for one token


def takes_step(width: int, value_width: int) -> bool:
    """Whether the kernels here take single tokens with heads of these widths."""
    return not refusal(backend.name(), True, width, value_width)


@planned("attend")
def refusal(target: str, is_alone: bool, width: int, value_width: int) -> Reason | None:
    """Why the kernels do not attend for a token alone, or for several, with keys and values of these widths."""
    if target == "ops":
        return NO_KERNELS
    if not is_alone:
        return SEVERAL
    if width > WIDEST:
        return Reason(f"head width {width} is above {WIDEST}")
    if value_width > width:
        return Reason(f"values of {value_width} are wider than keys of {width}")
    return next((Reason(f"head width {n} is not a multiple of 32") for n in (width, value_width) if n % 32), None)


def _step_kernel(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    cache: Steps,
    terms: Terms,
    whole: Whole | None,
    seen: SeenBlocks | None,
) -> mx.array:
    """`attend` for one token: [1, 1, heads * V]."""
    held = cache.held(k.dtype)
    (types, turn), constants = _planned_by(terms, q, held), _constants(terms, k, whole)
    shapes = q.shape, k.shape, v.shape
    sizes = SEEING_ALL if seen is None else seen.sizes
    step, combine = plan(backend.name(), shapes, types, held.keys.shape[2], turn, terms.limits, sizes)
    inputs: Sequence[Input] = (q, k, v) if whole is None else in_turn(whole.joined, q, k, v)
    chosen = held.positions if seen is None else seen.chosen
    parts, recent = step(*inputs, *constants, held.positions, held.keys, held.values, held.recent, chosen)
    cache.advance(recent)
    return combine(parts, inputs[0], parts if terms.sinks is None else terms.sinks, held.positions)[0]


def _rows_kernel(
    rows: slice,
    caches: Sequence[Steps],
    heads: tuple[mx.array, mx.array, mx.array],
    terms: Terms,
    whole: Whole | None,
) -> mx.array:
    """`attend` for a row of each of several sequences in two launches: [1, R, heads * V]."""
    held = [cache.held(heads[1].dtype) for cache in caches]
    inputs, constants, given = _of_rows(rows, held[0], max(one.keys.shape[2] for one in held), heads, terms, whole)
    step, combine = plan_rows(*given)
    positions, *arrays = ([getattr(one, name) for one in held] for name in ("positions", "keys", "values", "recent"))
    parts, *recent = step(*inputs, *constants, *positions, *(array for own in arrays for array in own), positions[0])
    for cache, kept in zip(caches, recent, strict=True):
        cache.advance(kept)
    return combine(parts, inputs[0], parts if terms.sinks is None else terms.sinks, *positions)[0]


def _steps_kernel(
    rows: slice,
    cache: Steps,
    begin: Begin,
    heads: tuple[mx.array, mx.array, mx.array],
    terms: Terms,
    whole: Whole | None,
) -> mx.array:
    """`attend` for consecutive tokens of a sequence in three launches, of which the first appends them all: [1, L,
    heads * V]. `begin` is called with each row before the cache absorbs it."""
    begin(rows.start)
    held = cache.held(heads[1].dtype, n=rows.stop - rows.start)
    inputs, constants, given = _of_rows(rows, held, held.keys.shape[2], heads, terms, whole)
    append, step, combine = plan_steps(*given)
    _, k_weight, periods, eps, magnitude, _ = constants
    (recent,) = append(*inputs[1:], k_weight, periods, eps, magnitude, held.positions, held.recent)
    positions = list[mx.array]()
    for row in range(rows.start, rows.stop):
        if positions:
            begin(row)
        positions.append(cache.held(heads[1].dtype).positions)
        cache.advance(recent)
    parts, _ = step(*inputs, *constants, *positions, held.keys, held.values, recent, positions[0])
    return combine(parts, inputs[0], parts if terms.sinks is None else terms.sinks, *positions)[0]


def _of_rows(
    rows: slice,
    held: Held,
    capacity: int,
    heads: tuple[mx.array, mx.array, mx.array],
    terms: Terms,
    whole: Whole | None,
) -> tuple[Sequence[Input], list[Input], Any]:
    """For some rows of a step: the kernel's q, k and v, its constants, and the arguments of `plan_rows`."""
    q, k, v = (part[:, rows] for part in heads)
    joined = None if whole is None else whole.joined[:, rows]
    types, turn = _planned_by(terms, q, held)
    shapes = tuple((1, 1, *part.shape[2:]) for part in (q, k, v))
    widths = tuple(part.shape[2] * part.shape[3] if joined is None else joined.shape[-1] for part in (q, k, v))
    inputs: Sequence[Input] = (q, k, v) if joined is None else in_turn(joined, q[:, :1], k[:, :1], v[:, :1])
    given = q.shape[1], widths, backend.name(), shapes, types, capacity, turn, terms.limits
    return inputs, _constants(terms, k, whole), given


def _planned_by(
    terms: Terms, q: mx.array, held: Held
) -> tuple[tuple[mx.Dtype, mx.Dtype | None, mx.Dtype], tuple[int, bool]]:
    """The `types` and `turn` of `plan`."""
    norm, rope = terms.q_norm, terms.rope
    types = q.dtype, None if norm is None else norm.weight.dtype, held.keys.dtype
    return types, (0, False) if rope is None else (rope.dims, rope.interleaved)


def _constants(terms: Terms, k: mx.array, whole: Whole | None) -> list[Input]:
    """The kernel's weights and numbers. It needs an array for every input; k stands for those that it does not read."""
    rope = terms.rope
    weights: Sequence[Input] = [k if norm is None else norm.weight for norm in (terms.q_norm, terms.k_norm)]
    weights = [*weights, k if rope is None else rope.periods] if whole is None else whole.weights
    return [*weights, terms.eps, rope.magnitude if rope else 1.0, terms.scale]


@lru_cache(512)
def plan_rows(count: int, widths: tuple[int, int, int], *given: Any) -> tuple[Launch, Launch]:
    """The launches of `plan`, whose arguments are `given`, for `count` rows; `widths`: values from one row of q, k and
    v to the next.
    """
    step, combine = plan(*given)
    own = {name: f"{name}@{count}" for name in ("positions", "keys", "values", "recent", "next")}
    return _several(step, combine, count, widths, own, [step.outputs[1]] * count)


@lru_cache(512)
def plan_steps(count: int, widths: tuple[int, int, int], *given: Any) -> tuple[Launch, Launch, Launch]:
    """As `plan_rows`, of a sequence's tokens: first the launch that appends all of them."""
    step, combine = plan(*given)
    names = "X", "D", "V", "K", "KV", "W", "NORM", "DIMS", "INTERLEAVED", "RECENT", "VNORM"
    sizes = {name: step.template[name] for name in names} | {"COUNT": count, "THREADS": APPENDING}
    sizes |= {"AT_K": widths[1], "AT_V": widths[2]}
    groups = step.template["KV"], count
    append = Launch(step.target, ATTEND_APPEND, sizes, groups, APPENDING, [step.outputs[1]])
    step = replace(step, template=step.template | {"APPENDED": 1})
    own = {"positions": f"positions@{count}"}
    return append, *_several(step, combine, count, widths, own, [((1,), step.outputs[1][1])])


def _several(
    step: Launch,
    combine: Launch,
    count: int,
    widths: tuple[int, int, int],
    own: dict[str, str],
    recent: Sequence[tuple[Shape, mx.Dtype]],
) -> tuple[Launch, Launch]:
    """The launches for `count` tokens, with the arrays `own` of each; `recent`: shapes and dtypes of outputs."""
    ((pieces, heads, values), _), ((out, dtype),) = step.outputs[0], combine.outputs
    # The first piece of every row, then the second, and so on: then the distance between rows does not depend on
    # the capacity. Each constant would compile another text.
    sizes = dict(zip(("AT_Q", "AT_K", "AT_V"), widths, strict=True)) | {"AT_OUT": out[-1]}
    sizes |= {"PIECE": count * heads, "AT_PARTS": heads * values}
    own = own | {"q": "q+AT_Q", "k": "k+AT_K", "v": "v+AT_V", "gate": "gate+AT_Q", "parts": "parts+AT_PARTS"}
    own["out"] = "out+AT_OUT"
    made = [((pieces, count * heads, values), mx.float32), *recent]
    return step.of_rows(own, count, sizes, made), combine.of_rows(own, count, sizes, [((1, count, out[-1]), dtype)])


@lru_cache(512)
def plan(
    target: str,
    shapes: tuple[Shape, Shape, Shape],
    types: tuple[mx.Dtype, mx.Dtype | None, mx.Dtype],
    capacity: int,
    turn: tuple[int, bool],
    limits: tuple[int | None, bool, bool],
    seen: SeenSizes = SEEING_ALL,
) -> tuple[Launch, Launch]:
    (heads, stride), (kv_heads, width), (_, value_width) = (shape[2:] for shape in shapes)
    window, has_sinks, norms_values = limits
    shared = heads // kv_heads
    abreast = max(n for n in range(1, HEADS + 1) if shared % n == 0)
    positions = (128 if width <= 128 else 64) // types[0].size  # positions of a piece: keys of up to 16 KB
    sizes = {"X": types[0], "H": heads, "D": width, "V": value_width, "P": positions, "WINDOW": window or 0}
    sizes |= {"PIECE": heads, **seen.template}
    template = sizes | {"K": types[2], "W": types[1] or types[0], "STRIDE": stride, "KV": kv_heads, "GH": abreast}
    template |= {"NORM": int(types[1] is not None), "DIMS": turn[0], "INTERLEAVED": int(turn[1]), "RECENT": RECENT}
    template |= {"VNORM": int(norms_values), "LISTS": seen.lists, "APPENDED": 0}
    # A window of n positions may span one piece more than it fills; a short text has fewer.
    pieces = ceildiv(seen.most or capacity + RECENT, positions)
    pieces = pieces if window is None else ceildiv(window - 1, positions) + 1
    most = MOST_THREADS[target]
    template["SHARES"] = shares = 2 if 2 * width <= most else 1
    columns = max(n for n in range(32, value_width + 1, 32) if value_width % n == 0 and 4 * n <= most)
    elements = row_bytes if types[2] == mx.uint8 else int
    kept = kv_heads * RECENT * (elements(width) + elements(value_width))
    outputs = [((pieces, heads, value_width + 2), mx.float32), ((kept,), types[2])]
    step = Launch(target, ATTEND_STEP, template, (pieces, heads // abreast), shares * width, outputs)
    out = [((1, 1, heads * value_width), types[0])]
    sizes |= {"GATE": int(stride > width), "C": columns, "SINKS": int(has_sinks)}
    return step, Launch(target, ATTEND_COMBINE, sizes, (heads, value_width // columns), 4 * columns, out)
