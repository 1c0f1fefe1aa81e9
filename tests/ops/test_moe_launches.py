"""The few launches of an MoE layer: norm and router, the choice of experts, and the shared expert together with the
routed ones. Each is compared with float64 or with its twin, and bit by bit where modes must agree.
"""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import oracle
import pytest
from grids import drawn, examples, one_in_three
from hypothesis import given, settings
from hypothesis import strategies as st
from test_forms import Stored
from test_kernels import FLOATS, LIMITS, Experts, Matrix, error, wide
from tile_choices import Chosen

from metal import msl
from moeflux_mlx.formats.record import Record
from moeflux_mlx.kinds import Activation, Router
from moeflux_mlx.ops import backend, combine, experts, native
from moeflux_mlx.ops import route as routes
from moeflux_mlx.ops.elementwise import activate
from moeflux_mlx.ops.experts import Records, Shared
from moeflux_mlx.ops.linear import linear
from moeflux_mlx.ops.matrix import Part
from moeflux_mlx.ops.route import Choice, read_host_copy, read_ids, route, route_with_host_copy, router_logits
from moeflux_mlx.ops.tiles import Tile, using
from moeflux_mlx.quant import EXPERTS, Quant

pytestmark = pytest.mark.usefixtures("cpu_device")
SIGMOID = Router(64, 6, "sigmoid", True, 8, 4, scale=2.5)


def random(rng, *shape, dtype=mx.float32):
    return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)


# ---- norm and router


def router(rng, rows, columns, bits, group):
    """Returns a matrix in a stored form (with 0 bits: in floats), and its values."""
    if not bits:
        values = random(rng, rows, columns)
        return Part(None, values), wide(values)
    matrix = Stored(rng, rows, columns, Quant(bits, group), "F32")
    return Part(Quant(bits, group), *matrix.arrays("F32")), matrix.values


ROUTERS = [(1, 33, 2048), (3, 8, 192), (20, 9, 192)]  # T, O, H


@pytest.mark.parametrize("sizes, form, dtype", drawn(ROUTERS, [(0, 64), (8, 64), (4, 32)], FLOATS))
def test_norm_and_logits_match_oracle(host, sizes, form, dtype):
    (T, O, H), (bits, group) = sizes, form
    rng = np.random.default_rng([T, O, bits])
    w, values = router(rng, O, H, bits, group)
    h, norm = random(rng, T, H, dtype=dtype), random(rng, H, dtype=dtype)
    bias = random(rng, O)
    x, logits = router_logits(h, norm, 1e-6, w)
    assert error(router_logits(h, norm, 1e-6, w, bias)[1], wide(logits) + wide(bias)) < 1e-6
    want = wide(h) / np.sqrt((wide(h) ** 2).mean(-1, keepdims=True) + 1e-6) * wide(norm)
    assert x.dtype == dtype and error(x, want) < LIMITS[dtype]
    assert error(logits, wide(x) @ values.T) < 2e-5, "logits are of the row as it is stored"
    other = random(rng, H)
    x, same = router_logits(h, norm, 1e-6, w, None, other)
    assert mx.array_equal(same, logits), "a norm of x's own changes no logit"
    assert error(x, want / wide(norm) * wide(other)) < LIMITS[dtype]
    x, logits = router_logits(h, None, 0.0, w)
    assert mx.array_equal(x, h) and error(logits, wide(h) @ values.T) < 2e-5, "there may be no norm"


@pytest.mark.parametrize("dtype", FLOATS)
def test_kernel_and_twin_of_the_router_agree(dtype):
    def outputs():
        rng = np.random.default_rng(2)
        w, _ = router(rng, 17, 256, 8, 64)
        h, norm, other = (random(rng, *shape, dtype=dtype) for shape in ((2, 256), (256,), (256,)))
        return [*router_logits(h, norm, 1e-6, w), *router_logits(h, norm, 1e-6, w, None, other)]

    twin = [wide(part) for part in outputs()]
    with msl.launching():
        assert all(error(got, want) < 2 * LIMITS[dtype] for got, want in zip(outputs(), twin, strict=True))


# ---- the choice


