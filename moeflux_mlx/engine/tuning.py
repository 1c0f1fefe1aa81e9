"""Finds the tiles with which each kernel is fastest on this GPU, at the shapes of one model.

One layer of each kind is made with random weights and given a few tokens. Every launch that asks for a tile is noted
with what it is given, and made again with other tiles: `search` goes from the code's tile to neighbours that are faster
and right. It measures what it is given a clock for, so it needs no GPU itself. Nearly all of the time goes by in
compiling, which MLX does one after the other on CUDA; so several processes search, and take turns with the GPU.
"""

import functools
import itertools
import multiprocessing
import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..errors import RequestError
from ..experts.routing import Report, Routing, ignore_report
from ..formats.record import ExpertLayout, Record
from ..model.decoder import DecoderLayer
from ..model.layers import Linear, Weight
from ..model.tensors import KEPT_FLOAT32, ROUTERS
from ..model.weights import arrange
from ..ops import backend
from ..ops.dequantize import dequantized_records
from ..ops.experts import Records, expert_ffn
from ..ops.forms import DTYPES
from ..ops.launch import ArrayPiece, Input, Launch, Reason
from ..ops.tiles import CODE, MAX_TOKENS, TILES, Tile, Tiles, neighbours, spot_of, using
from ..quant import E8M0, Quant
from ..spec import ModelArgs
from ..state.cache import make_cache
from .machine import machine_figures

