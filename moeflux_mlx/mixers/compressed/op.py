"""Attention over a window and over entries that stand for many positions each (DeepSeek-V4's model code in
transformers, `DeepseekV4Attention` and its compressors).

Keys are values: one head of both serves all queries. A query sees the keys of its window, the entries whose positions
all lie before the next one, or those of them that an indexer chooses, and a sink that counts in the softmax's sum only.
Tokens are handled a few at a time. One form serves MLX's arrays and numpy's; a single token on a GPU takes kernels.
"""

import operator
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ...kinds import KeyBlocks
from ...ops import backend, gpu_time, index
from ...ops.backend import AnyArray, Array, arange, kernels_take, library_of, of_kind
from ...ops.block_rounding import to_e2m1, to_e4m3
from ...ops.elementwise import softmax
from ...ops.gather_rows import gather_rows
from ...ops.index import Index, Projections, TokenPlace, choose, choose_blocks_step, choose_in_blocks
from ...ops.launch import SEVERAL, SHARED_BYTES, Input, Kernel, Launch, Reason, Shape, ceildiv
from ...ops.norm import Norm
from ...ops.rope import Rope
from ...ops.tiles import planned
from .spec import Compressed

INPUTS = Kernel("compressed_inputs", "q raw weight eps periods magnitude position", "query row")
ATTEND = Kernel("compressed_attend", "query ring entries chosen offset scale", "parts stats")
COMBINE = Kernel("compressed_combine", "parts stats sinks offset periods magnitude position", "out")
THREADS, PIECE, HEADS = 128, 128, 4  # of a threadgroup: threads, rows and heads
KEY_BLOCK, ENTRY_BLOCK, INDEX_BLOCK = 32, 16, 32  # values that share a scale where they are rounded


class Seen(NamedTuple):
    """The positions and entries that tokens attend over.

    first: the place of the first of the tokens. keys: [B, n, .] of the newest positions, in order up to the last of
    several tokens; a row begins with the key. places: [n], theirs; a negative one stands for no position. entries:
    [B, T, .], likewise, perhaps with more behind those that there are; None: there are none. chosen: entries int32
    [B, rows, top] that the last tokens attend to; None: all see all.
    """

    first: int | AnyArray
    keys: AnyArray
    places: AnyArray
    entries: AnyArray = None
    chosen: AnyArray = None


class QueryBlock(NamedTuple):
    """Some of the tokens, the keys and entries that they may see, and what was chosen for each; None: all entries."""

    rows: slice
    keys: slice
    entries: slice
    chosen: AnyArray


def choose_entries(made: Projections, seen: Seen, whole: int, position: int | mx.array, mixer: Compressed) -> AnyArray:
    """The entries that the tokens after the first `whole` attend to; the first ones attend to all: int32 [B, rows,
    top].

    `made` is of all tokens, the first of which has the rotary `position`. Its keys are all entries; the index keys are
    their last values.
    """
    compressor, (B, count) = mixer.compressor, made.queries.shape[:2]
    assert compressor is not None and compressor.indexer is not None
    keys, rule = made.keys, KeyBlocks(compressor.ratio, compressor.indexer)
    if kernels_take(keys, refusal, B * count, mixer) and kernels_take(keys, index.refusal, B * count == 1, rule):
        return choose_blocks_step(made, TokenPlace(_number(seen.first), _number(position)), rule)
    late, ended = _late(made, seen, whole, position, mixer)
    return choose(late, ended, compressor.indexer)


def choose_among(
    made: Projections, seen: Seen, whole: int, position: int | mx.array, mixer: Compressed, blocks: Array | None
) -> tuple[AnyArray, AnyArray]:
    """`choose_entries` among the entries of `blocks` int32 [B, rows, .], None: among all; and the blocks for later
    layers, which are these unless the layer marks some itself.
    """
    compressor = mixer.compressor
    assert compressor is not None and compressor.indexer is not None
    late, ended = _late(made, seen, whole, position, mixer)
    best = compressor.blocks
    if best is None:
        return choose_in_blocks(late, ended, compressor.indexer, None, None)
    rule, among = ((0, best.size), blocks) if best.reuses else ((best.top, best.size), None)
    return choose_in_blocks(late, ended, compressor.indexer, rule, among)


def _late(
    made: Projections, seen: Seen, whole: int, position: int | mx.array, mixer: Compressed
) -> tuple[Index, AnyArray]:
    """The queries and weights of the tokens after the first `whole`, the keys of all entries, and how many entries each
    of the tokens sees."""
    assert mixer.indexer is not None
    queries = made.terms.queries(made.queries, mixer.indexer.heads, position)[:, whole:]
    queries = to_e2m1(queries, INDEX_BLOCK) if mixer.rounds else queries
    late = Index(queries, made.keys[..., -mixer.indexer.dim :], made.weights[:, whole:] * made.terms.scale)
    tokens = arange(queries.shape[1], library_of(made.keys))
    return late, (seen.first + 1 + whole + tokens) // mixer.seen_ratio