@settings(max_examples=examples(12))
@given(
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.sampled_from([(16, 4), (40, 10), (119, 8), (128, 8), (288, 4), (320, 32), (512, 22)]),
    st.booleans(),
)
def test_softmax_topk(seed, T, shape, norm):
    E, K = shape
    rng = np.random.default_rng(seed)
    logits = rng.permuted(np.tile(np.arange(E) * 0.05, (T, 1)), axis=1).astype(np.float32)
    with msl.launching():
        ids, weights = route(mx.array(logits), Router(E, K, normalise=norm))
        mx.eval(ids, weights)
    want_ids, want_weights = oracle.softmax_topk(logits, K, norm)
    assert np.array_equal(np.array(ids), want_ids)
    np.testing.assert_allclose(np.array(weights), want_weights, rtol=1e-5)


@settings(max_examples=examples(12))
@given(
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.sampled_from(
        [
            (8, 8, 4, 8),
            (4, 40, 2, 4),
            (2, 16, 1, 3),
            (1, 24, 1, 5),
            (8, 32, 4, 8),
            (16, 1, 9, 3),
            (1, 320, 1, 32),
            (1, 119, 1, 8),
        ]
    ),
    st.floats(-3, 3),
)
def test_groups_of_sigmoids(seed, T, shape, shift):
    groups, size, kept, K = shape
    rng = np.random.default_rng(seed)
    order = np.tile(np.arange(groups * size) * 0.02, (T, 1))
    logits = (rng.permuted(order, axis=1) + rng.normal(size=(T, 1))).astype(np.float32)
    bias = (rng.normal(size=groups * size) * 0.1 + shift).astype(np.float32)
    rule = Router(groups * size, K, "sigmoid", True, groups, kept, scale=2.5)
    with msl.launching():
        ids, weights = route(mx.array(logits), rule, mx.array(bias))
        mx.eval(ids, weights)
    want_ids, want_weights = oracle.noaux_tc_topk(logits, bias, K, groups, kept, 2.5)
    assert np.array_equal(np.sort(np.array(ids)), np.sort(want_ids))
    order = np.argsort(np.array(ids)), np.argsort(want_ids)
    got = np.take_along_axis(np.array(weights), order[0], 1)
    np.testing.assert_allclose(got, np.take_along_axis(want_weights, order[1], 1), rtol=2e-5)


ROOT = Router(40, 6, "sqrtsoftplus", True, scale=1.5)


def check_roots(by_table):
    """The choice and the weights of DeepSeek-V4's router (its model code in transformers), also of scores near 0; or
    the weights of what a table gives."""
    rng = np.random.default_rng(6)
    rows = [np.linspace(least, most, 41) for least, most in ((-30, -12), (-3, 3))]
    logits, bias = rng.permuted(np.float32(rows), axis=1), np.float32([0, *[1e-4] * 39])
    scores = np.sqrt(np.log1p(np.exp(logits[:, :40].astype(np.float64))))
    if by_table:
        table = np.uint32([rng.permutation(40)[:6] for _ in range(7)])
        want, rule = table[[5, 2]].astype(np.int64), replace(ROOT, table=7, correction_bias=False)
        ids, weights = routes.route_by_table(mx.array(logits), rule, mx.array(table), mx.array([5, 2]))
    else:
        want = np.argsort(-(scores + bias), axis=-1)[:, :6]
        ids, weights = route(mx.array(logits), ROOT, mx.array(bias))
    own = np.take_along_axis(scores, want, 1)
    assert np.array_equal(np.array(ids), want)
    np.testing.assert_allclose(np.array(weights), 1.5 * own / own.sum(-1, keepdims=True), rtol=2e-5)


@pytest.mark.parametrize("by_table", [False, True])
def test_roots_of_softplus(host, by_table):
    assert not routes.refusal(backend.name(), ROOT)
    check_roots(by_table)


@msl.needed
@pytest.mark.parametrize(
    "file, old, new",
    [
        ("softplus.h.metal", "metal::precise::log(sum) * (e / (sum - 1.0f))", "metal::precise::log(sum)"),
        ("topk_table.metal", "tokens[token]", "token"),
    ],
)
def test_a_fault_in_roots_of_softplus_is_caught(host, monkeypatch, file, old, new):
    msl.plant(monkeypatch, file, old, new)
    with pytest.raises((AssertionError, msl.Failure)):
        check_roots("table" in file)


CHOICES = {
    "a softmax with a bias": Router(40, 6, correction_bias=True),
    "groups of a softmax": Router(40, 6, groups=5, kept_groups=2),
    "logits with a bias": Router(40, 6, "sigmoid", True, normalise=False, biases_logits=True),
    "large logits": Router(40, 6, "sigmoid", normalise=False, biases_logits=True),  # whose sigmoids are all 1
    "an eps of the sum": Router(40, 6, "sigmoid", True, eps=0.5),
}


