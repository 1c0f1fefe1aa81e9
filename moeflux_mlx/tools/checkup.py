"""Compares this machine's kernels with float64 arithmetic, in a second or two.

Each check runs an operation as a model would, on small random inputs, against the same sum in numpy. It knows neither
models nor files.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..formats.record import Projection, Record
from ..kinds import Router
from ..opening.kernel_cache import threads_allowed
from ..ops import backend, native
from ..ops.experts import expert_ffn
from ..ops.kernel_files import Program
from ..ops.launch import KernelText, threads_named
from ..ops.linear import linear
from ..ops.matrix import Part
from ..ops.records import Records
from ..ops.route import route
from ..planning.machine import activation_bits
from ..quant import EXPERTS

HIDDEN, INNER, EXPERT_COUNT, TOP_K = 512, 256, 8, 4
RATED, RATED_WIDTH, ROUND = 5, 4096, 4  # experts of three square matrices, 142 MB together; products that are timed
LONG_ENOUGH = 0.4  # seconds in which a GPU has reached its clock
BOUNDS = {
    mx.float32: 1e-4,
    mx.bfloat16: 2e-2,
}  # largest error over largest value; a wrong order of codes gives over 0.5

ASKED = 1024  # threads of a threadgroup that every Apple GPU allows for a kernel of few registers
# Values that are all in registers before the first is written.
CROWDED = """
const uint mine = thread_position_in_grid.x;
float held[96], sum = 0;
MLX_MTL_PRAGMA_UNROLL
for (uint i = 0; i < 96; i++) {
  held[i] = x[(mine + 31 * i) % 1024];
}
MLX_MTL_PRAGMA_UNROLL
for (uint i = 0; i < 96; i++) {
  sum = metal::fma(sum, held[i], held[i]);
}
MLX_MTL_PRAGMA_UNROLL
for (uint i = 0; i < 96; i++) {
  out[96 * mine + i] = held[i] * sum;
}
"""


@dataclass(frozen=True)
class Check:
    """The result of checking one operation.

    Args:
        name: the operation.
        error: largest difference from the reference over the reference's largest value.
        bound: the largest error that rounding explains.
        seconds: duration of the check, compiling included.
    """

    name: str
    error: float
    bound: float
    seconds: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.bound  # False for NaN


def runs_on() -> str:
    """The device that computes, in words."""
    if backend.has_kernels():
        return {"metal": "Apple GPU: Metal kernels", "cuda": "NVIDIA GPU: CUDA kernels"}[backend.name()]
    if native.available():
        return f"CPU: native kernels ({native.instruction_paths()[0]}, {native.threads()} threads)"
    return "CPU: plain MLX operations, 30 times slower: the native kernels are not built"


def thread_limits() -> tuple[int, int]:
    """The threads that Metal allows in a threadgroup of a kernel with many registers, and of one that also declares its
    threads.

    Before the M3 the first is less than 1,024; 0: it does not build. No kernel of a model depends on either.
    """
    return _threads_given(""), _threads_given(threads_named(ASKED))


def _threads_given(header: str) -> int:
    text = KernelText(f"moeflux_crowded{len(header)}", ["x"], ["out"], header, CROWDED)
    try:
        return threads_allowed(Program(text, [mx.float32], [mx.float32]))
    except RuntimeError:
        return 0


def check_operations(dtype: mx.Dtype) -> list[Check]:
    """Products, experts and routing with activations of `dtype`, float32, or bfloat16 on a GPU."""
    checks = {"product": _product, "experts": _experts, "routing": _routing}
    return [_timed(name, check, dtype) for name, check in checks.items()]


def _timed(name: str, check: Callable[[np.random.Generator, mx.Dtype], float], dtype: mx.Dtype) -> Check:
    start = time.perf_counter()
    error = check(np.random.default_rng(0), dtype)
    return Check(name, error, BOUNDS[dtype], time.perf_counter() - start)


def _product(random: np.random.Generator, dtype: mx.Dtype) -> float:
    """One token through a 4-bit matrix large enough for the kernels."""
    record = random_records(random, 1, 4096, 1024)
    words = record.blob[0]
    gate = record.record.gate
    codes, scales, biases = (mx.array(part) for part in _fields(words, gate))
    x = mx.array(random.standard_normal((1, gate.columns)), dtype)
    part = Part(gate.quant, codes, scales.view(mx.bfloat16), biases.view(mx.bfloat16))
    got = backend.leave(linear(backend.enter(x, dtype), part))
    return _error(got, _wide(x) @ dense(words, gate).T)


def _experts(random: np.random.Generator, dtype: mx.Dtype) -> float:
    """Two tokens through their experts, read from records by slot, weighted and added to the stream."""
    records = random_records(random, EXPERT_COUNT, HIDDEN, INNER)
    x, residual = (mx.array(random.standard_normal((2, HIDDEN)), dtype) for _ in range(2))
    slots = np.stack([random.permutation(EXPERT_COUNT)[:TOP_K] for _ in range(2)]).astype(np.int32)
    weights = mx.array(random.uniform(0.1, 1.0, slots.shape), mx.float32)
    want = _wide(residual).copy()
    for token in range(2):
        for slot, weight in zip(slots[token], np.array(weights)[token], strict=True):
            want[token] += weight * _expert(records, slot, _wide(x)[token])
    inputs = [backend.enter(array, dtype) for array in (x, weights, residual)]
    x, weights, residual = inputs
    records = Records(backend.of_kind(records.blob, x), records.record)
    return _error(backend.leave(expert_ffn(x, slots, records, weights, residual, None)), want)


def _routing(random: np.random.Generator, dtype: mx.Dtype) -> float:
    """Checks the weights of the likeliest experts, in float32 for any dtype of activations."""
    logits = mx.array(random.standard_normal((4, 128)), mx.float32)
    ids, weights = (np.asarray(a) for a in route(backend.enter(logits, dtype), Router(128, TOP_K)))
    wide = np.exp(_wide(logits))
    want_ids = np.argsort(-wide, axis=-1, kind="stable")[:, :TOP_K]
    want = np.take_along_axis(wide, want_ids, axis=-1)
    if not np.array_equal(ids, want_ids):
        return float("inf")
    return float(np.abs(weights - want / want.sum(axis=-1, keepdims=True)).max())


def product_rate(dtype: mx.Dtype) -> float:
    """Bytes of 4-bit weights per second in products with one row of `dtype`, which a CPU rounds as models do by
    default. The matrix exceeds the caches, so memory sets the rate, and a product takes far longer than the host needs
    for it. The fastest round counts: a GPU that had no work has a low clock at first.
    """
    records = random_records(np.random.default_rng(0), RATED, RATED_WIDTH, RATED_WIDTH)
    each = [_fields(words, projection) for words in records.blob for projection in records.record.projections]
    codes, scales, biases = (mx.array(np.concatenate(parts)) for parts in zip(*each, strict=True))
    part = Part(EXPERTS, codes, scales.view(mx.bfloat16), biases.view(mx.bfloat16))
    mx.eval(part.weight, part.second, part.third)
    nbytes = codes.nbytes + scales.nbytes + biases.nbytes

    def seconds() -> float:
        x = backend.enter(mx.ones((1, RATED_WIDTH), dtype), dtype)
        start = time.perf_counter()
        mx.eval([backend.leave(linear(x, part)) for _ in range(ROUND)])
        return (time.perf_counter() - start) / ROUND

    with native.activations(activation_bits("auto", None)):
        return nbytes / least_seconds(seconds)


def least_seconds(seconds: Callable[[], float]) -> float:
    """The least of what `seconds` measures in `LONG_ENOUGH` seconds, after a first call, which compiles."""
    seconds()
    made, end = [seconds()], time.perf_counter() + LONG_ENOUGH
    while time.perf_counter() < end:
        made.append(seconds())
    return min(made)


def random_records(random: np.random.Generator, count: int, hidden: int, inner: int) -> Records:
    """Records of random codes whose products keep the size of their inputs."""
    record = Record.make(hidden, inner, (EXPERTS,) * 3)
    blob = random.integers(0, 1 << 32, (count, record.stride // 4), dtype=np.uint32)
    for projection in record.projections:
        _, scales, biases = projection.fields
        values = random.uniform(0.5, 1.5, (count, *scales.shape)).astype(np.float32) / (4.6 * projection.columns**0.5)
        for field, one in ((scales, values), (biases, -7.5 * values)):
            blob[:, field.words] = (one.view(np.uint32) >> 16).astype(np.uint16).reshape(count, -1).view(np.uint32)
    return Records(blob, record)


def dense(words: np.ndarray, projection: Projection) -> np.ndarray:
    """A record's matrix [rows, columns] in float64: weight = scale * code + bias, first code in the lowest bits."""
    codes, scales, biases = _fields(words, projection)
    values = (codes[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(projection.rows, -1)
    wide = [(part.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for part in (scales, biases)]
    scale, bias = (np.repeat(part, projection.quant.group_size, axis=1) for part in wide)
    return values * scale + bias


def _fields(words: np.ndarray, projection: Projection) -> list[np.ndarray]:
    """The matrix's codes as uint32, its scales and biases as the bits of bfloat16."""
    views = [words[field.words].view(np.uint32 if field.dtype == "U32" else np.uint16) for field in projection.fields]
    return [view.reshape(field.shape) for view, field in zip(views, projection.fields, strict=True)]


def _expert(records: Records, slot: int, x: np.ndarray) -> np.ndarray:
    gate, up, down = (dense(records.blob[slot], part) for part in records.record.projections)
    act = gate @ x
    return down @ (act / (1 + np.exp(-act)) * (up @ x))


def _wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def _error(got: mx.array, want: np.ndarray) -> float:
    return float(np.abs(_wide(got) - want).max() / np.abs(want).max())
