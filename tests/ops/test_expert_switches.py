"""Experts with biases and other activations, in every width and implementation, compared with float64."""

import mlx.core as mx
import numpy as np
import pytest
from grids import examples, one_in_three
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_forms import MXFP4, Stored, narrow
from test_native import PATHS, force
from tile_choices import OF_CUDA, Chosen

from metal import msl
from moeflux_mlx.formats.record import Record
from moeflux_mlx.kinds import FORMS, Activation
from moeflux_mlx.layers import ScaledNorm
from moeflux_mlx.ops import backend, elementwise, experts, forms, grouped, native
from moeflux_mlx.ops.combine import combined
from moeflux_mlx.ops.experts import Records
from moeflux_mlx.ops.forms import Form
from moeflux_mlx.ops.stand_ins import standing_in
from moeflux_mlx.ops.tiles import MAX_TOKENS, using
from moeflux_mlx.quant import Quant
from moeflux_mlx.several import experts as several_experts

pytestmark = pytest.mark.usefixtures("cpu_device")
LIMIT = 0.6  # a limit that many products exceed
ACTIVATIONS = [Activation(form, LIMIT if "clip" in form else None) for form in FORMS if form != "situ"]
ACTIVATIONS += [Activation("situ", LIMIT, 0.8), Activation("situ", None, 2.0)]
STORED = [(MXFP4, "BF16"), (Quant(4, 64), "F16"), (Quant(3, 32), "F32"), (Quant(4, 32), "BF16"), (Quant(8, 64), "F32")]
KERNEL_LIMITS = {mx.float32: 1e-5, mx.bfloat16: 1e-2, mx.float16: 2e-3}
SEEN = 2e-2  # share of the largest value by which the smallest fault changes the result at least


def sigmoid(x):
    return 0.5 + 0.5 * np.tanh(0.5 * x)


def activated(g, u, activation, limit=None):
    """Computes the activation in float64, as gpt-oss (torch/model.py), Step-3.5 (modeling_step3p5.py) and DeepSeek-V4
    (model.py) have it, Kimi K3 (mlx-lm's kimi_k3.py), and Nemotron-H without a gate (arXiv:2109.08668)."""
    limit = activation.limit if limit is None else limit
    if activation.form == "situ":
        u = u if limit is None else limit * np.tanh(u / limit)
        return activation.gate_limit * np.tanh(g / activation.gate_limit) * sigmoid(g) * u
    clipped = None if limit is None else (np.minimum(g, limit), np.clip(u, -limit, limit))
    if activation.form == "silu":
        return g * sigmoid(g) * u
    if activation.form == "gelu":
        return 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u
    if activation.form == "clip then silu":
        return clipped[0] * sigmoid(clipped[0]) * clipped[1]
    if activation.form == "silu then clip":
        return np.minimum(g * sigmoid(g), limit) * clipped[1]
    if activation.form == "relu":
        return np.maximum(g, 0) * u
    return clipped[0] * sigmoid(1.702 * clipped[0]) * (clipped[1] + 1)


