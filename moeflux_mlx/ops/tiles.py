"""The tiles of the kernels, which say how each kernel cuts its matrix: the tuned constants, and the choice among them.

A model is computed with one choice of tiles (`using`); the makers of launches call `tile_of`.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from .launch import NO_KERNELS

P = ParamSpec("P")
R = TypeVar("R")
MAX_TOKENS = 16  # most rows of a step, each with the bits that it has alone; a call of the model with more is a prompt
LEASED_TOKENS = 8  # tokens whose experts fit in the smallest pool; the experts of more tokens may be requested in parts


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts its matrix: codes, or the state that the delta rule keeps in registers."""

    rows: int  # rows a simdgroup takes in turn with one load of x
    lanes: int  # lanes that share a row, at most; 32 / lanes rows lie abreast in a simdgroup
    simdgroups: int = 0  # per threadgroup
    ahead: int = 1  # 16-byte pieces per row that a lane has in flight (loop unrolling; CUDA only), or steps of a block
    spread: int = 0  # a row's columns are split until this many simdgroups are busy
    narrow: int = 0  # lanes are halved, down to 8, while this many threadgroups remain (0: never)
    dense: int = 0  # rows of an expert in a prompt from which its matrices are dequantised for MLX's dense product
    halves: int = 0  # 1: 4-bit integers are unpacked through halves (metal/affine4_halves.h.metal)
    kernel: int = 0  # 1: on Metal `expert_rows` multiplies a prompt's experts with any number of rows, else MLX does


# CUDA: measured on an H200, time per launch in a CUDA graph over rotating data; the rows of scripts/bench/results.tsv.
#   gate_up: 4 rows of each matrix cost occupancy, 1 row repeats the loads of x.
#   down: 8 lanes, so 16 rows per threadgroup, pay once enough threadgroups remain.
#   gate_up_planes: with 2 and 3 bits all of 397B's threadgroups are there at once; x is laid out once for 8 simdgroups.
#   gate_up_grids: 1 chunk instead of 4 leaves 48 registers instead of 66 to 96, so all of 397B's threadgroups are there
#     at once: a layer takes 44.1 us instead of 47.6 in iq3_xxs, 43.5 instead of 49.3 in iq2_xxs, 41.1 instead of 50.7
#     in iq2_s, but 45.9 instead of 42.8 in iq4_xs, which has the tile of gate_up_planes.
#   down_planes: 16 lanes lay out 16 rows of x for half as many rows of the matrix, and in float32 find no room for it.
#   qmv: 16 lanes and columns split over simdgroups. A large matrix fills the GPU by itself, and 8 rows share x better.
#   qmv_tokens: 2 rows load x twice as often. Lanes and split are those of qmv.
#   gated_delta_tokens: 1 row loads q and k from threadgroup memory twice as often, 4 rows take all
#     registers, and blocks of 16 steps are not unrolled.
#   expert_rows: 8 eights of rows unpack codes for more rows, but cost registers; 2 are 1.3 times as slow for 2,048
#     tokens of the 35B's shape, and 1.07 times as fast for 64.
#   router, expert_dequantize: not measured.
#   prompt_experts: CUDA's product with codes is slower at any number of rows (results.tsv, "prompt").
# Metal: not measured. 32 lanes read 512 bytes of a row at once, at most 4 rows and small threadgroups keep registers
# few; a tile that is safe on every Apple GPU was preferred to one that might be fast on some.
#   expert_choice: every threadgroup repeats the choice, about 700 instructions of a simdgroup. With the 2 simdgroups of
#     expert_gate_up a layer of the 35B's shape repeats it 1,024 times, by this count 18 us on an M1 of 8 cores; with
#     8 simdgroups 256 times, 4 us, which is what a launch of its own would cost.
#   qmv with a norm: with 8 rows 2.2 KB instead of 3.2 would pass the first cache for each row of 2,048 columns, and
#     arithmetic take 0.86 of the time. But codes, scales, sums and addresses of 8 rows take 90 of a thread's 128
#     registers before x and the norm are loaded, so 8 rows are left to `moeflux tune`.
#   halves: arithmetic takes half the time if counted (tests/ops/test_halves.py). 0 until an Apple GPU has run it.
#   prompt_experts: dequantising writes and reads 3.6 times the bytes of 4-bit codes. By bandwidths and rates, products
#     that save a tenth of their time by it make up for that from 400 to 600 rows an expert.
TILES = {
    "cuda": {
        "expert_gate_up": Tile(rows=2, lanes=32, simdgroups=4, ahead=2),
        "expert_down_combine": Tile(rows=4, lanes=16, ahead=4, narrow=256),
        "expert_gate_up_planes": Tile(rows=2, lanes=16, simdgroups=8, ahead=4),
        "expert_down_combine_planes": Tile(rows=4, lanes=8, ahead=2),
        "expert_gate_up_grids": Tile(rows=1, lanes=16, simdgroups=8),
        "qmv": Tile(rows=4, lanes=16, simdgroups=4, ahead=2, spread=2048),
        "qmv_large": Tile(rows=8, lanes=32, simdgroups=4, ahead=2),
        "qmv_tokens": Tile(rows=4, lanes=32),
        "delta_step": Tile(rows=4, lanes=32),
        "router": Tile(rows=2, lanes=32, simdgroups=4),
        "gated_delta_tokens": Tile(rows=2, lanes=8, simdgroups=4, ahead=8),
        "expert_dequantize": Tile(rows=1, lanes=32, simdgroups=8),
        "expert_rows": Tile(rows=4, lanes=32, simdgroups=4),
        "prompt_experts": Tile(rows=1, lanes=32, dense=1),
    },
    "metal": {
        "expert_gate_up": Tile(rows=2, lanes=32, simdgroups=2),
        "expert_choice": Tile(rows=2, lanes=32, simdgroups=8),
        "expert_down_combine": Tile(rows=4, lanes=32),
        "qmv": Tile(rows=4, lanes=32, simdgroups=2),
        "qmv_large": Tile(rows=4, lanes=32, simdgroups=2),
        "qmv_tokens": Tile(rows=2, lanes=32),
        "delta_step": Tile(rows=8, lanes=32),
        "router": Tile(rows=2, lanes=32, simdgroups=4),
        "gated_delta_tokens": Tile(rows=1, lanes=8, simdgroups=8, ahead=8),
        "expert_dequantize": Tile(rows=1, lanes=32, simdgroups=8),
        "expert_rows": Tile(rows=4, lanes=32, simdgroups=4),
        "prompt_experts": Tile(rows=1, lanes=32, dense=256),
    },
}


