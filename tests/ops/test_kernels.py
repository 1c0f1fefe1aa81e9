"""The kernels and their ops twins against float64, through the project's own launch code: Metal's source, executed by
the harness in `metal`, or the real kernels on a machine with a GPU that cannot run the harness."""

import functools
import re
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from floats import wide
from grids import drawn, one_in_three
from hypothesis import given, settings
from hypothesis import strategies as st
from tile_choices import OF_CUDA, Chosen

from metal import msl
from moeflux_mlx.errors import RequestError
from moeflux_mlx.files import directory
from moeflux_mlx.formats.record import Record
from moeflux_mlx.layers import RMSNorm
from moeflux_mlx.ops import backend, combine, experts, launch, linear
from moeflux_mlx.ops.experts import Records
from moeflux_mlx.ops.forms import Form
from moeflux_mlx.ops.matrix import Part
from moeflux_mlx.ops.tiles import using
from moeflux_mlx.quant import EXPERTS, Quant

pytestmark = pytest.mark.usefixtures("cpu_device")
FLOATS = [mx.float32, mx.bfloat16, mx.float16]
LIMITS = {
    mx.float32: 1e-5,
    mx.bfloat16: 6e-3,
    mx.float16: 1.5e-3,
}  # largest error over largest value, per row
VARIANTS = {  # hidden size, expert width, experts per token
    "Qwen3-30B-A3B": (2048, 768, 8),
    "Qwen3-235B-A22B": (4096, 1536, 8),
    "Qwen3-Next-80B-A3B": (2048, 512, 10),
    "Qwen3.6-35B-A3B": (2048, 512, 8),
    "Qwen3.5-122B-A10B": (3072, 1024, 8),
    "Qwen3.5-397B-A17B": (4096, 1024, 10),
    "Cogito-671B": (7168, 2048, 8),
}
METAL_TEXTS = sorted(p.name for p in directory("metal").iterdir() if p.suffix == ".metal")


# ---- launching


@pytest.fixture
def cuda_tiles():
    """Uses the tiles measured for CUDA in Metal's source: other lane counts and splits."""
    with using(Chosen(OF_CUDA)):
        yield


# ---- oracle in float64


