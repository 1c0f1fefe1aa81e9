"""Native CPU kernels: matrix products, routed experts and the small operations of a model.

Promises: float32 accumulation; a result depends on the processor's instruction set only, not on the
number of threads, the slots an expert sits in, or the values of other rows in the call; read-only inputs
(a mapped file) are fine; wrong dtypes, shapes, alignment or bounds raise before anything is written.
With AVX-512 VNNI, 4-bit weights in groups of 64 have two exact kernels with different bits: the rows of a step, up to
`MAX_TOKENS`, are multiplied in integers, and the rows of a prompt in floats. Other forms have one kernel for any number
of rows. Up to four rows go through a matrix together, and each has the bits that it has alone.
Inside `activations(8)` or `activations(16)` products round the activations of each group of weights to that many bits,
if the form and the processor have such a product. A row then has the same bits alone and among others, on every x86-64
instruction set that is used.
Calls release the GIL and may come from several threads; they take turns. The thread team is as large
as the physical cores this process may use, sleeps between bursts, and is started anew after a fork.

Arguments are C-contiguous numpy arrays or MLX arrays (evaluated on access); float32
unless said otherwise. `scales` and `biases` are bfloat16 (MLX), uint16 (bfloat16 bits), float16 or float32,
or scales alone are uint8 (E8M0, or E4M3 in groups of 16). Nested scales of GGUF's forms are uint8 too, with `supers` in
place of biases where the form has them; a symmetric form has its `supers` as scales.
`out` receives the result if given; it must be writable and overlap no input.

Does not know: models, files, MLX streams. If there was no compiler at installation, the extension is missing:
`available()` is False, and the MLX twins in the other modules compute.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..errors import MoefluxError, warn
from ..formats.record import Projection, Record
from ..installation import module_if_here, reinstall_command
from ..kinds import FORMS, SILU, Activation
from ..quant import E4M3, E8M0, GLOBAL_UNIT, TABLE, Quant
from .cores import cores
from .interrupt import pieces
from .stand_ins import NativeFunctions, stand_ins
from .tiles import MAX_TOKENS

if TYPE_CHECKING:
    import mlx.core as mx

Buffer: TypeAlias = "np.ndarray | mx.array"
NOTHING = np.zeros(0, np.float32)  # in place of an array that there is none of
EXACT = 24  # bits of activations that nothing is lost of beside float32's own rounding
ACTIVATIONS = (8, 16, EXACT)
KINDS = ("BF16", "F16", "F32", E8M0, E4M3)  # types of a record's scales, in the order of the kernels' numbers
TABLES = ("iq4_nl", "iq4_xs", "iq3_xxs", "iq3_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m", "tq1_0", "tq2_0")

MISSING = (
    "the native CPU kernels are not built, so decoding on the CPU is 30 times slower or more; "
    "install a C compiler (gcc or clang), then "
)


class _Chosen(threading.local):
    bits = EXACT


_chosen = _Chosen()


@contextmanager
def activations(bits: int) -> Iterator[None]:
    """Products of this thread round activations to 8 or 16 bits, or to EXACT, until the block is left."""
    before, _chosen.bits = _chosen.bits, bits
    try:
        yield
    finally:
        _chosen.bits = before


_native = module_if_here("moeflux_mlx.ops._native")


def available() -> bool:
    """True if the extension was built."""
    return _native is not None


def warn_if_missing() -> None:
    """Warn (MoefluxWarning) once per process, with the remedy, if the extension was not built."""
    if not available():
        warn_once()


@cache
def warn_once() -> None:
    """The warning of `warn_if_missing`, until the cache is cleared."""
    warn(MISSING + reinstall_command())


def extension() -> NativeFunctions:
    """The extension with the kernels, or its stand-in.

    Raises:
        MoefluxError: it was not built.
    """
    if not available():
        raise MoefluxError(MISSING + reinstall_command())
    return stand_ins().extension or _native


def set_threads(count: int) -> None:
    """Size of the thread team, at least 1 (no helpers) and at most 64; results do not depend on it."""
    extension().set_threads(count)


def threads() -> int:
    """Size of the thread team."""
    return extension().threads()


def instruction_paths() -> list[str]:
    """Instruction sets usable here, fastest first: "avx512vnni", "avx512", "avx2", "portable". The first is in use."""
    return extension().paths()


def use_path(path: str) -> None:
    """Computes with one of the `instruction_paths` from now on; the default is the first.

    Raises:
        ValueError: there is no such path here.
    """
    extension()._force(path)


def _result(out: np.ndarray | None, *shape: int) -> np.ndarray:
    return np.empty(shape, np.float32) if out is None else out


def linear(
    x: Buffer,
    quant: Quant | None,
    w: Buffer,
    scales: Buffer | None = None,
    third: Buffer | None = None,
    out: np.ndarray | None = None,
    norm: tuple[Buffer, float] | None = None,
    residual: Buffer | None = None,
) -> np.ndarray:
    """norm(x[T, I]) @ W.T + residual[T, O] -> [T, O]; `norm` is the weight [I] and epsilon of `rms_norm`.

    W holds codes (w uint32 [O, I * bits / 32]) with scales [O, I / group] and, as its form has them, as many biases or
    a global scale [O, 1], and I is a multiple of 64; or, without `quant` and them, dense float32 [O, I], I a multiple
    of 16. Up to T = 4 the weights are read from memory once, beyond that again from the cache.
    """
    out = _result(out, x.shape[0], w.shape[0])
    form = (quant.bits, quant.group_size, _source(quant)) if quant else (0, 0, 0)
    weight, eps = norm or (None, 0.0)
    alone = x.shape[0] <= MAX_TOKENS
    biases, factor = _apart(quant, third)
    added, given = residual if factor is None else None, (w, scales, biases, *form, _chosen.bits, weight, eps)
    if alone:
        extension().linear(x, *given, added, alone, out)
    else:
        for rows in pieces(x.shape[0], x.shape[1] * w.shape[0]):
            extension().linear(x[rows], *given, None if added is None else added[rows], alone, out[rows])
    if factor is not None:
        out *= factor.reshape(-1)
        out += 0 if residual is None else np.asarray(residual)
    return out


def _apart(quant: Quant | None, third: Buffer | None) -> tuple[Buffer | None, np.ndarray | None]:
    """Biases, and what multiplies the scales of each row [O, 1]."""
    if quant is None or not quant.has_global_scale:
        return third, None
    return None, np.asarray(third) * np.float32(1 / GLOBAL_UNIT)


def _source(quant: Quant) -> int:
    """The kernels' number of where scales and biases come from: both are stored, or scales alone of a symmetric form,
    or nested scales, or what a form with a table has.
    """
    if quant.is_of_mlx or quant.has_biases:
        return 0
    return TABLES.index(quant.mode) + 3 if quant.codes == TABLE else 2 if quant.is_nested else 1


def dequantize(
    quant: Quant, w: Buffer, scales: Buffer, third: Buffer | None = None, out: np.ndarray | None = None
) -> np.ndarray:
    """w, scales and third as for `linear` -> float32 [O, I]."""
    out = _result(out, w.shape[0], 32 * w.shape[1] // quant.bits)
    biases, factor = _apart(quant, third)
    extension().dequantize(w, scales, biases, quant.bits, quant.group_size, _source(quant), out)
    if factor is not None:
        out *= factor
    return out


def _places(*projections: Projection) -> tuple[int, ...]:
    """The places in a record of matrices of one form, and the form; without biases of groups or a global scale, the
    scales' place is repeated. Then the place of the products' biases (-1 for none) and their kind.
    """
    last = projections[-1]
    source = _source(last.quant)
    fields = [field for one in projections for field in (*one.codes[:2], one.codes[-1])]
    places = [field.words.start for field in fields]
    kind = last.quant.scale if last.quant.scale in KINDS else "F16" if source else last.fields[1].dtype
    biases = [-1 if one.bias is None else one.bias.words.start for one in projections]
    kinds = (KINDS.index(kind), *biases, 0 if last.bias is None else KINDS.index(last.bias.dtype))
    return (*places, last.quant.bits, last.quant.group_size, source, *kinds)


def _number(activation: Activation) -> tuple[int, float, float]:
    """The kernels' number of the activation's form, its limit, and that of gate."""
    return FORMS.index(activation.form), activation.limit or 0.0, activation.gate_limit or 0.0


def expert_gate_up(
    x: Buffer, blob: Buffer, slots: Buffer, record: Record, out: np.ndarray | None = None, alone: bool = True
) -> np.ndarray:
    """activation(gate_e x_t, up_e x_t) for each slot of each token -> act[T, K, I], biases added before.

    x [T, H]; blob uint32 [S, words] holds records of the geometry `record`, one in each row, read in place; slots int32
    [T, K] are rows of it. An expert that several tokens share is read once per call. `alone`: each row has the bits
    that it has by itself, as in a step; else those that it has in a prompt.
    """
    out = _result(out, *slots.shape, record.moe_intermediate_size)
    places, activation = _places(record.gate, record.up), _number(record.activation)
    extension().expert_gate_up(x, blob, slots, places, _chosen.bits, alone, *activation, record.interleaved, out)
    return out


def expert_down_combine(
    act: Buffer,
    blob: Buffer,
    slots: Buffer,
    record: Record,
    weights: Buffer,
    mid: Buffer,
    shared: Buffer | None = None,
    out: np.ndarray | None = None,
    alone: bool = True,
) -> np.ndarray:
    """(sum_k weights[t, k] * (down_{slots[t, k]} act[t, k] + its bias), k ascending) + mid + shared -> [T, H].

    act [T, K, I]; blob, slots, record and alone as in expert_gate_up; weights [T, K]; mid and shared [T, H].
    """
    out = _result(out, *mid.shape)
    places = _places(record.down)
    extension().expert_down_combine(act, blob, slots, places, _chosen.bits, alone, weights, mid, shared, out)
    return out


def combine(
    y: Buffer, where: Buffer, weights: Buffer, mid: Buffer, shared: Buffer | None = None, out: np.ndarray | None = None
) -> np.ndarray:
    """(sum_k weights[t, k] * y[where[t, k]], k ascending) + mid + shared -> [T, H].

    y [N, H]; where int32 [T, K]; weights [T, K]; mid and shared [T, H].
    """
    out = _result(out, *mid.shape)
    extension().combine(y, where, weights, mid, shared, out)
    return out


def rms_norm(x: Buffer, weight: Buffer | None, eps: float, out: np.ndarray | None = None) -> np.ndarray:
    """x[N, D] / sqrt(mean(x^2) + eps) * weight[D] -> [N, D]; D is a multiple of 16."""
    out = _result(out, *x.shape)
    extension().rms_norm(x, weight, eps, out)
    return out


def activate(gate: Buffer, up: Buffer, activation: Activation = SILU, out: np.ndarray | None = None) -> np.ndarray:
    """Applies `activation` to gate and up, all [N, D]."""
    out = _result(out, *gate.shape)
    extension().activate(gate, up, *_number(activation), out)
    return out


def rope(
    x: Buffer, cosine: Buffer, sine: Buffer, neighbours: bool = False, out: np.ndarray | None = None
) -> np.ndarray:
    """Rotates the first R values of every head of x[T, H, D] by the angles of its token -> [T, H, D].

    cosine and sine [T, R/2]. Value i turns with value i + R/2, or with `neighbours` 2i with 2i + 1.
    """
    out = _result(out, *x.shape)
    extension().rope(x, cosine, sine, neighbours, out)
    return out


def conv_silu(state: Buffer, x: Buffer, weight: Buffer, out: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Causal depthwise convolution over time, then silu -> ([T, C], next state); C is a multiple of 16.

    state [taps-1, C] holds the previous inputs, oldest first; x [T, C]; weight [taps, C], last row for
    the newest input.
    """
    out, following = _result(out, *x.shape), _result(None, *state.shape)
    extension().conv_silu(state, x, weight, following, out)
    return out, following


