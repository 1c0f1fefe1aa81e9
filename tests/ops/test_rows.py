"""Rows of a step: every operation that takes up to 16 rows together gives each row the bits that it has alone. This
holds for a GPU's kernels (Metal's source, executed by the harness in `metal`), plain MLX operations and the native
kernels on every instruction path, with exact and with rounded activations.
"""

import mlx.core as mx
import numpy as np
import pytest
from grids import drawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_expert_switches import ACTIVATIONS
from test_forms import FEW, Stored, narrow
from test_native import PATHS, force

from metal import msl
from moeflux_mlx.formats.record import Record
from moeflux_mlx.kinds import SILU, Router
from moeflux_mlx.layers import RMSNorm
from moeflux_mlx.ops import elementwise, experts, linear, native
from moeflux_mlx.ops import route as routes
from moeflux_mlx.ops.backend import view
from moeflux_mlx.ops.experts import Records, Shared
from moeflux_mlx.ops.matrix import Part
from moeflux_mlx.ops.route import Choice
from moeflux_mlx.ops.tiles import MAX_TOKENS, TILES, Tile
from moeflux_mlx.quant import Quant

pytestmark = pytest.mark.usefixtures("cpu_device")
DTYPES = [mx.float32, mx.bfloat16, mx.float16]
FORMS = [*FEW, (Quant(4, 64), "BF16"), (None, "F32")]
RULES = [
    Router(16, 4, normalise=False),
    Router(16, 4, "sigmoid", True, 4, 2, scale=2.5),
    Router(16, 4, "sigmoid"),
    Router(16, 4, scale=1.5),
]


