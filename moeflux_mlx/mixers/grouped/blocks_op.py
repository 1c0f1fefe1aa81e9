"""Attention over the blocks of positions that an indexer chooses (transformers, `Qwen4ExpTextQSAIndexer` and
`MiniMaxM3VLIndexer`).

A token that sees no more blocks than are chosen attends to all positions, as in `attend`. For any other token, whole
blocks are scored, and the keys and values of the best ones are gathered, together with those of the positions behind
the last whole block, or of the token's own block; the kernels for one token read them where they are. Many tokens are
processed a few at a time.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ...kinds import HeadBlocks, KeyBlocks
from ...ops import gpu_time, index, native
from ...ops.backend import AnyArray, Array, arange, kernels_take, library_of, view
from ...ops.elementwise import float32, sigmoid
from ...ops.gather_rows import gather_rows
from ...ops.index import (
    Index,
    Projections,
    TokenPlace,
    append_keys,
    best,
    choose,
    choose_blocks_step,
    choose_step,
    slices,
)
from ...ops.norm import Norm
from ...ops.rope import Rope, has_axes, laid_out
from ...ops.rows import AnyCache
from ...ops.seen import SeenBlocks
from .op import attend, refusal
from .terms import Terms

AnyBlocks = KeyBlocks | HeadBlocks
PARTS = 16  # of a prompt's attention, whose places are computed together


def attend_blocks(
    q: Array,
    k: Array,
    v: Array,
    caches: Sequence[AnyCache],
    made: Projections,
    blocks: AnyBlocks,
    terms: Terms,
    joined: mx.array | None = None,
) -> Array:
    """`attend` over the positions that are chosen: [B, L, heads * D].

    Args:
        q, k, v: as in `attend`, q perhaps with a gate behind each query.
        caches: of one text or a batch of them: of all positions; of `HeadBlocks`, also of the index keys.
        made: of these tokens; its keys are those of all blocks that are whole after the last token, or of `HeadBlocks`
            those of the tokens, which are appended.
        joined: as in `attend`.
    """
    (B, L, _, D), own, parts = k.shape, caches[0], []
    whole, by_head = own.whole(L), isinstance(blocks, HeadBlocks)
    if _takes_step(q, B * L == 1 and not has_axes(own.position), D, v.shape[-1], blocks):
        made = made if whole < L else made._replace(queries=None)
        if isinstance(blocks, HeadBlocks):
            chosen = choose_step(made, caches[1], blocks)
        else:
            chosen = None if whole else choose_blocks_step(made, TokenPlace(own.held(k.dtype).positions), blocks)
        seen = None if chosen is None else SeenBlocks(chosen, blocks.ratio, by_head)
        return attend(q, k, v, own, terms, joined, seen)
    first, position, library = own.offset, own.position, library_of(q)
    if by_head:
        made = made._replace(keys=append_keys(caches[1], made.terms.keys(made.keys, position)))
    if whole:
        some = q[:, :whole], k[:, :whole], v[:, :whole]
        parts.append(attend(*some, own, terms))
    if whole < L:
        queries = made.terms.queries(made.queries, blocks.indexer.heads, position)[:, whole:]
        weights = library.full(queries.shape[:3], made.terms.scale, library.float32)
        late, seeing = Index(queries, made.keys, weights), blocks.whole(first + whole + arange(L - whole, library))
        if isinstance(blocks, HeadBlocks):
            chosen = choose_by_head(late, seeing, blocks)
        else:
            chosen = choose(late, seeing, blocks.indexer)[:, :, None]
        parts.append(_over_chosen(q[:, whole:], k[:, whole:], v[:, whole:], own, chosen, blocks, terms))
    return parts[0] if len(parts) == 1 else library.concatenate(parts, axis=1)


def _takes_step(q: Array, is_alone: bool, width: int, value_width: int, blocks: AnyBlocks) -> bool:
    """Whether the kernels for one token attend."""
    return kernels_take(q, refusal, is_alone, width, value_width) and kernels_take(q, index.refusal, is_alone, blocks)


def choose_by_head(made: Index, seen: Array, blocks: HeadBlocks) -> Array:
    """For each head, the blocks with the best keys among those that each token sees: int32 [B, rows, heads, chosen],
    ascending; ties go to the first.
    """
    library = library_of(made.keys)
    (B, rows, heads, width), count = made.queries.shape, made.keys.shape[1] // blocks.ratio
    keys = float32(made.keys[:, : count * blocks.ratio]).swapaxes(-1, -2)
    numbers, parts = arange(count, library), []
    for some in slices(rows, blocks.indexer.rows_at_once(count * blocks.ratio, 0)):
        queries = float32(made.queries[:, some]).reshape(B, -1, width)
        scores = (queries @ keys).reshape(B, -1, heads, count, blocks.ratio).max(axis=-1)
        scores = library.where(numbers < seen[some, None, None], scores, library.array(-np.inf, library.float32))
        parts.append(best(scores, blocks.chosen, library))
        gpu_time.in_turn(rows, parts)
    return parts[0] if len(parts) == 1 else library.concatenate(parts, axis=1)


def _over_chosen(
    q: Array, k: Array, v: Array, cache: AnyCache, chosen: Array, blocks: AnyBlocks, terms: Terms
) -> Array:
    """[B, n, heads * D] of tokens that each attend to the blocks `chosen` [B, n, 1 or kv heads, .] and to their last
    positions."""
    (B, n, _, D), first, position = k.shape, cache.offset, cache.position
    held: AnyArray
    out: AnyArray
    q, gates = q[..., :D], q[..., D:].reshape(B, n, -1)
    q, k = terms.queries(q, position), terms.keys(k, position)
    if isinstance(q, np.ndarray):
        keys, values, _ = cache.append(mx.array(k.transpose(0, 2, 1, 3)), mx.array(v.transpose(0, 2, 1, 3)))
        mx.eval(keys, values)
        held = q, view(keys), view(values)
        out = np.stack([_text_native(text, first, blocks, terms.scale) for text in zip(*held, chosen, strict=True)])
    else:
        held = q.swapaxes(1, 2), *cache.append(k, v.transpose(0, 2, 1, 3))[:2]
        out = mx.stack([_text_ops(text, first, blocks, terms.scale) for text in zip(*held, chosen, strict=True)])
    out = out.reshape(B, n, -1)
    return out * sigmoid(gates) if gates.size else out


def _text_native(text: tuple[np.ndarray, ...], first: int, blocks: AnyBlocks, scale: float) -> np.ndarray:
    """[n, heads, D] of a text's queries [n, heads, D], keys and values [kv heads, P, D], and chosen blocks [n, 1 or kv
    heads, .]."""
    (q, keys, values, chosen), rows = text, []
    for i, of_token in enumerate(chosen):
        place = first + i
        tail = np.arange(blocks.whole(place) * blocks.ratio, place + 1)
        whole = (of_token[..., None] * blocks.ratio + np.arange(blocks.ratio)).reshape(len(of_token), -1)
        places = [(head, np.append(one, tail)) for head, one in _heads(whole, keys)]
        some_keys, some_values = (np.stack([part[head, at] for head, at in places]) for part in (keys, values))
        rows.append(native.attend(view(q[i : i + 1]), some_keys, some_values, some_keys.shape[1], scale)[0])
    return np.stack(rows)


def _heads(places: np.ndarray, part: Any) -> list[tuple[int, np.ndarray]]:
    """(kv head, its places) of keys or values [kv heads, P, D], where all share places or each has its own."""
    heads = range(len(part))
    return [(head, places[head if len(places) > 1 else 0]) for head in heads]


def _text_ops(text: tuple[mx.array, ...], first: int, blocks: AnyBlocks, scale: float) -> mx.array:
    """As `_text_native`, with plain operations."""
    (q, keys, values, chosen), parts = text, []
    kv_heads, positions, _ = keys.shape
    width = kv_heads * (keys.shape[-1] + values.shape[-1])
    own, inside = (first + arange(len(q), mx))[:, None], arange(blocks.ratio, mx)
    tails = blocks.whole(own) * blocks.ratio + inside
    tails = mx.where(tails > own, -1, tails)  # -1: not there yet
    starts = arange(kv_heads, mx)[:, None] * positions  # of the heads, all positions of which are gathered from
    flat = [part.reshape(-1, part.shape[-1]) for part in (keys, values)]
    at_once = blocks.indexer.rows_at_once(0, blocks.ratio * width)
    for group in slices(len(q), PARTS * at_once):
        count, heads, _ = chosen[group].shape
        whole = (chosen[group][..., None] * blocks.ratio + inside).reshape(count, heads, -1)
        tail = mx.broadcast_to(tails[group][:, None], (count, heads, blocks.ratio))
        places = mx.concatenate([whole, tail], axis=-1)  # [rows, 1 or kv heads, positions]
        seen, places = places[:, :1, None] >= 0, mx.maximum(places, 0) + starts
        # The queries of a key's heads count as rows: products of a matrix, where every head alone would read all keys.
        together = q[group].reshape(count, kv_heads, -1, q.shape[-1])
        for some in slices(count, at_once):
            near = [gather_rows(part, places[some]) for part in flat]
            out = mx.fast.scaled_dot_product_attention(together[some], *near, scale=scale, mask=seen[some])
            parts.append(out.reshape(-1, q.shape[1], values.shape[-1]))
            gpu_time.in_turn(len(q), parts)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def block_keys(rows: Array, norm: Norm, rope: Rope, first: int | mx.array, ratio: int) -> Array:
    """Keys [B, n, D] of blocks from number `first` on, of index keys [B, n * ratio, D]; `rope` turns by numbers."""
    B, _, width = rows.shape
    library = library_of(rows)
    means = rows.astype(library.float32).reshape(B, -1, ratio, width).mean(axis=2).astype(rows.dtype)
    return laid_out(rope(laid_out(norm(means)[:, :, None]), first))[:, :, 0]
