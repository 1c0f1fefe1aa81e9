"""Every form of stored matrices in every operation: Metal's kernels, MLX's operations and the native kernels against
float64. The whole grid for Metal's kernels runs with `--full`."""

import mlx.core as mx
import numpy as np
import pytest
from geometries import e4m3
from grids import drawn, one_in_three
from tile_choices import OF_CUDA, Chosen

from metal import msl
from moeflux_mlx import quant as quant_module
from moeflux_mlx.formats.record import Record, rounded
from moeflux_mlx.opening.random_weights import random_parts
from moeflux_mlx.ops import experts, forms, linear, native
from moeflux_mlx.ops.dequantize import dequantized_records
from moeflux_mlx.ops.matrix import Part, dequantized, part_of_heads
from moeflux_mlx.ops.records import Records
from moeflux_mlx.ops.tiles import using
from moeflux_mlx.packing.gguf_forms import grids, repacked
from moeflux_mlx.quant import AFFINE_BITS, AFFINE_GROUPS, GGUF_MODES, TABLE, Quant

pytest.importorskip("gguf")
import gguf_models  # noqa: E402  (needs gguf)

pytestmark = pytest.mark.usefixtures("cpu_device")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # OCP Microscaling 1.0, table 5
MXFP4, MXFP8, NVFP4 = Quant(4, 32, "mxfp4"), Quant(8, 32, "mxfp8"), Quant(4, 16, "nvfp4")
GLOBAL = Quant(4, 16, "nvfp4", has_global_scale=True)
SMALL_FLOATS = [(quant, "U8") for quant in (MXFP4, MXFP8, NVFP4, GLOBAL)]
GRID = [
    (Quant(bits, group), kind) for bits in AFFINE_BITS for group in AFFINE_GROUPS for kind in ("BF16", "F16", "F32")
]
FEW = [GRID[9 * i + (4 * i) % 9] for i in range(7)] + SMALL_FLOATS  # every width, every group, every kind of scales


def of(mode):
    return Quant(GGUF_MODES[mode].bits, GGUF_MODES[mode].group_size, mode)


GGUF = [(of(mode), "") for mode in GGUF_MODES]
GRID += [*SMALL_FLOATS, *GGUF]
H, I, SLOTS = 256, 128, 4


def named(case):
    quant, kind = case
    return f"{quant.mode}-{quant.bits}-{quant.group_size}-{kind}{'-global' * quant.has_global_scale}"


def grid(cases, **more):
    return pytest.mark.parametrize("quant, kind", cases, ids=map(named, cases), **more)


