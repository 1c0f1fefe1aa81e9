"""The choice among the positions or blocks that a token sees, by an indexer's queries and keys (DeepSeek Sparse
Attention, arXiv:2512.02556, section 2.1).

The score of a position is sum over heads of weight * relu(query key). On a GPU a token takes two launches, the first of
which also makes its queries and its key and appends the key as `attend` appends keys.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from ..kinds import Indexer
from . import backend, gpu_time
from .attend import RECENT, SEVERAL, Held
from .backend import Array, arange, library_of
from .elementwise import float32
from .launch import MOST_THREADS, NO_KERNELS, Kernel, Launch, Reason, ceildiv
from .rope import Rope
from .tiles import planned

SCORES = Kernel(
    "index_scores",
    "q key weights q_weight k_weight k_bias periods eps magnitude scale positions keys recent",
    "scores next",
)
CHOOSE = Kernel("index_choose", "scores positions", "chosen")
PIECE, THREADS = 128, 256  # positions and threads of a threadgroup that scores
ROOM = 4096  # values of queries in its memory, which each of its positions meets: 16 KB
WIDEST = 256  # a thread has half as many values of keys in registers


class Index(NamedTuple):
    """An indexer's outputs for tokens.

    queries: [B, L, heads, D], rotated. keys: [B, L, D], normed and rotated. weights: float32 [B, L, heads], the weights
    in the sum over heads.
    """

    queries: Any
    keys: Any
    weights: Any


class CentredNorm(Protocol):
    """A norm over the last axis that also takes the mean away (`layer_norm`)."""

    weight: mx.array
    bias: mx.array
    eps: float

    def __call__(self, x: Array) -> Array: ...


class IndexTerms(NamedTuple):
    """How an `Index` is made of `Projections`: the keys' norm, the rotation of queries and keys, and the factor of the
    weights."""

    norm: CentredNorm
    rope: Rope
    scale: float

    def keys(self, keys: Array, position: Any) -> Any:
        """The keys [B, L, D] of tokens from a rotary position on."""
        return self._turned(self.norm(keys)[:, :, None], position)[:, :, 0]

    def queries(self, queries: Array, heads: int, position: Any) -> Any:
        """The queries [B, L, heads, D]."""
        return self._turned(queries.reshape(*queries.shape[:2], heads, -1), position)

    def _turned(self, x: Array, position: Any) -> Any:
        if not isinstance(x, mx.array):
            return self.rope(x, position)
        return self.rope(x.transpose(0, 2, 1, 3), position).transpose(0, 2, 1, 3)


class Projections(NamedTuple):
    """What an indexer's matrices make of tokens.

    queries: [B, L, heads * D]; None: each of the tokens attends to all positions that it sees. keys: [B, L, D].
    weights: float32 [B, L, heads]. terms: what an `Index` is made with.
    """

    queries: Any
    keys: Any
    weights: Any
    terms: IndexTerms


class Stepping(Protocol):
    """A cache of keys that takes single tokens with the arrays of `Held`."""

    def held(self, dtype: mx.Dtype) -> Held:
        """The contents before a token, with entries of `dtype`."""
        ...

    def advance(self, recent: Any) -> None:
        """Replaces `recent` by a copy with one more token."""
        ...


# ---- plain operations


def choose(index: Index, seen: Any, indexer: Indexer) -> Any:
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
        if library is mx:
            gpu_time.commit(count, parts[-1])
    return parts[0] if len(parts) == 1 else library.concatenate(parts, axis=1)


def slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _scores(queries: Array, keys: Array, weights: Array, library: Any) -> Array:
    """sum over heads of weights * relu(queries keys): [B, rows, P] of [B, rows, heads, D], [B, P, D]."""
    B, rows, heads, width = queries.shape
    products = (queries.reshape(B, rows * heads, width) @ keys.swapaxes(-1, -2)).reshape(B, rows, heads, -1)
    return (weights[:, :, None] @ library.maximum(products, 0))[:, :, 0]


def best(scores: Array, top: int, library: Any) -> Array:
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


def takes_step(width: int) -> bool:
    """Whether the kernels here take single tokens with index keys of this width."""
    return not refusal(backend.name(), True, width)


@planned()
def refusal(target: str, is_alone: bool, width: int) -> Reason | None:
    """Why the kernels do not choose for a token alone, or for several, with keys of this width."""
    if target == "ops":
        return NO_KERNELS
    if not is_alone:
        return SEVERAL
    if width > WIDEST:
        return Reason(f"index keys of {width} values are wider than {WIDEST}")
    return Reason(f"index keys of {width} values are no multiple of 8") if width % 8 else None


def choose_step(made: Projections, cache: Stepping, indexer: Indexer) -> mx.array | None:
    """Appends the key of one token to `cache` and chooses among the positions up to its own: int32 [1, 1, top],
    ascending; None: it attends to all of them, so there are no queries."""
    (norm, rope, scale), key = made.terms, made.keys
    held, chooses = cache.held(key.dtype), made.queries is not None
    types, rotation = (key.dtype, norm.weight.dtype), (rope.dims, rope.interleaved)
    scores, choice = plan(backend.name(), types, indexer, chooses, rotation, held.keys.shape[2])
    q, weights = (made.queries, made.weights) if chooses else (key, key)
    weight, numbers = (norm.weight, norm.weight, norm.bias, rope.periods), (norm.eps, rope.magnitude, scale)
    found, recent = scores(q, key, weights, *weight, *numbers, held.positions, held.keys, held.recent)
    cache.advance(recent)
    return choice(found, held.positions)[0] if chooses else None


@lru_cache(512)
def plan(
    target: str,
    types: tuple[mx.Dtype, mx.Dtype],
    indexer: Indexer,
    chooses: bool,
    rotation: tuple[int, bool],
    capacity: int,
) -> tuple[Launch, Launch]:
    """The launches that score and choose; if the token `chooses` nothing, the first one only appends its key."""
    (X, W), width, heads = types, indexer.dim, indexer.heads if chooses else 0
    pieces = ceildiv(capacity + RECENT, PIECE) if chooses else 1
    blocks = {"RATIO": 1, "OWN": 0}
    template = {"X": X, "W": W, "H": heads, "D": width, "GH": max(min(heads, ROOM // width), 1), "P": PIECE}
    template |= {"T": THREADS, "QNORM": 0, "KNORM": 2, "DIMS": rotation[0], "INTERLEAVED": int(rotation[1])}
    template |= {"KEYED": 1, "STRIDE": width, "FIRST": 0, **blocks}
    out = [((pieces * PIECE,), mx.float32), ((RECENT, width), X)]
    threads, top = MOST_THREADS[target], indexer.top
    choice = {"TOP": top, "ROWS": 1, "T": threads, **blocks}
    return (
        Launch(target, SCORES, template, (pieces, 1), THREADS, out),
        Launch(target, CHOOSE, choice, (1, 1), threads, [((1, 1, top), mx.int32)]),
    )
