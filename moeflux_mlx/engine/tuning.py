"""Finds the tiles with which each kernel is fastest on this GPU, at the shapes of one model.

One layer of each kind is made with random weights and computes a few tokens. Every launch that asked for a tile is
noted with what it was given, and then made again with other tiles: `search` goes from the code's tile to neighbours
that are faster and right. It measures what it is given a clock for, so it needs no GPU itself.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import RequestError
from ..experts.routing import Report, Routing, unheard
from ..formats.record import ExpertLayout, Record
from ..model.decoder import DecoderLayer
from ..model.layers import Linear, Weight
from ..model.tensors import KEPT_FLOAT32, ROUTERS
from ..model.weights import arrange
from ..ops import backend
from ..ops.dequantize import dequantized_records
from ..ops.experts import Records, expert_ffn
from ..ops.forms import DTYPES
from ..ops.launch import Launch
from ..ops.tiles import CODE, MAX_TOKENS, TILES, Tile, Tiles, neighbours, spot_of, using
from ..quant import Quant
from ..spec import ModelArgs
from ..state.cache import make_cache

WORTH = 1.02  # a tile replaces the code's where it is so much faster
BETTER = 1.01  # and another candidate where it is so much faster than that
FIRST_ROUNDS, LAST_ROUNDS = 3, 9  # of alternating measurements: for a candidate, and of the best against the code's
TOKENS = (1, MAX_TOKENS // 2, 512)  # of one pass each: a token, a few, and a prompt's
BOUND = 2e-2  # of the largest difference, against the largest value; float32 sums in another order are far below
SPREAD_BYTES = 400 << 20  # that a measurement rotates over: more than the caches of any GPU
LARGE = 1 << 16  # bytes from which an input is a matrix, of which there is more than one
LAUNCHES = 128  # of one measurement, at least
LEAST_SECONDS = 2e-3  # of a measurement
ENCODING = 10e-6  # seconds that MLX takes at most to encode a launch; for so long the GPU is kept busy

QuantOf = Callable[[str, int], Quant | None]  # module path and columns -> how the matrix is stored; None: as floats
Seconds = Callable[[Tile], float]


# ---- the search


def search(
    start: Tile, around: Callable[[Tile], Iterable[Tile]], is_right: Callable[[Tile], bool], seconds: Seconds
) -> tuple[Tile, float]:
    """The best tile that a way of faster and faster neighbours leads to, and how much faster than `start` it is.

    Args:
        start: the code's, which is returned with 1.0 unless another is at least `WORTH` times as fast.
        around: the neighbours of a tile.
        is_right: whether the values that a tile gives are; only right ones are measured.
        seconds: one measurement; it is asked for two tiles in turn.
    """
    best, seen, moved = start, {start}, True
    while moved:
        moved = False
        for tile in around(best):
            if tile in seen:
                continue
            seen.add(tile)
            if is_right(tile) and ratio(best, tile, seconds, FIRST_ROUNDS) >= BETTER:
                best, moved = tile, True
                break
    gain = ratio(start, best, seconds, LAST_ROUNDS) if best != start else 1.0
    return (best, gain) if gain >= WORTH else (start, 1.0)


def ratio(one: Tile, other: Tile, seconds: Seconds, rounds: int) -> float:
    """How many times as fast `other` is: the median of alternating pairs."""
    return statistics.median(seconds(one) / seconds(other) for _ in range(rounds))


# ---- what a model launches


@dataclass
class Sample:
    """A launch that asked for a tile: the kernel, how it is made under a choice of tiles, and what it was given."""

    kernel: str
    make: Callable[[], Launch]
    inputs: tuple[mx.array, ...]


class Listening(Tiles):
    """The code's tiles; the first launch of each spot is noted when it is called, in `samples`."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: dict[str, Sample] = {}
        self._asked: list[tuple[str, str]] = []

    def tile(self, target: str, kernel: str, shape: str) -> Tile:
        self._asked.append((kernel, shape))
        return super().tile(target, kernel, shape)

    def plan(self, make: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        self._asked.clear()
        made, asked = make(*given), tuple(self._asked)
        if not asked or made is None:
            return made
        if not isinstance(made, tuple):
            return self._heard(made, lambda: make(*given), asked)
        return tuple(
            self._heard(launch, functools.partial(lambda i: make(*given)[i], i), asked) for i, launch in enumerate(made)
        )

    def _heard(
        self, launch: Launch, make: Callable[[], Launch], asked: Sequence[tuple[str, str]]
    ) -> Callable[..., Any]:
        """The launch, which tells what it is called with."""
        own = [(kernel, shape) for kernel, shape in asked if _depends(make, launch, kernel, shape)]

        def call(*inputs: mx.array) -> list[mx.array]:
            for kernel, shape in own:
                self.samples.setdefault(spot_of(kernel, shape), Sample(kernel, make, inputs))
            return launch(*inputs)

        return call


def _depends(make: Callable[[], Launch], launch: Launch, kernel: str, shape: str) -> bool:
    """Whether another tile makes another launch: of several that are made together, some have none."""
    return any(True for _ in _others(make, launch, spot_of(kernel, shape), kernel, TILES[launch.target][kernel]))


def _others(make: Callable[[], Launch], launch: Launch, spot: str, kernel: str, tile: Tile) -> Iterator[Tile]:
    """The neighbours of `tile` with which the launch is possible, and another one."""
    for other in neighbours(launch.target, kernel, tile):
        with suppress(RequestError), using(Tiles({spot: other})):
            if make() != launch:
                yield other


class TrialExperts:
    """Routed experts of random weights for one layer at a time, as many as a token uses."""

    def __init__(self, record: Record, count: int):
        self.count = count
        self.records = random_records(record, count)

    def __call__(self, routing: Routing, x: Any, residual: Any, shared: Any, report: Report = unheard) -> Any:
        slots = mx.broadcast_to(mx.arange(self.count, dtype=mx.uint32), (len(x), self.count))
        if len(x) <= MAX_TOKENS:
            return expert_ffn(x, slots + 0, self.records, routing.weights, residual, shared)
        dequantized_records(self.records, slots[0] + 0, x.dtype)
        return residual

    def expect(self, layer: int, tokens: int) -> None:
        pass

    def wants_guess(self, layer: int, tokens: int) -> bool:
        return False


def samples(
    args: ModelArgs, layout: ExpertLayout, quant_of: QuantOf, dtype: mx.Dtype, report: Report = unheard
) -> Iterator[tuple[str, Sample]]:
    """Every spot that the model's layers and head have, each with its launch, in turn.

    What a layer holds is let go before the next one is made. `report` is told what share of all has been given.
    """
    listening = Listening()
    parts = [*_layers(args, layout, quant_of, dtype), lambda: _head(args, quant_of, dtype)]
    for i, part in enumerate(parts):
        before = set(listening.samples)
        module, caches = part()
        for tokens in TOKENS:
            x = mx.random.normal((1, tokens, args.hidden_size)).astype(dtype)
            with using(listening):
                mx.eval(module(x) if caches is None else module(x, caches()))
        del module
        new = [spot for spot in listening.samples if spot not in before]
        for j, spot in enumerate(new):
            report((i + j / len(new)) / len(parts))
            sample = listening.samples[spot]
            mx.eval(sample.inputs)
            yield spot, sample
            sample.inputs = ()


def _layers(args: ModelArgs, layout: ExpertLayout, quant_of: QuantOf, dtype: mx.Dtype) -> list[Callable[[], Any]]:
    """Makers of one layer of each kind, with what makes its cache."""
    kinds: dict[Any, int] = {}
    for i, mixer in enumerate(args.mixers):
        kinds.setdefault((mixer, layout.records.get(i)), i)

    def maker(i: int) -> Callable[[], Any]:
        def make() -> Any:
            record = layout.records.get(i)
            experts = None if record is None else TrialExperts(record, args.num_experts_per_tok)
            layer = DecoderLayer(args, i, cast(Any, experts), False)
            randomise(layer, f"model.layers.{i}.", quant_of, dtype)
            return layer, lambda: make_cache(args.mixers[i])

        return make

    return [maker(i) for i in kinds.values()]


def _head(args: ModelArgs, quant_of: QuantOf, dtype: mx.Dtype) -> Any:
    """The last matrix, of which only single tokens and a few are asked."""
    matrix = Linear(args.hidden_size, args.vocab_size)
    fill_randomly(matrix, quant_of("lm_head", args.hidden_size), dtype)
    return lambda x: matrix(x[:, :MAX_TOKENS]), None


# ---- random weights


def randomise(module: nn.Module, path: str, quant_of: QuantOf, dtype: mx.Dtype) -> None:
    """Gives every parameter of `module`, which the model has at `path`, random values of a trained model's size."""
    matrices = {name: part for name, part in module.named_modules() if isinstance(part, Weight)}
    for name, matrix in matrices.items():
        kept = mx.float32 if f".{name}".endswith(ROUTERS) else dtype
        fill_randomly(matrix, quant_of(path + name, matrix.shape[-1]), kept)
    for name, value in cast(list[tuple[str, mx.array]], tree_flatten(module.parameters())):
        owner, _, leaf = name.rpartition(".")
        if owner not in matrices:
            kept = mx.float32 if leaf in KEPT_FLOAT32 else dtype
            values = mx.random.normal(value.shape) * 0.1 + (leaf == "weight")
            setattr(_part(module, owner), leaf, values.astype(kept))
    arrange(cast(Any, module))
    mx.eval(module.parameters())


def _part(module: nn.Module, path: str) -> Any:
    found: Any = module
    for name in filter(None, path.split(".")):
        found = found[int(name)] if isinstance(found, list) else getattr(found, name)
    return found


def fill_randomly(matrix: Weight, quant: Quant | None, dtype: mx.Dtype) -> None:
    """Random codes of `quant`, or values, whose product keeps the size of its input."""
    matrix.quant, matrix.filled = quant, True
    if quant is None:
        matrix.weight = (mx.random.normal(matrix.shape) * matrix.shape[-1] ** -0.5).astype(dtype)
        return
    for name, part in zip(quant.parts, random_parts(quant, matrix.shape, dtype), strict=True):
        setattr(matrix, name, part)


def random_parts(quant: Quant, shape: Sequence[int], dtype: mx.Dtype) -> list[mx.array]:
    """Codes, scales and, where the form has them, biases of a random matrix [..., rows, columns]."""
    *rows, columns = shape
    groups = (*rows, quant.groups(columns))
    codes = _random_words((*rows, quant.words(columns)))
    if not quant.has_biases:
        return [codes, mx.full(groups, 122 - columns.bit_length() // 2, mx.uint8)]
    steps = 2**quant.bits - 1
    scale = 3.4 / (steps * columns**0.5)
    return [codes, mx.full(groups, scale, dtype), mx.full(groups, -scale * steps / 2, dtype)]


def _random_words(shape: Sequence[int]) -> mx.array:
    """uint32 of any value: `mx.random.randint` is exact up to 16 bits."""
    halves = mx.random.randint(0, 1 << 16, (*shape[:-1], 2 * shape[-1]), dtype=mx.uint16)
    return halves.view(mx.uint32)


def random_records(record: Record, count: int) -> Records:
    parts: list[mx.array] = []
    for projection in (record.gate, record.up, record.down):
        kind = DTYPES[projection.fields[1].dtype]
        made = random_parts(projection.quant, (count, projection.rows, projection.columns), kind)
        parts += [part.reshape(count, -1).view(mx.uint32) for part in made]
    parts.append(mx.zeros((count, (record.stride - record.size) // 4), mx.uint32))
    blob = mx.concatenate(parts, axis=1)
    mx.eval(blob)
    return Records(blob, record)


# ---- one launch under the clock


class Trial:
    """A sample under other tiles: which there are, and whether their values are right.

    Attributes:
        wanted: what the launch gives with the code's tile.
    """

    def __init__(self, spot: str, sample: Sample):
        self._spot, self._sample = spot, sample
        self.wanted = self._launch(None)(*sample.inputs)
        mx.eval(self.wanted)

    def around(self, tile: Tile) -> Iterator[Tile]:
        """Neighbours of `tile` that make another launch."""
        return _others(self._sample.make, self._launch(tile), self._spot, self._sample.kernel, tile)

    def is_right(self, tile: Tile) -> bool:
        """Whether a launch with `tile` builds, and gives what the code's gives."""
        poison = [mx.full(out.shape, float("nan"), out.dtype) for out in self.wanted]
        mx.eval(poison)
        del poison  # its memory is used again: what a launch does not write is no value of an earlier one
        try:
            made = self._launch(tile)(*self._sample.inputs)
            mx.eval(made)
        except RuntimeError:  # it does not build, or takes more registers than there are
            return False
        return all(difference(got, want) <= BOUND for got, want in zip(made, self.wanted, strict=True))

    def _launch(self, tile: Tile | None) -> Launch:
        with using(CODE if tile is None else Tiles({self._spot: tile})):
            return self._sample.make()


class Bench(Trial):
    """A trial under the clock, with several copies of its matrices: none is in a cache when its turn comes again."""

    def __init__(self, spot: str, sample: Sample):
        super().__init__(spot, sample)
        large = [part.nbytes >= LARGE for part in sample.inputs]
        nbytes = sum(part.nbytes for part, is_large in zip(sample.inputs, large, strict=True) if is_large)
        count = min(max(2, -(-SPREAD_BYTES // nbytes)), 64) if nbytes else 1
        self._copies = [sample.inputs]
        for _ in range(count - 1):
            parts = zip(sample.inputs, large, strict=True)
            self._copies.append(tuple(part * 1 if is_large else part for part, is_large in parts))
        mx.eval(self._copies)
        self._next = _follows(self.wanted, sample.inputs)
        self._count = self._enough()

    def seconds(self, tile: Tile) -> float:
        """A chain of launches with `tile`, each of which waits for the one before it."""
        cover = self._count * ENCODING
        alone = _timed([busy(cover)])
        return max(_timed(self._chain(tile, self._count, busy(cover))) - alone, 1e-9)

    def _chain(self, tile: Tile | None, count: int, start: mx.array) -> list[mx.array]:
        """What is evaluated: small parts of outputs, so that the outputs themselves need not be in memory together."""
        launch, at, last = self._launch(tile), self._next, None
        ends: list[mx.array] = []
        for inputs in itertools.islice(itertools.cycle(self._copies), count):
            given = list(inputs)
            if at is not None:
                given[at] = given[at] + start.astype(given[at].dtype) if last is None else _shaped(last, given[at])
            last = launch(*given)[0]
            if at is None:
                ends.append(last.reshape(-1)[:1] * 1)
        return [start, *ends] if last is None or at is None else [last]

    def _enough(self) -> int:
        """Launches that take long enough to be measured."""
        start = mx.zeros((1,))
        mx.eval(self._chain(None, 4, start))
        each = min(_timed(self._chain(None, 16, start)) for _ in range(2)) / 16
        return int(min(max(LEAST_SECONDS / each, 8), LAUNCHES))


def _follows(outputs: Sequence[mx.array], inputs: Sequence[mx.array]) -> int | None:
    """Which input the first output takes the place of in the next launch: best one that it fills; None: no floats."""
    kind = outputs[0].dtype
    floats = [i for i, part in enumerate(inputs) if part.dtype == kind and part.nbytes < LARGE]
    fitting = [i for i in floats if inputs[i].size <= outputs[0].size]
    return next(iter([*fitting, *floats]), None)


def _shaped(out: mx.array, like: mx.array) -> mx.array:
    """The values of `out` in the shape of `like`, repeated if they are too few; else a view."""
    flat = out.reshape(-1)
    if flat.size < like.size:
        flat = mx.tile(flat, -(-like.size // flat.size))
    return flat[: like.size].reshape(like.shape)


def difference(got: mx.array, want: mx.array) -> float:
    """The largest difference over the largest value; infinite where a value is none."""
    found, meant = got.astype(mx.float32), want.astype(mx.float32)
    error = cast(float, (mx.abs(found - meant).max() / mx.maximum(mx.abs(meant).max(), 1e-30)).item())
    return error if error == error else float("inf")


def _timed(arrays: list[mx.array]) -> float:
    start = time.perf_counter()
    mx.eval(arrays)
    return time.perf_counter() - start


@functools.cache
def _long_row() -> tuple[mx.array, float]:
    """Zeros, and the seconds that their running sum takes."""
    row = mx.zeros((1, 1 << 22))
    mx.eval(row)
    return row, statistics.median(_timed([mx.cumsum(row, axis=1)]) for _ in range(5))


def busy(least: float) -> mx.array:
    """A zero that takes a corner of the GPU at least so many seconds, in which MLX encodes what follows."""
    row, took = _long_row()
    for _ in range(1 + int(least / took)):
        row = mx.cumsum(row, axis=1)
    return row[0, :1]


# ---- all of it


@dataclass(frozen=True)
class Result:
    """What was found for one spot: the code's tile, the best one, and how much faster that is."""

    spot: str
    code: Tile
    best: Tile
    gain: float


def tune(found: Iterable[tuple[str, Sample]], bench: Callable[[str, Sample], Any] = Bench) -> Iterator[Result]:
    """Searches every spot in turn."""
    target = backend.name()
    for spot, sample in found:
        code, trial = TILES[target][sample.kernel], bench(spot, sample)
        best, gain = search(code, trial.around, trial.is_right, trial.seconds)
        yield Result(spot, code, best, gain)


def kept(results: Iterable[Result]) -> Mapping[str, Tile]:
    """The tiles that are not the code's, by spot."""
    return {one.spot: one.best for one in results if one.best != one.code}