def rounded_key(key: Array, mixer: Compressed) -> Array:
    """A window's keys [B, L, D] as the layer uses them."""
    return to_e4m3(key, KEY_BLOCK) if mixer.rounds else key


def rounded_entry(entry: Array, index_key: Array, mixer: Compressed) -> tuple[Array, Array]:
    """Entries and index keys as the layers use them."""
    if not mixer.rounds:
        return entry, index_key
    return to_e2m1(entry, ENTRY_BLOCK, has_e4m3_scale=True), to_e2m1(index_key, INDEX_BLOCK)


def attend_compressed(q: Array, seen: Seen, sinks: mx.array, mixer: Compressed) -> Array:
    """softmax(D ** -0.5 * q k) k over what each query sees and its head's sink: [B, L, heads, D] of q, shaped alike."""
    logits, results = of_kind(sinks, q), list[AnyArray]()
    for part in _parts(q.shape[1], seen, mixer):
        results.append(_of_part(q[:, part.rows], part, seen, logits, mixer))
        gpu_time.in_turn(q.shape[1], results)
    return results[0] if len(results) == 1 else library_of(q).concatenate(results, axis=1)


def _parts(count: int, seen: Seen, mixer: Compressed) -> Iterator[QueryBlock]:
    everything, whole = slice(None), count - (0 if seen.chosen is None else seen.chosen.shape[1])
    if count == 1:
        yield QueryBlock(everything, everything, everything, seen.chosen)
        return
    size, before = mixer.rows_at_once(count, seen.first + count), seen.keys.shape[1] - count
    starts = *range(0, whole, size), *range(whole, count, size)
    for start, end in pairwise((*starts, count)):
        keys = slice(max(before + start - mixer.window + 1, 0), before + end)
        entries = slice((seen.first + end) // mixer.seen_ratio if mixer.seen_ratio else 0)
        chosen = None if start < whole else seen.chosen[:, start - whole : end - whole]
        yield QueryBlock(slice(start, end), keys, entries, chosen)


def _of_part(q: Array, part: QueryBlock, seen: Seen, sinks: Array, mixer: Compressed) -> Array:
    library = library_of(q)
    (B, rows, heads, width), least = q.shape, library.array(-np.inf, q.dtype)
    own = seen.first + (part.rows.start or 0) + arange(rows, library)
    keys, places = seen.keys[:, None, part.keys, :width], seen.places[part.keys]
    age = own[:, None] - places
    is_near = (age >= 0) & (age < mixer.window) & (places >= 0)
    near = library.where(is_near[:, None], _products(q, keys), least)
    scores, entries, count = [near * width**-0.5], None, keys.shape[2]
    if part.chosen is not None:
        take = gather_rows if library is mx else operator.getitem
        # Whole rows, because a kernel would copy all entries to take a part of each.
        gathered = [take(text, places)[..., :width] for text, places in zip(seen.entries, part.chosen, strict=True)]
        entries = library.stack(gathered)  # [B, rows, top, D]
        scores.append(_products(q, entries) * width**-0.5)
    elif seen.entries is not None:
        entries = seen.entries[:, None, part.entries, :width]
        ended = arange(entries.shape[2], library) < ((own + 1) // mixer.seen_ratio)[:, None]
        scores.append(library.where(ended[:, None], _products(q, entries), least) * width**-0.5)
    scores.append(library.broadcast_to(sinks.astype(q.dtype)[:, None], (B, rows, heads, 1)))
    weights = softmax(library.concatenate(scores, axis=-1))
    out = _mixed(weights[..., :count], keys)
    return out if entries is None else out + _mixed(weights[..., count:-1], entries)


def _products(q: Array, keys: Array) -> Array:
    """[B, rows, heads, n] of q [B, rows, heads, D] and keys [B, rows, n, D], or [B, 1, n, D] for all rows."""
    if keys.shape[1] > 1:
        return q @ keys.swapaxes(-1, -2)
    B, rows, heads, width = q.shape
    return (q.reshape(B, rows * heads, width) @ keys[:, 0].swapaxes(-1, -2)).reshape(B, rows, heads, -1)


def _mixed(weights: Array, values: Array) -> Array:
    """[B, rows, heads, D] of weights [B, rows, heads, n] and values, as `_products` takes them."""
    if values.shape[1] > 1:
        return weights @ values
    B, rows, heads, count = weights.shape
    return (weights.reshape(B, rows * heads, count) @ values[:, 0]).reshape(B, rows, heads, -1)


# ---- kernels, for one token on a GPU


@planned("compressed")
def refusal(target: str, tokens: int, mixer: Compressed) -> Reason | None:
    """Why the kernels do not take this number of tokens of a layer."""
    if tokens != 1:
        return SEVERAL
    entry = mixer.entry or mixer.borrowed
    if mixer.head_dim % 8 or mixer.row % 8 or entry % 8:
        return Reason(f"rows of {mixer.head_dim}, {mixer.row} and {entry} values are not multiples of 8")
    room = 4 * (_heads(mixer) * (max(8 * THREADS, mixer.head_dim) + PIECE) + PIECE)
    return Reason(f"heads of {mixer.head_dim} values do not fit a threadgroup") if room > SHARED_BYTES else None


def token_inputs(
    q: mx.array, raw: Input, norm: Norm, rope: Rope, position: int | mx.array, mixer: Compressed
) -> tuple[mx.array, mx.array]:
    """The queries [1, 1, heads, D] of a token, perhaps normed, and rotated, and the row [1, 1, mixer.row] that its
    cache keeps, whose key is perhaps rounded.

    Args:
        q: [1, 1, heads * D].
        raw: the token's key, to be normed by `norm` and rotated, and behind it the inputs of entries.
        position: the rotary position.
    """
    launch = plan_inputs(backend.name(), q.dtype, mixer, rope.interleaved)
    turning = rope.periods, rope.magnitude, _number(position)
    query, row = launch(q, raw, norm.weight, norm.eps, *turning)
    return query, to_e4m3(row, KEY_BLOCK, mixer.head_dim) if mixer.rounds else row


def attend_token(
    q: mx.array, seen: Seen, sinks: mx.array, back: Rope, position: int | mx.array, mixer: Compressed
) -> mx.array:
    """`attend_compressed` of a token, rotated back: [1, 1, heads * D] of q [1, 1, heads, D]. Position p is in row p % n
    of the n keys.
    """
    chosen, offset = seen.chosen, _number(seen.first)
    entries = (0, 0) if seen.entries is None else seen.entries.shape[1:]
    top = 0 if chosen is None else chosen.shape[-1]
    attend, combine = plan_attend(backend.name(), q.dtype, seen.keys.shape[1], entries, top, mixer, back.interleaved)
    rows = seen.keys, seen.keys if seen.entries is None else seen.entries, offset if chosen is None else chosen
    parts, stats = attend(q, *rows, offset, mixer.head_dim**-0.5)
    return combine(parts, stats, sinks, offset, back.periods, back.magnitude, _number(position))[0]


def _number(value: int | mx.array) -> mx.array:
    """An array [1] of a number or of an array of no axes."""
    return value.reshape(1) if isinstance(value, mx.array) else mx.array([value], mx.int32)


def _heads(mixer: Compressed) -> int:
    """Heads of a threadgroup that attends."""
    return next(n for n in range(HEADS, 0, -1) if mixer.heads % n == 0)


@planned("compressed")
def plan_inputs(target: str, dtype: mx.Dtype, mixer: Compressed, interleaved: bool) -> Launch:
    template = {"X": dtype, "H": mixer.heads, "D": mixer.head_dim, "R": mixer.rotation.dims, "ROW": mixer.row}
    template |= {"SG": THREADS // 32, "INTERLEAVED": int(interleaved), "NORMED": int(mixer.norms_queries)}
    outputs: list[tuple[Shape, mx.Dtype]] = [((1, 1, mixer.heads, mixer.head_dim), dtype), ((1, 1, mixer.row), dtype)]
    return Launch(target, INPUTS, template, (mixer.heads + 1, 1), THREADS, outputs)


@planned("compressed")
def plan_attend(
    target: str, dtype: mx.Dtype, slots: int, entries: Shape, top: int, mixer: Compressed, interleaved: bool
) -> tuple[Launch, Launch]:
    """The launch over pieces of rows, and that of their sum. `entries`: room for them, and values of each; `top`: how
    many are chosen."""
    heads, width, rings = mixer.heads, mixer.head_dim, ceildiv(slots, PIECE)
    pieces = rings + ceildiv(top or entries[0], PIECE)
    common = {"X": dtype, "H": heads, "D": width, "P": PIECE, "T": THREADS, "RINGS": rings}
    common |= {"RATIO": mixer.seen_ratio, "TOP": top}
    template = common | {"GH": _heads(mixer), "SLOTS": slots, "ROW": mixer.row, "ENTRY": entries[1]}
    outputs = [((pieces, heads, width), mx.float32), ((pieces, heads, 2), mx.float32)]
    groups = pieces, heads // _heads(mixer)
    attend = Launch(target, ATTEND, template | {"WINDOW": mixer.window}, groups, THREADS, outputs)
    template = common | {"R": mixer.rotation.dims, "INTERLEAVED": int(interleaved)}
    return attend, Launch(target, COMBINE, template, (heads, 1), THREADS, [((1, 1, heads * width), dtype)])
