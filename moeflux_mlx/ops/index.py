"""The choice among the positions or blocks that a token sees, by an indexer's queries and keys (DeepSeek Sparse
Attention, arXiv:2512.02556, section 2.1).

The score of a position is sum over heads of weight * relu(query key). On a GPU a token takes two launches, the first of
which also makes its queries and its key and appends the key as `attend` appends keys.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from ..kinds import HeadBlocks, Indexer, KeyBlocks
from . import backend, gpu_time
from .backend import AnyArray, Array, EitherArray, arange, leave, library_of, of_kind
from .elementwise import float32
from .launch import LEAST_ELEMENTS, MOST_THREADS, SEVERAL, Kernel, Launch, Reason, Shape, ceildiv
from .norm import CentredNorm, Norm
from .positions import RECENT, Held, Positions
from .rope import Rope, laid_out, turned
from .seen import SeenSizes
from .tiles import planned

IndexRule = Indexer | KeyBlocks | HeadBlocks
SCORES = Kernel(
    "index_scores",
    "q key weights q_weight k_weight k_bias periods eps magnitude scale positions turning keys recent",
    "scores next",
)
CHOOSE = Kernel("index_choose", "scores positions", "chosen")
RING = Kernel("index_ring", "ring key gates weight bias eps offset", "next")
PIECE, THREADS = 128, 256  # positions and threads of a threadgroup that scores
ROOM = 4096  # values of queries in its memory, which each of its positions meets: 16 KB
WIDEST = 256  # a thread has half as many values of keys in registers


class Index(NamedTuple):
    """An indexer's outputs for tokens.

    queries: [B, L, heads, D], rotated. keys: [B, L, D], normed and rotated. weights: float32 [B, L, heads], the weights
    in the sum over heads.
    """

    queries: AnyArray
    keys: AnyArray
    weights: AnyArray


class IndexTerms(NamedTuple):
    """How an `Index` is made of `Projections`.

    key_norm, query_norm: of the keys and of each query; None: no norm, or keys are whole already. rope: rotates both;
    None: no rotation. scale: a factor of the weights. rotates_last: it rotates the last values, not the first ones. The
    norms have one epsilon.
    """

    key_norm: Norm | CentredNorm | None
    rope: Rope | None
    scale: float = 1.0
    query_norm: Norm | None = None
    rotates_last: bool = False

    def keys(self, keys: Array, position: int | AnyArray) -> Array:
        """The keys [B, L, D] of tokens from a rotary position on."""
        assert self.key_norm is not None
        return self._turned(self.key_norm(keys)[:, :, None], position)[:, :, 0]

    def queries(self, queries: Array, heads: int, position: int | AnyArray) -> AnyArray:
        """The queries [B, L, heads, D]."""
        queries = queries.reshape(*queries.shape[:2], heads, -1)
        return self._turned(queries if self.query_norm is None else self.query_norm(queries), position)

    def _turned(self, x: Array, position: int | AnyArray) -> Array:
        if self.rope is None:
            return x
        if self.rotates_last:
            return turned(x, self.rope, position)
        return laid_out(self.rope(laid_out(x), position))


class Projections(NamedTuple):
    """What an indexer's matrices make of tokens.

    queries: [B, L, heads * D]; None: each of the tokens attends to all positions that it sees. keys: [B, L, D].
    weights: float32 [B, L, heads]; None: equal ones. terms: what an `Index` is made with.
    """

    queries: AnyArray
    keys: AnyArray
    weights: AnyArray
    terms: IndexTerms


class KeyStepping(Protocol):
    """A cache of keys that takes single tokens with the arrays of `Held`."""

    def held(self, dtype: mx.Dtype) -> Held:
        """The contents before a token, with entries of `dtype`."""

    def advance(self, recent: EitherArray) -> None:
        """Replaces `recent` by a copy with one more token."""


# ---- plain operations


def append_keys(cache: Positions, keys: Array) -> Array:
    """Appends index keys [B, L, D]; returns those of all positions [B, P, D]."""
    (B, L, _), rows = keys.shape, leave(keys)[:, None]
    every, _ = cache.update_and_fetch(rows, mx.zeros((B, 1, L, 0), rows.dtype))
    return of_kind(every, keys)[:, 0]


def choose(index: Index, seen: Array, indexer: Indexer) -> Array:
    """The positions with the best scores among those that each token sees: int32 [B, rows, top], ascending.

    Args:
        index: queries and weights of the tokens, and keys of all positions.
        seen: how many of the first positions each token sees, [rows].
        indexer: how many are chosen, no more than any of the tokens sees.
    """
    library = library_of(index.keys)
    count, keys = index.queries.shape[1], float32(index.keys)
    positions, parts = arange(keys.shape[1], library), []
    for some in slices(count, indexer.rows_at_once(keys.shape[1], 0)):
        scores = _scores(float32(index.queries[:, some]), keys, index.weights[:, some], library)
        scores = library.where(positions < seen[some, None], scores, library.array(-np.inf, library.float32))
        parts.append(best(scores, indexer.top, library))
        gpu_time.in_turn(count, parts)
    return parts[0] if len(parts) == 1 else library.concatenate(parts, axis=1)


def choose_in_blocks(
    index: Index, seen: AnyArray, indexer: Indexer, blocks: tuple[int, int] | None, among: AnyArray
) -> tuple[AnyArray, AnyArray]:
    """`choose` among the entries of some blocks; and the blocks among which later layers choose.

    Args:
        blocks: how many blocks are marked here, by the best score in each, besides the newest; and positions of each.
            None: there are no blocks.
        among: int32 [B, rows, n], the blocks that are marked already; None: every position may be chosen.

    Returns:
        Positions as `choose` gives them, and `among` or the blocks that are marked here, ascending; None for the latter
        if there are no more blocks than are marked.
    """
    library = library_of(index.keys)
    count, keys = index.queries.shape[1], float32(index.keys)
    number, (top, size) = keys.shape[1], blocks or (0, 1)
    room, positions, parts = -(-number // size), arange(number, library), []
    marks = 0 < top < room
    for some in slices(count, indexer.rows_at_once(number, 0)):
        scores = _scores(float32(index.queries[:, some]), keys, index.weights[:, some], library)
        least = library.array(-np.inf, library.float32)
        scores = library.where(positions < seen[some, None], scores, least)
        marked = None if among is None else among[:, some]
        if marks:
            marked = _best_blocks(scores, (seen[some] - 1) // size, top, size, library)
        elif marked is not None:
            in_block = (arange(room, library)[:, None] == marked[:, :, None]).any(axis=-1)
            scores = library.where(library.repeat(in_block, size, axis=-1)[..., :number], scores, least)
        parts.append((best(scores, indexer.top, library), marked))
        gpu_time.in_turn(count, [one for one, _ in parts])
    chosen, marked = zip(*parts, strict=True)
    return library.concatenate(chosen, axis=1), None if marked[0] is None else library.concatenate(marked, axis=1)


def _best_blocks(scores: Array, newest: Array, top: int, size: int, library: ModuleType) -> Array:
    """The blocks int32 [B, rows, top] with the largest scores [B, rows, P], and of each row the `newest`, [rows]."""
    B, rows, number = scores.shape
    room = -(-number // size)
    filled = library.full((B, rows, room * size - number), -np.inf, library.float32)
    largest = library.concatenate([scores, filled], axis=-1).reshape(B, rows, room, size).max(axis=-1)
    is_newest = arange(room, library) == newest[:, None]
    return best(library.where(is_newest, library.array(np.inf, library.float32), largest), top, library)


def slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _scores(queries: Array, keys: Array, weights: Array, library: ModuleType) -> Array:
    """sum over heads of weights * relu(queries keys): [B, rows, P] of [B, rows, heads, D], [B, P, D]."""
    B, rows, heads, width = queries.shape
    products = (queries.reshape(B, rows * heads, width) @ keys.swapaxes(-1, -2)).reshape(B, rows, heads, -1)
    return (weights[:, :, None] @ library.maximum(products, 0))[:, :, 0]


def best(scores: Array, top: int, library: ModuleType) -> Array:
    """The places of the `top` largest float32 scores [..., P], ascending; ties go to the first. It compares distinct
    integers: a score's bits in float order, followed by the place.
    """
    bits = (scores + 0.0).view(library.int32)  # -0.0 becomes 0.0
    ordered = library.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(library.int64)
    count = scores.shape[-1]
    order = library.array(1 << 32, library.int64) * ordered - arange(count, library).astype(library.int64)
    best = library.argpartition(order, count - top, axis=-1)[..., count - top :]
    return library.sort(best, axis=-1).astype(library.int32)


# ---- the kernels for one token


def takes_step(rule: IndexRule) -> bool:
    """Whether the kernels here choose for single tokens."""
    return not refusal(backend.name(), True, rule)


@planned("index")
def refusal(target: str, is_alone: bool, rule: IndexRule) -> Reason | None:
    """Why the kernels do not choose for a token alone, or for several."""
    if not is_alone:
        return SEVERAL
    width = indexer_of(rule).dim
    if width > WIDEST:
        return Reason(f"index keys of {width} values are wider than {WIDEST}")
    if isinstance(rule, HeadBlocks) and PIECE % rule.ratio:
        return Reason(f"{PIECE} is not a multiple of blocks of {rule.ratio} positions")
    if not sizes_of(rule).top:
        return Reason("no block is chosen")
    return Reason(f"index keys of {width} values are not a multiple of 8") if width % 8 else None


def indexer_of(rule: IndexRule) -> Indexer:
    """The indexer of a rule, which may be one itself."""
    return rule if isinstance(rule, Indexer) else rule.indexer


def sizes_of(rule: IndexRule) -> SeenSizes:
    """What a token sees by the rule."""
    if isinstance(rule, Indexer):
        return SeenSizes(rule.top, 1, False, 1)
    by_head = isinstance(rule, HeadBlocks)
    return SeenSizes(rule.chosen, rule.ratio, by_head, rule.indexer.heads if by_head else 1)


def choose_step(made: Projections, cache: KeyStepping, rule: Indexer | HeadBlocks) -> mx.array | None:
    """Appends the key of one token to `cache` and chooses for it.

    Returns:
        Of an `Indexer` positions int32 [1, 1, top], of `HeadBlocks` blocks int32 [1, 1, heads, chosen], ascending.
        None: the token attends to all positions, so there are no queries.
    """
    held = cache.held(made.keys.dtype)
    chosen, recent = _choose_kernel(made, held.keys, held.recent, TokenPlace(held.positions), rule)
    cache.advance(recent)
    return chosen


class TokenPlace(NamedTuple):
    """A token's place: `positions` as in `Held`, or an array of which only the first number, the token's place in the
    cache, is given; then `position` [1] is the rotary position.
    """

    positions: mx.array
    position: mx.array | None = None


def choose_blocks_step(made: Projections, place: TokenPlace, rule: KeyBlocks) -> mx.array:
    """Chooses blocks for one token: int32 [1, 1, top], ascending.

    Args:
        made: its queries, and the keys of all blocks; a key may lie behind other values of its row.
    """
    chosen, _ = _choose_kernel(made, made.keys, None, place, rule)
    assert chosen is not None
    return chosen


def _choose_kernel(
    made: Projections, keys: mx.array, recent: mx.array | None, place: TokenPlace, rule: IndexRule
) -> tuple[mx.array | None, mx.array]:
    """What is chosen, and if there are `recent` keys, these with the token's own."""
    key_norm, rope, scale, query_norm, rotates_last = made.terms
    chooses, is_held, norms = made.queries is not None, place.position is None, (query_norm, key_norm)
    is_weighed, numbers_of = made.weights is not None, (_number_of(query_norm), _number_of(key_norm))
    kinds = Kinds(chooses, is_weighed, *numbers_of, rotates_last, is_held)
    rotation = (0, False) if rope is None else (rope.dims, rope.interleaved)
    weights = [None if norm is None else norm.weight for norm in norms]
    types = made.keys.dtype, next((weight.dtype for weight in weights if weight is not None), made.keys.dtype)
    scores, choice = plan(backend.name(), types, rule, kinds, keys.shape[-2:], rotation)
    given = made.queries, made.keys, made.weights, *weights, getattr(key_norm, "bias", None), rope and rope.periods
    inputs = [made.keys if one is None else one for one in given]  # the kernel needs an array for every input
    numbers = max(0.0 if norm is None else norm.eps for norm in norms), rope.magnitude if rope else 1.0, scale
    turning = place.positions if place.position is None else place.position
    found, kept = scores(*inputs, *numbers, place.positions, turning, keys, keys if recent is None else recent)
    return choice(found, place.positions)[0] if chooses else None, kept


