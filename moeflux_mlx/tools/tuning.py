"""Finds which of the tiles in `ops.tiles.TRIED` are faster on this GPU, at the shapes of one model.

What is timed is what a model does: a token goes through layers with random weights and the head, or the rows of a
prompt go through a layer's experts, with one choice of tiles and with another, by turns.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..engine.random_weights import Shapes, fill_randomly, random_records, randomise
from ..experts.routing import Pieces, Routing
from ..formats.record import Record
from ..kinds import streams_before
from ..layers import Linear
from ..mixers.registry import USUAL, make_caches
from ..model.layer import DecoderLayer
from ..model.tokens import Tokens
from ..ops import backend
from ..ops.backend import AnyArray
from ..ops.expert_rows import refusal
from ..ops.experts import chosen_ffn, expert_ffn
from ..ops.grouped import GroupedRows
from ..ops.streams import spread
from ..ops.tiles import MAX_TOKENS, TRIED, TileChanges, Tiles, joined, using

WORTH = 1.02  # tiles are kept if they are faster by this factor
ROUNDS = 11  # pairs of measurements, of which the median counts
BOUND = 2e-2  # largest allowed difference relative to the largest value; float32 sums in another order differ far less
LEAST_BYTES, MOST_LAYERS = 1 << 30, 32  # of layers that a token goes through: more than the caches of any GPU
ROWS = tuple(2 ** (i // 3) for i in range(28))  # of each expert in a prompt: 1 to 512, three experts with each number

LayerCall = Callable[[mx.array], mx.array]  # takes x [1, L, H]


class Work(Protocol):
    """What is timed."""

    def run(self) -> mx.array:
        """Its last output, which depends on all of the work; not evaluated."""
        ...

    def outputs(self) -> list[mx.array]:
        """The output of each part for the same input; not evaluated."""
        ...


class TokenWork:
    """A token in layers of each kind, with empty caches, and in the head."""

    def __init__(self, shapes: Shapes):
        self._x = mx.random.normal((1, 1, shapes.args.hidden_size)).astype(shapes.dtype)
        parts, nbytes = list[LayerCall](), 0
        for part in itertools.islice(layers(shapes), MOST_LAYERS):
            parts.append(part)
            nbytes += part.nbytes
            if nbytes >= LEAST_BYTES and len(parts) >= len(kinds(shapes)):
                break
        self._parts = [*parts, head(shapes)]

    def run(self) -> mx.array:
        h = self._x
        for part in self._parts:
            h = part(h)
        return h

    def outputs(self) -> list[mx.array]:
        return [part(self._x) for part in self._parts]


class PromptWork:
    """The rows of a prompt in a layer's experts, of which some have few rows and some many."""

    def __init__(self, shapes: Shapes):
        self._record = next(iter(shapes.layout.records.values()))
        self._records = random_records(self._record, len(ROWS))
        self._x = mx.random.normal((sum(ROWS), self._record.hidden_size)).astype(shapes.dtype)

    def run(self) -> mx.array:
        experts, on_units = np.arange(len(ROWS)), not refusal(self._x.dtype, self._record)
        ids = np.repeat(experts, ROWS)[:, None]
        rows = GroupedRows(self._x, ids, np.array(ROWS), [experts], self._record, on_units=on_units)
        rows.multiply(0, experts, self._records)
        return cast(mx.array, rows.outputs())

    def outputs(self) -> list[mx.array]:
        return [self.run()]


class TrialExperts:
    """Routed experts with random weights for one layer, as many as a token uses, so that every token uses all of
    them.
    """

    def __init__(self, record: Record, count: int):
        self.count = count
        self.records = random_records(record, count)

    def in_pieces(self, routing: Routing, x: AnyArray, residual: AnyArray, shared: AnyArray) -> Pieces[AnyArray]:
        """Nothing: `PromptWork` has the experts of a prompt."""
        yield from ()
        return residual

    def __call__(self, routing: Routing, x: Any, residual: Any, shared: Any) -> Any:
        slots = mx.array(np.tile(np.arange(self.count, dtype=np.uint32), (len(x), 1)))
        if routing.choice is None:
            return expert_ffn(x, slots, self.records, mx.full(slots.shape, 1 / self.count), residual, shared)
        choice = routing.choice  # these logits choose the first experts, which exist
        falling = mx.zeros(choice.logits.shape) - mx.arange(choice.logits.shape[1], dtype=mx.float32)
        choice = replace(choice, logits=falling, bias=None if choice.bias is None else mx.zeros(choice.bias.shape))
        return chosen_ffn(x, choice, self.records, residual, shared, choice.rule.experts)

    def expect(self, layer: int, tokens: int) -> None:
        pass

    def wants_guess(self, layer: int, tokens: int) -> bool:
        return False