def check_choice(name, kind):
    """Compares a choice and its weights with their definition in float64."""
    rule, rng = CHOICES[name], np.random.default_rng(8)
    logits, bias = np.float32(rng.normal(0, 2, (3, 40))), np.float32(rng.normal(0, 0.3, 40))
    logits += np.float32(40 if name == "large logits" else 0)
    exponentials = np.exp(logits.astype(np.float64))
    scores = exponentials / (exponentials.sum(-1, keepdims=True) if rule.score == "softmax" else 1 + exponentials)
    choice = (logits if rule.biases_logits else scores) + (bias if rule.correction_bias else 0)
    grouped = choice.reshape(3, rule.groups, -1)
    best_two = np.sort(grouped, -1)[..., -2:].sum(-1)
    dropped = best_two < np.sort(best_two, -1)[:, -rule.kept_groups, None]
    want = np.argsort(-np.where(dropped[..., None], -np.inf, grouped).reshape(choice.shape), -1)[:, :6]
    weights = np.take_along_axis(scores, want, 1)
    if rule.normalise:
        weights /= weights.sum(-1, keepdims=True) + (rule.eps if rule.score != "softmax" else 0)
    found = route(kind(logits), rule, mx.array(bias) if rule.correction_bias else None)
    assert np.array_equal(np.array(found[0]), want)
    np.testing.assert_allclose(np.array(found[1]), weights, rtol=2e-5)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("kind", [mx.array, np.array])
def test_what_experts_are_chosen_by(host, name, kind):
    assert not routes.refusal(backend.name(), CHOICES[name])
    check_choice(name, kind)


@msl.needed
@pytest.mark.parametrize(
    "name, old, new",
    [
        ("a softmax with a bias", "!SCORE && !BIAS", "!SCORE"),
        ("groups of a softmax", "&& KEPT == GROUPS;", ";"),
        ("logits with a bias", "BIAS >= 2 ? v", "BIAS == 3 ? v"),
        ("large logits", "BIAS >= 2 ? v", "BIAS == 2 ? v"),
        ("an eps of the sum", "kept + eps", "kept"),
    ],
)
def test_a_fault_in_a_choice_is_caught(host, monkeypatch, name, old, new):
    msl.plant(monkeypatch, "topk.h.metal", old, new)
    with pytest.raises((AssertionError, msl.Failure)):
        check_choice(name, mx.array)


@pytest.mark.parametrize("rule", [Router(512, 10), Router(16, 5), SIGMOID])
def test_the_host_copy_of_one_token_is_its_choice(host, monkeypatch, rule):
    monkeypatch.setattr(routes, "HOST_COPY", {backend.name()})
    logits, bias = random(np.random.default_rng(3), 2, rule.experts), mx.zeros((rule.experts,))
    *want, copy = route_with_host_copy(logits, rule, bias)
    assert not copy, "of several tokens nothing is copied"
    ids, weights, copy = route_with_host_copy(logits[1:], rule, bias)
    mx.eval(ids, weights, copy)
    assert max(part.nbytes for part in copy) <= 8
    for of_last, of_both in zip((ids, weights), want, strict=True):
        assert np.array_equal(np.array(of_last), np.array(of_both)[1:])
    of_last = read_host_copy(copy)
    assert np.array_equal(of_last[0], np.array(ids))
    np.testing.assert_allclose(of_last[1], np.array(weights), rtol=2**-7)


@pytest.mark.parametrize(
    "rule", [Router(40, 6, expert_scales=True), replace(SIGMOID, scale=1.0, expert_scales=True)], ids=str
)
def test_each_expert_has_a_scale_of_its_own(host, rule):
    """Compares the kernel, the native form and plain operations with float64's choice times the scale."""
    rng = np.random.default_rng(5)
    logits, scales = (random(rng, *shape) for shape in ((3, rule.experts), (rule.experts,)))
    bias = mx.zeros((rule.experts,)) if rule.correction_bias else None
    plain = replace(rule, expert_scales=False)
    for one in (logits, np.array(logits)):
        ids, weights = (np.array(part) for part in route(one, rule, bias, scales))
        want_ids, want = (np.array(part) for part in route(one, plain, bias))
        assert np.array_equal(ids, want_ids)
        np.testing.assert_allclose(weights, want * np.array(scales)[ids], rtol=1e-5)