class Stored:
    """A random matrix: its parts as numpy arrays (bfloat16 as uint16), and its values in float64."""

    def __init__(self, rng, rows, columns, quant, kind):
        self.quant, words, shape = quant, quant.words(columns), (rows, quant.groups(columns))
        if not quant.is_of_mlx:
            stored = gguf_models.random_blocks(
                quant.mode.upper(), (rows, columns), int(rng.integers(1 << 30)), columns**-0.5
            )
            self.parts = *repacked(quant.mode.upper(), stored), *grids(quant.mode.upper())
            self.values = gguf_models.values_of(quant.mode.upper(), stored).astype(np.float64)
            self.largest = np.abs(self.values)
            return
        codes = rng.integers(0, 1 << 32, (rows, words), np.uint32)
        stream = np.unpackbits(codes.view(np.uint8), axis=1, bitorder="little").reshape(rows, columns, quant.bits)
        values = (stream.astype(np.int64) << np.arange(quant.bits)).sum(-1)
        size = rng.uniform(0.5, 1.5, shape) / (0.29 * 2**quant.bits * columns**0.5)
        if kind == "U8":
            values, wide = self._small_floats(rng, quant, codes, values, shape)
        else:
            stored = [narrow(part, kind) for part in (size, -(2**quant.bits - 1) / 2 * size)]
            self.parts, wide = [codes, *(part for part, _ in stored)], [value for _, value in stored]
        s, b = (np.repeat(part, quant.group_size, axis=1) for part in wide)
        self.values, self.largest = s * values + b, np.abs(s) * np.abs(values) + np.abs(b)

    def _small_floats(self, rng, quant, codes, values, shape):
        """Returns codes and scales of 8 bits with any sign, also subnormal ones. Checkpoints have no NaN codes."""
        if quant.codes == quant_module.E4M3:
            np.copyto(codes.view(np.uint8), 0x7E, where=codes.view(np.uint8) & 0x7F == 0x7F)
            values = e4m3(codes.view(np.uint8).astype(np.int64)) / 64
        else:
            values = E2M1[values]
        if quant.scale == quant_module.E8M0:
            scales = rng.integers(122, 125, shape).astype(np.uint8)
            if quant.codes == quant_module.E4M3:
                values, scales = values * 64, scales - 6
            wide = 2.0 ** (scales.astype(np.float64) - 127)
        else:
            scales = rng.integers(2, 48, shape).astype(np.uint8)
            wide = e4m3(scales)
        self.parts = [codes, scales]
        if quant.has_global_scale:
            self.parts.append(np.full((len(codes), 1), 1234.5, np.float32))
            wide = wide * (1234.5 / 2688)
        return values, [wide, 0 * wide]

    def in_record(self, field):
        """Returns its bytes as the words of a field in a record."""
        part = self.parts[self.quant.parts.index(field.part)]
        return np.ascontiguousarray(part[:1] if field.part == "global_scale" else part).reshape(-1).view(np.uint32)

    def arrays(self, kind):
        """Returns its parts as MLX arrays."""
        parts = [mx.array(part) for part in self.parts]
        return [parts[0], *(part.view(mx.bfloat16) if kind == "BF16" else part for part in parts[1:])]


def narrow(values, kind):
    """Returns values in the dtype of a field, and their float64 values."""
    if kind == "BF16":
        bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    kept = values.astype(np.float16 if kind == "F16" else np.float32)
    return kept, kept.astype(np.float64)


