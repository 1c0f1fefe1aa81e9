"""Latent attention over the positions that an indexer chooses (DeepSeek Sparse Attention, arXiv:2512.02556, 2.1).

A token that sees at most as many positions as the budget attends to all of them, as in `latent`. For any other token,
the indexer scores all positions with its own keys (`index`), and the latents of the best positions are gathered; the
kernels for one token read them where they are. The projections of keys and values are folded into queries and results,
so nothing else is read. Many tokens are processed a few at a time.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ...kinds import Indexer, KeyBlocks
from ...ops import gpu_time, index, native
from ...ops.backend import AnyArray, Array, arange, kernels_take, library_of, view
from ...ops.gather_rows import gather_rows
from ...ops.index import Index, Projections, TokenPlace, append_keys, choose, choose_blocks_step, choose_step, slices
from ...ops.norm import Norm
from ...ops.positions import Positions, Steps
from ...ops.rope import Rope
from ...ops.rows import AnyCache
from ...ops.seen import Chosen, SeenBlocks
from .op import (
    AttentionMask,
    HeadMatrices,
    Matrices,
    Queries,
    absorb_native,
    absorbed_native,
    absorbed_ops,
    attend_latent,
    expanded_native,
    expanded_ops,
    native_refusal,
    parts_of,
    products,
    refusal,
    softmax,
    values_native,
)
from .spec import ABSORB_AT_MOST


def attend_indexed(
    q: Array,
    kv: Array,
    caches: Sequence[Steps],
    queries: Queries,
    key: HeadMatrices,
    value: HeadMatrices,
    *,
    made: Projections | None,
    indexer: Indexer,
    chosen: Chosen,
    norm: Norm,
    rope: Rope | None,
    scale: float,
    sinks: mx.array | None = None,
) -> Array:
    """`attend_latent` over the positions that an indexer chooses, or without `made`, over those in `chosen`.

    Args:
        caches: one of latents and rotated keys, and with `made` one of the indexer's keys.
        made: what the indexer's matrices make of these tokens; the keys are appended, and the choice is stored in
            `chosen`.
        indexer: how many positions are chosen.

    Returns:
        [B, L, heads * v]
    """
    (B, L), own = q.shape[:2], caches[0]
    whole, rotated = own.whole(L), rope.dims if rope else 0
    if _takes_step(q, B * L == 1, kv.shape[-1] - rotated, rotated, indexer):
        if made is not None:
            chosen.positions = choose_step(made, caches[1], indexer)
        seen = None if whole else SeenBlocks(chosen.positions)
        around: Any = {"norm": norm, "rope": rope, "scale": scale, "sinks": sinks}
        return attend_latent(q, kv, own, queries, key, value, seen=seen, **around)
    offset, position = own.offset, own.position
    parts = parts_of(queries.scaled(queries(q), position), kv, norm, rope, position)
    latents, keys, mask = _append(own, *parts[2:])
    if made is not None:
        index_keys = append_keys(caches[1], made.terms.keys(made.keys, position))
        chosen.positions = None
        if made.queries is not None:
            index_queries = made.terms.queries(made.queries, indexer.heads, position)[:, whole:]
            late = Index(index_queries, index_keys, made.weights[:, whole:] * made.terms.scale)
            chosen.positions = choose(late, offset + 1 + whole + arange(L - whole, library_of(q)), indexer)
    held = HeldLatents(latents, keys, mask, offset, whole, chosen.positions if whole < L else None)
    at_once, matrices = indexer.rows_at_once(0, kv.shape[-1]), Matrices(key, value, scale, sinks)
    return _over(*parts[:2], held, at_once, matrices)


def _takes_step(q: Array, is_alone: bool, latent: int, rotated: int, rule: index.IndexRule) -> bool:
    """Whether the kernels for one token attend."""
    return kernels_take(q, refusal, is_alone, latent, rotated) and kernels_take(q, index.refusal, is_alone, rule)


def attend_pools(
    q: Array,
    kv: Array,
    cache: AnyCache,
    queries: Queries,
    key: HeadMatrices,
    value: HeadMatrices,
    *,
    made: Projections,
    blocks: KeyBlocks,
    norm: Norm,
    rope: Rope | None,
    scale: float,
) -> Array:
    """`attend_latent` over the positions of the blocks that an indexer chooses, and those behind the last whole block.

    Args:
        made: of these tokens, with the keys of all blocks that are whole with the last of them; None: there are none.
        blocks: how many positions each has, and how many are chosen.

    Returns:
        [B, L, heads * v]
    """
    (B, L), chosen, rotated = q.shape[:2], None, rope.dims if rope else 0
    whole = cache.whole(L)
    if _takes_step(q, B * L == 1, kv.shape[-1] - rotated, rotated, blocks):
        if not whole:
            place = TokenPlace(cache.held(kv.dtype).positions)
            chosen = SeenBlocks(choose_blocks_step(made, place, blocks), blocks.ratio)
        return attend_latent(q, kv, cache, queries, key, value, norm=norm, rope=rope, scale=scale, seen=chosen)
    first, position = cache.offset, cache.position
    parts = parts_of(queries.scaled(queries(q), position), kv, norm, rope, position)
    latents, keys, mask = _append(cache, *parts[2:])
    if whole < L:
        library = library_of(q)
        index_queries = made.terms.queries(made.queries, blocks.indexer.heads, position)[:, whole:]
        late = Index(index_queries, made.keys, made.weights[:, whole:] * made.terms.scale)
        places = first + whole + arange(L - whole, library)
        chosen = with_tail(choose(late, blocks.whole(places), blocks.indexer), places, blocks, library)
    held = HeldLatents(latents, keys, mask, first, whole, chosen, has_gaps=True)
    at_once = blocks.indexer.rows_at_once(0, blocks.ratio * kv.shape[-1])
    return _over(*parts[:2], held, at_once, Matrices(key, value, scale))


def with_tail(chosen: Array, places: Array, blocks: KeyBlocks, library: ModuleType) -> Array:
    """The positions [B, rows, `blocks.most`] of chosen blocks [B, rows, top], and behind them those of tokens at
    `places` that no whole block has; -1 in place of some that there are not."""
    B, rows, _ = chosen.shape
    inside = arange(blocks.ratio, library)
    positions = (chosen[..., None] * blocks.ratio + inside).reshape(B, rows, -1)
    tails: Array = blocks.whole(places)[:, None] * blocks.ratio + inside[:-1]
    tails = library.where(tails <= places[:, None], tails, -1).astype(library.int32)
    return library.concatenate([positions, library.broadcast_to(tails, (B, *tails.shape))], axis=-1)


class HeldLatents(NamedTuple):
    """What tokens attend over: latents [B, P, N] and rotated keys [B, P, R], up to the last of the tokens or to more
    that `mask` hides; the first token's place; how many attend to all that they see, and what the others do to.
    `has_gaps`: -1 among that stands for no position."""

    latents: AnyArray
    keys: AnyArray
    mask: AttentionMask
    offset: Any
    whole: int
    chosen: AnyArray
    has_gaps: bool = False


def _append(cache: Positions, latent: Array, k_pe: Array) -> tuple[AnyArray, AnyArray, AttentionMask]:
    """Appends the tokens; returns latents [B, P, N] and rotated keys [B, P, R] of all positions, and a token's mask."""
    B, L = latent.shape[:2]
    entry = k_pe.reshape(B, 1, L, k_pe.shape[-1])
    if isinstance(latent, mx.array):
        latents, keys = cache.update_and_fetch(latent[:, None], entry)
        return latents[:, 0], keys[:, 0], cache.mask(L)
    cache.update_and_fetch(mx.array(latent[:, None]), mx.array(entry))
    arrays = [view(part)[:, 0, : cache.offset] for part in (cache.keys, cache.values)]
    return arrays[0], arrays[1], None


