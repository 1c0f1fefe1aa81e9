"""Checks and times the kernels on this machine's GPU (Metal or CUDA), and MLX's own operations for comparison.

    python scripts/bench/bench_kernels.py [--gib 1.5] [--layers 256] [--skip-check] [--sections experts products ...]

Checks every operation against float64 numpy at the three target shapes in three dtypes, with fresh random inputs and
poisoned outputs, and shows that each bound catches planted faults. Then times one layer of experts and single
products at one token and a few, in chains (each launch reads the one before it) over more data than the caches hold.
Prints tables and ends with one line of JSON. Times are medians. "wall" is mx.eval of a graph built before; "gpu" is
the same while the GPU is kept busy until all launches are encoded, so that the host's share does not show; "build" is
Python's part. TB/s counts the weights only, against "gpu".

The section "geometry" checks every form of matrices that kernels read, then times one layer of 397B-A17B's experts and
a product in each width, in alternating rounds: the ratio of bytes a second to 4 bits' is the median of the rounds'.
`moeflux tune` tries tiles.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import mlx.core as mx
import numpy as np

from moeflux_mlx.formats.record import Record
from moeflux_mlx.opening.random_weights import random_parts
from moeflux_mlx.ops import backend, launch
from moeflux_mlx.ops.combine import moe_combine
from moeflux_mlx.ops.dequantize import dequantized_records
from moeflux_mlx.ops.experts import expert_down_combine, expert_gate_up
from moeflux_mlx.ops.forms import unpacked_float32
from moeflux_mlx.ops.linear import qmv
from moeflux_mlx.ops.matrix import Part
from moeflux_mlx.ops.records import Records
from moeflux_mlx.planning.settings import configure_mlx
from moeflux_mlx.quant import AFFINE_BITS, AFFINE_GROUPS, EXPERTS, GRID, Quant

SHAPES = {"35B-A3B": (2048, 512, 8), "397B-A17B": (4096, 1024, 10), "Cogito-671B": (7168, 2048, 8)}  # H, I, K
PRODUCTS = [
    (12288, 2048),
    (8192, 4096),
    (16384, 7168),
    (248320, 2048),
    (9216, 2048),
    (4096, 2048),
    (2048, 2048),
]
PAIRS = [(4096, 2048), (512, 2048), (8192, 4096)]  # O, I: a product and then one back to I, at several token counts
TOKENS = (1, 2, 4, 8)
FORM_PRODUCTS = [(20480, 4096), (61440, 4096)]  # for both tiles of one token; the GPU takes longer than the host
SECTIONS = ("experts", "products", "geometry")
BOUNDS = {mx.float32: 1e-3, mx.bfloat16: 2e-2, mx.float16: 5e-3}  # largest error over largest value, per row
SHIFTS = np.arange(8, dtype=np.uint32) * 4
Matrix = tuple[mx.array, mx.array, mx.array]
Stored = tuple[mx.array, ...]  # codes, scales and, if the form has them, the biases
MXFP4 = Quant(4, 32, "mxfp4")
COVER = 0.02  # seconds that the GPU is kept busy while the host encodes a chain
REPEATS, CHAIN = 7, 256  # of a timing, and products that follow one another in it
ROUNDS, LAUNCHES = 9, 64  # of every form
ROW = 1 << 25  # values of the row whose running sums keep it busy
TINY = {"SHAPES": {"397B-A17B": (512, 256, 2)}, "PRODUCTS": [(256, 128)], "PAIRS": [(256, 128)], "TOKENS": (1, 2)}
TINY |= {
    "FORM_PRODUCTS": [(256, 128)],
    "COVER": 1e-4,
    "ROW": 1 << 16,
    "REPEATS": 1,
    "CHAIN": 2,
    "ROUNDS": 1,
    "LAUNCHES": 2,
}


# ---- random weights


def random_words(*shape: int) -> mx.array:
    """Returns random uint32 values.

    mx.random.randint is exact up to 16 bits. If the highest bit were never set, codes would have a mean, and a model
    would send all tokens to nearly the same experts.
    """
    return mx.random.randint(0, 1 << 16, (*shape[:-1], 2 * shape[-1]), dtype=mx.uint16).view(mx.uint32)


def random_matrix(count: int, rows: int, columns: int) -> Matrix:
    """Returns `count` stacked 4-bit matrices whose product keeps the size of its input."""
    codes = random_words(count, rows, columns // 8)
    scales = mx.random.uniform(0.5, 1.5, (count, rows, columns // 64)) / (4.6 * columns**0.5)
    biases = -7.5 * scales * mx.random.uniform(0.9, 1.1, scales.shape)
    parts = codes, scales.astype(mx.bfloat16), biases.astype(mx.bfloat16)
    mx.eval(parts)
    return parts


def random_experts(count: int, hidden: int, inner: int) -> tuple[mx.array, list[Matrix]]:
    """Returns the same experts packed, [count, words] uint32, and as the three stacks that gather_qmm takes."""
    stacks = [random_matrix(count, *shape) for shape in ((inner, hidden), (inner, hidden), (hidden, inner))]
    words = [a.reshape(count, -1).view(mx.uint32) for matrix in stacks for a in matrix]
    blob = mx.concatenate(words, axis=1)
    mx.eval(blob)
    return blob, stacks


# ---- reference in float64


def wide(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def dequantised(w: mx.array, scales: mx.array, biases: mx.array, fault: str = "") -> np.ndarray:
    codes, s, b = np.array(w), wide(scales), wide(biases)
    if fault == "nibble order":
        codes = (codes >> 4 & 0x0F0F0F0F) | (codes & 0x0F0F0F0F) << 4
    if fault == "scale and bias swapped":
        s, b = b, s
    if fault == "off by one group":
        s, b = np.roll(s, 1, axis=-1), np.roll(b, 1, axis=-1)
    values = (codes[..., None] >> SHIFTS & 15).reshape(*s.shape, 64)
    return (values * s[..., None] + b[..., None]).reshape(codes.shape[0], -1)


FAULTS = ("nibble order", "scale and bias swapped", "off by one group")


def expert(stacks: list[Matrix], slot: int, fault: str = "") -> list[np.ndarray]:
    return [dequantised(*(a[slot : slot + 1].reshape(a.shape[1:]) for a in m), fault=fault) for m in stacks]


def swiglu(matrices: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    gate, up = matrices[0] @ x, matrices[1] @ x
    return gate / (1 + np.exp(-gate)) * up


def error(got: mx.array, want: np.ndarray) -> float:
    """Returns max |got - want| / max |want| of a row, the largest over all rows. NaN and unwritten outputs stay NaN."""
    difference = np.abs(wide(got) - want).max(axis=-1)
    return float(np.max(difference / np.abs(want).max(axis=-1)))


# ---- checks


def poisoned(build: Callable) -> Callable:
    """Builds kernels whose outputs contain NaN before they start."""
    return lambda *kernel: functools.partial(build(*kernel), init_value=float("nan"))


def check_experts(hidden: int, inner: int, count: int) -> dict[mx.Dtype, dict[str, float]]:
    """Returns, by dtype, the errors of gate_up and of down + combine, and the smallest error that a planted fault
    causes.
    """
    blob, stacks = random_experts(count + 3, hidden, inner)
    records = Records(blob, Record.make(hidden, inner))
    slots = np.random.default_rng().permutation(count + 3)[:count]
    index = mx.array(slots[None].astype(np.int32))
    matrices = [expert(stacks, int(s)) for s in slots]
    faulty = [expert(stacks, int(slots[0]), fault) for fault in FAULTS]
    errors = {}
    for dtype in BOUNDS:
        x, h_mid, shared = (mx.random.normal((1, hidden)).astype(dtype) for _ in range(3))
        weights = mx.random.uniform(0, 1, (1, count))
        act = expert_gate_up(x, index, records)
        out = expert_down_combine(act, index, records, weights, h_mid, shared)
        w, a = wide(weights)[0], wide(act)[0]  # down is compared for the activations that it was given
        downs = np.stack([m[2] @ a[k] for k, m in enumerate(matrices)])
        errors[dtype] = {
            "gate_up": error(act[0], np.stack([swiglu(m, wide(x)[0]) for m in matrices])),
            "down": error(out, wide(h_mid) + w @ downs + wide(shared)),
            "fault": min(error(act[0, :1], swiglu(m, wide(x)[0])[None]) for m in faulty),
        }
    return errors


def check_product(rows: int, columns: int, tokens: int, dtype: mx.Dtype) -> dict[str, float]:
    w, s, b = (a[0:1].reshape(a.shape[1:]) for a in random_matrix(1, rows, columns))
    x = mx.random.normal((tokens, columns)).astype(dtype)
    y = qmv(x, Part(EXPERTS, w, s, b))
    wrong = [error(y, wide(x) @ dequantised(w, s, b, fault).T) for fault in FAULTS]
    return {"qmv": error(y, wide(x) @ dequantised(w, s, b).T), "fault": min(wrong)}


def check_combine(hidden: int, count: int, dtype: mx.Dtype) -> dict[str, float]:
    out, places = mx.random.normal((2 * count, hidden)).astype(dtype), mx.arange(2 * count, dtype=mx.int32)
    h_mid, shared = (mx.random.normal((2, hidden)).astype(dtype) for _ in range(2))
    weights = mx.random.uniform(0, 1, (2, count))
    got = moe_combine(out, places.reshape(2, count), weights, h_mid, shared)
    parts = np.einsum("tk,tkh->th", wide(weights), wide(out).reshape(2, count, hidden))
    want = wide(h_mid) + parts + wide(shared)
    return {"combine": error(got, want), "fault": error(got, wide(h_mid) + parts)}


def check() -> list[dict]:
    rows = []
    for name, (hidden, inner, count) in SHAPES.items():
        for dtype, errors in check_experts(hidden, inner, count).items():
            results = [errors, check_combine(hidden, count, dtype)]
            results += [check_product(1032, hidden, tokens, dtype) for tokens in (1, 3, 8)]
            rows.append(verdict(name, dtype, results))
    rows_columns = max(PRODUCTS[:3])
    large = check_product(*rows_columns, 1, mx.bfloat16)
    return [*rows, verdict("{}x{}".format(*rows_columns), mx.bfloat16, [large])]


def verdict(name: str, dtype: mx.Dtype, results: list[dict[str, float]]) -> dict:
    """Prints and returns the largest error of each operation beside its bound and the smallest error of a planted
    fault.
    """
    bound = BOUNDS[dtype]
    errors = {k: max(r[k] for r in results if k in r) for r in results for k in r if k != "fault"}
    fault = min(r["fault"] for r in results)
    good = all(e <= bound for e in errors.values()) and fault > bound
    kind = str(dtype).split(".")[-1]
    text = "  ".join(f"{k} {e:.1e}" for k, e in errors.items())
    mark = "ok" if good else "WRONG"
    print(f"{name:12s} {kind:9s} {text}  bound {bound:g}, planted faults >= {fault:.1e}  {mark}")
    return {"shape": name, "dtype": kind, **errors, "fault": fault, "ok": good}


# ---- timing


@dataclass
class Times:
    """Microseconds per layer or product. `wall` is the time of mx.eval. `gpu` is the part of it that remains if MLX
    encodes the launches while the GPU does other work. `build` is the time that Python takes to build the graph."""

    wall: float
    gpu: float
    build: float

    def __str__(self) -> str:
        return f"{self.gpu:7.2f} us gpu {self.wall:7.2f} wall {self.build:5.1f} build"


def seconds(build: Callable[[], mx.array | list[mx.array]]) -> tuple[float, float]:
    """Returns the seconds to evaluate and to build one graph."""
    start = time.perf_counter()
    out = build()
    built = time.perf_counter()
    mx.eval(out)
    return time.perf_counter() - built, built - start


@functools.cache
def long_row() -> tuple[mx.array, float]:
    """Returns a vector, and the seconds that its running sum takes."""
    row = mx.random.uniform(-1, 1, (1, ROW))
    mx.eval(row)
    return row, statistics.median(seconds(lambda: mx.cumsum(row, axis=1))[0] for _ in range(5))


def busy(least: float) -> mx.array:
    """Returns a zero that takes the GPU at least `least` seconds. It is made of running sums of one row, which use only
    a small part of the GPU and do not lower its clocks, as products of large matrices would."""
    row, took = long_row()
    for _ in range(1 + int(least / took)):
        row = mx.cumsum(row, axis=1) * 1e-3
    return (row[0, :1] * 0).astype(mx.bfloat16)


def timed(chain: Callable[[mx.array], mx.array], x: mx.array, launches: int) -> Times:
    mx.eval(chain(x))
    runs = [seconds(lambda: chain(x)) for _ in range(REPEATS)]
    wall, build = (statistics.median(r) for r in zip(*runs, strict=True))
    cover = 1.5 * wall + 0.005
    mx.eval(chain(x + busy(cover)))
    spare = []
    for _ in range(REPEATS):
        alone = seconds(lambda: x + busy(cover))[0]
        spare.append(seconds(lambda: chain(x + busy(cover)))[0] - alone)
    return Times(*(1e6 * t / launches for t in (wall, statistics.median(spare), build)))


def copy_bandwidth() -> float:
    """Returns the GB/s of an elementwise operation, counting the bytes that are read and written."""
    a = random_words(ROW >> 11, ROW >> 11)
    mx.eval(a)

    def chain(x: mx.array) -> mx.array:
        for _ in range(8):
            x = x + 1
        return x

    mx.eval(chain(a))
    return 8 * 2 * a.nbytes / statistics.median(seconds(lambda: chain(a))[0] for _ in range(7)) / 1e9


@functools.partial(mx.compile, shapeless=True)
def glu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


def gather_layer(x: mx.array, stacks: list[Matrix], slots: mx.array, weights: mx.array) -> mx.array:
    """Computes one layer of experts as mlx-lm does: three gather_qmm, SwiGLU, weighted sum, residual."""
    each = mx.expand_dims(x, (-2, -3))

    def product(v: mx.array, matrix: Matrix) -> mx.array:
        return mx.gather_qmm(v, *matrix, rhs_indices=slots, transpose=True, group_size=64, bits=4)

    act = glu(product(each, stacks[0]), product(each, stacks[1]))
    down = product(act, stacks[2]).squeeze(-2)
    return x + (down * weights[..., None].astype(x.dtype)).sum(axis=-2)


def kernel_layer(x: mx.array, records: Records, slots: mx.array, weights: mx.array) -> mx.array:
    act = expert_gate_up(x, slots, records)
    return expert_down_combine(act, slots, records, weights, x)


def time_experts(name: str, tokens: int, gib: float, layers: int) -> dict:
    """Times a chain of layers. Each layer has its own experts, as many as its tokens choose, in random order. The order
    is the same for all layers, because in a model the router has just written it, so it is in the caches."""
    hidden, inner, count = SHAPES[name]
    each = tokens * count
    size = 3 * hidden * inner * 9 // 16
    groups = max(2, int(gib * 2**30 / (size * each)))
    blob, stacks = random_experts(groups * each, hidden, inner)
    cuts = [slice(g * each, (g + 1) * each) for g in range(groups)]
    blobs = [blob[cut] for cut in cuts]
    dense = [[tuple(a[cut] for a in matrix) for matrix in stacks] for cut in cuts]
    shuffled = np.random.permutation(each).astype(np.uint32).reshape(tokens, count)
    slots = mx.array(shuffled) + mx.array(0, mx.uint32)  # the ids are on the device
    weights = mx.random.uniform(0, 2e-2, (tokens, count))
    x = mx.random.normal((tokens, hidden)).astype(mx.bfloat16)
    records = [Records(blob, Record.make(hidden, inner)) for blob in blobs]
    mx.eval(blobs, dense, slots, weights, x)

    def ours(h: mx.array) -> mx.array:
        for i in range(layers):
            h = kernel_layer(h, records[i % groups], slots, weights)
        return h

    def theirs(h: mx.array) -> mx.array:
        for i in range(layers):
            h = gather_layer(h, dense[i % groups], slots, weights)
        return h

    row = {"shape": name, "T": tokens}
    return report(row, f"{name:12s}", timed(ours, x, layers), timed(theirs, x, layers), each * size, "gather_qmm")


def report(row: dict, name: str, ours: Times, theirs: Times, size: float, other: str) -> dict:
    """Prints one comparison and returns the row with its figures. `size` is the bytes of weights that are read."""
    row |= {"us": asdict(ours), f"{other}_us": asdict(theirs), "TB/s": size / ours.gpu / 1e6}
    row |= {"x": theirs.gpu / ours.gpu, "x_wall": theirs.wall / ours.wall}
    print(
        f"{name} T={row['T']} {ours}  {row['TB/s']:5.2f} TB/s | {other} {theirs} | "
        f"{row['x']:5.2f} x, wall {row['x_wall']:5.2f} x"
    )
    return row


def time_product(rows: int, columns: int, gib: float) -> dict:
    """Times y = W x in a chain: the first values of y are the next x."""
    count = max(2, min(400, int(gib * 2**30 / (rows * columns * 9 // 16))))
    w, s, b = random_matrix(count, rows, columns)
    matrices = [tuple(a[i : i + 1].reshape(a.shape[1:]) for a in (w, s, b)) for i in range(count)]
    x = mx.random.normal((1, columns)).astype(mx.bfloat16)
    mx.eval(matrices, x)
    order = [matrices[i % count] for i in range(max(CHAIN, count))]

    def chain(product: Callable, y: mx.array) -> mx.array:
        for m in order:
            y = product(y, *m).reshape(-1)[:columns][None]  # a view; slicing two axes would copy
        return y

    return compare(chain, x, len(order), f"{rows}x{columns}", rows * columns * 9 / 16)


def time_pair(rows: int, columns: int, tokens: int, gib: float) -> dict:
    """Times y = W x, x = V y: two products per step."""
    count = max(2, min(100, int(gib * 2**30 / (rows * columns * 9 // 8))))
    stacks = random_matrix(count, rows, columns), random_matrix(count, columns, rows)
    pool = [[a[i : i + 1].reshape(a.shape[1:]) for a in m] for i in range(count) for m in stacks]
    order = [pool[i % len(pool)] for i in range(CHAIN)]
    x = mx.random.normal((tokens, columns)).astype(mx.bfloat16)
    mx.eval(pool, x)

    def chain(product: Callable, y: mx.array) -> mx.array:
        for m in order:
            y = product(y, *m)
        return y

    return compare(chain, x, len(order), f"{rows}x{columns} and back", rows * columns * 9 / 16)


def our_product(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    return qmv(x, Part(EXPERTS, w, scales, biases))


def mlx_product(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    return mx.quantized_matmul(x, w, scales, biases, transpose=True, group_size=64, bits=4)


def compare(chain: Callable, x: mx.array, launches: int, name: str, size: float) -> dict:
    ours = timed(functools.partial(chain, our_product), x, launches)
    theirs = timed(functools.partial(chain, mlx_product), x, launches)
    row = {"product": name, "T": x.shape[0]}
    return report(row, f"{name:20s}", ours, theirs, size, "quantized_matmul")


# ---- every form


def random_stored(count: int, rows: int, columns: int, quant: Quant, dtype: mx.Dtype = mx.bfloat16) -> Stored:
    """Returns `count` stacked matrices of any form whose product keeps the size of its input."""
    if not quant.is_of_mlx:
        parts = zip(quant.parts, random_parts(quant, (count, rows, columns), dtype), strict=True)
        return tuple(mx.broadcast_to(part, (count, *part.shape)) if name == GRID else part for name, part in parts)
    codes, shape = random_words(count, rows, quant.words(columns)), (count, rows, quant.groups(columns))
    if not quant.has_biases:
        least = 127 - round(np.log2(3 * columns**0.5))
        return codes, mx.random.randint(least, least + 2, shape).astype(mx.uint8)
    steps = 2**quant.bits
    scales = mx.random.uniform(0.5, 1.5, shape) / (0.29 * steps * columns**0.5)
    biases = -(steps - 1) / 2 * scales * mx.random.uniform(0.9, 1.1, shape)
    return codes, scales.astype(dtype), biases.astype(dtype)


def random_records(count: int, record: Record, dtype: mx.Dtype = mx.bfloat16) -> tuple[Records, list[Stored]]:
    parts = record.gate, record.up, record.down
    stacks = [random_stored(count, part.rows, part.columns, part.quant, dtype) for part in parts]
    blob = mx.concatenate([a.reshape(count, -1).view(mx.uint32) for stack in stacks for a in stack], axis=1)
    mx.eval(blob, stacks)
    return Records(blob, record), stacks


def check_form(quants: tuple[Quant, Quant, Quant], dtype: mx.Dtype, kind: str) -> dict:
    """Returns the largest errors of every kernel on matrices of one form, with bfloat16 activations, and of a planted
    fault.
    """
    hidden, inner, count = 512, 256, 3
    records, stacks = random_records(count, Record.make(hidden, inner, quants, 4 * 2**20, kind), dtype)
    x, mid = (mx.random.normal((1, hidden)).astype(mx.bfloat16) for _ in range(2))
    slots, weights = mx.array([[2, 0, 1]], mx.int32), mx.random.uniform(0, 1, (1, count))
    values = [wide(unpacked_float32(q, *stack)) for q, stack in zip(quants, stacks, strict=True)]
    act = expert_gate_up(x, slots, records)
    out = expert_down_combine(act, slots, records, weights, mid)
    want_act = np.stack([swiglu([values[0][s], values[1][s]], wide(x)[0]) for s in (2, 0, 1)])
    downs = np.stack([values[2][s] @ a for s, a in zip((2, 0, 1), wide(act)[0], strict=True)])
    errors = {"gate_up": error(act[0], want_act), "down": error(out, wide(mid) + wide(weights)[0] @ downs)}
    for tokens in (1, 3):
        rows = mx.random.normal((tokens, hidden)).astype(mx.bfloat16)
        parts = [a[0] for a in stacks[0]]
        got = qmv(rows, Part(quants[0], *parts))
        errors[f"qmv {tokens}"] = error(got, wide(rows) @ values[0][0].T)
    gate_up, down = dequantized_records(records, mx.array([1, 2], mx.uint32), mx.float32)
    errors["dequantize"] = max(
        error(gate_up[1], np.concatenate([v[2] for v in values[:2]])), error(down[0], values[2][1])
    )
    fault = error(act[0], np.roll(want_act, 1, axis=0))
    ok = all(e <= BOUNDS[mx.bfloat16] for e in errors.values()) and fault > BOUNDS[mx.bfloat16]
    text = "  ".join(f"{name} {value:.1e}" for name, value in errors.items())
    print(
        f"{quants[0]}, down {quants[2].bits}, {kind:4s} {text}  fault {fault:.1e}  {'ok' if ok else 'WRONG'}",
        flush=True,
    )
    return {"form": str(quants[0]), "down_form": str(quants[2]), "scales": kind, **errors, "ok": ok}


def check_forms() -> list[dict]:
    kinds = [(mx.bfloat16, "BF16"), (mx.float16, "F16"), (mx.float32, "F32")]
    affine = [Quant(bits, group) for bits in AFFINE_BITS for group in AFFINE_GROUPS]
    rows = [check_form((one,) * 3, *kinds[i % 3 if i % 2 else 0]) for i, one in enumerate(affine)]
    rows.append(check_form((MXFP4,) * 3, mx.bfloat16, "U8"))
    return [*rows, check_form((Quant(3, 64), Quant(3, 64), Quant(6, 64)), mx.bfloat16, "BF16")]


@dataclass(frozen=True)
class Launches:
    """Launches that use different weights in turn: the function that builds them from a start, the start, and the bytes
    that one launch reads.

    The launches of a chain wait for each other, as in a model, and the GPU does other work until the host has encoded
    them. Other launches do not wait, and their time is that of the whole evaluation.
    """

    build: Callable[[mx.array], mx.array | list[mx.array]]
    start: mx.array
    size: float
    is_chain: bool = True

    def seconds(self) -> float:
        """Returns the seconds of all launches."""
        if not self.is_chain:
            return seconds(lambda: self.build(self.start))[0]
        alone = seconds(lambda: self.start + busy(COVER))[0]
        return seconds(lambda: self.build(self.start + busy(COVER)))[0] - alone


def form_products(quant: Quant, rows: int, columns: int, gib: float, launches: int) -> Launches:
    matrices = [[a[0] for a in random_stored(1, rows, columns, quant)] for _ in range(2)]
    while len(matrices) * sum(a.nbytes for a in matrices[0]) < gib * 2**30:
        matrices.append([a[0] for a in random_stored(1, rows, columns, quant)])
    start = mx.random.normal((1, columns)).astype(mx.bfloat16)
    mx.eval(matrices, start)

    def build(x: mx.array) -> list[mx.array]:
        return [qmv(x, Part(quant, *matrices[i % len(matrices)])) for i in range(launches)]

    return Launches(build, start, sum(a.nbytes for a in matrices[0]), is_chain=False)


def form_chains(quant: Quant, gib: float, launches: int) -> dict[str, Launches]:
    """Returns the chains by name. Each uses `gib` of weights in turn."""
    hidden, inner, count = SHAPES["397B-A17B"]
    packed = Record.make(hidden, inner, (quant,) * 3, Record.make(hidden, inner, (quant,) * 3).size)
    groups = max(2, int(gib * 2**30 / (packed.size * count)))
    records = [random_records(count, packed)[0] for _ in range(groups)]
    slots = mx.array(np.random.permutation(count).astype(np.uint32)[None]) + mx.array(0, mx.uint32)
    weights, act = mx.random.uniform(0, 2e-2, (1, count)), mx.random.normal((1, count, inner)).astype(mx.bfloat16)
    start = mx.random.normal((1, hidden)).astype(mx.bfloat16)
    mx.eval(slots, weights, act, start)

    def gate_up(x: mx.array) -> mx.array:
        for i in range(launches):
            x = expert_gate_up(x, slots, records[i % groups]).reshape(-1)[:hidden][None]
        return x

    def down(x: mx.array) -> mx.array:
        for i in range(launches):
            x = expert_down_combine(act, slots, records[i % groups], weights, x)
        return x

    down_bytes = count * (packed.size - packed.down.fields[0].offset)
    chains = {
        "gate_up": Launches(gate_up, start, count * packed.size - down_bytes),
        "down": Launches(down, start, down_bytes),
    }
    return chains | {f"qmv {r}x{c}": form_products(quant, r, c, gib, launches) for r, c in FORM_PRODUCTS}


def time_forms(gib: float) -> list[dict]:
    """Times every width in alternating rounds, beside 4 bits in groups of 64."""
    quants = [Quant(4, 64), *(Quant(bits, 64) for bits in AFFINE_BITS if bits != 4), Quant(4, 32), Quant(3, 128), MXFP4]
    chains = {quant: form_chains(quant, gib / 2, LAUNCHES) for quant in quants}
    for parts in chains.values():
        for one in parts.values():
            mx.eval(one.build(one.start))
    rows = []
    for name in chains[quants[0]]:
        rates: dict[Quant, list[float]] = {quant: [] for quant in quants}
        for _ in range(ROUNDS):
            for quant in quants:
                one = chains[quant][name]
                rates[quant].append(LAUNCHES * one.size / one.seconds())
        for quant in quants:
            ratio = statistics.median(a / b for a, b in zip(rates[quant], rates[quants[0]], strict=True))
            rate, size = statistics.median(rates[quant]), chains[quant][name].size
            rows.append({"op": name, "form": str(quant), "us": 1e6 * size / rate, "TB/s": rate / 1e12, "x4": ratio})
            print(
                f"{name:14s} {quant!s:38s} {1e6 * size / rate:7.2f} us {rate / 1e12:6.2f} TB/s {ratio:5.2f} of 4 bits'"
            )
    return rows


def bench_geometry(gib: float, skip_check: bool) -> dict:
    return {"check": [] if skip_check else check_forms(), "forms": time_forms(gib)}


# ---- command


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.5, help="GiB of weights that one timing rotates over")
    parser.add_argument("--layers", type=int, default=256, help="layers of experts in one evaluation")
    parser.add_argument("--skip-check", action="store_true", help="time only")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="what is checked and timed")
    parser.add_argument("--tiny", action="store_true", help="with tiny shapes, to see whether it runs; a CPU will do")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    configure_mlx()  # as every command does; MLX's own operations run under the same settings
    if args.tiny:
        globals().update(TINY)
    elif not backend.has_kernels():
        raise SystemExit("no GPU: mx.default_device() is the CPU; run on Apple silicon or with mlx[cuda13]")
    device = mx.device_info()
    result: dict = {
        "mlx": mx.__version__,
        "backend": backend.name(),
        "device": device.get("device_name", ""),
    }
    print(f"mlx {mx.__version__}, {result['backend']}, {result['device']}")
    sections = set(args.sections)
    if sections & {"experts", "products"}:
        if not args.skip_check:
            build, launch.built = launch.built, poisoned(launch.built)
            result["check"] = check()
            launch.built = build
        result["copy_GB/s"] = copy_bandwidth()
        print(f"copy {result['copy_GB/s']:.0f} GB/s")
    if "experts" in sections:
        result["experts"] = [time_experts(name, t, args.gib, args.layers) for name in SHAPES for t in TOKENS]
    if "products" in sections:
        result["products"] = [time_product(*shape, args.gib) for shape in PRODUCTS]
        result["products"] += [time_pair(*shape, tokens, args.gib) for shape in PAIRS for tokens in TOKENS]
    if "geometry" in sections:
        result["geometry"] = bench_geometry(args.gib, args.skip_check)
    print(json.dumps(result))
    checked = [*result.get("check", []), *result.get("geometry", {}).get("check", [])]
    if not all(row["ok"] for row in checked):
        raise SystemExit("a check failed")


if __name__ == "__main__":
    main()