def attend(
    q: Buffer,
    k: Buffer,
    v: Buffer,
    length: int,
    scale: float,
    out: np.ndarray | None = None,
    *,
    window: int | None = None,
    sinks: Buffer | None = None,
) -> np.ndarray:
    """Causal grouped-query attention of the newest T tokens over a key/value cache -> [T, Hq, Dv].

    q [T, Hq, Dk]; k [Hkv, C, Dk] and v [Hkv, C, Dv] hold `length` valid rows of capacity C, the newest
    T of them for q's tokens; query head h reads kv head h // (Hq / Hkv). Dk, Dv are multiples of 16. A token sees the
    newest `window` rows up to its own, None: all; `sinks` [Hq]: logits whose exponentials count in the softmax's sum.
    """
    out = _result(out, q.shape[0], q.shape[1], v.shape[2])
    (T, heads, _), seen, limits = q.shape, window or length or 1, NOTHING if sinks is None else sinks
    before = length - T
    for rows in pieces(T, heads * min(seen, length) * (q.shape[2] + v.shape[2])):
        extension().attend(q[rows], k, v, before + rows.stop, scale, seen, limits, out[rows])
    return out


def attend_step(
    q: Buffer,
    k: Buffer,
    v: Buffer,
    norms: tuple[Buffer, Buffer, float] | None,
    turn: tuple[Buffer, Buffer, bool],
    seen: tuple[Buffer, Buffer, int],
    recent: np.ndarray,
    length: int,
    scale: float,
    *,
    window: int | None = None,
    sinks: Buffer | None = None,
    rotates_first: bool = False,
    biases: Buffer | None = None,
) -> np.ndarray:
    """A token's queries and key normed and turned (or turned and normed), its key and value kept; `attend` of it.

    q [Hq, Dk]; k [Hkv, Dk]; v [Hkv, Dv]; norms: weights [Dk] of queries and of keys, and epsilon; turn: as `rope` takes
    one token's, of no angles where nothing turns. seen: keys [Hkv, C, Dk] and values [Hkv, C, Dv] and how many
    positions lie there, position p in row p % C. The ones after those lie in `recent`, keys [Hkv, M, Dk] and then
    values [Hkv, M, Dv] in one row; position `length - 1`, the token's own, is written there. The bits are those of
    `rms_norm`, `rope` and `attend` over one array. Where the three arrays are uint8, their rows are those of `kv_rows`
    in place of Dk or Dv floats, and the token's own is rounded like them. biases: [Hq * E], of each head what is added
    to its products of q and k by the distance of positions; nothing from E on.
    """
    out = np.empty((q.shape[0], v.shape[1]), np.float32)
    limits = window or length or 1, NOTHING if sinks is None else sinks
    last = out, rotates_first, NOTHING if biases is None else biases
    extension().attend_step(
        q, k, v, *(norms or (NOTHING, NOTHING, 0.0)), *turn, *seen, recent, length, scale, *limits, *last
    )
    return out