# ---- attention


def _over(q_nope: Array, q_pe: Array, held: HeldLatents, at_once: int, matrices: Matrices) -> Array:
    """[B, L, heads * v] of queries in attention's layout."""
    return (_native if isinstance(q_nope, np.ndarray) else _ops)(q_nope, q_pe, held, at_once, matrices)


def _ops(q_nope: mx.array, q_pe: mx.array, held: HeldLatents, at_once: int, matrices: Matrices) -> mx.array:
    """[B, L, heads * v] of queries [B, heads, L, .]; latents are gathered for a few tokens at a time."""
    (B, _, L, _), whole, (key, value, scale, sinks, _), parts = q_nope.shape, held.whole, matrices, []
    if whole:
        seen = slice(None) if whole == L else slice(held.offset + whole)
        mask = held.mask if whole == L else "causal" if whole > 1 else None
        form = absorbed_ops if whole <= ABSORB_AT_MOST else expanded_ops
        entries = held.latents[:, None, seen], held.keys[:, None, seen]
        parts.append(form(q_nope[:, :, :whole], q_pe[:, :, :whole], *entries, mask, matrices))
    if whole < L:
        q = key.multiply(q_nope[:, :, whole:], transpose=False)
        texts = zip(q, q_pe[:, :, whole:], held.latents, held.keys, held.chosen, strict=True)
        mixed = [_gathered_ops(*text, held.has_gaps, at_once, scale, sinks) for text in texts]
        parts.append(value.multiply(mx.stack(mixed), transpose=True))
    out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
    return out.transpose(0, 2, 1, 3).reshape(B, L, -1)


