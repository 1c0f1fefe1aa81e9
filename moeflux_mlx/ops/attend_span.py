"""Attention of many new positions on CUDA.

MLX keeps all scores of heads wider than 128 (`causal_parts`), uses a part of the GPU for few rows, and has cuDNN plan
each new number of positions, which takes longer than a short turn's attention. Here a launch keeps no scores and one
text serves all lengths. Where a span has too few rows for the whole GPU, the positions are cut into pieces, and a
second launch sums them; the cuts depend on sizes only.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from . import backend
from .launch import LEAST_ELEMENTS, MOST_THREADS, Kernel, Launch, Reason, Shape, Template, ceildiv
from .seen import SEEING_ALL
from .tiles import planned

ATTEND_SPAN = Kernel("attend_span", "q keys values scale positions", "out", units="matrix")
ATTEND_COMBINE = Kernel("attend_combine", "parts gate sinks positions", "out")
WIDEST = 256  # heads
MOST = 16  # pieces of the positions, where there are several


class SpanSizes(NamedTuple):
    """What does not depend on the model.

    Args:
        keys: how many keys a threadgroup has in its memory.
        threads: of a threadgroup.
        groups: threadgroups that run at once.
        least: least positions of a piece.
    """

    keys: int
    threads: int = 256
    groups: int = 132
    least: int = 512


# By NVIDIA's capability: the units of 9.0 multiply 128 keys at once; others have 99 KB of memory of a threadgroup.
SIZES, OTHERS = {9: SpanSizes(128)}, SpanSizes(32)


def takes_span(widths: tuple[int, int], dtype: mx.Dtype, rows: int, limited: bool) -> bool:
    """Whether `attend_span` takes `rows` new positions, as `span_refusal` has the others."""
    return rows > 1 and not span_refusal(backend.name(), widths, dtype, limited)


@planned("attend_span")
def span_refusal(target: str, widths: tuple[int, int], dtype: mx.Dtype, limited: bool) -> Reason | None:
    """Why MLX's attention is used for a span with heads of these widths of keys and values. `limited`: whether a query
    sees a window or a chunk only, or the softmax has sinks.
    """
    if target != "cuda":
        return Reason("no Apple GPU has run the kernel")
    if 0 < backend.capability() < 8:
        return Reason(f"NVIDIA's capability {backend.capability()} has no matrix units for bfloat16")
    if limited:
        return Reason("there is a window, or sinks")
    if dtype.size != 2:
        return Reason("matrix units take 16 bits")
    return width_refusal(widths)


def width_refusal(widths: Sequence[int]) -> Reason | None:
    """Why the kernel does not take heads of these widths."""
    odd = [width for width in widths if width % 64 or width > WIDEST]
    return Reason(f"head width {odd[0]} is above {WIDEST} or no multiple of 64") if odd else None


def piece_values(queries: int, width: int) -> int:
    """The most float32 values of the pieces of a span of up to `queries` queries of heads with values of `width`."""
    return min(queries, OTHERS.groups * OTHERS.threads // 8) * MOST * (width + 2)


def attend_span(
    q: mx.array, keys: mx.array, values: mx.array, count: int, scale: float, sizes: SpanSizes | None = None
) -> mx.array:
    """softmax(scale * q k) v of the newest of `count` positions: [B, L, heads, V].

    Args:
        q: [B, heads, L, D].
        keys, values: [B, kv heads, capacity, D] and [.., V], with those of all positions, the newest included.
        sizes: None means those of this machine's GPU.
    """
    assert q.dtype == keys.dtype == values.dtype, "the text has one type"
    sizes = sizes or sizes_here()
    heads = q.shape, keys.shape[1], values.shape[-1]
    rows, combine = span_plan(backend.name(), *heads, q.dtype, ceildiv(count, sizes.least), sizes)
    positions = span_positions(count, q.shape[2], keys.shape[2])
    (out,) = rows(q, keys, values, scale, positions)
    return out if combine is None else combine(out, out, out, positions)[0]


@lru_cache(64)
def span_positions(count: int, rows: int, capacity: int) -> mx.array:
    """The kernels' input of these numbers, which is the same in all layers."""
    return mx.array([count - 1, rows, capacity] + [0] * (LEAST_ELEMENTS - 3), mx.int32)


@lru_cache(64)
def span_plan(
    target: str, queries: Shape, kv_heads: int, V: int, dtype: mx.Dtype, lengths: int, sizes: SpanSizes
) -> tuple[Launch, Launch | None]:
    """The launch over pieces of up to `lengths` times `least` positions, for queries [B, heads, L, D], and that of
    their sum, if there are several.
    """
    B, heads, L, D = queries
    groups = ceildiv(L * heads // kv_heads, sizes.threads // 2), kv_heads * B
    most = MOST if 4 * groups[0] * groups[1] <= sizes.groups else 1
    pieces = ceildiv(lengths, ceildiv(lengths, most))  # as piece_length of seen.h.metal
    whole = (B, L, heads, V), dtype
    template: Template = {"X": dtype, "D": D, "V": V, "P": sizes.least, "MOST": most}
    own = {"R": dtype if most == 1 else mx.float32, "H": heads, "KV": kv_heads}
    own |= {"KEYS": sizes.keys, "THREADS": sizes.threads}
    kernel = replace(ATTEND_SPAN, memory=dtype.size * ((sizes.threads // 2 + sizes.keys) * D + sizes.keys * V))
    made = whole if most == 1 else ((B, L, heads, most, V + 2), mx.float32)
    rows = Launch(target, kernel, template | own, (*groups, pieces), sizes.threads, [made])
    if most == 1:
        return rows, None
    template |= {"WINDOW": 0, "CHUNKED": 0, "PIECE": 1, "EACH": most, "GATE": 0, "SINKS": 0, **SEEING_ALL.template}
    return rows, combine_launch(target, template, B * L * heads, whole)


def combine_launch(target: str, template: Template, heads: int, out: tuple[Shape, mx.Dtype]) -> Launch:
    """The launch that sums the pieces of so many heads. `template`: all constants of the text but the columns of a
    threadgroup; `out`: shape and dtype of the result.
    """
    V = template["V"]
    columns = max(n for n in range(32, V + 1, 32) if V % n == 0 and 4 * n <= MOST_THREADS[target])
    return Launch(target, ATTEND_COMBINE, template | {"C": columns}, (heads, V // columns), 4 * columns, [out])


def sizes_here() -> SpanSizes:
    return SIZES.get(backend.capability(), OTHERS)
