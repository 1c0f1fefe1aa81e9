"""Tries a launch with other tiles than the built-in one: which tiles are possible, whether the values are right, and
the time.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from ..errors import RequestError
from ..ops.launch import ArrayPiece, Input, Launch
from ..ops.tiles import CODE, Tile, Tiles, neighbours, using

BOUND = 2e-2  # largest allowed difference relative to the largest value; float32 sums in another order differ far less
SPREAD_BYTES = 256 << 20  # bytes that a measurement rotates over: more than the caches of any GPU
LARGE = 1 << 16  # inputs of at least this many bytes are matrices, and are copied
LAUNCHES = 128  # the most launches of one measurement
LEAST_SECONDS = 2e-3  # seconds of a measurement


@dataclass
class Sample:
    """A launch that asked for a tile: the kernel, a function that makes it with a choice of tiles, and its inputs."""

    kernel: str
    make: Callable[[], Launch]
    inputs: tuple[Input, ...]


def others(make: Callable[[], Launch], launch: Launch, spot: str, kernel: str, tile: Tile) -> Iterator[Tile]:
    """The neighbours of `tile` with which the launch is possible and differs."""

    def is_other(tile: Tile) -> bool:
        with suppress(RequestError), using(Tiles({spot: tile})):
            return make() != launch
        return False

    return filter(is_other, neighbours(launch.target, kernel, tile))


class TileTrial:
    """Tries a sample with other tiles: which are possible, and whether their values are right.

    Attributes:
        wanted: the outputs with the built-in tile.
    """

    def __init__(self, spot: str, sample: Sample):
        self._spot, self._sample = spot, sample
        mx.eval(sample.inputs)
        self.wanted = self._launch(None)(*sample.inputs)
        mx.eval(self.wanted)

    def around(self, tile: Tile) -> Iterator[Tile]:
        """The neighbours of `tile` that change the launch."""
        return others(self._sample.make, self._launch(tile), self._spot, self._sample.kernel, tile)

    def is_right(self, tile: Tile) -> bool:
        """Whether a launch with `tile` builds and gives the outputs of the built-in tile."""
        poison = [mx.full(out.shape, float("nan"), out.dtype) for out in self.wanted]
        mx.eval(poison)
        del poison  # so that values that a launch does not write are not those of an earlier launch
        try:
            made = self._launch(tile)(*self._sample.inputs)
            mx.eval(made)
        except (RuntimeError, ValueError):  # it does not build, or needs too many registers or threads
            return False
        return all(difference(got, want) <= BOUND for got, want in zip(made, self.wanted, strict=True))

    def _launch(self, tile: Tile | None) -> Launch:
        with using(CODE if tile is None else Tiles({self._spot: tile})):
            return self._sample.make()


class Bench(TileTrial):
    """Times a trial with several copies of its matrices, so that none is in a cache when it is used again.

    `turn` is held while measuring.
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
        """Seconds of a launch with `tile`, in a chain in which each launch waits for the previous one."""
        with self._turn:
            alone = _timed([busy(self._cover)])
            whole = _timed(self._chain(tile, self._count, busy(self._cover)))
        return max(whole - alone, 1e-9) / self._count

    def _chain(self, tile: Tile | None, count: int, start: mx.array) -> list[mx.array]:
        """The arrays to evaluate: small parts of outputs, so that the outputs need not be in memory together."""
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
        """The number of launches that takes long enough to be measured, and the seconds that MLX needs to encode
        them.
        """
        start = mx.zeros((1,))
        mx.eval(self._chain(None, 4, start))
        with self._turn:
            each = min(_timed(self._chain(None, 16, start)) for _ in range(3)) / 16
        count = int(min(max(LEAST_SECONDS / each, 8), LAUNCHES))
        return count, 1.5 * count * each + 1e-3


def _large(inputs: Sequence[Input]) -> dict[int, mx.array]:
    """The large arrays among the inputs or behind them, each once."""
    arrays = [given.whole if isinstance(given, ArrayPiece) else given for given in inputs]
    return {id(array): array for array in arrays if isinstance(array, mx.array) and array.nbytes >= LARGE}


def _copied(inputs: Sequence[Input]) -> tuple[Input, ...]:
    """The same inputs, with copies of the large arrays."""
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
    """The index of the input that the first output replaces in the next launch, preferably one of its size; None if no
    input has floats.
    """
    kind = outputs[0].dtype
    arrays = [(i, part) for i, part in enumerate(inputs) if isinstance(part, mx.array)]
    floats = [(i, part) for i, part in arrays if part.dtype == kind and part.nbytes < LARGE]
    fitting = [i for i, part in floats if part.size <= outputs[0].size]
    return next(iter([*fitting, *(i for i, _ in floats)]), None)


def _shaped(out: mx.array, like: mx.array) -> mx.array:
    """The values of `out` in the shape of `like`: a view, or repeated if there are too few."""
    flat = out.reshape(-1)
    if flat.size < like.size:
        flat = mx.tile(flat, -(-like.size // flat.size))
    return flat[: like.size].reshape(like.shape)


def difference(got: mx.array, want: mx.array) -> float:
    """The largest difference over the largest value; infinity if a value is not finite."""
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
    """A zero whose computation keeps a small part of the GPU busy for at least `least` seconds, while MLX encodes the
    launches after it.
    """
    row, took = _long_row()
    for _ in range(1 + int(least / took)):
        row = mx.cumsum(row, axis=1)
    return row[0, :1]