def test_ties_go_to_the_lowest_index(host):
    logits = np.zeros((1, 70), np.float32)
    logits[0, [3, 40, 69]] = 1
    for score in ("softmax", "sigmoid"):
        ids, _ = route(mx.array(logits), Router(70, 6, score))
        assert np.array(ids)[0].tolist() == [3, 40, 69, 0, 1, 2]
    ids, _ = route(mx.array(logits[:, :64]), Router(64, 4, "sigmoid", groups=8, kept_groups=3), None)
    assert np.array(ids)[0].tolist() == [3, 40, 0, 1], "groups as good as one another: the first"


@pytest.mark.parametrize("rule", [Router(64, 4), SIGMOID])
def test_a_choice_among_nans_stays_in_range(host, rule):
    ids, _ = route(mx.full((1, 64), float("nan")), rule, mx.zeros((64,)) if rule.correction_bias else None)
    assert np.array(ids).max() < 64


@pytest.mark.skipif(not native.available(), reason="the extension is not built, and arrays of numpy need it")
@pytest.mark.parametrize("rule", [Router(24, 5), Router(24, 5, "sigmoid", True, 4, 2, True, 1.5)])
def test_columns_beside_the_experts_are_not_chosen(rule):
    """The last column is the shared expert's gate."""
    rng = np.random.default_rng(4)
    logits, bias = rng.normal(size=(3, 25)).astype(np.float32), rng.normal(size=24).astype(np.float32)
    logits[:, -1] = 100.0

    def routed(kind):
        ids, weights = route(kind(logits), rule, mx.array(bias) if rule.correction_bias else None)
        return np.array(ids), np.array(weights)

    want = routed(np.array)
    twin = routed(mx.array)
    with msl.launching():
        kernel = routed(mx.array)
    for ids, weights in (twin, kernel):
        assert np.array_equal(ids, want[0])
        np.testing.assert_allclose(weights, want[1], rtol=2e-5)


# ---- the shared expert together with the routed ones


class Layer(Experts):
    """Routed experts, and a shared expert in the same stored form."""

    def __init__(self, seed, T, K, H, I, dtype, columns=7, scales=mx.bfloat16, gated=True, **more):
        super().__init__(seed, T, K, H, I, dtype, **more)
        rng = np.random.default_rng([seed, 1])
        self.own = [Matrix(rng, I, H), Matrix(rng, I, H), Matrix(rng, H, I)]
        parts = [matrix.arrays(scales) for matrix in self.own]
        first = Part(EXPERTS, *(mx.concatenate([a, b]) for a, b in zip(parts[0], parts[1], strict=True)))
        last = Part(EXPERTS, *parts[2])
        self.logits = random(rng, T, columns)

        def multiplied(x, scale, residual, squashed):
            assert squashed and residual is None
            gate, up = mx.split(linear(x, first), 2, axis=-1)
            act = gate * mx.sigmoid(gate) * up
            return linear((act if scale is None else act * mx.sigmoid(scale)).astype(x.dtype), last)

        self.shared = Shared(multiplied, first, last, self.logits if gated else None)

    def want_shared(self):
        gate, up, down = (matrix.values for matrix in self.own)
        g = wide(self.x) @ gate.T
        rows = (g / (1 + np.exp(-g)) * (wide(self.x) @ up.T)) @ down.T
        return rows if self.shared.gates is None else rows / (1 + np.exp(-wide(self.logits)[:, -1:]))

    def routed_and_shared(self):
        weights = mx.array(self.weights.astype(np.float32))
        return experts.expert_ffn(self.x, self.index(), self.records, weights, self.h_mid, self.shared)

    def want(self):
        self.act = mx.array(self.want_act().astype(np.float32))
        return Experts.want_out(self, shared=False) + self.want_shared()


EXPERTS_OF = [(1, 3, 256, 128), (2, 4, 128, 192)]  # T, K, H, I


@pytest.mark.parametrize("sizes, gated, dtype", drawn(EXPERTS_OF, [False, True], FLOATS, seed=1))
def test_shared_expert_with_routed_ones_matches_oracle(host, sizes, gated, dtype):
    T, K, H, I = sizes
    layer = Layer(10 * T + K, T, K, H, I, dtype, gated=gated)
    assert layer.shared.joins(layer.records.record, K)
    assert error(layer.routed_and_shared(), layer.want()) < 2 * LIMITS[dtype]