class TrialLayer:
    """Layer `i` of a model with random weights: x [1, L, H] -> the first stream of its output [1, L, H].

    Attributes:
        nbytes: of the weights that a token reads.
    """

    def __init__(self, shapes: Shapes, i: int):
        args, record = shapes.args, shapes.layout.records.get(i)
        experts = None if record is None else TrialExperts(record, args.num_experts_per_tok)
        self._layer: Any = DecoderLayer(args, i, cast(Any, experts), USUAL)
        randomise(self._layer, f"model.layers.{i}.", shapes)
        self._mixer, self._streams = args.mixers[i], streams_before(args.connections, i)
        self.nbytes = sum(array.nbytes for _, array in cast(Any, tree_flatten(self._layer.parameters())))
        self.nbytes += 0 if experts is None else experts.records.blob.nbytes

    def __call__(self, x: mx.array) -> mx.array:
        tokens = Tokens(mx.zeros(x.shape[:2], mx.uint32))
        out: mx.array = self._layer(spread(x, self._streams), make_caches(self._mixer), None, tokens)
        return out[..., : x.shape[-1]]


def kinds(shapes: Shapes) -> list[int]:
    """The first layer of each kind."""
    first = dict[Any, int]()
    for i, mixer in enumerate(shapes.args.mixers):
        first.setdefault((mixer, shapes.layout.records.get(i)), i)
    return list(first.values())


def layers(shapes: Shapes) -> Iterator[TrialLayer]:
    """A layer of each kind, again and again, each with weights of its own."""
    return (TrialLayer(shapes, i) for i in itertools.cycle(kinds(shapes)))


def head(shapes: Shapes) -> LayerCall:
    """The last matrix, which gets only single tokens and a few."""
    matrix = Linear(shapes.args.hidden_size, shapes.args.vocab_size)
    fill_randomly(matrix, shapes.quants.get(shapes.args.last_matrix), shapes.dtype)
    return lambda x: matrix(x[:, :MAX_TOKENS])


# ---- the search


@dataclass(frozen=True)
class Result:
    """The result for some changes of tiles.

    Args:
        gain: how many times as fast the work is with them; 0: they are wrong.
        found: all changes that were kept until here.
    """

    changes: TileChanges
    gain: float
    found: TileChanges

    @property
    def is_kept(self) -> bool:
        return self.gain >= WORTH


def tune(
    shapes: Shapes, seconds: float, compared: Callable[[Work, Tiles, Tiles], float] | None = None
) -> Generator[Result, None, None]:
    """Tries all changes in turn; after `seconds` no further one.

    Args:
        compared: how many times as fast some work is with other tiles, 0 if they are wrong; None: it is measured.
    """
    end, work = time.monotonic() + seconds, cast(Any, None)
    found: TileChanges = {}
    for changes in TRIED[backend.name()]:
        if time.monotonic() >= end:
            return
        kind = PromptWork if "prompt_experts" in changes else TokenWork
        if not isinstance(work, kind):
            work = kind(shapes)
        other = joined([found, changes])
        gain = (compared or measured)(work, Tiles(found), Tiles(other))
        found = other if gain >= WORTH else found
        yield Result(changes, gain, found)


def measured(work: Work, one: Tiles, other: Tiles) -> float:
    """How many times as fast `other` is: the median of alternating pairs; 0 if its values are wrong."""
    if not is_right(work, one, other):
        return 0.0
    for tiles in (one, other):
        seconds(work, tiles)
    return statistics.median(seconds(work, one) / seconds(work, other) for _ in range(ROUNDS))


def is_right(work: Work, one: Tiles, other: Tiles) -> bool:
    """Whether all launches of the work build with `other` and its outputs are those with `one`."""
    with using(one):
        wanted = work.outputs()
    mx.eval(wanted)
    with using(other), suppress(RuntimeError, ValueError):  # it does not build, or needs too many registers or threads
        outputs = work.outputs()
        mx.eval(outputs)
        return all(difference(got, want) <= BOUND for got, want in zip(outputs, wanted, strict=True))
    return False


def difference(got: mx.array, want: mx.array) -> float:
    """The largest difference over the largest value; infinity if a value is not finite."""
    actual, expected = got.astype(mx.float32), want.astype(mx.float32)
    error = cast(float, (mx.abs(actual - expected).max() / mx.maximum(mx.abs(expected).max(), 1e-30)).item())
    return error if error == error else float("inf")


def seconds(work: Work, tiles: Tiles) -> float:
    """Seconds until the work is done; its graph is built before."""
    with using(tiles):
        out = work.run()
    start = time.perf_counter()
    mx.eval(out)
    return time.perf_counter() - start
