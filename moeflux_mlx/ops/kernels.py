"""GPU kernels for decode, their twins in plain MLX ops, and the choice between them.

Four operations, for few tokens: a product with a 4-bit matrix, the two halves of the routed experts read straight
from their packed records, and the unscaled combine. 4-bit weights come in groups of 64 columns (weight = scale * code
+ bias, eight codes per uint32, low nibble first). All sums are float32. The kernels are written once, in Metal
Shading Language, under `metal/`: `mx.fast.metal_kernel` builds them on Apple GPUs, `mx.fast.cuda_kernel` builds the
same text behind `metal/cuda_shim.h` on NVIDIA GPUs. Everywhere else the twin runs. A kernel that does not build
raises when it is evaluated; nothing falls back in silence.

Which kernel, tile and split runs depends on the backend and the shapes alone, so the bits of a result do not depend on
slot numbers or on what else the blob holds. This module knows no files, layers or models.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import mlx.core as mx

from ..errors import RequestError
from ..resources import directory

GROUP = 64  # columns that share one scale and one bias
MAX_TOKENS = 8
MAX_SLOTS = 16  # the down projection gives each slot a simdgroup of one threadgroup
LEAST_ELEMENTS = 8  # MLX hands Metal an input of fewer as `constant`, which the text does not take
FLOATS = (mx.float32, mx.bfloat16, mx.float16)


def backend() -> str:
    """Who runs the operations: "metal" or "cuda" if the default device is such a GPU, else "ops" (the twins)."""
    if mx.default_device() == mx.gpu:
        if mx.metal.is_available():
            return "metal"
        if mx.cuda.is_available():
            return "cuda"
    return "ops"


def has_kernels() -> bool:
    """Whether the operations run as GPU kernels on the default device."""
    return backend() != "ops"


# ---- tiles: the constants that were tuned


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts its matrix."""

    rows: int  # rows a simdgroup takes in turn with one load of x
    lanes: int  # lanes that share a row, at most; 32 / lanes rows lie abreast in a simdgroup
    simdgroups: int = 0  # per threadgroup
    ahead: int = 1  # 16-byte chunks per row that a lane has in flight (loop unrolling; CUDA only)
    spread: int = 0  # a row's columns are split until so many simdgroups are busy
    narrow: int = 0  # lanes are halved, down to 8, while so many threadgroups remain (0: never)


# CUDA: measured on an H200, time per launch in a CUDA graph over rotating data; scripts/results.tsv has the runs.
#   gate_up: 4 rows of each matrix cost occupancy (397B 17.8 -> 19.0 us), 1 row repeats the loads of x (19.8 us).
#   down: 8 lanes, so 16 rows per threadgroup, pay once enough threadgroups remain (397B 12.2 -> 10.5 us, but
#     35B 4.5 -> 4.7 us).
#   qmv4: 16 lanes and columns split over simdgroups (12288x2048 7.2 -> 7.0 us, 2048x4096 7.4 -> 4.2 us). A large
#     matrix fills the GPU by itself, and 8 rows share x better (16384x7168 25.2 -> 23.2 us).
#   qmv4_tokens: 2 rows load x twice as often (8192x4096, 8 tokens: 33.5 -> 42.6 us).
# Metal: not measured. 32 lanes read 512 bytes of a row at once, at most 4 rows and small threadgroups keep registers
# few; a tile that is safe on every Apple GPU was preferred to one that might be fast on some.
TILES = {
    "cuda": {
        "expert_gate_up": Tile(rows=2, lanes=32, simdgroups=4, ahead=2),
        "expert_down_combine": Tile(rows=4, lanes=16, ahead=4, narrow=256),
        "qmv4": Tile(rows=4, lanes=16, simdgroups=4, ahead=2, spread=2048),
        "qmv4_large": Tile(rows=8, lanes=32, simdgroups=4, ahead=2),
        "qmv4_tokens": Tile(rows=4, lanes=16, simdgroups=4, spread=2048),
    },
    "metal": {
        "expert_gate_up": Tile(rows=2, lanes=32, simdgroups=2),
        "expert_down_combine": Tile(rows=4, lanes=32),
        "qmv4": Tile(rows=4, lanes=32, simdgroups=2),
        "qmv4_large": Tile(rows=4, lanes=32, simdgroups=2),
        "qmv4_tokens": Tile(rows=2, lanes=32, simdgroups=2),
    },
}
PAYS_FROM = (
    4_000_000  # weights; below, MLX's own product is as fast (512x2048 0.75-1.0x, 4096x2048 1.2-1.4x on an H200)
)
LARGE = 100_000_000  # weights of a matrix that fills a GPU by itself