def test_kernels_agree_with_separate_products_of_the_shared_expert(host, monkeypatch):
    layer = Layer(3, 2, 4, 128, 64, mx.float32)
    together = layer.routed_and_shared()
    monkeypatch.setattr(Shared, "joins", lambda *_: False)
    assert error(layer.routed_and_shared(), wide(together)) < LIMITS[mx.float32]


@pytest.mark.parametrize("pays", [True, False])
def test_a_shared_expert_in_another_form_is_launched_separately(host, request, pays):
    """In two launches where they pay."""
    if pays:
        request.getfixturevalue("small_products")
    routed = Layer(5, 1, 3, 128, 64, mx.float32)
    for other in (Layer(5, 1, 3, 128, 64, mx.float32, scales=mx.float32), Layer(5, 1, 3, 128, 128, mx.float32)):
        assert not other.shared.joins(routed.records.record, 3)
        routed.own, routed.logits, routed.shared = other.own, other.logits, other.shared
        if pays:
            routed.shared = replace(other.shared, layer=fail)
        assert error(routed.routed_and_shared(), routed.want()) < 2 * LIMITS[mx.float32]


@pytest.mark.usefixtures("both_builds")
@pytest.mark.parametrize("form", ["silu", "silu then clip"])
def test_rows_of_a_shared_expert_alone_have_their_own_bits(host, small_products, form):
    layer = Layer(6, 5, 3, 128, 192, mx.bfloat16)
    activation = Activation(form, None if form == "silu" else 0.25)
    shared = replace(layer.shared, layer=fail, activation=activation)
    rows = [replace(shared, gates=shared.gates[t : t + 1]).rows(layer.x[t : t + 1]) for t in range(5)]
    assert mx.array_equal(mx.concatenate(rows), shared.rows(layer.x))
    gate, up = (wide(layer.x) @ matrix.values.T for matrix in layer.own[:2])
    act = wide(activate(mx.array(gate, mx.float32), mx.array(up, mx.float32), activation))
    want = act @ layer.own[2].values.T / (1 + np.exp(-wide(layer.logits)[:, -1:]))
    assert error(shared.rows(layer.x), want) < 2 * LIMITS[mx.bfloat16]


@pytest.mark.parametrize("T, dtype", drawn([1, 3], [mx.float32, mx.bfloat16]))
def test_the_bits_of_a_sum_of_rows(host, T, dtype):
    """Several ranks sum rows in this way: every row by itself, then the sum in the order of the routing."""
    layer = Layer(9, T, 4, 128, 64, dtype)
    want = layer.routed_and_shared()
    shared = experts.shared_rows(layer.x, layer.shared, layer.records.record, 4)
    assert shared.dtype == mx.float32
    weights, zeros = layer.weights.astype(np.float32), mx.zeros((T, 128))
    rows = []
    for t, k in np.ndindex(T, 4):
        slot, weight = (mx.array(part[t : t + 1, k : k + 1]) for part in (layer.slots, weights))
        act = experts.expert_gate_up(layer.x[t : t + 1], slot, layer.records)
        rows.append(experts.expert_down_combine(act, slot, layer.records, weight, zeros[:1]))
    places = mx.arange(4 * T, dtype=mx.int32).reshape(T, 4)
    assert mx.array_equal(combine.moe_combine(mx.concatenate(rows), places, mx.ones((T, 4)), layer.h_mid, shared), want)


# ---- the choice in the launch of gate and up


@pytest.mark.usefixtures("both_builds")
@pytest.mark.parametrize(
    "rule, with_shared",
    drawn(
        [Router(16, 4), Router(16, 4, "sigmoid", True, 4, 2, True, 2.5), Router(16, 4, expert_scales=True)],
        [False, True],
    ),
)
def test_choosing_in_the_launch_gives_the_bits_of_choosing_before_it(host, rule, with_shared):
    layer = Layer(6, 2, 4, 128, 64, mx.bfloat16, columns=17, records=16)
    bias = random(np.random.default_rng(7), 16) if rule.correction_bias else None
    scales = random(np.random.default_rng(8), 16) if rule.expert_scales else None
    ids, weights = route(layer.logits, rule, bias, scales)
    shared = layer.shared if with_shared else None
    want = experts.expert_ffn(layer.x, ids, layer.records, weights, layer.h_mid, shared)
    got = experts.chosen_ffn(layer.x, Choice(layer.logits, rule, bias, scales), layer.records, layer.h_mid, shared)
    assert mx.array_equal(got, want)


