"""Finds which of the tiles in `ops.tiles.TRIED` are faster on this GPU, at the shapes of one model.

What is timed is what a model does: a token goes through layers with random weights and the head, or the rows of a
prompt go through a layer's experts, with one choice of tiles and with another, by turns.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..experts.routing import Pieces, Routing
from ..experts.source import ExpertLoader
from ..formats.record import Record
from ..kinds import streams_before
from ..layers import Linear
from ..mixers.registry import USUAL, make_caches
from ..model.layer import DecoderLayer
from ..model.tokens import Tokens
from ..opening.random_weights import Shapes, fill_randomly, random_records, randomise
from ..opening.some_experts import values_of_zeros
from ..ops import backend
from ..ops.backend import Array
from ..ops.expert_rows import refusal
from ..ops.experts import chosen_ffn, expert_ffn
from ..ops.grouped import GroupedRows
from ..ops.streams import spread
from ..ops.tiles import MAX_TOKENS, TRIED, TileChanges, Tiles, merged, using

WORTH = 1.02  # tiles are kept if they are faster by this factor
ROUNDS = 11  # pairs of measurements, of which the median counts
BOUND = 2e-2  # largest allowed difference relative to the largest value; float32 sums in another order differ far less
LEAST_BYTES, MOST_LAYERS = 1 << 30, 32  # of layers that a token goes through: more than the caches of any GPU
ROWS = tuple(2 ** (i // 3) for i in range(28))  # of each expert in a prompt: 1 to 512, three experts with each number

Part = Callable[[mx.array], mx.array]  # takes x [1, L, H]


@dataclass(frozen=True)
class Work:
    """What is timed: x goes through all parts, one after the other."""

    x: mx.array
    parts: Sequence[Part]

    def run(self) -> mx.array:
        """The last output; not evaluated."""
        out = self.x
        for part in self.parts:
            out = part(out)
        return out

    def outputs(self) -> list[mx.array]:
        """The output of each part for x; not evaluated."""
        return [part(self.x) for part in self.parts]


def token_work(shapes: Shapes) -> Work:
    """A token in layers of each kind, with empty caches, and in the head."""
    kinds, record = kinds_of(shapes), next(iter(shapes.layout.records.values()))
    wanted = LEAST_BYTES // (record.stride * shapes.args.num_experts_per_tok) + 1
    count = min(max(wanted, len(kinds)), MOST_LAYERS)
    parts = [layer(shapes, i) for i in itertools.islice(itertools.cycle(kinds), count)]
    return Work(mx.random.normal((1, 1, shapes.args.hidden_size)).astype(shapes.dtype), [*parts, head(shapes)])


def prompt_work(shapes: Shapes) -> Work:
    """The rows of a prompt in a layer's experts, of which some have few rows and some many."""
    record = next(iter(shapes.layout.records.values()))
    records, experts = random_records(record, len(ROWS)), np.arange(len(ROWS))

    def part(x: mx.array) -> mx.array:
        ids, on_units = np.repeat(experts, ROWS)[:, None], not refusal(x.dtype, record)
        rows = GroupedRows(x, ids, np.array(ROWS), [experts], record, on_units=on_units)
        rows.multiply(0, experts, records)
        return cast(mx.array, rows.outputs())

    return Work(mx.random.normal((sum(ROWS), record.hidden_size)).astype(shapes.dtype), [part])


class TrialExperts:
    """Routed experts with random weights for one layer, as many as a token uses, so that every token uses all of
    them. `source`: of its value experts.
    """

    def __init__(self, record: Record, count: int, source: ExpertLoader | None):
        self.count, self.source = count, source
        self.records = random_records(record, count)

    def in_pieces(self, routing: Routing, x: Array, residual: Array, shared: Array | None) -> Pieces[Array]:
        """Nothing: `prompt_work` has the experts of a prompt."""
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


def kinds_of(shapes: Shapes) -> list[int]:
    """The first layer of each kind."""
    first = dict[Any, int]()
    for i, mixer in enumerate(shapes.args.mixers):
        first.setdefault((mixer, shapes.layout.records.get(i)), i)
    return list(first.values())


def layer(shapes: Shapes, i: int) -> Part:
    """Layer `i` of a model with random weights: x [1, L, H] -> the first stream of its output [1, L, H]."""
    args, record = shapes.args, shapes.layout.records.get(i)
    own = values_of_zeros(shapes.layout, args.matrix_set(i)).source if i in args.matrix_layers else None
    experts: Any = None if record is None else TrialExperts(record, args.num_experts_per_tok, own)
    decoder: Any = DecoderLayer(args, i, experts, USUAL)
    randomise(decoder, f"model.layers.{i}.", shapes)
    streams = streams_before(args.connections, i)

    def part(x: mx.array) -> mx.array:
        tokens = Tokens(mx.zeros(x.shape[:2], mx.uint32))
        out: mx.array = decoder(spread(x, streams), make_caches(args.mixers[i]), None, tokens)
        return out[..., : x.shape[-1]]

    return part


def head(shapes: Shapes) -> Part:
    """The last matrix, which gets only single tokens and a few."""
    matrix = Linear(shapes.args.hidden_size, shapes.args.vocab_size)
    fill_randomly(matrix, shapes.quants.get(shapes.args.last_matrix), shapes.dtype)
    return lambda x: matrix(x[:, :MAX_TOKENS])


def tune(shapes: Shapes, seconds: float) -> Iterator[tuple[TileChanges, float]]:
    """Tries all changes in turn, each together with those that were faster by `WORTH`; after `seconds` no further one.

    Yields:
        The changes, and how many times as fast the work is with them; 0: they are wrong.
    """
    end, found = time.monotonic() + seconds, Tiles()
    for is_prompt, tried in itertools.groupby(TRIED[backend.name()], lambda changes: "prompt_experts" in changes):
        work = prompt_work(shapes) if is_prompt else token_work(shapes)
        for changes in tried:
            if time.monotonic() >= end:
                return
            other = Tiles(merged([found.found, changes]))
            gain = measured(work, found, other)
            found = other if gain >= WORTH else found
            yield changes, gain


def measured(work: Work, one: Tiles, other: Tiles) -> float:
    """How many times as fast `other` is: the median of alternating pairs; 0 if its values are wrong."""
    if not is_right(work, one, other):
        return 0.0
    for tiles in (one, other):
        timed(work, tiles)
    return statistics.median(timed(work, one) / timed(work, other) for _ in range(ROUNDS))


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


def timed(work: Work, tiles: Tiles) -> float:
    """Seconds until the work is done; its graph is built before."""
    with using(tiles):
        out = work.run()
    start = time.perf_counter()
    mx.eval(out)
    return time.perf_counter() - start