def choose(
    logits: Buffer, experts: int, top_k: int, normalise: bool, scale: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """The largest of softmax(logits[t, :experts]) -> (indices int32 [T, K], their values [T, K] times scale).

    Largest first, the lowest index of equals first; with `normalise` the values of a row sum to 1 before `scale`.
    """
    shape = logits.shape[0], top_k
    ids, weights = np.zeros(shape, np.int32), np.empty(shape, np.float32)  # a stand-in leaves ids that exist
    extension().choose(logits, experts, normalise, scale, ids, weights)
    return ids, weights


def gated_delta(
    state: Buffer,
    q: Buffer,
    k: Buffer,
    v: Buffer,
    decay: Buffer,
    beta: Buffer,
    out: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """T steps of the gated delta rule from state [Hv, Dv, Dk] -> (out [T, Hv, Dv], next state).

    Per step and value head: S *= decay; S += outer((v - S k) * beta, k); o = S q, with key head
    h // (Hv / Hk). q, k [T, Hk, Dk]; v [T, Hv, Dv]; decay (a factor, not its logarithm) and beta
    [T, Hv]; or decay [T, Hv, Dk], a factor for each column of S. Dk is a multiple of 16.
    """
    out, following = _result(out, *v.shape), _result(None, *state.shape)
    steps = extension().gated_delta if len(decay.shape) == 2 else extension().channel_delta
    steps(state, q, k, v, decay, beta, following, out)
    return out, following


def huge_pages(array: Buffer) -> int:
    """Moves the array's memory into huge pages where Linux can; returns how many bytes of it lie in them.

    The content does not change. Products with large matrices get about a tenth faster.
    """
    return extension().huge_pages(array)


if _native is not None:
    _native.set_threads(cores())