@pytest.mark.parametrize("E, K", [(16, 4), (256, 9), (257, 9)])
def test_the_launch_that_chooses_copies_the_ids_of_one_token(host, E, K):
    layer, rule, copies = Layer(6, 1, K, 64, 64, mx.float32, columns=E + 1, records=E), Router(E, K), []
    choice = Choice(layer.logits, rule)
    want = experts.chosen_ffn(layer.x, choice, layer.records, layer.h_mid, layer.shared)
    got = experts.chosen_ffn(layer.x, choice, layer.records, layer.h_mid, layer.shared, host_copy=copies)
    assert mx.array_equal(got, want)
    assert np.array_equal(read_ids(copies), np.array(route(layer.logits, rule)[0]))
    assert max(part.nbytes for part in copies) <= 8


@pytest.mark.parametrize(
    "cut", [Tile(rows=4, lanes=4, simdgroups=1), Tile(rows=1, lanes=32, simdgroups=8, halves=1)], ids=str
)
def test_the_tile_of_the_choice_changes_no_bit(host, cut):
    """Its rows and simdgroups are its own, and what decides bits is that of gate and up."""
    layer, rule = Layer(6, 2, 4, 512, 64, mx.float32, columns=17, records=16), Router(16, 4)
    ids, weights = route(layer.logits, rule)
    for first in (None, Tile(rows=2, lanes=4, simdgroups=2, halves=1)):
        tiles = {"expert_choice": cut} | ({} if first is None else {"expert_gate_up": first})
        with using(Chosen(tiles)):
            want = experts.expert_ffn(layer.x, ids, layer.records, weights, layer.h_mid, layer.shared)
            got = experts.chosen_ffn(layer.x, Choice(layer.logits, rule), layer.records, layer.h_mid, layer.shared)
        assert mx.array_equal(got, want)