TileChanges = Mapping[str, Mapping[str, int]]  # fields of the kernels' tiles, by kernel
# What `moeflux tune` tries on a GPU, one after the other: each is kept if it is right and faster than what was found
# before it. On an H200 other tiles made decode only 1.01 times as fast (results.tsv, "all kernels with a tile").
TRIED: Mapping[str, tuple[TileChanges, ...]] = {
    "cuda": (),
    "metal": (
        {name: {"halves": 1} for name in ("expert_gate_up", "expert_down_combine", "qmv", "qmv_large")},
        {"qmv": {"rows": 8}},
        {"expert_choice": {"simdgroups": 4}},
        {"expert_choice": {"simdgroups": 2}},
        # MLX's product with codes uses the matrix units of an M5, as its dense one does; `expert_rows` does not.
        {"prompt_experts": {"kernel": 1}},
        *({"prompt_experts": {"dense": rows}} for rows in (32, 64, 128, 512, 1024)),
    ),
}


def merged(changes: Iterable[TileChanges]) -> TileChanges:
    """All of the changes together; of two that set the same field, the later one counts."""
    together: dict[str, dict[str, int]] = {}
    for one in changes:
        for kernel, values in one.items():
            together.setdefault(kernel, {}).update(values)
    return together


class Tiles:
    """A choice of tiles: the built-in ones with the changes `found`."""

    def __init__(self, found: TileChanges | None = None):
        self.found = found or {}

    def tile(self, target: str, kernel: str) -> Tile:
        """The tile of a kernel on the backend `target`."""
        return replace(TILES[target][kernel], **self.found.get(kernel, {}))

    def plan(self, operation: str, make: Callable[..., R], given: tuple[object, ...]) -> R:
        """The result of a `planned` function of an operation with this choice."""
        return make(*given)


CODE = Tiles()
_used: ContextVar[Tiles] = ContextVar("tiles", default=CODE)


@contextmanager
def using(tiles: Tiles) -> Iterator[None]:
    """A context manager in which this thread's launches use these tiles."""
    token = _used.set(tiles)
    try:
        yield
    finally:
        _used.reset(token)


def tile_of(target: str, kernel: str) -> Tile:
    """Under the choice in use, as `Tiles.tile`."""
    return _used.get().tile(target, kernel)


def planned(
    operation: str, most: int | None = None, everywhere: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`functools.lru_cache` for a function that calls `tile_of`: each choice of tiles has its own results, which are
    freed with it. It takes arguments by position only. If the first is a backend without kernels, the result is
    `NO_KERNELS`; a function that checks its arguments `everywhere` is called there too, and returns that itself.
    `operation`: the name under which users see the function's reasons.
    """

    def decorate(make: Callable[P, R]) -> Callable[P, R]:
        kept = WeakKeyDictionary[Tiles, Callable[..., R]]()

        def chosen(*given: Any) -> Any:
            makes: Any = make if everywhere or given[:1] != ("ops",) else lambda *_: NO_KERNELS
            return _used.get().plan(operation, makes, given)

        @functools.wraps(make)
        def call(*given: P.args, **named: P.kwargs) -> R:
            if named:
                raise TypeError(f"{make.__name__}() takes its arguments by position, not {', '.join(named)}")
            tiles = _used.get()
            own = kept.get(tiles)
            if own is None:
                kept[tiles] = own = functools.lru_cache(most)(chosen)
            return own(*given)

        call.cache_clear = kept.clear  # type: ignore[attr-defined]
        return call

    return decorate


def lanes_of(chunks: int, limit: int) -> int:
    """Lanes per row: the largest power of two up to `limit` that leaves less than a tenth of its turns without a chunk.

    So rows of 2880 columns, 90 chunks, have 32 lanes; of those that divide 90 evenly, 2 is the largest.
    """
    powers = [1 << i for i in range(limit.bit_length())]
    return max(lanes for lanes in powers if 10 * chunks > 9 * lanes * -(-chunks // lanes))


def down_lanes(tile: Tile, rows: int, chunks: int) -> int:
    """Lanes per row of the down projection, for a number of rows of `chunks`."""
    lanes = lanes_of(chunks, tile.lanes)
    while tile.narrow and lanes > 8 and chunks < 4 * lanes and rows * lanes // (64 * tile.rows) >= tile.narrow:
        lanes //= 2
    return max(lanes, tile.rows)


def split_of(tile: Tile, blocks: int, chunks: int, lanes: int) -> int:
    """Simdgroups that share a row's columns, so that a matrix of few rows still occupies the GPU."""
    split = 1
    while split < tile.simdgroups and blocks * split < tile.spread and 2 * split * lanes <= chunks:
        split *= 2
    return split