class Case:
    """Random records of experts with biases, the slots of some tokens, and the experts' results in float64."""

    def __init__(
        self, seed, stored, activation, tokens=3, size=(128, 192), has_bias=True, top_k=3, count=5, turns=False
    ):
        rng, (quant, kind), (H, I) = np.random.default_rng(seed), stored, size
        self.matrices = matrices = 2 if activation.form == "relu" else 3
        turns = turns and matrices == 3
        self.record = Record.make(H, I, (quant,) * matrices, None, kind, has_bias, activation, turns)
        self.blob = rng.integers(0, 1 << 32, (count, self.record.stride // 4), np.uint32)
        self.experts = [[self._filled(rng, row, part, kind) for part in self.record.projections] for row in self.blob]
        if matrices == 2:
            self.experts = [[up, up, down] for up, down in self.experts]
        if turns:
            self.experts = [[*self._apart(gate, up), down] for gate, up, down in self.experts]
        self.slots = rng.integers(0, count, (tokens, top_k)).astype(np.int32)
        self.x, self.mid = rng.standard_normal((2, tokens, H), dtype=np.float32)
        self.weights = rng.random((tokens, top_k), dtype=np.float32)

    @staticmethod
    def _filled(rng, row, part, kind):
        """Writes a matrix and its bias into a record, and returns their values."""
        matrix = Stored(rng, part.rows, part.columns, part.quant, part.fields[1].dtype)
        for field, values in zip(part.codes, matrix.parts, strict=True):
            row[field.words] = values.reshape(-1).view(np.uint32)
        if part.bias is None:
            return matrix.values, np.zeros(part.rows)
        kept, bias = narrow(rng.standard_normal(part.rows), kind)
        row[part.bias.words] = kept.view(np.uint32)
        return matrix.values, bias

    @staticmethod
    def _apart(first, second):
        """Separates the rows of gate and up, which alternate in the two arrays."""
        values, bias = (np.concatenate(pair) for pair in zip(first, second, strict=True))
        return [(values[turn::2], bias[turn::2]) for turn in (0, 1)]

    def want(self, activation=None, without="", swapped=False, limit=None, norm=lambda made: made):
        """Returns the sum of residual and experts, or that sum with a fault: without the bias of a matrix, with gate
        and up swapped, or with another limit."""
        out = self.mid.astype(np.float64)
        for t, k in np.ndindex(self.slots.shape):
            products, x = [], self.x[t].astype(np.float64)
            for name, (values, bias) in zip(("gate", "up", "down"), self.experts[self.slots[t, k]], strict=True):
                if name == "down":
                    g, u = reversed(products) if swapped else products
                    x = activated(g, u, activation or self.record.activation, limit)
                products.append(values @ x + (0 if name == without else bias))
            out[t] += self.weights[t, k] * norm(products[-1])
        return out

    def stepped(self, make, dtype=None, norm=None):
        """Computes with the function for the rows of a step, with arrays that `make` makes."""

        def floats(values):
            return make(values) if dtype is None else make(values).astype(dtype)

        given = make(self.slots), Records(make(self.blob), self.record)
        return experts.expert_ffn(floats(self.x), *given, make(self.weights), floats(self.mid), None, norm)

    def prompted(self, make, norm=None):
        """Computes as a prompt does: rows by expert, in two waves."""
        waves = [part for part in np.array_split(np.unique(self.slots), 2) if len(part)]
        counts = np.bincount(self.slots.reshape(-1), minlength=len(self.blob))
        rows = grouped.GroupedRows(make(self.x), self.slots, counts, waves, self.record)
        for i, wave in enumerate(waves):
            rows.multiply(i, wave, Records(make(self.blob), self.record))
        return rows.combined(make(self.weights), make(self.mid), None, norm)


def error(got, want):
    got = np.array(got.astype(mx.float32) if isinstance(got, mx.array) else got, np.float64)
    return float(np.abs(got - want).max() / np.abs(want).max())


def named(case):
    return str(case[0] if isinstance(case, tuple) else case.form)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=named)
def test_faults_would_be_seen(activation):
    """Otherwise the comparisons below would prove nothing.

    The faults differ from the results by much more than the tolerances.
    """
    case = Case(1, STORED[0], activation)
    want = case.want()
    faults = [case.want(without=name) for name in ("gate", "up", "down")]
    faults += [case.want(swapped=True)] if case.matrices == 3 else []
    faults += [case.want(other) for other in ACTIVATIONS if other.form != activation.form]
    faults += [] if activation.limit is None else [case.want(limit=1e6)]
    least = SEEN / 4 if activation.form == "relu" else SEEN  # no kernel is compared with relu in bfloat16
    assert all(error(fault, want) > least for fault in faults)


@pytest.fixture(params=PATHS)
def path(request):
    force(request.param)
    yield request.param
    force(PATHS[0])


sizes = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(lambda size: (64 * size[0], 64 * size[1]))


def cases(most_tokens):
    seeds, tokens, slots = st.integers(0, 2**32), st.integers(1, most_tokens), st.integers(1, 5)
    forms = st.sampled_from(STORED), st.sampled_from(ACTIVATIONS)
    return st.builds(Case, seeds, *forms, tokens, sizes, st.booleans(), slots, turns=st.booleans())


few = settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@few
@given(cases(20))
def test_native_matches_oracle(path, case):
    want = case.want()
    assert error(case.stepped(np.array), want) < 3e-6
    assert error(case.prompted(np.array), want) < 3e-6


@few
@given(cases(MAX_TOKENS))
def test_operations_match_oracle(case):
    assert error(case.stepped(mx.array), case.want()) < 1e-5


KERNELS = [  # each activation is a variant of Metal's source
    (STORED[0], ACTIVATIONS[4], mx.bfloat16, True, (2880, 64)),
    (STORED[0], ACTIVATIONS[3], mx.float32, False, (128, 320)),
    (STORED[1], ACTIVATIONS[2], mx.float32, True, (64, 704)),
    (STORED[2], ACTIVATIONS[1], mx.float16, True, (192, 128)),
    (STORED[3], ACTIVATIONS[0], mx.float32, True, (128, 192)),
    (STORED[1], ACTIVATIONS[5], mx.float32, True, (192, 128)),
    (STORED[0], ACTIVATIONS[6], mx.bfloat16, False, (64, 192)),
    (STORED[0], ACTIVATIONS[7], mx.float32, True, (64, 192)),
]


@pytest.mark.parametrize("stored, activation, dtype, has_bias, size", KERNELS, ids=map(str, range(len(KERNELS))))
def test_kernels_match_oracle(host, stored, activation, dtype, has_bias, size):
    for turns in (False, True):
        case = Case(4, stored, activation, 2, size, has_bias, 3, turns=turns)
        assert error(case.stepped(mx.array, dtype), case.want()) < KERNEL_LIMITS[dtype]


@few
@given(cases(20), st.sampled_from([1, 10**9]))
def test_prompts_on_mlx_side_match_oracle(case, dense_from):
    """Checks both ways: dequantised experts, and products from codes in blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "dense_from", lambda *_: dense_from)
        assert error(case.prompted(mx.array), case.want()) < 1e-5


@pytest.fixture(params=["native", "operations", "kernels"])
def way(request):
    """Gives the function that makes arrays for one way of computing."""
    if request.param == "kernels":
        request.getfixturevalue("host")
    return np.array if request.param == "native" else mx.array


@pytest.mark.parametrize("tokens", [1, 7])
def test_outputs_that_are_normed_before_they_are_weighed(way, tokens):
    """7 tokens have more pairs with experts than a launch takes rows."""
    case, norm = Case(6, STORED[1], ACTIVATIONS[0], tokens), ScaledNorm(128, 0.5)
    scale = np.random.default_rng(7).standard_normal(128)
    norm.weight = mx.array(scale.astype(np.float32))

    def wanted(made, before=scale, behind=1.0):
        return before * made / np.sqrt(np.mean((before * made) ** 2) + 0.5) * behind

    want = case.want(norm=wanted)
    assert error(case.want(norm=lambda made: wanted(made, 1.0, scale)), want) > SEEN < error(case.want(), want)
    assert error(case.stepped(way, norm=norm), want) < 1e-5 > error(case.prompted(way, norm=norm), want)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=named)
def test_activations_of_many_values(path, activation):
    """Checks whole vectors, their ends and values far outside. NaN stays NaN."""
    gate, up = 4 * np.random.default_rng(3).standard_normal((2, 3, 37), dtype=np.float32)
    gate[0, :4], up[0, 4:8] = (90, -90, 1e4, -1e4), (90, -90, 1e4, -1e4)
    want = activated(gate.astype(np.float64), up.astype(np.float64), activation)
    for got in (native.activate(gate, up, activation), elementwise.activate(mx.array(gate), mx.array(up), activation)):
        np.testing.assert_allclose(np.array(got), want, rtol=1e-5, atol=1e-6)
    gate[1, :], up[2, :] = np.nan, np.nan
    for got in (native.activate(gate, up, activation), elementwise.activate(mx.array(gate), mx.array(up), activation)):
        assert np.isnan(np.array(got)[1:]).all() and not np.isnan(np.array(got)[0]).any()


def test_a_prompts_activation_has_the_values_of_its_operations():
    rng = np.random.default_rng(4)
    gate, up, scale = (mx.array(rng.normal(size=(MAX_TOKENS + 1, n)).astype(np.float32)) for n in (32, 32, 1))
    for squashed, factor in ((False, scale), (True, mx.sigmoid(scale))):
        with standing_in(backend="metal"):
            made = elementwise.activate(gate, up, ACTIVATIONS[0], scale, squashed)
        np.testing.assert_allclose(made, elementwise.activate(gate, up, ACTIVATIONS[0]) * factor, rtol=1e-5)


def test_a_prompts_gates_are_those_of_a_token():
    """Also where gates stand between other values."""
    rng = np.random.default_rng(5)
    x, both = (mx.array(rng.normal(size=(2, MAX_TOKENS, 3, n)).astype(np.float32)) for n in (8, 16))
    want = np.array(x) / (1 + np.exp(-np.array(both[..., 8:])))
    for target in ("metal", "ops"):
        with standing_in(backend=target):
            made = elementwise.times_sigmoid(x, both[..., 8:])
        np.testing.assert_allclose(made, want.reshape(2, MAX_TOKENS, -1), rtol=1e-5)


@pytest.mark.parametrize("top_k, activation", [(17, ACTIVATIONS[0]), (22, ACTIVATIONS[4]), (32, ACTIVATIONS[2])])
@pytest.mark.parametrize("integers", [False, True])
def test_a_token_may_use_up_to_32_experts(host, monkeypatch, integers, top_k, activation):
    """With `integers`, multiplies as on CUDA, where a threadgroup holds x for each simdgroup."""
    tiles = {}
    if integers:
        monkeypatch.setitem(forms.INTEGERS, "metal", forms.INTEGERS["cuda"])
        tiles = OF_CUDA
    with using(Chosen(tiles)):
        case = Case(5, STORED[0], activation, 1, (320, 64), True, top_k, 33)
        assert error(case.stepped(mx.array), case.want()) < 1e-5


def test_planes_of_32_simdgroups_fit_a_threadgroup():
    quant, columns = Quant(2, 64), 8192
    record = Record.make(64, columns, (quant,) * 3)
    blob, float32 = (40, record.stride // 4), (mx.float32,) * 2
    plan = experts.plan_down("cuda", (1, 32, columns), (1, 64), blob, (1, 32), (*float32, None), record)
    room = plan.template["SG"] * Form(quant, mx.bfloat16, 3).room(plan.template["SPAN"])
    assert plan.kernel.form == "planes" and room <= 48 * 1024


KERNEL_FAULTS = {
    "no bias of gate": ("swiglu.h.metal", "gx += float(ending.gate[row[r]]);", ""),
    "no bias of up": ("swiglu.h.metal", "ux += float(ending.up[row[r]]);", ""),
    "no bias of down": ("expert_down_combine.metal", "if (BIASED) {", "if (0) {"),
    "another row's bias": ("swiglu.h.metal", "ending.up[row[r]]", "ending.up[row[0]]"),
    "up's bias for gate": ("expert_gate_up.metal", "(record + GATE_BIAS)", "(record + UP_BIAS)"),
    "gate and up swapped": ("swiglu.h.metal", "swiglu_joined<ACTIVATION>(gx, ux,", "swiglu_joined<ACTIVATION>(ux, gx,"),
    "no limit of gate": ("swiglu.h.metal", "g = g > limit ? limit : g;", ""),
    "no lower limit of up": ("swiglu.h.metal", "u < -limit ? -limit : u;", "u;"),
    "no rectifier": ("swiglu.h.metal", "(g < 0.0f ? 0.0f : g) * u", "g * u"),
    "no one": ("swiglu.h.metal", "(u + 1.0f)", "u"),
    "gate's rows in turns": ("swiglu.h.metal", "2 * row[i % R] + i / R", "row[i % R] + I * (i / R)"),
    "the second half's biases": ("swiglu.h.metal", "(2 * row[r] < I ? ending.gate : ending.up)", "ending.gate"),
    "half without its weight": ("expert_down_combine.metal", "weight * total", "0.5f * (weight + 1) * total"),
}


@pytest.mark.skipif(backend.has_kernels(), reason="MLX 0.32.4 does not multiply batches of that shape on CUDA")
def test_more_experts_than_kernels_take_go_to_the_twins(host):
    case = Case(7, STORED[1], ACTIVATIONS[4], 2, (64, 64), True, 33)
    assert error(case.stepped(mx.array), case.want()) < 1e-5


@pytest.mark.parametrize("make", [np.array, mx.array])
def test_the_bits_of_a_sum_of_rows(host, make):
    """Several ranks sum rows in this way: a bias is added in the row of its pair, before the weight."""
    case = Case(6, STORED[0], ACTIVATIONS[4], 2, (128, 64))
    pairs = list(np.ndindex(case.slots.shape))
    tokens, slots = np.array([t for t, _ in pairs]), np.array([case.slots[pair] for pair in pairs])
    weights = np.array([case.weights[pair] for pair in pairs])
    rows = several_experts.pair_rows(make(case.x), tokens, slots, Records(make(case.blob), case.record), weights)
    beside = case.weights if make is np.array else np.ones_like(case.weights)
    where = np.arange(case.slots.size, dtype=np.int32).reshape(case.slots.shape)
    whole = combined(rows, where, make(beside), make(case.mid), None)
    assert np.array_equal(np.array(whole), np.array(case.stepped(make)))


@msl.needed
@pytest.mark.parametrize("name", one_in_three(KERNEL_FAULTS))
def test_a_planted_fault_in_a_kernel_is_caught(host, monkeypatch, name):
    msl.plant(monkeypatch, *KERNEL_FAULTS[name])
    activation = ACTIVATIONS[5 if "rectifier" in name else 4]
    case = Case(4, STORED[0], activation, 1, (64, 64), turns="second half" in name or "turns" in name)
    assert not error(case.stepped(mx.array), case.want()) < 1e-3