@pytest.mark.parametrize("target, share", [("metal", 4), ("cuda", 1)])
def test_how_often_the_choice_is_repeated(target, share):
    """Every threadgroup makes it: on Metal a quarter as many as gate and up have by themselves."""
    record, sizes = Record.make(2048, 512), ((1, 2048), (256, Record.make(2048, 512).stride // 4))
    own = experts.plan_gate_up(target, sizes[0], mx.bfloat16, sizes[1], (1, 8), record, record.activation)
    plan = experts.plan_choice(target, *sizes, (1, 257), mx.bfloat16, record, Router(256, 8), False, record.activation)
    assert own.groups == (share * plan.groups[0], 9) and plan.groups[1] == 9
    assert plan.template["L"] == own.template["L"]


@pytest.mark.parametrize("K", range(1, 9))
def test_a_token_may_have_few_experts(host, K):
    """Metal passes an array of fewer than eight values as another kind of pointer."""
    for T in (1, 2):
        layer, rule = Layer(7, T, K, 64, 64, mx.float32, columns=9, records=8), Router(8, K)
        ids, weights = route(layer.logits, rule)
        want = experts.expert_ffn(layer.x, ids, layer.records, weights, layer.h_mid, layer.shared)
        choice = Choice(layer.logits, rule)
        assert mx.array_equal(experts.chosen_ffn(layer.x, choice, layer.records, layer.h_mid, layer.shared), want)


NAMED = {  # hidden size, expert width, rule, bits of the router, gate of the shared expert (None: there is none)
    "Qwen3-30B-A3B": (2048, 768, Router(128, 8), 8, None),
    "Qwen3.6-35B-A3B": (2048, 512, Router(256, 8), 8, True),
    "Qwen3.5-397B-A17B": (4096, 1024, Router(512, 10), 8, True),
    "Cogito-671B": (7168, 2048, Router(256, 8, "sigmoid", True, 8, 4, scale=2.5), 0, False),
    "G9v3-39B-A5B": (2048, 512, Router(320, 32, "sigmoid", True, scale=3.66), 0, None),
    "gpt-oss-120b": (2880, 2880, Router(128, 4, logit_bias=True), 8, None),
}
BIASED = {"quants": (Quant(4, 32, "mxfp4"),) * 3, "has_bias": True, "activation": Activation("clip then swish", 7.0)}


def stored(rows, columns, bits=4):
    """Returns a matrix of zeros that takes no memory."""
    if not bits:
        return Part(None, mx.zeros((rows, columns)))
    quant, kind = Quant(bits, 64), mx.bfloat16 if bits == 4 else mx.float32
    scales = mx.zeros((rows, columns // 64), kind)
    return Part(quant, mx.zeros((rows, columns * bits // 32), mx.uint32), scales, scales)


@msl.needed
@pytest.mark.parametrize("name", one_in_three(NAMED))
def test_an_moe_layer_is_three_launches(name):
    """The source of these launches compiles for every variant."""
    H, I, rule, bits, gate = NAMED[name]
    record, h = Record.make(H, I, **(BIASED if rule.logit_bias else {})), mx.zeros((1, H), mx.bfloat16)
    records = Records(mx.zeros((rule.experts, record.stride // 4), mx.uint32), record)
    bias = mx.zeros((rule.experts,)) if rule.correction_bias else None
    with msl.launching(msl.TextKernel):
        norm, added = mx.ones((H,), mx.bfloat16), mx.zeros((rule.experts,)) if rule.logit_bias else None
        x, logits = router_logits(h, norm, 1e-6, stored(rule.experts + bool(gate), H, bits), added)
        shared = None if gate is None else Shared(fail, stored(2 * I, H), stored(H, I), logits if gate else None)
        out = experts.chosen_ffn(x, Choice(logits, rule, bias), records, h, shared)
    assert out.shape == (1, H) and len(msl.TextKernel.texts) == 3


def fail(*_):
    raise AssertionError("the shared expert goes by itself")


# ---- planted faults

FAULTS = {
    "no norm": ("router.h.metal", "v[j] * scale * w[j]", "v[j] * w[j]"),
    "a simdgroup's squares are left out": ("router_codes.metal", "s < SG; s++", "s < SG - 1; s++"),
    "the weight of other columns": ("router_codes.metal", "norm + CHUNK * chunk", "norm"),
    "missing barrier": ("router_codes.metal", "threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    "up before gate": ("expert_gate_up.metal", "(I, own_codes", "(0, own_codes"),
    "the shared row of the first token": ("expert_down_combine.metal", "(token * (K + JOINED) + k)", "(token * K + k)"),
    "gate of the first token": ("expert_down_combine.metal", "gates[token * STRIDE + STRIDE", "gates[STRIDE"),
    "a choice later": ("topk.h.metal", "found = wanted == k", "found = wanted == k + 1"),
    "bias in the weights": ("topk.h.metal", "<SCORE>(logit)", "<SCORE>(logit + float(bias[where]))"),
    "one of the best two": ("topk.h.metal", "first + second", "first"),
}  # fmt: skip


@msl.needed
@pytest.mark.parametrize("name", one_in_three(FAULTS))
def test_planted_fault_is_caught(host, monkeypatch, name):
    msl.plant(monkeypatch, *FAULTS[name])
    with pytest.raises((AssertionError, msl.Failure)):
        assert errors_of(np.random.default_rng(1)) < 1e-4  # this also catches NaN


def errors_of(rng):
    layer = Layer(11, 2, 3, 256, 128, mx.float32)
    w, values = router(rng, 9, 2048, 8, 64)
    h, norm = random(rng, 2, 2048), random(rng, 2048)
    _, logits = router_logits(h, norm, 1e-6, w)
    x = wide(h) / np.sqrt((wide(h) ** 2).mean(-1, keepdims=True) + 1e-6) * wide(norm)
    chosen, bias = np.array(random(rng, 2, 64)), np.array(random(rng, 64))
    ids, weights = route(mx.array(chosen), SIGMOID, mx.array(bias))
    want_ids, want = route(chosen, SIGMOID, mx.array(bias))
    errors = error(layer.routed_and_shared(), layer.want()), error(logits, x @ values.T), error(weights, want)
    return max(errors) if np.array_equal(np.array(ids), want_ids) else 1.0


def test_without_kernels_the_shared_expert_is_separate():
    layer = Layer(6, 1, 4, 128, 64, mx.bfloat16)
    assert backend.name() == "ops" and not layer.shared.joins(layer.records.record, 4)
    assert error(layer.routed_and_shared(), layer.want()) < 3 * LIMITS[mx.bfloat16]
