"""Many tokens through a layer's experts, in waves: a few experts of the layer in memory together.

Rows are sorted by expert and go expert by expert, so that the temporary memory is known in advance. Which experts make
a wave depends on the tokens and the sizes only, where it shows in the bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np

from ..ops.backend import Array
from ..ops.combine import combine
from ..ops.grouped import expert_rows, waves_show
from ..ops.tiles import MAX_TOKENS
from .routing import Routing
from .source import ExpertLoader

WAVE_BYTES = 128 << 20  # of records taken apart at a time; of a wave that was read, four times as much exists
NEARLY_ALL = 0.9  # share of a layer's experts in use from which the next layer's first ones are read unseen


def in_waves(
    source: ExpertLoader, routing: Routing, x: Array, residual: Array, shared: Array | None, reads_ahead: bool
) -> Array:
    """residual + sum_k weights[:, k] * expert(ids[:, k])(x) + shared, all [T, H]; each expert is asked for once.

    Args:
        reads_ahead: whether the next layer's first experts may be read before its router has run.
    """
    T, K = routing.ids.shape
    flat = np.array(routing.ids).reshape(-1)
    order = np.argsort(flat, kind="stable")  # rows of one expert become neighbours, in token order
    rows, experts = order // K, flat[order]
    outs, places, start = [], [], 0
    for wave in _waves(source, routing.layer, flat, K, reads_ahead):
        out, place = _run(source, wave, x, rows[wave.part], experts[wave.part])
        outs.append(out)
        places.append(start + place)
        start += len(out)
    found = mx.concatenate(outs) if isinstance(outs[0], mx.array) else np.concatenate(outs)
    where = np.concatenate(places)[np.argsort(order)].reshape(T, K).astype(np.int32)
    return combine(found, where, cast(Array, routing.weights), residual, shared)


@dataclass(frozen=True)
class Wave:
    """Rows `part` (sorted by expert) of a few experts of `layer`; `following` is what is wanted next."""

    layer: int
    part: slice
    following: tuple[int, list[int]]


def _run(source: ExpertLoader, wave: Wave, x: Array, rows: np.ndarray, experts: np.ndarray) -> tuple[Array, np.ndarray]:
    """As `expert_rows`; the next wave's experts are read meanwhile."""
    records = source.whole(wave.layer)
    if records is not None:
        return expert_rows(x, rows, experts, records)
    with source.request(wave.layer, experts) as lease:
        source.hint(*wave.following)
        lease.wait()
        records, slots = lease.records()
        return expert_rows(x, rows, slots, records)


def _waves(source: ExpertLoader, layer: int, ids: np.ndarray, top_k: int, reads_ahead: bool) -> Iterator[Wave]:
    """A few experts each, ascending; `ids` [T * K] is what the chunk uses.

    Afterwards the experts with the most tokens are still in the pool, as many as are this layer's share.
    """
    layout = source.layout
    size = _wave_size(source, layer, top_k)
    counts = np.bincount(ids, minlength=layout.num_experts)
    used = np.flatnonzero(counts)
    kept = set(np.argsort(-counts, kind="stable")[: source.slots_per_layer(spare=2 * size)].tolist())
    ends = np.cumsum(counts)
    groups = [used[cut : cut + size].tolist() for cut in range(0, len(used), size)]
    first: tuple[int, list[int]] = layer, []
    following = layout.next_moe_layer(layer)
    if reads_ahead and following is not None and len(used) >= NEARLY_ALL * layout.num_experts:
        first = following, list(range(min(size, layout.num_experts)))
    nexts = [*((layer, group) for group in groups[1:]), first]
    for group, wanted in zip(groups, nexts, strict=True):
        yield Wave(layer, slice(ends[group[0]] - counts[group[0]], ends[group[-1]]), wanted)
        source.give_way(layer, [expert for expert in group if expert not in kept])


def _wave_size(source: ExpertLoader, layer: int, top_k: int) -> int:
    """Experts of a wave. Where bits do not depend on it, a layer in memory goes in few and large ones, which is faster
    (results.tsv, "prefill")."""
    layout = source.layout
    if not waves_show() and source.whole(layer) is not None:
        return layout.experts_within(2 * WAVE_BYTES, at_most=layout.num_experts)
    return layout.experts_within(WAVE_BYTES, at_most=MAX_TOKENS * top_k // 2)