class Step:
    """Random weights in one form, and rows of `rows` tokens that are multiplied by them.

    Args:
        make: converts a numpy array of rows to what the backend computes with.
        size: hidden size and expert width.
        experts: whether they have biases, their activation, and whether rows of gate and up alternate.
    """

    def __init__(self, rng, form, rows, size, make=mx.array, experts=(False, SILU, False)):
        self.rng, self.form, self.rows, self.make = rng, form, rows, make
        self.hidden, self.inner = size
        self.switches, self.activation = experts, experts[1]

    def normal(self, *shape):
        return self.rng.standard_normal(shape, dtype=np.float32)

    def arrays(self, count, columns):
        """Returns activations [rows, columns]."""
        return [self.make(self.normal(self.rows, columns)) for _ in range(count)]

    def matrix(self, rows, columns):
        quant, kind = self.form
        if quant is None:
            return Part(None, mx.array(self.normal(rows, columns)))
        return Part(quant, *Stored(self.rng, rows, columns, quant, kind).arrays(kind))

    def weight(self, columns):
        norm, leaf = RMSNorm(columns, 1e-6), self.make(self.normal(columns))
        norm.weight = mx.array(leaf) if isinstance(leaf, np.ndarray) else leaf
        return norm

    def linear(self, has_norm, has_residual, rows=24):
        w, norm = self.matrix(rows, self.hidden), self.weight(self.hidden) if has_norm else None
        given = [*self.arrays(1, self.hidden), *(self.arrays(1, rows) if has_residual else [])]
        return lambda x, *residual: [linear.linear(x, w, norm, *residual)], given

    def norm(self):
        weight = self.weight(self.hidden)
        return lambda x: [weight(x)], self.arrays(1, self.hidden)

    def router(self):
        w, norm, bias = self.matrix(17, self.hidden), mx.array(self.normal(self.hidden)), mx.array(self.normal(17))
        return lambda h: routes.router_logits(h, norm, 1e-6, w, bias), self.arrays(1, self.hidden)

    def choice(self, rule):
        bias = mx.array(self.normal(rule.experts)) if rule.correction_bias else None
        logits = self.make(self.normal(self.rows, 17), np.float32)
        return lambda logits: routes.route(logits, rule, bias), [logits]

    def embedding(self):
        w = self.matrix(40, self.hidden)
        ids = self.rng.integers(0, 40, self.rows)
        return lambda ids: [linear.embed(ids, w)], [self.make(ids, np.int32)]

    def records(self, count=16):
        quant, kind = self.form
        form = quant or Quant(4, 64)
        kind = kind if quant is not None and kind != "U8" else "BF16"
        record = Record.make(self.hidden, self.inner, (form,) * 3, None, kind, *self.switches)
        blob = np.stack([self._record(record) for _ in range(count)])
        return Records(self.make(blob, np.uint32), record)

    def _record(self, record):
        words = np.zeros(record.stride // 4, np.uint32)
        for one in record.projections:
            matrix = Stored(self.rng, one.rows, one.columns, one.quant, one.fields[1].dtype)
            for field in one.fields:
                if field == one.bias:
                    words[field.words] = narrow(self.normal(one.rows), one.bias.dtype)[0].view(np.uint32)
                else:
                    words[field.words] = matrix.in_record(field)
        return words

    def shared(self, gated):
        """Returns a function of the gates' columns that gives a shared expert."""
        gate_up, down = self.matrix(2 * self.inner, self.hidden), self.matrix(self.hidden, self.inner)

        def layer(x, scale, residual, squashed):
            gate, up = elementwise.split(linear.linear(x, gate_up), self.inner)
            out = linear.linear(elementwise.activate(gate, up, self.activation), down)
            return out if scale is None else out * elementwise.sigmoid(scale).astype(out.dtype)

        return lambda gates: Shared(layer, gate_up, down, gates if gated else None, self.activation)

    def ffn(self, gated):
        records, shared = self.records(), self.shared(gated)
        slots = np.stack([self.rng.permutation(16)[:3] for _ in range(self.rows)])
        given = [*self.arrays(2, self.hidden), self.make(slots, np.int32)]
        given += [
            self.make(self.rng.random((self.rows, 3)), np.float32),
            self.make(self.normal(self.rows, 17), np.float32),
        ]

        def run(x, residual, slots, weights, gates):
            return [
                experts.expert_ffn(x, slots, records, weights, residual, None),
                experts.expert_ffn(x, slots, records, weights, residual, shared(gates)),
            ]

        return run, given

    def chosen(self, rule):
        """As `ffn`, if the kernel chooses the experts."""
        records, shared = self.records(), self.shared(True)
        bias = mx.array(self.normal(rule.experts)) if rule.correction_bias else None
        given = [*self.arrays(2, self.hidden), self.make(self.normal(self.rows, 17), np.float32)]
        return lambda x, residual, logits: [
            experts.chosen_ffn(x, Choice(logits, rule, bias), records, residual, shared(logits))
        ], given


def bits(results):
    return [view(part).view(np.uint8) for part in results]


def holds(case):
    """Checks that each row of an operation's results has the bits that it has alone."""
    operation, given = case
    together, last = bits(operation(*given)), len(given[0]) - 1
    for t in sorted({0, last // 2, last}):
        alone = bits(operation(*(rows[t : t + 1] for rows in given)))
        for several, one in zip(together, alone, strict=True):
            assert np.array_equal(several[t], one[0]), f"row {t} of {len(given[0])}"


def numpy_rows(values, dtype=np.float32):
    return np.ascontiguousarray(values, dtype)


def mlx_rows(dtype):
    return lambda values, kind=None: mx.array(values if kind is None else values.astype(kind)).astype(
        dtype if kind is None else {np.float32: mx.float32, np.int32: mx.int32, np.uint32: mx.uint32}[kind]
    )


def size_for(form, columns, inner):
    """Returns sizes that are divisible by the groups of the form."""
    group = 64 if form[0] is None else max(64, form[0].group_size)
    return columns * group, inner * group


def check(step, around, rule):
    holds(step.norm())
    holds(step.linear(*around))
    holds(step.router())
    holds(step.choice(rule))
    holds(step.embedding())
    holds(step.ffn(gated=around[0]))


def name(form):
    return "floats" if form[0] is None else f"{form[0].mode}-{form[0].bits}-{form[0].group_size}-{form[1]}"


def draw_step(draw, form, make):
    size = size_for(form, draw(st.integers(1, 5)), draw(st.integers(1, 4)))
    rng, rows = np.random.default_rng(draw(st.integers(0, 2**32))), draw(st.integers(2, MAX_TOKENS))
    return Step(rng, form, rows, size, make, draw(SWITCHES))


@pytest.fixture(params=PATHS)
def path(request):
    force(request.param)
    yield request.param
    force(PATHS[0])


SWITCHES = st.tuples(st.booleans(), st.sampled_from(ACTIVATIONS), st.booleans())
few = settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
around = st.tuples(st.booleans(), st.booleans())


@few
@pytest.mark.parametrize("form, path", drawn(FORMS, PATHS), indirect=["path"])
@given(st.data())
def test_native(path, form, data):
    step = draw_step(data.draw, form, numpy_rows)
    for activations in (native.EXACT, data.draw(st.sampled_from([8, 16]))):
        with native.activations(activations):
            check(step, data.draw(around), data.draw(st.sampled_from(RULES)))


@pytest.fixture
def products(monkeypatch):
    """Makes MLX's own products depend on the number of rows, as those of a GPU do."""
    multiply, matmul = linear.multiply, experts.matmul_float32
    monkeypatch.setattr(linear, "multiply", lambda x, w, transpose: multiply(x, w, transpose) + x.size // x.shape[-1])
    monkeypatch.setattr(experts, "matmul_float32", lambda x, *w: matmul(x, *w) + len(x))


@few
@pytest.mark.parametrize("form", FORMS, ids=name)
@given(st.data())
def test_operations(products, form, data):
    step = draw_step(data.draw, form, mlx_rows(data.draw(st.sampled_from(DTYPES))))
    check(step, data.draw(around), data.draw(st.sampled_from(RULES)))


# Few lanes and many simdgroups, so that small matrices use all loops: rows in turn, columns and several threadgroups.
SMALL = {
    "qmv": Tile(rows=4, lanes=8, simdgroups=4, ahead=2, spread=2048),
    "qmv_large": Tile(rows=8, lanes=4, simdgroups=2),
    "qmv_tokens": Tile(rows=2, lanes=32),
}


@pytest.fixture
def kernels(monkeypatch, small_products):
    monkeypatch.setitem(TILES, "metal", TILES["metal"] | SMALL)
    linear.plan.cache_clear()
    with msl.launching():
        yield
    linear.plan.cache_clear()


@pytest.mark.usefixtures("both_builds")
@pytest.mark.parametrize("i, is_large", drawn(range(len(FORMS) - 1), [False, True]))
def test_products(kernels, monkeypatch, i, is_large):
    """Each form is tested for one or two row counts, because each row count has a compiled kernel of its own."""
    rng, form, count = np.random.default_rng(i), FORMS[i], (2, 7, 16, 3, 9, 5, 4, 8, 6, 12, 2, 3)[i]
    step = Step(rng, form, count, size_for(form, 4, 1), mlx_rows(DTYPES[i % 3]))
    if is_large:
        monkeypatch.setattr(linear, "LARGE", 0)
        linear.plan.cache_clear()
    holds(step.linear(i // 2 % 2, i // 4 % 2))


@pytest.mark.usefixtures("both_builds")
@pytest.mark.parametrize("i", [pytest.param(0, marks=pytest.mark.full), 1, 2, 3])
def test_moe_layers(kernels, i):
    form, size, switches = FORMS[2 * i], size_for(FORMS[2 * i], 2, 1), (i == 2, ACTIVATIONS[-i], i == 3)
    step = Step(np.random.default_rng(i), form, 3 - i % 2, size, mlx_rows(DTYPES[i % 3]), switches)
    holds(step.router())
    holds(step.choice(RULES[i]))
    holds(step.ffn(gated=i % 2))
    holds(step.chosen(RULES[i]))