def _gathered_ops(
    q: mx.array,
    q_pe: mx.array,
    latents: mx.array,
    keys: mx.array,
    chosen: mx.array,
    has_gaps: bool,
    at_once: int,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    """Mixed latents [heads, rows, N] of queries [heads, rows, N] and [heads, rows, R]."""
    q, q_pe, parts = q.swapaxes(0, 1), q_pe.swapaxes(0, 1), []
    for some in slices(len(q), at_once):
        places = mx.maximum(chosen[some], 0) if has_gaps else chosen[some]
        near, turned = gather_rows(latents, places), gather_rows(keys, places)  # [rows, positions, .]
        scores = products(q[some], q_pe[some], near, turned) * scale
        mask = chosen[some][:, None] >= 0 if has_gaps else None
        parts.append(softmax(scores, mask, sinks, heads=-2) @ near)
        gpu_time.in_turn(len(q), parts)
    return (parts[0] if len(parts) == 1 else mx.concatenate(parts)).swapaxes(0, 1)


def _native(q_nope: np.ndarray, q_pe: np.ndarray, held: HeldLatents, at_once: int, matrices: Matrices) -> np.ndarray:
    """[B, L, heads * v] of queries [B, L, heads, .]."""
    (B, L), rows = q_nope.shape[:2], []
    for b in range(B):
        chosen = None if held.chosen is None else held.chosen[b]
        rows.append(_text_native(q_nope[b], q_pe[b], held.latents[b], held.keys[b], chosen, held, matrices))
    return np.stack(rows).reshape(B, L, -1)


def _text_native(
    q_nope: np.ndarray,
    q_pe: np.ndarray,
    latents: np.ndarray,
    keys: np.ndarray,
    chosen: np.ndarray | None,
    held: HeldLatents,
    matrices: Matrices,
) -> np.ndarray:
    """[L, heads, v] of one text."""
    whole, (key, value, scale, sinks, _), parts = held.whole, matrices, []
    if whole:
        form, seen = expanded_native if native_refusal(whole) else absorbed_native, held.offset + whole
        parts.append(form(q_nope[:whole], q_pe[:whole], latents[:seen], keys[:seen], matrices))
    if chosen is not None:
        q = absorb_native(q_nope[whole:], q_pe[whole:], latents.shape[-1], key)
        places = [at[at >= 0] for at in chosen]
        mixed = [_gathered_native(one, latents[at], keys[at], scale, sinks) for one, at in zip(q, places, strict=True)]
        parts.append(values_native(np.stack(mixed), value))
    return np.concatenate([part.reshape(len(part), -1) for part in parts])


def _gathered_native(
    q: np.ndarray, latents: np.ndarray, keys: np.ndarray, scale: float, sinks: mx.array | None
) -> np.ndarray:
    """Mixed latents [heads, N] of a token's queries [heads, N + R]."""
    entries = np.concatenate([latents, keys], axis=-1)
    own = None if sinks is None else view(sinks)
    return native.attend(q[None], entries[None], latents[None], len(latents), scale, sinks=own)[0]
