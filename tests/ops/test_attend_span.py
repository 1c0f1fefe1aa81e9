"""The kernel for the attention of many positions compared with float64."""

import contextlib

import mlx.core as mx
import numpy as np
import pytest
from floats import wide
from grids import drawn, one_in_three

from metal import msl
from moeflux_mlx.kinds import Rotation
from moeflux_mlx.layers import Weight
from moeflux_mlx.mixers.grouped import op
from moeflux_mlx.mixers.grouped.spec import GroupedQuery
from moeflux_mlx.mixers.grouped.terms import Terms
from moeflux_mlx.mixers.latent import op as latent
from moeflux_mlx.mixers.latent.module import LatentProjection
from moeflux_mlx.mixers.latent.spec import SPAN_VALUES, Latent, heads_at_once
from moeflux_mlx.mixers.registry import make_caches
from moeflux_mlx.opening.launches import Noted
from moeflux_mlx.ops import attend_span as span_op
from moeflux_mlx.ops import backend
from moeflux_mlx.ops.launch import NO_KERNELS
from moeflux_mlx.ops.stand_ins import standing_in
from moeflux_mlx.ops.tiles import CODE

pytestmark = pytest.mark.usefixtures("cpu_device")
LIMITS = {mx.bfloat16: 8e-3, mx.float16: 1e-3}  # largest error over largest value: weights have 16 bits too
TERMS = Terms(None, None, None, 0.17)
SCALES = [0.17, 128**-0.5, 1.0]  # they round the score of a position that is not seen to different sides
CASES = {  # texts, positions before, new ones, heads, kv heads, widths of keys and values
    "nothing before": (1, 0, 5, 4, 2, 64, 64),
    "odd lengths": (1, 71, 37, 6, 2, 64, 64),
    "several texts": (2, 100, 23, 4, 2, 128, 64),
    "one key head": (1, 300, 20, 8, 1, 64, 128),
    "a head each": (1, 150, 33, 3, 3, 64, 64),
    "a piece that early rows do not see": (1, 120, 23, 4, 2, 64, 64),
}


def small(groups):
    """Returns sizes with threadgroups that fit into the memory of every GPU, and short pieces."""
    return span_op.SpanSizes(16, 128, groups, 64)