class Experts:
    """Packed records, the slots of two tokens, and the experts' results in float64."""

    def __init__(self, quants, kind, tokens=2, seed=0):
        rng = np.random.default_rng(seed)
        self.width = inner = I if I % quants[-1].multiple == 0 else H
        shapes, junk = ((inner, H), (inner, H), (H, inner)), 64
        size = rounded(Record.make(H, inner, quants, None, kind).size, 16)
        self.record = Record.make(H, inner, quants, size + junk, kind)
        self.matrices = [
            [Stored(rng, *shape, q, kind) for shape, q in zip(shapes, quants, strict=True)] for _ in range(SLOTS)
        ]
        self.blob = np.full((SLOTS, self.record.stride // 4), 0xFFFFFFFF, np.uint32)
        for row, matrices in zip(self.blob, self.matrices, strict=True):
            for projection, matrix in zip(self.record.projections, matrices, strict=True):
                for field in projection.fields:
                    row[field.words] = matrix.in_record(field)
        self.slots = rng.integers(0, SLOTS, (tokens, 3)).astype(np.int32)
        self.x, self.mid = rng.standard_normal((2, tokens, H), dtype=np.float32)
        self.weights = rng.random((tokens, 3), dtype=np.float32)

    def results(self, kind):
        """Computes act and out with arrays of this `kind`."""
        records, slots = Records(kind(self.blob), self.record), kind(self.slots)
        act = experts.expert_gate_up(kind(self.x), slots, records)
        return np.array(act), np.array(
            experts.expert_down_combine(act, slots, records, kind(self.weights), kind(self.mid))
        )

    def wanted(self, act):
        acts, outs = np.zeros(act.shape), self.mid.astype(np.float64)
        for t, k in np.ndindex(self.slots.shape):
            gate, up, down = (matrix.values for matrix in self.matrices[self.slots[t, k]])
            g = gate @ self.x[t]
            acts[t, k] = g / (1 + np.exp(-g)) * (up @ self.x[t])
            outs[t] += self.weights[t, k] * (down @ act[t, k].astype(np.float64))
        return acts, outs

    def error(self, kind=mx.array):
        got = self.results(kind)
        return max(map(error, got, self.wanted(got[0])))


def error(got, want):
    """Returns the largest error relative to the largest value of its row. NaN counts as infinite."""
    largest = (np.abs(got - want).max(-1) / np.abs(want).max(-1)).max()
    return np.inf if np.isnan(largest) else largest


def product_error(quant, kind, tokens, multiply, rows=24):
    rng = np.random.default_rng([quant.bits, tokens])
    matrix, x = Stored(rng, rows, H, quant, kind), rng.standard_normal((tokens, H), dtype=np.float32)
    return error(np.array(multiply(mx.array(x), Part(quant, *matrix.arrays(kind)))), x @ matrix.values.T)


def check(quant, kind, limit, counts=(1, 3)):
    made = Experts((quant,) * 3, kind)
    assert made.error() < limit
    check_dequantized(made)
    check_products(quant, kind, limit, counts)


def check_products(quant, kind, limit, counts):
    for tokens in counts:
        assert product_error(quant, kind, tokens, linear.qmv) < limit


def check_dequantized(made):
    where, n = [2, 0], made.width
    got = dequantized_records(Records(mx.array(made.blob), made.record), mx.array(where, mx.uint32), mx.float32)
    for i, slot in enumerate(where):
        gate, up, down = made.matrices[slot]
        for values, matrix in ((got[0][i, :n], gate), (got[0][i, n:], up), (got[1][i], down)):
            assert (np.abs(np.array(values) - matrix.values) <= 1.2e-7 * matrix.largest).all()


LIMIT = 4e-5  # float32: here codes of two bits are added to a constant of 128


def limit_of(quant):
    """Returns the limit of a form: that of the codes -1, 0 and 1 is higher, as they are smaller."""
    return 4 * LIMIT if quant.mode in ("tq1_0", "tq2_0") else LIMIT


@pytest.mark.parametrize("case, tokens", drawn(FEW + GGUF, [1, 3]))
def test_kernel_reads_every_width(host, case, tokens):
    check_products(*case, limit_of(case[0]), [tokens])


@grid([FEW[2], FEW[3], *SMALL_FLOATS[1:], *GGUF[::3]])
def test_expert_kernels_read_every_kind_of_codes(host, quant, kind):
    check(quant, kind, LIMIT, [])


def shared_error(quant):
    """Returns the error of three experts and a shared one, which has arrays of its own: here it has the matrices of the
    first of the records, and counts as one more expert with weight 1.
    """
    made = Experts((quant,) * 3, "")
    gate, up, down = (matrix.arrays("") for matrix in made.matrices[0])
    both = Part(quant, *(mx.concatenate(parts) for parts in zip(gate, up, strict=True)))
    shared = experts.Shared(pytest.fail, both, Part(quant, *down))
    assert shared.joins(made.record, 3)
    records, residual = Records(mx.array(made.blob), made.record), mx.array(made.mid)
    given = mx.array(made.x), mx.array(made.slots), records, mx.array(made.weights), residual
    out = np.array(experts.expert_ffn(*given, shared))
    made.slots = np.concatenate([made.slots, np.zeros((2, 1), np.int32)], axis=1)
    made.weights = np.concatenate([made.weights, np.ones((2, 1), np.float32)], axis=1)
    act, want = made.results(mx.array)
    return error(out, want)


@pytest.mark.parametrize("mode", one_in_three(GGUF_MODES))
def test_a_shared_expert_has_separate_arrays(host, mode):
    assert shared_error(of(mode)) < LIMIT


@pytest.mark.full
@grid(GRID)
def test_kernel_reads_every_form(host, quant, kind):
    check(quant, kind, limit_of(quant))


@pytest.mark.full
@grid(FEW)
def test_kernel_reads_every_width_with_tiles_of_cuda(host, quant, kind):
    with using(Chosen(OF_CUDA)):
        check(quant, kind, LIMIT)


# ---- codes times integers


INTEGERS = [(Quant(2, 64), "BF16"), (Quant(2, 32), "F16"), (Quant(3, 32), "F32"), (Quant(3, 128), "BF16")]
INTEGERS += [(MXFP4, "U8"), (GLOBAL, "U8")]
PAIRS = [case for case in GGUF if case[0].is_nested and case[0].codes == quant_module.INTEGER]


@pytest.fixture
def integers(host, monkeypatch):
    """Gives the experts' kernels in the form that CUDA uses."""
    monkeypatch.setitem(forms.INTEGERS, "metal", forms.INTEGERS["cuda"])
    with using(Chosen(OF_CUDA)):
        yield


@grid(INTEGERS)
def test_codes_times_integers(integers, quant, kind):
    made = Experts((quant,) * 3, kind)
    made.x[0, :64] = 0
    made.x[1, 64:128] *= 30
    assert made.error() < 2e-6


@grid(INTEGERS + PAIRS)
def test_integers_of_nan_are_nan(integers, quant, kind):
    made = Experts((quant,) * 3, kind)
    records, slots, x = Records(mx.array(made.blob), made.record), mx.array(made.slots), made.x.copy()
    x[1, 100] = np.nan
    act = np.array(experts.expert_gate_up(mx.array(x).astype(mx.bfloat16), slots, records).astype(mx.float32))
    assert np.isfinite(act[0]).all() and np.isnan(act[1]).all()


def narrow_errors(quant, kind, dtype):
    """Returns the errors of down and of gate and up with x of two bytes."""
    made = Experts((quant,) * 3, kind)
    act = mx.array(np.random.default_rng(7).standard_normal((2, 3, made.width), dtype=np.float32)).astype(dtype)
    records = Records(mx.array(made.blob), made.record)
    slots, *rest = map(mx.array, (made.slots, made.weights, made.mid))
    out = experts.expert_down_combine(act, slots, records, *rest)
    down = error(np.array(out), made.wanted(np.array(act.astype(mx.float32)))[1])
    x = mx.array(made.x).astype(dtype)
    made.x = np.array(x.astype(mx.float32))
    got = np.array(experts.expert_gate_up(x, slots, records).astype(mx.float32))
    return down, error(got, made.wanted(got)[0])


@pytest.mark.parametrize("case, dtype", drawn(INTEGERS + PAIRS, [mx.bfloat16, mx.float16]))
def test_integers_of_narrow_x(integers, case, dtype):
    """x has two planes of bytes, or 16 bits, which are less precise than x itself next to a large value."""
    down, gate_up = narrow_errors(*case, dtype)
    assert down < LIMIT and gate_up < (4e-3 if dtype == mx.bfloat16 else 6e-4)


@grid(INTEGERS[-3:])
def test_a_row_stored_in_parts_has_the_same_bits(integers, monkeypatch, quant, kind):
    monkeypatch.setitem(globals(), "I", 640)
    made = Experts((quant,) * 3, kind)
    whole = made.results(mx.array)
    monkeypatch.setattr(experts, "PLANES_BYTES", 3 * 1000)
    with using(Chosen(OF_CUDA)):  # plans the launch again
        assert all(map(np.array_equal, made.results(mx.array), whole))


def test_a_row_that_does_not_fit_in_memory_is_not_multiplied_in_integers():
    for columns, header in ((8192, "planes"), (65536, "affine")):
        record = Record.make(columns, 64, (Quant(2, 64),) * 3)
        blob = 4, record.stride // 4
        assert experts.plan_gate_up("cuda", (1, columns), mx.float32, blob, (1, 2), record).kernel.form == header


INTEGER_FAULTS = {
    "a code that crosses": (Quant(3, 64), "bytes.h.metal", "(b << 2)", "(b << 1)"),
    "the sum of the other half": (Quant(2, 32), "planes.h.metal", "g == 0 ? low : high", "low"),
    "signs": (MXFP4, "planes.h.metal", "0x4444u", "0x4440u"),
    "the other half of a block": (MXFP4, "planes.h.metal", "columns / 32 % 2", "columns / 64 % 2"),
    "the highest byte": (Quant(2, 64), "planes.h.metal", "PLANES - 1; p >= 0", "PLANES - 2; p >= 0"),
    "integers that overflow": (Quant(3, 64), "planes.h.metal", "4161000.0f", "4261000.0f"),
    "x of another slot": (
        Quant(2, 64),
        "expert_down_combine.metal",
        "planes + simdgroup_index_in_threadgroup",
        "planes + 0",
    ),
    "no barrier": (Quant(2, 64), "expert_gate_up.metal", "threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
}


@msl.needed
@pytest.mark.parametrize("name", one_in_three(INTEGER_FAULTS))
def test_a_planted_fault_in_integers_is_caught(integers, monkeypatch, name):
    quant, file, old, new = INTEGER_FAULTS[name]
    msl.plant(monkeypatch, file, old, new)
    with pytest.raises((AssertionError, msl.Failure)):
        assert Experts((quant,) * 3, "BF16" if quant.has_biases else "U8").error() < 1e-4


PAIR_FAULTS = {
    "the higher two bytes": ("q3_k", "BITS % 2 ? q + 8", "BITS % 2 ? q"),
    "the scale of another group": ("q2_k", "0x4440 + g", "0x4440"),
    "a sum of minima": ("q2_k", "sum[1] >> 4", "sum[1] >> 5"),
    "the zero of scales": ("q3_k", "total - 32 *", "total - 31 *"),
    "the zero of codes": ("q6_k", "BITS == 3 ? 4 : 32", "BITS == 3 ? 4 : 31"),
    "the sum of another half": ("q5_k", "x.side ? rest.z : rest.y", "rest.y"),
    "bytes of five words": ("q5_k", "0x61u, words[2], words[4]", "0x61u, words[2], words[3]"),
    "the other half of a block": ("q4_k", "4 * x.side", "2 * x.side"),
    "bits of the third byte": ("q6_k", "(c << 4) & 0x30303030u", "0u"),
    "the zero of integers": ("q4_k", "16u * 0x4B400000u", "15u * 0x4B400000u"),
}


@msl.needed
@pytest.mark.parametrize("name", one_in_three(PAIR_FAULTS))
def test_a_planted_fault_in_pairs_is_caught(integers, monkeypatch, name):
    mode, old, new = PAIR_FAULTS[name]
    msl.plant(monkeypatch, "pairs.h.metal", old, new)
    assert narrow_errors(of(mode), "", mx.bfloat16)[0] > 5 * LIMIT


def test_down_may_have_another_width(host):
    made = Experts((Quant(3, 64), Quant(3, 64), Quant(6, 32)), "BF16")
    assert made.error() < LIMIT
    check_dequantized(made)


@grid(GRID)
def test_twins_read_every_form(ops, quant, kind):
    check(quant, kind, 2e-6)


FAULTS = {
    "a code that crosses": (Quant(3, 64), "affine.h.metal", "lanes[k + 1] << left", "lanes[k + 1] >> left"),
    "the second place": (Quant(2, 64), "affine.h.metal", "float(1 << (BITS * i))", "float(1 << i)"),
    "halfwords of a block": (Quant(5, 64), "affine.h.metal", "words[(k + SPAN) / 2]", "words[k / 2]"),
    "the second group of a chunk": (Quant(3, 32), "codes.h.metal", "GROUPS + g;", "GROUPS;"),
    "bytes": (Quant(8, 64), "affine.h.metal", "-256.0f, x_sum", "-255.0f, x_sum"),
    "the sign": (MXFP4, "e2m1.h.metal", "0x80008000u", "0x80000000u"),
    "the sign of a byte": (MXFP8, "e4m3.h.metal", "0x80008000u", "0x80000000u"),
    "bytes that are odd": (MXFP8, "e4m3.h.metal", "odd ? word : word << 8", "word << 8"),
    "the second scale of a chunk": (NVFP4, "e2m1.h.metal", "scale[GROUPS * r + g]", "scale[GROUPS * r]"),
    "a scale of eight bits": (
        NVFP4,
        "codes.h.metal",
        "(bits & 0x7F) << 7))) * 256.0f",
        "(bits & 0x7F) << 6))) * 256.0f",
    ),
    "the factor of a matrix": (GLOBAL, "codes.h.metal", "factors[row] * (1.0f / 2688.0f)", "factors[row]"),
    "a scale that crosses": (of("q4_k"), "nested.h.metal", "(first >> 2) & 48", "(first >> 2) & 16"),
    "the halves of a minimum": (of("q5_k"), "nested.h.metal", "(third >> 4) & 15", "third & 15"),
    "m for d": (of("q2_k"), "nested.h.metal", "-float(d.y)", "-float(d.x)"),
    "the high bits of scales": (of("q3_k"), "nested.h.metal", "(words + 2) >> (2 * four)", "(words + 2)"),
    "the second of two groups": (of("q3_k"), "affine.h.metal", "dot[g * R + r]", "dot[r]"),
    "a rest of the low code": (of("q3_k"), "affine.h.metal", "if (!APART) {", "if (true) {"),
    "the sign of a scale": (of("q6_k"), "nested.h.metal", " ^ 0x80808080u", ""),
    "the zero of codes": (of("q8_0"), "nested.h.metal", "-float(ZERO)", "-float(ZERO - 1)"),
    "256 columns of a row": (of("q6_k"), "nested.h.metal", "row * (COLS / 256) + chunk", "row * (COLS / 128) + chunk"),
    "a scale's exponent": (MXFP4, "codes.h.metal", "uint(scale.bits) << 23", "uint(scale.bits) << 22"),
}


@msl.needed
@pytest.mark.parametrize("name", one_in_three(FAULTS))
def test_a_planted_fault_is_caught(host, monkeypatch, name):
    quant, file, old, new = FAULTS[name]
    msl.plant(monkeypatch, file, old, new)
    kind = "BF16" if quant.has_biases else "U8"
    try:
        assert product_error(quant, kind, 1, linear.qmv) > 10 * LIMIT
    except msl.Failure as failure:
        assert "out of bounds" in str(failure)


# ---- the native kernels


PATHS = native.instruction_paths() if native.available() else []


@pytest.fixture(params=PATHS)
def path(request, team):
    native.use_path(request.param)
    yield request.param
    native.use_path(native.instruction_paths()[0])


@pytest.mark.parametrize("case, path", drawn(GRID, PATHS), indirect=["path"])
def test_native_kernels_read_every_form(path, case):
    quant, kind = case
    made = Experts((quant,) * 3, kind, tokens=5)
    assert made.error(np.array) < 2e-6
    rng = np.random.default_rng(3)
    unit = max(128, quant.multiple)
    for rows, columns in ((7, unit), (21, 5 * unit)):
        matrix = Stored(rng, rows, columns, quant, kind)
        values = native.dequantize(quant, *matrix.parts)
        assert (np.abs(values - matrix.values) <= 2.4e-7 * matrix.largest).all()
        for tokens in (1, 2, 3, 4, 9):
            x = rng.standard_normal((tokens, columns), dtype=np.float32)
            got = native.linear(x, quant, *matrix.parts)
            bound = 2e-6 * np.abs(x).astype(np.float64) @ matrix.largest.T
            assert (np.abs(got - x @ matrix.values.T) <= bound).all()


@grid([case for case in FEW + GGUF if case[0] != Quant(4, 64)])
def test_native_bits_of_a_row_depend_on_that_row_alone(path, quant, kind):
    made = Experts((quant,) * 3, kind, tokens=5)
    native.set_threads(1)
    want = made.results(np.array)
    for threads in (2, 3):
        native.set_threads(threads)
        assert all(map(np.array_equal, made.results(np.array), want))
    order = np.random.default_rng(1).permutation(SLOTS)
    made.blob, made.slots = made.blob[np.argsort(order)], order[made.slots].astype(np.int32)
    assert all(map(np.array_equal, made.results(np.array), want))
    matrix, x = Stored(np.random.default_rng(2), 33, H, quant, kind), np.repeat(made.x[:1], 9, axis=0)
    rows = native.linear(x, quant, *matrix.parts)
    assert all(np.array_equal(native.linear(x[:n], quant, *matrix.parts), rows[:n]) for n in range(1, 9))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@grid(FEW + GGUF)
def test_native_products_of_nan_are_nan(path, quant, kind, value):
    """An infinite activation may give infinities too."""
    matrix, x = Stored(np.random.default_rng(2), 9, 2 * H, quant, kind), np.ones((5, 2 * H), np.float32)
    x[2, 100] = value
    for tokens in (3, 5):
        got = native.linear(x[:tokens], quant, *matrix.parts)
        assert not np.isfinite(got[2]).any() and np.isfinite(got[[0, 1]]).all()
        assert np.isnan(got[2]).all() or value == np.inf
    assert not np.isfinite(native.linear(x[2:3], quant, *matrix.parts)).any()


# ---- resident matrices, and what is not read


@pytest.mark.parametrize("quant, kind", [(Quant(3, 32), "BF16"), (Quant(6, 128), "F32"), *SMALL_FLOATS, *GGUF])
def test_resident_matrices(quant, kind):
    """Checks products in both directions, rows by id, and the matrices of heads, with MLX and natively."""
    rng = np.random.default_rng(6)
    matrix, x = Stored(rng, 64, H, quant, kind), rng.standard_normal((3, H), dtype=np.float32)
    stored = Part(quant, *matrix.arrays(kind))
    wide = Part(
        quant,
        *(part.astype(mx.float32) if kind == "BF16" and i else part for i, part in enumerate(matrix.arrays(kind))),
    )
    ids, left = np.array([[5, 0, 63]]), rng.standard_normal((3, 64), dtype=np.float32)
    assert error(linear.linear(x, stored), x @ matrix.values.T) < 2e-6
    assert error(np.array(linear.linear(mx.array(x), wide)), x @ matrix.values.T) < 2e-6
    assert error(np.array(linear.multiply(mx.array(left), wide, transpose=False)), left @ matrix.values) < 2e-6
    assert error(linear.embed(ids, stored)[0], matrix.values[ids[0]]) < 2e-7
    assert error(np.array(linear.embed(mx.array(ids), wide).astype(mx.float32))[0], matrix.values[ids[0]]) < 2e-7
    heads = np.stack([head.copy() for head in linear.by_head(stored, 4, slice(8, None))])
    assert error(heads, matrix.values.reshape(4, 16, H)[:, 8:]) < 2e-7
    part = part_of_heads(wide, 4, slice(8, None))
    assert error(np.array(dequantized(part, mx.float32)), heads) < 2e-7


@grid(GGUF)
def test_random_weights_of_a_form_keep_the_size_of_their_input(quant, kind):
    values = dequantized(Part(quant, *random_parts(quant, (64, 512), mx.float32)), mx.float32)
    assert values.shape == (64, 512) and 0.3 < values.std().item() * 512**0.5 < 2


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("group", [32, 128])
def test_one_bit_is_unpacked_without_mlx_on_cuda(monkeypatch, group, dtype, backend_is):
    values = mx.random.normal((2, 5, 256), key=mx.random.key(group)).astype(dtype)
    parts = mx.quantize(values, group, 1)
    wanted = mx.dequantize(*parts, group, 1)
    backend_is("cuda")
    monkeypatch.delattr(mx, "dequantize")
    got = forms.unpacked(Quant(1, group), *parts)
    assert got.dtype == dtype and mx.array_equal(got, wanted)
    assert mx.array_equal(forms.unpacked_float32(Quant(1, group), *parts).astype(dtype), wanted)


def test_a_form_without_a_kernel_is_recognised():
    assert not forms.is_read(Quant(4, 128), 192) and forms.is_read(Quant(3, 64), 192)


# ---- what only the kernels for codes of tables do, GGUF's IQ types

TABLES = [name for name, mode in GGUF_MODES.items() if mode.codes == TABLE]


def experts_of(first, last):
    return Experts((of(first), of(first), of(last)), "")


@pytest.mark.parametrize("first, last", [("iq2_xxs", "iq4_xs"), ("iq4_nl", "iq3_xxs"), ("iq3_s", "iq2_s")])
def test_codes_of_tables_times_integers(integers, first, last):
    """With x in float32."""
    assert experts_of(first, last).error() < 2e-6


@pytest.mark.parametrize("mode", ["iq2_xxs", *one_in_three([mode for mode in TABLES if GGUF_MODES[mode].grid][3:])])
def test_prepared_grids(integers, monkeypatch, mode):
    """As on CUDA, where a threadgroup keeps a grid, with signs."""
    msl.plant(monkeypatch, "tables.h.metal", "#define CODES_ZERO 0u", "#define CODES_ZERO 0u\n#define CODES_NEAR_GRIDS")
    msl.plant(monkeypatch, "tables.h.metal", "*)room", "*)size_t(room)")  # CUDA does not tell memories apart
    assert experts_of(mode, mode).error() < 2e-6
    assert mode != "iq2_xxs" or shared_error(of(mode)) < 2e-6


def test_codes_times_integers_of_narrow_x(integers):
    made = experts_of("iq1_m", "iq2_xs")
    x = mx.array(made.x).astype(mx.bfloat16)
    made.x = np.array(x.astype(mx.float32))
    act = experts.expert_gate_up(x, mx.array(made.slots), Records(mx.array(made.blob), made.record))
    wanted = made.wanted(np.array(act.astype(mx.float32)))[0]
    assert (np.abs(np.array(act.astype(mx.float32)) - wanted).max(-1) / np.abs(wanted).max(-1)).max() < 4e-3


@pytest.mark.parametrize("mode", one_in_three(TABLES))
def test_dequantised_values_of_tables_are_exact(host, mode):
    made = experts_of(mode, mode)
    records = Records(mx.array(made.blob), made.record)
    gate_up, down = dequantized_records(records, mx.array([2, 0], mx.uint32), mx.float32)
    for i, slot in enumerate((2, 0)):
        gate, up, last = (matrix.values for matrix in made.matrices[slot])
        assert np.array_equal(np.array(gate_up[i]), np.concatenate([gate, up])) and np.array_equal(down[i], last)


@pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
@pytest.mark.parametrize("mode", TABLES)
def test_native_products(mode):
    """On the fastest path, which looks many codes up at once."""
    assert experts_of(mode, mode).error(np.array) < 2e-6


TABLE_FAULTS = {
    "sign parity": ("iq3_xxs", "folded ^= folded >> 1;", ""),
    "the other half of eight signs": ("iq2_s", "signs >> (8 * k + 4)", "signs >> (8 * k)"),
    "the order of low halves": ("iq4_xs", "all.y >> (4 * unit)", "all.y >> (4 * (unit ^ 1u))"),
    "high bits of scales": ("iq4_xs", "low | high << 4", "low | high << 3"),
    "high bits of indices": ("iq3_s", "((high >> i) & 1u) << 8", "0u"),
    "the index of a grid": ("iq2_xs", "(words[0] >> 16) & 511u", "(words[0] >> 16) & 255u"),
    "the second scale": ("iq2_xs", "scale[1] = d", "scale[1] = scale[0]"),
    "a shift by an eighth": ("iq1_s", "fields >> 15 ? 0x8888u", "fields >> 14 ? 0x8888u"),
    "the digits of 32 columns before": ("tq1_0", "unit % 2 ? 9u : 1u", "1u"),
    "codes of two bits": ("tq2_0", "0x03030303u", "0x01030303u"),
    "halves of codes": ("iq4_nl", "(at + 4)) & 15u", "at) & 15u"),
}


@msl.needed
@pytest.mark.parametrize("name", one_in_three(TABLE_FAULTS))
def test_a_planted_fault_in_tables_is_caught(host, monkeypatch, name):
    mode, old, new = TABLE_FAULTS[name]
    msl.plant(monkeypatch, "tables.h.metal", old, new)
    assert product_error(of(mode), "", 1, linear.qmv) > 10 * LIMIT
