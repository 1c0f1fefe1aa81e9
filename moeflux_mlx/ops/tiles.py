"""The tiles of the kernels: how each cuts its matrix. The constants that were tuned."""

from dataclasses import dataclass

MAX_TOKENS = 8  # rows of x that the kernels for few tokens take


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts its matrix: codes, or the state that `gated_delta_tokens` keeps in registers."""

    rows: int  # rows a simdgroup takes in turn with one load of x
    lanes: int  # lanes that share a row, at most; 32 / lanes rows lie abreast in a simdgroup
    simdgroups: int = 0  # per threadgroup
    ahead: int = 1  # 16-byte pieces per row that a lane has in flight (loop unrolling; CUDA only), or steps of a block
    spread: int = 0  # a row's columns are split until so many simdgroups are busy
    narrow: int = 0  # lanes are halved, down to 8, while so many threadgroups remain (0: never)


# CUDA: measured on an H200, time per launch in a CUDA graph over rotating data; the rows of scripts/bench/results.tsv.
#   gate_up: 4 rows of each matrix cost occupancy, 1 row repeats the loads of x.
#   down: 8 lanes, so 16 rows per threadgroup, pay once enough threadgroups remain.
#   qmv: 16 lanes and columns split over simdgroups. A large matrix fills the GPU by itself, and 8 rows share x better.
#   qmv_tokens: 2 rows load x twice as often.
#   gated_delta_tokens: 1 row loads q and k from threadgroup memory twice as often, 4 rows take all
#     registers, and blocks of 16 steps are not unrolled.
#   router, expert_dequantize: not measured.
# Metal: not measured. 32 lanes read 512 bytes of a row at once, at most 4 rows and small threadgroups keep registers
# few; a tile that is safe on every Apple GPU was preferred to one that might be fast on some.
TILES = {
    "cuda": {
        "expert_gate_up": Tile(rows=2, lanes=32, simdgroups=4, ahead=2),
        "expert_down_combine": Tile(rows=4, lanes=16, ahead=4, narrow=256),
        "qmv": Tile(rows=4, lanes=16, simdgroups=4, ahead=2, spread=2048),
        "qmv_large": Tile(rows=8, lanes=32, simdgroups=4, ahead=2),
        "qmv_tokens": Tile(rows=4, lanes=16, simdgroups=4, spread=2048),
        "router": Tile(rows=2, lanes=32, simdgroups=4),
        "gated_delta_tokens": Tile(rows=2, lanes=8, simdgroups=4, ahead=8),
        "expert_dequantize": Tile(rows=1, lanes=32, simdgroups=8),
    },
    "metal": {
        "expert_gate_up": Tile(rows=2, lanes=32, simdgroups=2),
        "expert_down_combine": Tile(rows=4, lanes=32),
        "qmv": Tile(rows=4, lanes=32, simdgroups=2),
        "qmv_large": Tile(rows=4, lanes=32, simdgroups=2),
        "qmv_tokens": Tile(rows=2, lanes=32, simdgroups=2),
        "router": Tile(rows=2, lanes=32, simdgroups=4),
        "gated_delta_tokens": Tile(rows=1, lanes=8, simdgroups=8, ahead=8),
        "expert_dequantize": Tile(rows=1, lanes=32, simdgroups=8),
    },
}


def lanes_of(chunks: int, limit: int) -> int:
    """Lanes per row: the largest power of two up to `limit` that divides the row's chunks evenly."""
    lanes = 1
    while lanes < limit and chunks % (2 * lanes) == 0:
        lanes *= 2
    return lanes


def down_lanes(tile: Tile, rows: int, chunks: int) -> int:
    """Lanes per row of the down projection, of so many rows of `chunks`."""
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
