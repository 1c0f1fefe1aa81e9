"""Attention with a bias by distance: a token on kernels against plain operations, which goldens compare."""

import mlx.core as mx
import numpy as np
import pytest
from floats import wide

from metal import msl
from moeflux_mlx.kinds import QueryLog
from moeflux_mlx.layers import RMSNorm
from moeflux_mlx.mixers.grouped.biased_op import attend_biased
from moeflux_mlx.mixers.grouped.module import HeadClip
from moeflux_mlx.mixers.grouped.spec import GroupedQuery, RelativeBias
from moeflux_mlx.mixers.grouped.terms import Terms
from moeflux_mlx.mixers.registry import make_caches
from moeflux_mlx.ops import native
from moeflux_mlx.ops.rows import StepRows

pytestmark = pytest.mark.usefixtures("cpu_device")
HEADS, KEYS, D, WIDTH = 4, 2, 64, 16
GROWTH = QueryLog(0.5, 20)
CASES = {  # window, extent, whether lengths are limited, dtype
    "all positions": (None, 24, False, mx.float32),
    "window": (33, 33, False, mx.float32),
    "clipped": (None, 24, True, mx.float32),
    "clipped window": (20, 20, True, mx.float32),
    "bfloat16": (None, 24, True, mx.bfloat16),
}


class Layer:
    """Random tokens of a layer; `clips`: it limits lengths, norms values and has sinks of tokens."""

    def __init__(self, window, extent, clips, dtype):
        self.rng, self.dtype, self.clips = np.random.default_rng(extent), dtype, clips
        bias = RelativeBias(WIDTH, extent, 3.0 if clips else None)
        norm = "clip" if clips else "head"
        self.part = GroupedQuery(
            HEADS, KEYS, D, None, window=window, norm=norm, clip=6.0 if clips else 0.0, relative=bias
        )
        self.profiles = self.drawn(WIDTH, extent)
        self.clip = HeadClip(HEADS, WIDTH, 3.0, scales=True) if clips else None
        norms = [HeadClip(HEADS, D, 6.0, scales=True), HeadClip(KEYS, D, 6.0, scales=False)]
        norms = norms if clips else [RMSNorm(D, 1e-2), RMSNorm(D, 1e-2)]
        for one in [*norms, *([self.clip] if clips else [])]:
            if "weight" in one:
                one.weight = self.drawn(*one.weight.shape)
        growth = None if window else GROWTH
        self.terms = Terms(*norms, None, 0.3, window, value_norm=1e-2 if clips else None, query_scale=growth)

    def drawn(self, *shape):
        return mx.array(self.rng.normal(size=shape).astype(np.float32)).astype(self.dtype)

    def tokens(self, count):
        heads = (HEADS, D), (KEYS, D), (KEYS, D), (HEADS, WIDTH)
        return [*(self.drawn(1, count, *one) for one in heads), self.drawn(1, count, HEADS) if self.clips else None]

    def attend(self, parts, cache):
        return attend_biased(*parts, self.profiles, cache, self.terms, self.clip)


def error(layer, lengths):
    """The largest error of tokens on kernels, over the largest value; each follows a prompt of plain operations. Rows
    of two sequences have the bits that each has alone."""
    caches, plain = [make_caches(layer.part)[0] for _ in range(3)], make_caches(layer.part)[0]
    calls, worst = [layer.tokens(length) for length in lengths], 0.0
    with msl.launching():
        made = [layer.attend(parts, caches[0]) for parts in calls]
        for parts in calls:
            if parts[0].shape[1] > 1:
                mx.eval([layer.attend(parts, cache) for cache in caches[1:]])
                continue
            both = [None if part is None else mx.concatenate([part, part], axis=1) for part in parts]
            rows = layer.attend(both, StepRows(caches[1:], lambda i: None))
        mx.eval(made, rows)
    assert mx.array_equal(rows, mx.concatenate([made[-1]] * 2, axis=1))
    for parts, got in zip(calls, made, strict=True):
        want = wide(layer.attend(parts, plain))
        worst = max(worst, np.abs(wide(got) - want).max() / np.abs(want).max())
    assert caches[0].offset == plain.offset == sum(lengths)
    return worst