WORTH = 1.02  # a tile replaces another where it is so much faster
FIRST_ROUNDS, LAST_ROUNDS = 5, 15  # of alternating measurements: for a candidate, and of the best against the code's
TOKENS = (1, 512, MAX_TOKENS // 4)  # of one pass each: a token, a prompt's, and a few
BOUND = 2e-2  # of the largest difference, against the largest value; float32 sums in another order are far below
SPREAD_BYTES = 256 << 20  # that a measurement rotates over: more than the caches of any GPU
LARGE = 1 << 16  # bytes from which an input is a matrix, of which there is more than one
LAUNCHES = 128  # of one measurement, at most
LEAST_SECONDS = 2e-3  # of a measurement
PROCESSES, PROCESS_BYTES = 6, 2 << 30  # that compile at a time, at most; of the GPU's memory for each

Seconds = Callable[[Tile], float]
Fill = Callable[[Weight, Quant | None, mx.Dtype], None]


@dataclass(frozen=True)
class Shapes:
    """What is tuned for: the sizes of a model, the layout of its experts, how each matrix is stored, by module path
    (None, or none: as floats), and what it computes in."""

    args: ModelArgs
    layout: ExpertLayout
    quants: Mapping[str, Quant | None]
    dtype: mx.Dtype


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
            if is_right(tile) and ratio(best, tile, seconds, FIRST_ROUNDS) >= WORTH:
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
    inputs: tuple[Input, ...]


class Listening(Tiles):
    """The code's tiles; the first launch of each spot is noted when it is called, in `samples`, and gives noise."""

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
        if not asked or isinstance(made, Reason):
            return made
        if not isinstance(made, tuple):
            return self._heard(made, lambda: make(*given), asked)
        return tuple(
            self._heard(launch, functools.partial(lambda i: make(*given)[i], i), asked) for i, launch in enumerate(made)
        )

    def _heard(
        self, launch: Launch, make: Callable[[], Launch], asked: Sequence[tuple[str, str]]
    ) -> Callable[..., Any]:
        """The launch; if a tile makes a difference to it, it tells what it is called with, and is not compiled."""
        own = [(kernel, shape) for kernel, shape in asked if _depends(make, launch, kernel, shape)]

        def call(*inputs: Input) -> list[mx.array]:
            for kernel, shape in own:
                self.samples.setdefault(spot_of(kernel, shape), Sample(kernel, make, inputs))
            return [_noise(shape, dtype) for shape, dtype in launch.outputs]

        return call if own else launch


def _noise(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Numbers such as activations are; indices are 0, which any array has."""
    return mx.random.normal(shape).astype(dtype) if mx.issubdtype(dtype, mx.floating) else mx.zeros(shape, dtype)


def _depends(make: Callable[[], Launch], launch: Launch, kernel: str, shape: str) -> bool:
    """Whether another tile makes another launch: of several that are made together, some have none."""
    return any(True for _ in _others(make, launch, spot_of(kernel, shape), kernel, TILES[launch.target][kernel]))


def _others(make: Callable[[], Launch], launch: Launch, spot: str, kernel: str, tile: Tile) -> Iterator[Tile]:
    """The neighbours of `tile` with which the launch is possible, and another one."""

    def is_other(tile: Tile) -> bool:
        with suppress(RequestError), using(Tiles({spot: tile})):
            return make() != launch
        return False

    return filter(is_other, neighbours(launch.target, kernel, tile))


class TrialExperts:
    """Routed experts of random weights for one layer, as many as a token uses; all of them are, by every token."""

    def __init__(self, record: Record, count: int):
        self.count = count
        self.records = random_records(record, count)

    def __call__(self, routing: Routing, x: Any, residual: Any, shared: Any, report: Report = ignore_report) -> Any:
        slots = mx.array(np.tile(np.arange(self.count, dtype=np.uint32), (len(x), 1)))
        if len(x) <= MAX_TOKENS:
            return expert_ffn(x, slots, self.records, mx.random.uniform(shape=slots.shape), residual, shared)
        dequantized_records(self.records, slots[0] + 0, x.dtype)
        return residual

    def expect(self, layer: int, tokens: int) -> None:
        pass

    def wants_guess(self, layer: int, tokens: int) -> bool:
        return False


def samples(shapes: Shapes) -> dict[str, Sample]:
    """Every spot that the model's layers and head have, each with its launch: those of a single token first."""
    listening = Listening()
    for run in passes(shapes):
        with using(listening):
            run()
    return listening.samples


def passes(shapes: Shapes) -> Iterator[Callable[[], object]]:
    """Of a token, a prompt and a few tokens, through one layer of each kind and the head; nothing is evaluated."""
    parts = [*_layers(shapes), _head(shapes)]
    for tokens in TOKENS:
        for part in parts:
            x = mx.random.normal((1, tokens, shapes.args.hidden_size)).astype(shapes.dtype)
            yield functools.partial(part, x)


def _layers(shapes: Shapes) -> Iterator[Callable[[mx.array], object]]:
    """One layer of each kind, for a text that begins."""
    args, records = shapes.args, shapes.layout.records
    kinds = dict[Any, int]()
    for i, mixer in enumerate(args.mixers):
        kinds.setdefault((mixer, records.get(i)), i)
    for i in kinds.values():
        experts = TrialExperts(records[i], args.num_experts_per_tok) if i in records else None
        layer = DecoderLayer(args, i, cast(Any, experts), False)
        randomise(layer, f"model.layers.{i}.", shapes)
        yield lambda x, layer=layer, mixer=args.mixers[i]: layer(x, make_cache(mixer))  # type: ignore[misc]


def _head(shapes: Shapes) -> Callable[[mx.array], object]:
    """The last matrix, of which only single tokens and a few are asked."""
    matrix = Linear(shapes.args.hidden_size, shapes.args.vocab_size)
    fill_randomly(matrix, shapes.quants.get("lm_head"), shapes.dtype)
    return lambda x: matrix(x[:, :MAX_TOKENS])


# ---- random weights


def randomise(module: nn.Module, path: str, shapes: Shapes, fill: Fill | None = None) -> None:
    """Gives every parameter of `module`, which the model has at `path`, random values of a trained model's size.

    `fill`: gives matrices other values, of a form and a dtype.
    """
    matrices = {name: part for name, part in module.named_modules() if isinstance(part, Weight)}
    for name, matrix in matrices.items():
        kept = mx.float32 if f".{name}".endswith(ROUTERS) else shapes.dtype
        (fill or fill_randomly)(matrix, shapes.quants.get(path + name), kept)
    for name, value in cast(list[tuple[str, mx.array]], tree_flatten(module.parameters())):
        owner, _, leaf = name.rpartition(".")
        if owner not in matrices:
            kept = mx.float32 if leaf in KEPT_FLOAT32 else shapes.dtype
            values = mx.random.normal(value.shape) * 0.1 + (leaf == "weight")
            setattr(_part(module, owner), leaf, values.astype(kept))
    arrange(cast(Any, module))


def _part(module: nn.Module, path: str) -> Any:
    part: Any = module
    for name in filter(None, path.split(".")):
        part = part[int(name)] if isinstance(part, list) else getattr(part, name)
    return part


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
    if quant.scale == E8M0:
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
    for projection in record.projections:
        kind = DTYPES[projection.fields[1].dtype]
        arrays = random_parts(projection.quant, (count, projection.rows, projection.columns), kind)
        if projection.bias is not None:
            arrays.append(mx.zeros((count, projection.rows), DTYPES[projection.bias.dtype]))
        parts += [part.reshape(count, -1).view(mx.uint32) for part in arrays]
    parts.append(mx.zeros((count, (record.stride - record.size) // 4), mx.uint32))
    return Records(mx.concatenate(parts, axis=1), record)


# ---- one launch under the clock


class Trial:
    """A sample under other tiles: which there are, and whether their values are right.

    Attributes:
        wanted: what the launch gives with the code's tile.
    """

    def __init__(self, spot: str, sample: Sample):
        self._spot, self._sample = spot, sample
        mx.eval(sample.inputs)
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
            outputs = self._launch(tile)(*self._sample.inputs)
            mx.eval(outputs)
        except (RuntimeError, ValueError):  # it does not build, or takes more registers or threads than there are
            return False
        return all(difference(got, want) <= BOUND for got, want in zip(outputs, self.wanted, strict=True))

    def _launch(self, tile: Tile | None) -> Launch:
        with using(CODE if tile is None else Tiles({self._spot: tile})):
            return self._sample.make()


class Bench(Trial):
    """A trial under the clock, with several copies of its matrices: none is in a cache when its turn comes again.

    `turn` is entered by who measures.
    """

    def __init__(self, spot: str, sample: Sample, turn: AbstractContextManager[Any]):
        super().__init__(spot, sample)
        self._turn = turn
        nbytes = sum(array.nbytes for array in _large(sample.inputs).values())
        count = min(max(2, -(-SPREAD_BYTES // nbytes)), 64) if nbytes else 1
        self._copies = [sample.inputs, *(_copied(sample.inputs) for _ in range(count - 1))]
        self._next = _follows(self.wanted, sample.inputs)
        self._count, self._cover = self._enough()

    def seconds(self, tile: Tile) -> float:
        """Of a launch with `tile`, in a chain in which each waits for the one before it."""
        with self._turn:
            alone = _timed([busy(self._cover)])
            whole = _timed(self._chain(tile, self._count, busy(self._cover)))
        return max(whole - alone, 1e-9) / self._count

    def _chain(self, tile: Tile | None, count: int, start: mx.array) -> list[mx.array]:
        """What is evaluated: small parts of outputs, so that the outputs themselves need not be in memory together."""
        launch, at, last = self._launch(tile), self._next, None
        ends: list[mx.array] = []
        for inputs in itertools.islice(itertools.cycle(self._copies), count):
            arrays = list(inputs)
            if at is not None:
                like = cast(mx.array, arrays[at])
                arrays[at] = like + start.astype(like.dtype) if last is None else _shaped(last, like)
            last = launch(*arrays)[0]
            if at is None:
                ends.append(last.reshape(-1)[:1] * 1)
        return [start, *ends] if last is None or at is None else [last]

    def _enough(self) -> tuple[int, float]:
        """Launches that take long enough to be measured, and seconds in which MLX has encoded them."""
        start = mx.zeros((1,))
        mx.eval(self._chain(None, 4, start))
        with self._turn:
            each = min(_timed(self._chain(None, 16, start)) for _ in range(3)) / 16
        count = int(min(max(LEAST_SECONDS / each, 8), LAUNCHES))
        return count, 1.5 * count * each + 1e-3


def _large(inputs: Sequence[Input]) -> dict[int, mx.array]:
    """The large arrays that inputs are or lie in, each once."""
    arrays = [given.whole if isinstance(given, ArrayPiece) else given for given in inputs]
    return {id(array): array for array in arrays if isinstance(array, mx.array) and array.nbytes >= LARGE}


def _copied(inputs: Sequence[Input]) -> tuple[Input, ...]:
    """The same inputs, in copies of what is large."""
    copies = {key: array * 1 for key, array in _large(inputs).items()}
    mx.eval(copies)
    copied: list[Input] = []
    for given in inputs:
        if isinstance(given, ArrayPiece):
            copied.append(given._replace(whole=copies.get(id(given.whole), given.whole)))
        else:
            copied.append(copies.get(id(given), given))
    return tuple(copied)


def _follows(outputs: Sequence[mx.array], inputs: Sequence[Input]) -> int | None:
    """Which input the first output takes the place of in the next launch: best one that it fills; None: no floats."""
    kind = outputs[0].dtype
    arrays = [(i, part) for i, part in enumerate(inputs) if isinstance(part, mx.array)]
    floats = [(i, part) for i, part in arrays if part.dtype == kind and part.nbytes < LARGE]
    fitting = [i for i, part in floats if part.size <= outputs[0].size]
    return next(iter([*fitting, *(i for i, _ in floats)]), None)


def _shaped(out: mx.array, like: mx.array) -> mx.array:
    """The values of `out` in the shape of `like`, repeated if they are too few; else a view."""
    flat = out.reshape(-1)
    if flat.size < like.size:
        flat = mx.tile(flat, -(-like.size // flat.size))
    return flat[: like.size].reshape(like.shape)


def difference(got: mx.array, want: mx.array) -> float:
    """The largest difference over the largest value; infinite where a value is none."""
    actual, expected = got.astype(mx.float32), want.astype(mx.float32)
    error = cast(float, (mx.abs(actual - expected).max() / mx.maximum(mx.abs(expected).max(), 1e-30)).item())
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
    """What was found for one spot: the code's tile, the best one, how much faster that is, and how long it takes."""

    spot: str
    code: Tile
    best: Tile
    gain: float
    seconds: float


def tune(
    spots: Iterable[str], launches: Mapping[str, Sample], bench: Callable[[str, Sample], Any]
) -> Generator[Result, None, None]:
    """Searches `spots` in turn, each with its sample of `launches`."""
    for spot in spots:
        sample = launches[spot]
        code, trial = TILES[backend.name()][sample.kernel], bench(spot, sample)
        best, gain = search(code, trial.around, trial.is_right, trial.seconds)
        yield Result(spot, code, best, gain, trial.seconds(best))
        sample.inputs = ()


def kept(results: Iterable[Result]) -> Mapping[str, Tile]:
    """The tiles that are not the code's, by spot."""
    return {one.spot: one.best for one in results if one.best != one.code}


def crew(shapes: Shapes, spots: Sequence[str], seconds: float) -> Generator[Result, None, None]:
    """The results of a search of `spots` by several processes, as they come; after `seconds` no other is begun."""
    end = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")  # MLX does not come along in a fork
    most = 1 if backend.name() == "metal" else min(PROCESSES, (os.cpu_count() or 2) // 2)
    count = max(1, min(most, machine_figures().memory // PROCESS_BYTES))
    shared = shapes.args, shapes.layout, shapes.quants, str(shapes.dtype).rpartition(".")[2], context.Lock()
    waiting, running = deque(spots), set[Future[Result]]()
    with ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=shared) as pool:
        while True:
            while waiting and len(running) < count and time.monotonic() < end:
                running.add(pool.submit(_search, waiting.popleft()))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


_work: dict[str, Any] = {}  # of a process of the crew


def _begin(args: ModelArgs, layout: ExpertLayout, quants: Mapping[str, Quant | None], dtype: str, turn: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    _work.update(launches=samples(Shapes(args, layout, quants, getattr(mx, dtype))), turn=turn)


def _search(spot: str) -> Result:
    return next(tune([spot], _work["launches"], functools.partial(Bench, turn=_work["turn"])))