def _ceildiv(a: int, b: int) -> int:
    return -(-a // b)


def _lanes(columns: int, limit: int) -> int:
    """Lanes per row: the largest power of two up to `limit` that divides the row's 16-byte chunks evenly."""
    lanes = 1
    while lanes < limit and columns // 32 % (2 * lanes) == 0:
        lanes *= 2
    return lanes


def _down_lanes(tile: Tile, hidden: int, inner: int) -> int:
    lanes = _lanes(inner, tile.lanes)
    while tile.narrow and lanes > 8 and inner // 32 < 4 * lanes and hidden * lanes // (64 * tile.rows) >= tile.narrow:
        lanes //= 2
    return max(lanes, tile.rows)


def _qmv_tile(target: str, tokens: int, rows: int, columns: int) -> tuple[str, Tile]:
    """The family and tile for a [rows, columns] matrix."""
    tiles = TILES[target]
    if tokens > 1:
        return "qmv4_tokens", tiles["qmv4_tokens"]
    return "qmv4", tiles["qmv4_large" if rows * columns >= LARGE else "qmv4"]


def _split(tile: Tile, blocks: int, columns: int, lanes: int) -> int:
    """Simdgroups that share a row's columns, so that a matrix of few rows still occupies the GPU."""
    split = 1
    while split < tile.simdgroups and blocks * split < tile.spread and 2 * split * lanes <= columns // 32:
        split *= 2
    return split


# ---- building and launching

FAMILIES = {
    "qmv4": (["x", "w", "scales", "biases"], "y"),
    "qmv4_tokens": (["x", "w", "scales", "biases"], "y"),
    "expert_gate_up": (["x", "blob", "slots"], "act"),
    "expert_down_combine": (["act", "blob", "slots", "weights", "h_mid", "shared"], "out"),
    "moe_combine": (["expert_out", "weights", "h_mid", "shared"], "out"),
}


HEADERS = {"lanes": "lane_sum", "q4": "q4_"}  # by the names they define


def _text(name: str) -> str:
    """A file of `metal/` without comments and indentation: MLX copies and hashes a kernel's text at every call."""
    lines = (line.strip() for line in (directory("metal") / name).read_text("ascii").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//")) + "\n"


def build(target: str, family: str, inputs: list[str], outputs: list[str]) -> Any:
    """MLX's object for `metal/family.metal`, compiled at first use with each set of template arguments.

    Headers go in where their names occur: CUDA's build hashes the whole text at every launch.
    """
    source = _text(f"{family}.metal")
    header = "".join(_text(f"{name}.h.metal") for name, mark in HEADERS.items() if mark in source)
    make: Any = mx.fast.metal_kernel
    if target == "cuda":
        header = _text("cuda_shim.h") + header
        make = mx.fast.cuda_kernel
    return make(name=f"moeflux_{family}", input_names=inputs, output_names=outputs, header=header, source=source)


@cache
def _kernel(target: str, family: str) -> Any:
    inputs, output = FAMILIES[family]
    return build(target, family, inputs, [output])


@dataclass(frozen=True)
class Launch:
    """Everything of a kernel call but its inputs. Depends on shapes and dtypes only, so it is made once for each."""

    target: str
    family: str
    template: dict[str, Any]
    groups: tuple[int, int]  # threadgroups; MLX counts its grid in threads
    threads: int
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @cached_property
    def arguments(self) -> dict[str, Any]:
        return {
            "template": list(self.template.items()),
            "grid": (self.groups[0] * self.threads, self.groups[1], 1),
            "threadgroup": (self.threads, 1, 1),
            "output_shapes": [self.shape],
            "output_dtypes": [self.dtype],
        }

    def __call__(self, *inputs: mx.array) -> mx.array:
        return _kernel(self.target, self.family)(inputs=list(inputs), **self.arguments)[0]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RequestError(message)


Shape = tuple[int, ...]


def _check_activations(name: str, shape: Shape, dtype: mx.Dtype, rank: int = 2) -> None:
    _require(dtype in FLOATS, f"{name} is {dtype}; the kernels take float32, bfloat16 or float16")
    good = len(shape) == rank and shape[-1] % GROUP == 0 and shape[-1] > 0
    _require(good, f"{name} is {shape}; expected {rank} axes, the last a multiple of {GROUP}")
    _require(1 <= shape[0] <= MAX_TOKENS, f"{name} has {shape[0]} tokens; the kernels take 1 to {MAX_TOKENS}")


def _check_slots(blob: Shape, slots: Shape, tokens: int, inner: int, hidden: int) -> None:
    least = 3 * _matrix_words(inner, hidden)
    good = len(blob) == 2 and blob[1] >= least and blob[1] % 4 == 0
    _require(good, f"blob is {blob}; expected [S, words], words a multiple of 4 and at least {least}")
    good = len(slots) == 2 and slots[0] == tokens and 1 <= slots[1] <= MAX_SLOTS
    _require(good, f"slots are {slots}; expected [{tokens}, K], K from 1 to {MAX_SLOTS}")


# ---- product with a 4-bit matrix


def qmv4(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    """x times the transpose of a 4-bit matrix.

    Args:
        x: [T, I] float32, bfloat16 or float16, T from 1 to 8. Each row starts at a multiple of 16 bytes, as in a
            whole array and in slices of its leading axes.
        w: [O, I / 8] uint32 codes.
        scales, biases: [O, I / 64], both of one floating dtype.

    Returns:
        [T, O] in x's dtype.

    Raises:
        RequestError: a shape or dtype the kernels do not take.
    """
    launch = _qmv4_launch(backend(), x.shape, x.dtype, w.shape, scales.shape, scales.dtype)
    return launch(x, w, scales, biases) if launch else _qmv4_ops(x, w, scales, biases)


def qmv4_pays(tokens: int, rows: int, columns: int) -> bool:
    """Whether `qmv4` runs as a kernel here and beats `mx.quantized_matmul` for a [rows, columns] matrix."""
    return has_kernels() and tokens <= MAX_TOKENS and rows * columns >= PAYS_FROM


@cache
def _qmv4_launch(
    target: str, x: Shape, x_dtype: mx.Dtype, w: Shape, scales: Shape, scales_dtype: mx.Dtype
) -> Launch | None:
    _check_activations("x", x, x_dtype)
    tokens, columns = x
    rows = w[0]
    good = w == (rows, columns // 8) and scales == (rows, columns // GROUP)
    _require(good, f"w is {w}, scales {scales}; expected [O, {columns // 8}] and [O, {columns // GROUP}]")
    if target == "ops" or rows * columns // GROUP < LEAST_ELEMENTS:
        return None
    family, tile = _qmv_tile(target, tokens, rows, columns)
    lanes = _lanes(columns, tile.lanes)
    blocks = _ceildiv(rows * lanes, tile.rows * 32)
    split = _split(tile, blocks, columns, lanes)
    template = {"X": x_dtype, "S": scales_dtype, "O": rows, "I": columns, "R": tile.rows, "L": lanes}
    template |= {"SG": tile.simdgroups, "SPLIT": split}
    template |= {"T": tokens} if tokens > 1 else {"AHEAD": tile.ahead}
    groups = (_ceildiv(blocks * split, tile.simdgroups), 1)
    return Launch(target, family, template, groups, 32 * tile.simdgroups, (tokens, rows), x_dtype)


def _qmv4_ops(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    return _matmul(x, w, scales, biases).astype(x.dtype)


def _matmul(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    """In float32: MLX's CPU build sums bfloat16 in bfloat16, at an eighth of the speed."""
    wide = [a.astype(mx.float32) for a in (x, scales, biases)]
    return mx.quantized_matmul(wide[0], w, wide[1], wide[2], transpose=True, group_size=GROUP, bits=4)


# ---- routed experts


def expert_gate_up(x: mx.array, blob: mx.array, slots: mx.array, *, moe_intermediate_size: int) -> mx.array:
    """silu(gate x) * (up x) for every slot of every token, from packed records.

    A record is gate, up and down, each as codes (uint32), scales and biases (bfloat16), row by row; gate and up are
    [I, H], down is [H, I]. Padding may follow.

    Args:
        x: [T, H] float32, bfloat16 or float16; rows as for `qmv4`.
        blob: [S, words] uint32, one record per row; a record starts at a multiple of 16 bytes.
        slots: [T, K] int32 or uint32, rows of blob, K from 1 to 16.
        moe_intermediate_size: I.

    Returns:
        [T, K, I] in x's dtype.

    Raises:
        RequestError: a shape or dtype the kernels do not take.
    """
    inner = moe_intermediate_size
    launch = _gate_up_launch(backend(), x.shape, x.dtype, blob.shape, slots.shape, inner)
    return launch(x, blob, slots) if launch else _expert_gate_up_ops(x, blob, slots, inner)


@cache
def _gate_up_launch(target: str, x: Shape, dtype: mx.Dtype, blob: Shape, slots: Shape, inner: int) -> Launch | None:
    _check_activations("x", x, dtype)
    tokens, hidden = x
    _check_slots(blob, slots, tokens, inner, hidden)
    if target == "ops":
        return None
    count = slots[1]
    tile = TILES[target]["expert_gate_up"]
    lanes = _lanes(hidden, tile.lanes)
    template = {"X": dtype, "H": hidden, "I": inner, "K": count, "WORDS": blob[1]}
    template |= {"R": tile.rows, "L": lanes, "SG": tile.simdgroups, "AHEAD": tile.ahead}
    groups = (_ceildiv(inner * lanes, tile.rows * 32 * tile.simdgroups), tokens * count)
    shape = (tokens, count, inner)
    return Launch(target, "expert_gate_up", template, groups, 32 * tile.simdgroups, shape, dtype)


def expert_down_combine(
    act: mx.array,
    blob: mx.array,
    slots: mx.array,
    weights: mx.array,
    h_mid: mx.array,
    shared: mx.array | None = None,
) -> mx.array:
    """h_mid + sum_k weights[k] * (down_k act[k]) + shared, k ascending, rounded once.

    Args:
        act: [T, K, I] float32, bfloat16 or float16, as `expert_gate_up` returns it.
        blob, slots: as for `expert_gate_up`.
        weights: [T, K] float32.
        h_mid: [T, H], the residual stream before the experts.
        shared: [T, H], the shared expert's output, or None.

    Returns:
        [T, H] in h_mid's dtype.

    Raises:
        RequestError: a shape or dtype the kernels do not take.
    """
    other = h_mid if shared is None else shared  # an input cannot be left out; it is not read
    dtypes = act.dtype, h_mid.dtype, None if shared is None else other.dtype
    launch = _down_launch(backend(), act.shape, h_mid.shape, blob.shape, slots.shape, dtypes)
    weights = weights.astype(mx.float32)
    if launch is None:
        return _expert_down_combine_ops(act, blob, slots, weights, h_mid, shared)
    return launch(act, blob, slots, weights, h_mid, other)


Dtypes = tuple[mx.Dtype, mx.Dtype, mx.Dtype | None]  # of the experts' values, h_mid and shared


def _combine_types(dtypes: Dtypes) -> dict[str, Any]:
    experts, h_mid, shared = dtypes
    return {"X": experts, "Y": h_mid, "Z": shared or h_mid, "SHARED": int(shared is not None)}


@cache
def _down_launch(target: str, act: Shape, h_mid: Shape, blob: Shape, slots: Shape, dtypes: Dtypes) -> Launch | None:
    _check_activations("act", act, dtypes[0], rank=3)
    _check_activations("h_mid", h_mid, dtypes[1])
    tokens, count, inner = act
    hidden = h_mid[1]
    _check_slots(blob, slots, tokens, inner, hidden)
    _require(slots[1] == count, f"act is {act} but slots are {slots}; both hold [T, K]")
    if target == "ops":
        return None
    tile = TILES[target]["expert_down_combine"]
    lanes = _down_lanes(tile, hidden, inner)
    template = {
        "H": hidden,
        "I": inner,
        "K": count,
        "WORDS": blob[1],
        "OFFSET": 2 * _matrix_words(inner, hidden),
    }
    template |= {"R": tile.rows, "L": lanes, "AHEAD": tile.ahead, **_combine_types(dtypes)}
    groups = (_ceildiv(hidden * lanes, tile.rows * 32), tokens)
    return Launch(target, "expert_down_combine", template, groups, 32 * count, (tokens, hidden), dtypes[1])


def _matrix_words(rows: int, columns: int) -> int:
    """uint32 words of one packed matrix: codes, then scales and biases."""
    return rows * columns // 8 + 2 * (rows * columns // GROUP // 2)


def _expert_matmul(x: mx.array, blob: mx.array, slots: mx.array, start: int, rows: int) -> mx.array:
    """[P, columns] x, each row times its own record's matrix that begins `start` words in: float32 [P, rows]."""
    pairs, columns = x.shape
    codes, params = rows * columns // 8, rows * columns // GROUP // 2
    words = mx.take(blob[:, start : start + codes + 2 * params], slots.reshape(-1), axis=0)
    w = words[:, :codes].reshape(pairs, rows, columns // 8)
    scales = words[:, codes : codes + params].view(mx.bfloat16).reshape(pairs, rows, columns // GROUP)
    biases = words[:, codes + params :].view(mx.bfloat16).reshape(pairs, rows, columns // GROUP)
    return _matmul(x[:, None], w, scales, biases)[:, 0]


def _expert_gate_up_ops(x: mx.array, blob: mx.array, slots: mx.array, inner: int) -> mx.array:
    tokens, hidden = x.shape
    count = slots.shape[1]
    each = mx.repeat(x, count, axis=0)
    gate = _expert_matmul(each, blob, slots, 0, inner)
    up = _expert_matmul(each, blob, slots, _matrix_words(inner, hidden), inner)
    return (gate * mx.sigmoid(gate) * up).astype(x.dtype).reshape(tokens, count, inner)


def _expert_down_combine_ops(
    act: mx.array,
    blob: mx.array,
    slots: mx.array,
    weights: mx.array,
    h_mid: mx.array,
    shared: mx.array | None,
) -> mx.array:
    tokens, count, inner = act.shape
    hidden = h_mid.shape[1]
    start = 2 * _matrix_words(inner, hidden)
    down = _expert_matmul(act.reshape(tokens * count, inner), blob, slots, start, hidden)
    return _moe_combine_ops(down.reshape(tokens, count, hidden), weights, h_mid, shared)


# ---- combine


def moe_combine(expert_out: mx.array, weights: mx.array, h_mid: mx.array, shared: mx.array | None = None) -> mx.array:
    """h_mid + sum_k weights[k] * expert_out[k] + shared, k ascending, rounded once.

    Args:
        expert_out: [T, K, H] float32, bfloat16 or float16.
        weights: [T, K] float32.
        h_mid: [T, H].
        shared: [T, H] or None.

    Returns:
        [T, H] in h_mid's dtype.
    """
    other = h_mid if shared is None else shared
    dtypes = expert_out.dtype, h_mid.dtype, None if shared is None else other.dtype
    launch = _combine_launch(backend(), expert_out.shape, dtypes)
    weights = weights.astype(mx.float32)
    if launch is None:
        return _moe_combine_ops(expert_out, weights, h_mid, shared)
    return launch(expert_out, weights, h_mid, other)


@cache
def _combine_launch(target: str, shape: Shape, dtypes: Dtypes) -> Launch | None:
    if target == "ops":
        return None
    tokens, count, hidden = shape
    threads = 256
    template = {"H": hidden, "K": count, **_combine_types(dtypes)}
    groups = (_ceildiv(hidden, threads), tokens)
    return Launch(target, "moe_combine", template, groups, threads, (tokens, hidden), dtypes[1])


def _moe_combine_ops(expert_out: mx.array, weights: mx.array, h_mid: mx.array, shared: mx.array | None) -> mx.array:
    total = h_mid.astype(mx.float32)
    for k in range(expert_out.shape[1]):
        total = total + weights[:, k, None] * expert_out[:, k].astype(mx.float32)
    if shared is not None:
        total = total + shared.astype(mx.float32)
    return total.astype(h_mid.dtype)