def bfloat16(values):
    """Returns float64 values rounded down to bfloat16, as uint16 bits and as float64."""
    bits = (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class Matrix:
    """A random 4-bit matrix: its packed parts and its values."""

    def __init__(self, rng, rows, columns, spread=0):
        self.codes = rng.integers(0, 2**32, (rows, columns // 8), dtype=np.uint32)
        size = rng.uniform(0.5, 1.5, (rows, columns // 64)) * 10.0 ** rng.integers(-spread, spread + 1)
        self.scales, s = bfloat16(size / columns**0.5)
        self.biases, b = bfloat16(-7.5 * size / columns**0.5 * rng.uniform(0.5, 1.5, size.shape))
        nibbles = (self.codes[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).reshape(rows, -1, 64)
        self.values = (nibbles * s[..., None] + b[..., None]).reshape(rows, columns)

    def words(self):
        parts = [self.codes.reshape(-1), *(p.reshape(-1).view(np.uint32) for p in (self.scales, self.biases))]
        return np.concatenate(parts)

    def arrays(self, dtype=mx.bfloat16):
        scales, biases = (mx.array(p).view(mx.bfloat16).astype(dtype) for p in (self.scales, self.biases))
        return mx.array(self.codes), scales, biases


class Experts:
    """Random experts in packed records with padding, and one routing of T tokens."""

    def __init__(self, seed, T, K, H, I, dtype, records=5, padding=64, spread=0):
        rng = np.random.default_rng(seed)
        shapes = ((I, H), (I, H), (H, I))
        self.matrices = [[Matrix(rng, *shape, spread) for shape in shapes] for _ in range(records)]
        junk = rng.integers(0, 2**32, (records, padding), dtype=np.uint32)
        packed = [np.concatenate([m.words() for m in e] + [j]) for e, j in zip(self.matrices, junk, strict=True)]
        self.records = Records(mx.array(np.stack(packed)), Record.make(H, I))
        self.slots = rng.integers(0, records, (T, K))
        self.weights = rng.uniform(0, 1, (T, K)) * (rng.uniform(0, 1, (T, K)) > 0.2)

        def normal(*shape):
            return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)

        self.x, self.act, self.h_mid, self.shared = normal(T, H), normal(T, K, I), normal(T, H), normal(T, H)

    def index(self, dtype=mx.int32):
        return mx.array(self.slots).astype(dtype)

    def gate_up(self, slots=None):
        index = self.index() if slots is None else slots
        return experts.expert_gate_up(self.x, index, self.records)

    def down_combine(self, shared=True):
        weights = mx.array(self.weights.astype(np.float32))
        extra = self.shared if shared else None
        return experts.expert_down_combine(self.act, self.index(), self.records, weights, self.h_mid, extra)

    def want_act(self):
        def one(x, slot):
            gate, up = (self.matrices[slot][i].values @ x for i in range(2))
            return gate * np.exp(-np.logaddexp(0, -gate)) * up

        return np.array([[one(x, s) for s in row] for x, row in zip(wide(self.x), self.slots, strict=True)])

    def want_out(self, shared=True):
        out = wide(self.h_mid) + (wide(self.shared) if shared else 0)
        for t, row in enumerate(self.slots):
            for k, slot in enumerate(row):
                out[t] += np.float32(self.weights[t, k]) * (self.matrices[slot][2].values @ wide(self.act)[t, k])
        return out


def error(got, want):
    """Returns the largest error relative to the largest value of a row.

    float16 cannot be closer than its smallest step.
    """
    step = 2**-24 if got.dtype == mx.float16 else 0
    return float((np.maximum(np.abs(wide(got) - want) - step, 0).max(-1) / np.abs(want).max(-1)).max())


# ---- one answer from kernel, twin and oracle


@pytest.mark.parametrize(
    "sizes, dtype",
    drawn([(1, 40, 256), (1, 9, 2048), (1, 1, 64), (3, 40, 256), (8, 24, 192), (2, 7, 64)], FLOATS),
)
def test_qmv_matches_oracle(host, sizes, dtype):
    T, O, I = sizes
    rng = np.random.default_rng([T, O, I])
    matrix = Matrix(rng, O, I)
    x = mx.array(rng.normal(size=(T, I)).astype(np.float32)).astype(dtype)
    assert error(linear.qmv(x, Part(EXPERTS, *matrix.arrays())), wide(x) @ matrix.values.T) < LIMITS[dtype]


class Fused:
    """A product of one row with a norm before it and a residual after it, and its float64 value."""

    def __init__(self, what, O, I, dtype):
        rng = np.random.default_rng([O, I])
        self.matrix = Matrix(rng, O, I)
        self.x, self.residual = (mx.array(rng.normal(size=(1, n)).astype(np.float32)).astype(dtype) for n in (I, O))
        self.norm, x = None, wide(self.x)
        if "norm" in what:
            self.norm = RMSNorm(I, 0.1)
            self.norm.weight = mx.array(rng.normal(size=I).astype(np.float32)).astype(dtype)
            x = x / np.sqrt((x**2).mean() + 0.1) * wide(self.norm.weight)
        self.want = x @ self.matrix.values.T + (wide(self.residual) if "sum" in what else 0)
        self.residual = self.residual if "sum" in what else None

    def error(self):
        got = linear.qmv(self.x, Part(EXPERTS, *self.matrix.arrays()), norm=self.norm, residual=self.residual)
        return error(got, self.want)


FUSED = ["norm", "sum", "norm and sum"]


@pytest.mark.parametrize("what, sizes, dtype", drawn(FUSED, [(40, 256), (9, 2048), (1, 64)], FLOATS, turns=3))
def test_qmv_with_norm_and_residual_matches_oracle(host, what, sizes, dtype):
    assert Fused(what, *sizes, dtype).error() < LIMITS[dtype]


@pytest.mark.parametrize("what", FUSED)
def test_fused_qmv_at_tiles_of_cuda_matches_oracle(host, cuda_tiles, what):
    assert Fused(what, 40, 512, mx.float32).error() < LIMITS[mx.float32]


@pytest.mark.parametrize("what", FUSED)
def test_twin_of_a_fused_qmv_matches_oracle(ops, what):
    assert Fused(what, 40, 512, mx.float32).error() < LIMITS[mx.float32]


@pytest.mark.parametrize("bits", [3, 8])
def test_fused_qmv_reads_every_form(host, bits):
    """Each column of x is read once, in the order that a form's codes require."""
    quant = Quant(bits, 64)
    parts = mx.quantize(mx.random.normal((24, 256), key=mx.random.key(bits)), 64, bits)
    case = Fused("norm and sum", 24, 256, mx.float32)
    x = case.norm(case.x)
    want = wide(x @ mx.dequantize(*parts, 64, bits).T + case.residual)
    got = linear.qmv(case.x, Part(quant, *parts), norm=case.norm, residual=case.residual)
    assert error(got, want) < LIMITS[mx.float32]


@pytest.mark.parametrize("sizes, dtype", drawn([(1, 3, 256, 128), (2, 4, 128, 192)], FLOATS))
def test_experts_match_oracle(host, sizes, dtype):
    T, K, H, I = sizes
    e = Experts([T, K], T, K, H, I, dtype)
    assert error(e.gate_up(), e.want_act()) < LIMITS[dtype]
    assert error(e.down_combine(), e.want_out()) < LIMITS[dtype]
    assert error(e.down_combine(shared=False), e.want_out(shared=False)) < LIMITS[dtype]


@pytest.mark.parametrize("H, I", [(512, 512), (256, 1024)])
def test_tiles_of_cuda_match_oracle(host, cuda_tiles, H, I):
    e = Experts([H, I], 1, 5, H, I, mx.bfloat16, records=3)
    matrix = e.matrices[0][0]
    assert error(e.gate_up(), e.want_act()) < LIMITS[mx.bfloat16]
    assert error(e.down_combine(), e.want_out()) < LIMITS[mx.bfloat16]
    for T in (1, 2, 5):
        x = mx.repeat(e.x, T, axis=0)
        assert error(linear.qmv(x, Part(EXPERTS, *matrix.arrays())), wide(x) @ matrix.values.T) < LIMITS[mx.bfloat16]


@pytest.mark.parametrize("shared, dtype", drawn([False, True], FLOATS))
def test_moe_combine_matches_oracle(host, shared, dtype):
    e = Experts(1, 3, 5, 320, 64, dtype)
    out = mx.random.normal((17, 320)).astype(dtype)
    places = np.random.default_rng(0).permutation(17)[:15].reshape(3, 5)
    weights = mx.array(e.weights.astype(np.float32))
    got = combine.moe_combine(out, mx.array(places.astype(np.int32)), weights, e.h_mid, e.shared if shared else None)
    want = wide(e.h_mid) + np.einsum("tk,tkh->th", wide(weights), wide(out)[places]) + shared * wide(e.shared)
    assert error(got, want) < LIMITS[dtype]


@settings(max_examples=4)
@given(data=st.data())
def test_random_shapes_match_oracle(data):
    draw = functools.partial(lambda low, high: data.draw(st.integers(low, high)))
    T, K, H, I = draw(1, 3), draw(1, 16), 64 * draw(1, 4), 64 * draw(1, 4)
    dtype = data.draw(st.sampled_from(FLOATS))
    e = Experts(draw(0, 2**32), T, K, H, I, dtype, records=4, padding=4 * draw(0, 3), spread=draw(0, 4))
    with msl.launching():
        act, out = e.gate_up(), e.down_combine()
        mx.eval(act, out)
    if np.isfinite(wide(act)).all():  # float16 overflows where the exact value does
        assert error(act, e.want_act()) < LIMITS[dtype] * 2
    if np.isfinite(wide(out)).all():
        assert error(out, e.want_out()) < LIMITS[dtype] * 2


@pytest.mark.parametrize("dtype", FLOATS)
def test_twins_match_oracle(ops, dtype):
    e = Experts(3, 2, 4, 128, 192, dtype)
    matrix = e.matrices[0][0]
    assert error(e.gate_up(), e.want_act()) < LIMITS[dtype]
    assert error(e.down_combine(), e.want_out()) < LIMITS[dtype]
    assert error(linear.qmv(e.x, Part(EXPERTS, *matrix.arrays())), wide(e.x) @ matrix.values.T) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", FLOATS)
def test_scales_may_have_any_float_type(host, dtype):
    rng = np.random.default_rng(5)
    matrix = Matrix(rng, 16, 128)
    x = mx.array(rng.normal(size=(1, 128)).astype(np.float32))
    assert error(linear.qmv(x, Part(EXPERTS, *matrix.arrays(dtype))), wide(x) @ matrix.values.T) < 1e-3


# ---- what the bits may depend on


def test_bits_do_not_depend_on_slots_or_blob(host):
    small = Experts(7, 1, 4, 128, 64, mx.bfloat16, records=6, padding=0)
    order = np.random.default_rng(0).permutation(6)
    large = Experts(7, 1, 4, 128, 64, mx.bfloat16, records=6, padding=0)
    padded = mx.concatenate([large.records.blob[mx.array(order)], mx.zeros((6, 128), mx.uint32)], axis=1)
    large.records = replace(large.records, memory=mx.concatenate([padded, padded]))
    large.slots = np.argsort(order)[large.slots] + 6
    assert mx.array_equal(small.gate_up(), large.gate_up())
    assert mx.array_equal(small.down_combine(), large.down_combine())


def test_bits_do_not_depend_on_whether_records_lie_apart(host):
    """There are as many arrays as records, in another order, and the shared expert's inputs follow them."""
    together, apart = (Experts(7, 1, 4, 128, 64, mx.bfloat16, records=6) for _ in range(2))
    order = np.random.default_rng(0).permutation(6)
    apart.records = replace(together.records, memory=tuple(together.records.blob[i] for i in order.tolist()))
    apart.slots = np.argsort(order)[together.slots]
    assert mx.array_equal(together.gate_up(), apart.gate_up())
    assert mx.array_equal(together.down_combine(), apart.down_combine())


def test_more_slots_than_a_threadgroup_has_simdgroups(host, monkeypatch):
    e = Experts(11, 2, 11, 64, 64, mx.float32)
    turns = e.down_combine()
    assert error(turns, e.want_out()) < LIMITS[mx.float32]
    monkeypatch.setitem(launch.MOST_THREADS, "metal", 1024)
    with using(Chosen()):  # plans the launch again
        assert mx.array_equal(e.down_combine(), turns)


@pytest.mark.parametrize("target, most", [("metal", 8), ("cuda", 16)])
@pytest.mark.parametrize("quant", [Quant(4, 64), Quant(2, 64)], ids=str)
def test_the_simdgroups_of_the_down_projection_share_its_slots(target, most, quant):
    """In as few turns as the most simdgroups need, and in the last turn fewer of them are idle than there are turns.
    Up to the most, each slot has a simdgroup of its own.
    """
    record = Record.make(256, 128, (quant,) * 3)
    for K in range(1, experts.MAX_SLOTS + 1):
        shapes = (1, K, 128), (1, 256), (K, record.stride // 4), (1, K)
        plan = experts.plan_down(target, *shapes, (mx.bfloat16, mx.bfloat16, None), record)
        simdgroups = plan.template["SG"]
        turns = -(-K // simdgroups)
        assert plan.threads == 32 * simdgroups and turns == -(-K // most)
        assert turns * simdgroups - K < turns and (turns > 1 or simdgroups == K)


def test_slots_may_be_signed_or_not(host):
    e = Experts(8, 1, 4, 64, 64, mx.float32)
    assert mx.array_equal(e.gate_up(e.index(mx.int32)), e.gate_up(e.index(mx.uint32)))


@msl.needed
def test_record_offsets_pass_4_gib():
    """Compares the addresses of records that the header's own function computes."""
    record = "codes_record(codes_pointer(nullptr), uint(slots[i]), WORDS)"
    source = f"const uint i = thread_position_in_grid.x; out[i] = size_t({record}) / 4;"
    kernel = msl.HostKernel.make(
        name="record",
        input_names=["slots"],
        output_names=["out"],
        source=source,
        header=launch.text_of("codes.h.metal"),
    )
    slots, words = [0, 1, 511, 2**31], 7077888 // 4
    call = {"grid": (4, 1, 1), "threadgroup": (4, 1, 1), "template": [("WORDS", words)]}
    call |= {"output_shapes": [(4,)], "output_dtypes": [mx.uint64]}
    inputs = [mx.array(np.array(slots, np.uint32))]
    text = msl.generate(kernel, inputs, **call)
    (out,) = msl.launch(text, [np.array(slots, np.uint32)], [((4,), np.uint64)], (4, 1, 1), (4, 1, 1))
    assert out.tolist() == [s * words for s in slots]
    assert out[2] * 4 > 2**31 and out[3] * 4 > 2**32


# ---- planted faults

FAULTS = {
    "scale and bias swapped": ("codes.h.metal", "scale[g] = codes_scale(scales[group])",
                               "scale[g] = codes_scale(biases[group])"),
    "high nibble first": ("affine4.h.metal", "CODES_PAIR(word >> (4 * j)", "CODES_PAIR(word >> (12 - 4 * j)"),
    "next group": ("codes.h.metal", "chunk / EACH * GROUPS", "(chunk + 1) / EACH * GROUPS"),
    "constant of the high codes": ("affine4.h.metal", "128.259765625f", "128.0f"),
    "up before gate": ("expert_gate_up.metal", "(record, GATE_W,", "(record, UP_W,"),
    "slots beyond the first token": ("expert_down_combine.metal", "slots[token * ROW + k]", "slots[k]"),
    "weights of the last token": ("expert_down_combine.metal", "weights[token * ROW + k]", "weights[k]"),
    "missing barrier": ("expert_down_combine.metal", "threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    "one lane too few": ("lane.h.metal", "o < L; o *= 2", "o < L / 2; o *= 2"),
}  # fmt: skip


@msl.needed
@pytest.mark.parametrize("name", one_in_three(FAULTS))
def test_planted_fault_is_caught(host, monkeypatch, name):
    msl.plant(monkeypatch, *FAULTS[name])
    e = Experts(11, 2, 3, 256, 128, mx.float32)
    with pytest.raises((AssertionError, msl.Failure)):
        assert error(e.gate_up(), e.want_act()) <= LIMITS[mx.float32]  # this also catches NaN
        assert error(e.down_combine(), e.want_out()) <= LIMITS[mx.float32]


FUSED_FAULTS = {
    "squares of half a row": ("qmv.metal", "m < SPLIT; m++) {\nwhole", "m < 1; m++) {\nwhole"),
    "no epsilon": ("qmv.metal", "+ eps[0]", "+ 0 * eps[0]"),
    "the residual's first rows": ("qmv.metal", "residual[top + i]", "residual[i]"),
    "weights of the row's beginning": (
        "input.h.metal",
        "codes_x8(row.norm + row.at, weight)",
        "codes_x8(row.norm, weight)",
    ),
}


@msl.needed
@pytest.mark.parametrize("name", one_in_three(FUSED_FAULTS))
def test_planted_fault_around_a_product_is_caught(host, cuda_tiles, monkeypatch, name):
    """With CUDA's tiles more than one simdgroup shares a row."""
    msl.plant(monkeypatch, *FUSED_FAULTS[name])
    assert Fused("norm and sum", 40, 1024, mx.float32).error() > LIMITS[mx.float32]


# ---- the source


def test_sources_are_ascii():
    assert not [path.name for path in directory("metal").iterdir() if path.is_file() and not path.read_text().isascii()]


def test_sources_keep_to_portable_metal():
    for name in METAL_TEXTS:
        text = launch.text_of(name)
        assert not re.search(r"\bdouble\b|\bstatic\b|\[[&=]?\]\s*\(|#include|quad_", text), name
        msl.lint(text)


def launches(H, I, K, dtype):
    """Launches every operation once, at the shapes of one layer."""
    record = Record.make(H, I)
    records, slots = Records(mx.zeros((1, record.stride // 4), mx.uint32), record), mx.zeros((1, K), mx.int32)
    x = mx.zeros((1, H), dtype)
    act = experts.expert_gate_up(x, slots, records)
    out = experts.expert_down_combine(act, slots, records, mx.zeros((1, K)), x, x)
    out = combine.moe_combine(mx.zeros((K, H), dtype), mx.zeros((1, K), mx.int32), mx.zeros((1, K)), out)
    w, s = mx.zeros((64, H // 8), mx.uint32), mx.zeros((64, H // 64), mx.bfloat16)
    for tokens in (1, 8):
        linear.qmv(mx.zeros((tokens, H), dtype), Part(EXPERTS, w, s, s))


@msl.needed
@pytest.mark.parametrize("name", one_in_three(VARIANTS))
def test_source_compiles_for_every_variant(name):
    with msl.launching(msl.TextKernel):
        launches(*VARIANTS[name], mx.bfloat16)
    assert len(msl.TextKernel.texts) == 5
    for text in msl.TextKernel.texts:
        signature = text[text.index("[[kernel]]") : text.index(") {\n")]
        assert text.isascii()
        assert not re.search(r"_shape|_strides|_ndim|-", signature.replace("thread-", ""))
        assert "&" not in signature  # no inputs of 0 dimensions: they are values on Metal and pointers on CUDA


# ---- the choice


def test_cpu_takes_the_twins():
    assert backend.name() == "ops" and not backend.has_kernels()


CHOICES = [("gpu", True, False, "metal"), ("gpu", False, True, "cuda"), ("cpu", True, False, "ops")]


@pytest.mark.parametrize("device, metal, cuda, want", [*CHOICES, ("cpu", False, True, "ops")])
def test_backend_asks_device_and_availability(monkeypatch, device, metal, cuda, want):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(getattr(mx, device), 0))
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    assert backend.name() == want


@msl.needed
def test_no_silent_fallback(host, monkeypatch):
    """If a kernel does not build on a GPU, an exception is raised."""
    msl.plant(monkeypatch, "qmv.metal", "\n", " no such thing;\n")
    x, w, s = mx.zeros((1, 64)), mx.zeros((8, 8), mx.uint32), mx.zeros((8, 1))
    with pytest.raises(msl.Failure):
        linear.qmv(x, Part(EXPERTS, w, s, s))


@pytest.mark.parametrize("target", ["metal", "cuda"])
@pytest.mark.parametrize("name", VARIANTS)
def test_launches_stay_within_metals_limits(name, target):
    H, I, K = VARIANTS[name]
    record, T = Record.make(H, I), 2
    blob = 256, record.stride // 4
    types = mx.bfloat16, mx.bfloat16, None
    plans = [
        experts.plan_gate_up(target, (T, H), mx.bfloat16, blob, (T, K), record),
        experts.plan_down(target, (T, K, I), (T, H), blob, (T, K), types, record),
        linear.plan(target, (1, H), mx.bfloat16, (I, H // 8), (I, H // 64), Form(EXPERTS, mx.bfloat16)),
    ]
    for plan in plans:
        assert plan.threads % 32 == 0 and plan.threads <= 512
        assert plan.template["L"] in (8, 16, 32)
        assert all(v >= 0 for v in plan.template.values() if isinstance(v, int))


def product(tokens, columns, dtype=mx.float32):
    return linear.qmv(
        mx.zeros((tokens, columns), dtype), Part(EXPERTS, mx.zeros((1, 8), mx.uint32), *[mx.zeros((1, 1))] * 2)
    )


def routed(words, count):
    blob, slots = mx.zeros((1, words), mx.uint32), mx.zeros((1, count), mx.int32)
    return experts.expert_gate_up(mx.zeros((1, 64)), slots, Records(blob, Record.make(64, 64)))


BAD = {
    "17 tokens": lambda: product(17, 64),
    "int32": lambda: product(1, 64, mx.int32),
    "expected [O, 16]": lambda: product(1, 128),
    "a multiple of 64": lambda: product(1, 96),
    "K from 1": lambda: routed(4096, 0),
    "at least 1728": lambda: routed(1720, 4),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_shapes_are_refused(message):
    with pytest.raises(RequestError, match=re.escape(message)):
        BAD[message]()