def attended(B, before, L, heads, kv_heads, D, V, dtype, sizes=None, scale=0.17):
    """Returns the result of a span and that of float64."""
    rng = np.random.default_rng([before, L])
    q, k, v, *earlier = (
        mx.array(rng.normal(size=shape), dtype)
        for shape in (
            (B, heads, L, D),
            (B, kv_heads, L, D),
            (B, L, kv_heads, V),
            *((B, kv_heads, before, w) for w in (D, V)),
        )
    )
    cache = make_caches(GroupedQuery(heads, kv_heads, D, Rotation(32, 1e4), value_dim=V))[0]
    if before:
        cache.append(*earlier)
    got = span_op.attend_span(q, *cache.append(k, v.swapaxes(1, 2)), scale, sizes)
    keys, values = (np.repeat(wide(one)[:, :, : before + L], heads // kv_heads, axis=1) for one in cache.state[:2])
    scores = scale * wide(q) @ keys.swapaxes(2, 3)
    scores = np.where(np.arange(before + L) <= before + np.arange(L)[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return wide(got), (weights / weights.sum(-1, keepdims=True) @ values).swapaxes(1, 2)


def error(*case):
    got, want = attended(*case)
    return np.abs(got - want).max() / np.abs(want).max()


@pytest.mark.parametrize("case, dtype, groups, scale", drawn(CASES, LIMITS, [1, 40], SCALES))
def test_a_span_matches_oracle(host, case, dtype, groups, scale):
    """In one piece of the positions, and in several."""
    assert error(*CASES[case], dtype, small(groups), scale) < LIMITS[dtype]


@pytest.mark.parametrize("scale", SCALES)
def test_a_piece_that_a_row_does_not_see_adds_nothing(host, scale):
    assert error(*CASES["a piece that early rows do not see"], mx.float16, small(40), scale) < LIMITS[mx.float16]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("before, L", [(0, 300), (1000, 64), (3000, 700)])
@pytest.mark.parametrize("heads, kv_heads, D, V", [(16, 2, 256, 256), (12, 12, 192, 128), (8, 1, 128, 128)])
def test_real_shapes_on_a_gpu(host, dtype, before, L, heads, kv_heads, D, V):
    """By the units and with the pieces of this GPU; the harness has too little memory for them."""
    if backend.name() != "cuda":
        pytest.skip("needs an NVIDIA GPU")
    assert error(1, before, L, heads, kv_heads, D, V, dtype, None, D**-0.5) < LIMITS[dtype]


def test_which_spans_it_takes():
    taken = "cuda", (256, 256), mx.bfloat16, False
    assert span_op.span_refusal(*taken) is None
    others = [("metal", *taken[1:]), ("cuda", (80, 80), *taken[2:]), ("cuda", (96, 160), *taken[2:])]
    others += [("cuda", (512, 512), *taken[2:]), (*taken[:2], mx.float32, False), (*taken[:3], True)]
    assert all(span_op.span_refusal(*other) for other in others)


@contextlib.contextmanager
def on_cuda():
    """Stands in for CUDA; gives the numbers of launches by kernel."""
    with standing_in(backend="cuda"):
        noted = Noted(CODE, NO_KERNELS)
        with noted.listening():
            yield noted.runs


BOTH = {"attend_span": 1, "attend_combine": 1}


@pytest.mark.parametrize("width, L, names", [(256, 3, BOTH), (128, 5, BOTH), (80, 5, {})])
def test_cuda_runs_it_for_heads_of_whole_units(width, L, names):
    cache = make_caches(GroupedQuery(4, 2, width, Rotation(64, 1e4)))[0]
    q, k = mx.zeros((1, 4, L, width), mx.float16), mx.zeros((1, 2, L, width), mx.float16)
    with on_cuda() as run:
        assert op.attend_in_parts(q, k, k.swapaxes(1, 2), cache, TERMS).shape == (1, L, 4, width)
    assert run == names


def latents(heads, nope, rope, V, L, N):
    """Returns the inputs of attention over expanded latents."""
    rng, weights = np.random.default_rng(nope), Weight(heads * (nope + V), 64)
    weights.weight = mx.array(rng.normal(size=weights.weight.shape) / 8, mx.float16)
    key, values = (latent.HeadMatrices(weights, heads, rows) for rows in (slice(None, nope), slice(nope, None)))
    shapes = (1, heads, L, nope), (1, heads, L, rope), (1, 1, N, 64), (1, 1, N, rope)
    rows = (
        mx.zeros(shape, mx.float16) if N > 1000 else mx.array(rng.normal(size=shape), mx.float16) for shape in shapes
    )
    return *rows, "causal", latent.Matrices(key, values, 0.17)


def test_expanded_latents_are_heads_with_own_keys(host):
    given = latents(3, 32, 32, 64, 37, 90)
    made, wanted = (wide(compute(*given)) for compute in (latent.of_heads_fused, latent.of_heads_ops))
    assert np.abs(made - wanted).max() < 4e-3 * np.abs(wanted).max()


def test_the_memory_of_expanded_latents_is_what_the_plan_counts(host):
    if backend.name() == "cuda":
        pytest.skip("a GPU's small arrays are rounded up to pages")
    heads, L, N = 4, 9, 900
    given = latents(heads, 32, 32, 64, L, N)
    counted = 2 * Latent(heads, None, 64, 32, 64, Rotation(32, 1e4)).fused_temporaries(L, N)
    mx.eval(*given[:4], given[5].key.weights.weight)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(latent.of_heads_fused(*given))
    assert 0.95 * counted < mx.get_peak_memory() - before < counted + 4 * span_op.piece_values(L * heads, 64)


@pytest.mark.parametrize("N, turns", [(40, 1), (1 << 20, 4)])
def test_cuda_runs_it_for_expanded_latents_a_few_heads_at_a_time(N, turns):
    given = latents(4, 128, 64, 128, 20, N)
    with on_cuda() as run:
        assert latent.expanded_ops(*given).shape == (1, 4, 20, 128)
        assert latent.expanded_ops(*given[:4], None, given[5]).shape == (1, 4, 20, 128)
    assert run == {name: turns for name in BOTH}


def test_both_halves_of_a_projection_are_as_high_as_its_parts():
    """By them the heads that are expanded at a time are counted."""
    projection = LatentProjection(4, 128, 64, 512)
    with standing_in(backend="cuda"):
        projection.arrange()
    assert projection.key.height == 128 and projection.value.height == 64


@pytest.mark.parametrize("heads", [20, 64, 96, 128])
def test_a_text_of_any_length_has_few_numbers_of_heads_at_a_time(heads):
    """Each number compiles a kernel, and the last heads' may be another."""
    some = [heads_at_once(heads, 320 * positions) for positions in range(4096, 1 << 18, 4096)]
    assert some == sorted(some, reverse=True) and some[0] == heads and len(set(some)) <= 7
    assert all(n == 1 or n * 320 * (4096 + 4096 * i) <= SPAN_VALUES for i, n in enumerate(some))


FAULTS = {
    "missing barrier": ("attend_span", "threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    "a position too far": ("attend_span", "row[r] / G + 1;", "row[r] / G + 2;"),
    "sums of earlier scores": ("attend_span", "acc[i] *= share[i / 2 % 2]", "acc[i] *= share[0]"),
    "total of earlier scores": ("attend_span", "total[r] *= share[r];", ""),
    "last keys left out": ("attend_span", "at < stop; at += KEYS", "at + KEYS < stop; at += KEYS"),
    "weights of what a row does not see": ("attend_span", "most > NONE ? -most * factor : 0.0f", "-most * factor"),
    "one piece": ("attend_span", "threadgroup_position_in_grid.z * length", "0"),
    "the first key head": ("attend_span", "size_t(text) * KV + kv;", "size_t(text) * KV;"),
    "a head's neighbour": ("attend_span", "at % G) * L + at / G", "at / L) * L + at % L"),
    "another row's units": ("span.h", "(unit ^ row) % 8", "(unit ^ row / 2) % 8 + row % 2"),
    "keys of another half": ("span.h", "8 * (i % 2) + 2 *", "8 * (i / 2) + 2 *"),
    "pieces beside each other": ("attend_combine", "head * EACH", "head"),
}


@msl.needed
@pytest.mark.parametrize("name", one_in_three(FAULTS))
def test_planted_fault_is_caught(host, monkeypatch, name):
    file, old, new = FAULTS[name]
    msl.plant(monkeypatch, f"{file}.metal", old, new)
    with contextlib.suppress(msl.Failure):
        cases = "odd lengths", "several texts", "a piece that early rows do not see"
        assert any(not error(*CASES[case], mx.float16, small(40), 1.0) < LIMITS[mx.float16] for case in cases)