def _number_of(norm: Norm | CentredNorm | None) -> int:
    """The norm's number in metal/index.h.metal."""
    return 0 if norm is None else 2 if hasattr(norm, "bias") else 1


def put_in_ring(key: mx.array, gates: mx.array, norm: CentredNorm) -> Callable[[mx.array, mx.array], mx.array]:
    """A function that puts the row of one token into a ring [1, 1, slots, 2 * D] at the token's place: its key
    [1, 1, D], normed, and behind it its gates [1, 1, D] float32."""

    def put(ring: mx.array, offset: mx.array) -> mx.array:
        launch = plan_ring(backend.name(), (ring.dtype, norm.weight.dtype), ring.shape, key.shape[-1])
        return launch(ring, key, gates, norm.weight, norm.bias, norm.eps, offset.reshape(1))[0]

    return put


@lru_cache(512)
def plan_ring(target: str, types: tuple[mx.Dtype, mx.Dtype], ring: Shape, width: int) -> Launch:
    template = {"X": types[0], "W": types[1], "D": width, "SLOTS": ring[2], "ROW": ring[3], "T": THREADS}
    return Launch(target, RING, template, (1, 1), THREADS, [(ring, types[0])])


class Kinds(NamedTuple):
    """What a token's launches depend on besides their sizes: whether it chooses at all, whether heads have weights; the
    norms of queries and keys, as metal/index.h.metal numbers them; whether the last values are rotated; and whether the
    rotary position is among `Held.positions`.
    """

    chooses: bool
    is_weighed: bool
    query_norm: int
    key_norm: int
    rotates_last: bool = False
    is_held: bool = True