@pytest.mark.parametrize("case", CASES)
def test_tokens_on_kernels(case):
    assert error(Layer(*CASES[case]), [50, 1, 1, 1]) < (3e-2 if CASES[case][-1] == mx.bfloat16 else 3e-5)


@pytest.mark.usefixtures("matrix_units")
@pytest.mark.parametrize("switches", [(None, 24, True), (33, 33, False), (20, 200, True)])
def test_tokens_on_matrix_units(switches):
    assert error(Layer(*switches, mx.bfloat16), [150, 1, 1]) < 3e-2


@msl.needed
@pytest.mark.parametrize(
    "old, new",
    [
        ("age < EXTENT ? float(biases[at + age])", "age < EXTENT - 2 ? float(biases[at + age])"),
        ("uint age = offset - low", "uint age = offset"),
        ("(head + metal::min(quad, uint(GH - 1))) * EXTENT", "head * EXTENT"),
        ("+ (EXTENT ? float(biases[(head + h) * EXTENT]) : 0.0f)", ""),
    ],
)
@pytest.mark.usefixtures("matrix_units")
def test_a_planted_fault_in_the_text_for_matrix_units_is_caught(monkeypatch, old, new):
    msl.plant(monkeypatch, "attend_matrix.metal", old, new)
    assert error(Layer(33, 33, False, mx.bfloat16), [150, 1, 1]) > 3e-2


@pytest.mark.parametrize("case", [case for case in CASES if case != "bfloat16"])
def test_tokens_on_the_cpu(case):
    if not native.available():
        pytest.skip("the extension is not built")
    layer, worst = Layer(*CASES[case]), 0.0
    caches = [make_caches(layer.part)[0] for _ in range(2)]
    for length in (50, *[1] * 40):  # more than lie in the small array of the newest
        parts = layer.tokens(length)
        own = [None if part is None else np.array(part) for part in parts]
        got, want = layer.attend(own, caches[0]), wide(layer.attend(parts, caches[1]))
        assert isinstance(got, np.ndarray)
        worst = max(worst, np.abs(got - want).max() / np.abs(want).max())
    assert worst < 3e-5


def test_a_row_of_an_image_has_its_bias():
    """Its rotary position is three numbers, which no form for a single token takes."""
    layer, made = Layer(*CASES["window"]), []
    prompt, row = layer.tokens(50), layer.tokens(1)
    for axes in (None, np.full((3, 1), 50)):
        cache = make_caches(layer.part)[0]
        layer.attend(prompt, cache)
        cache.axes = axes
        made.append(np.array(layer.attend([None if part is None else np.array(part) for part in row], cache)))
    assert np.abs(made[1] - made[0]).max() < 3e-5 * np.abs(made[0]).max()


def test_a_token_without_a_text():
    assert error(Layer(*CASES["clipped"]), [1, 1]) < 3e-5


@msl.needed
@pytest.mark.parametrize(
    "file, old, new",
    [
        ("attend_step", "EXTENT && age < EXTENT", "EXTENT && age < EXTENT - 2"),
        ("attend_step", "(head + h) * EXTENT + age", "h * EXTENT + age"),
        ("attend_step", "biases[(head + h) * EXTENT]) : 0.0f", "biases[(head + h) * EXTENT]) * 0 : 0.0f"),
        ("biased_inputs", "sum * INVERSE", "sum"),
        ("biased_inputs", "is_state ? R_LIMIT : LIMIT", "LIMIT"),
        ("biased_inputs", "q_weight + (is_key ? 0 : at * D)", "q_weight"),
        ("biased_inputs", "float(x[i]) * (is_key ? 1.0f : float(weight[i]))", "float(x[i])"),
        ("biased_inputs", "k + at * D : q", "k : q"),
    ],
)
def test_a_planted_fault_is_caught(monkeypatch, file, old, new):
    msl.plant(monkeypatch, f"{file}.metal", old, new)
    assert error(Layer(*CASES["clipped"]), [50, 1, 1]) > 1e-3