@lru_cache(512)
def plan(
    target: str,
    types: tuple[mx.Dtype, mx.Dtype],
    rule: IndexRule,
    kinds: Kinds,
    keys: tuple[int, ...],
    rotation: tuple[int, bool],
) -> tuple[Launch, Launch]:
    """The launches that score and choose; without a choice the first one only appends the token's key.

    Args:
        types: of keys, and of the norms' weights.
        keys: the number of rows of keys, without those of the newest positions, and of the values of a row, the last
            of which are the key.
    """
    indexer, sizes, by_head = indexer_of(rule), sizes_of(rule), isinstance(rule, HeadBlocks)
    width, heads, has_key = indexer.dim, indexer.heads if kinds.chooses else 0, not isinstance(rule, KeyBlocks)
    pieces, stride = ceildiv(keys[0] + RECENT, PIECE) if heads else 1, keys[1]
    blocks = {"RATIO": sizes.ratio, "OWN": int(sizes.has_own)}
    template = {"X": types[0], "W": types[1], "H": heads, "D": width, "GH": _abreast(heads, width, by_head)}
    template |= {"P": PIECE, "T": THREADS, "QNORM": kinds.query_norm, "KNORM": kinds.key_norm, **blocks}
    template |= {"WEIGHED": int(kinds.is_weighed), "BY_HEAD": int(by_head), "KEYED": int(has_key)}
    template |= {"DIMS": rotation[0], "INTERLEAVED": int(rotation[1]), "STRIDE": stride, "FIRST": stride - width}
    template |= {"FROM": width - rotation[0] if kinds.rotates_last else 0, "AT": 3 if kinds.is_held else 0}
    scored = pieces * PIECE // sizes.ratio * sizes.lists if by_head else pieces * PIECE
    recent: Shape = (RECENT, width) if has_key else (LEAST_ELEMENTS,)
    threads = MOST_THREADS[target]
    choice = {"TOP": sizes.top, "ROWS": sizes.lists, "T": threads, **blocks}
    chosen = (1, 1, sizes.lists, sizes.top) if by_head else (1, 1, sizes.top)
    return (
        Launch(target, SCORES, template, (pieces, 1), THREADS, [((scored,), mx.float32), (recent, types[0])]),
        Launch(target, CHOOSE, choice, (1, sizes.lists), threads, [(chosen, mx.int32)]),
    )


def _abreast(heads: int, width: int, by_head: bool) -> int:
    """Heads whose queries, and `by_head` the products of all positions, are in a threadgroup's memory at a time."""
    return max(min(heads, ROOM // (width + PIECE if by_head else width)), 1)
