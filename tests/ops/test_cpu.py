"""The CPU path: numpy and native kernels compared with MLX's operations, and state that they must not change."""

import tracemalloc
from dataclasses import replace

import goldens
import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_directory, tiny_model, use_plain_operations

from moeflux_mlx.kinds import Router
from moeflux_mlx.layers import Embedding, Linear, Weight
from moeflux_mlx.mixers.delta import op as delta
from moeflux_mlx.mixers.delta.spec import ChannelDecay, Delta
from moeflux_mlx.mixers.grouped import op as attend
from moeflux_mlx.mixers.latent import op as latent
from moeflux_mlx.mixers.latent.op import HeadMatrices
from moeflux_mlx.mixers.registry import make_caches
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import backend, elementwise, native
from moeflux_mlx.ops import route as router
from moeflux_mlx.ops.elementwise import log_softmax
from moeflux_mlx.ops.linear import by_head
from moeflux_mlx.ops.matrix import dequantized
from moeflux_mlx.ops.route import route
from moeflux_mlx.quant import Quant

pytestmark = pytest.mark.skipif(
    not native.available() or mx.default_device() != mx.cpu, reason="needs the extension, and the CPU as device"
)

TOLERANCE = 1e-4  # of logits with standard deviation 1
TOKENS = mx.array([np.random.default_rng(0).integers(0, 240, 40).tolist()])
CHUNKS = {40: TOKENS, 1: TOKENS[:, :12]}  # tokens of one call


def run(model, tokens, chunk):
    cache = model.make_cache()
    parts = [model(tokens[:, i : i + chunk], cache) for i in range(0, tokens.shape[1], chunk)]
    return np.array(mx.concatenate(parts, axis=1))


@pytest.fixture(scope="module")
def by_mlx():
    """Returns the logits of every family from MLX's operations, in one chunk and in single tokens."""
    with pytest.MonkeyPatch.context() as patch:
        use_plain_operations(patch)
        return {
            (family, chunk): run(tiny_model(family, mx.float32), CHUNKS[chunk], chunk)
            for family in goldens.families()
            for chunk in CHUNKS
        }


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("family", goldens.families())
def test_both_paths_give_the_same_logits(by_mlx, family, chunk):
    got = run(tiny_model(family, mx.float32), CHUNKS[chunk], chunk)
    assert np.abs(got - by_mlx[family, chunk]).max() < TOLERANCE


@pytest.mark.parametrize(
    "module, family",
    [(attend, "qwen3_5_moe"), (delta, "qwen3_5_moe"), (elementwise, "qwen3_5_moe"), (router, "deepseek_v3")],
)
def test_the_comparison_sees_a_fault(by_mlx, monkeypatch, module, family):
    def wrong(x):
        return 1 / (1 + np.exp(-1.05 * x))

    if module is router:
        monkeypatch.setitem(router.SCORES, "sigmoid", wrong)
    else:
        monkeypatch.setattr(module, "sigmoid", wrong)
    got = run(tiny_model(family, mx.float32), CHUNKS[1], 1)
    assert np.abs(got - by_mlx[family, 1]).max() > 10 * TOLERANCE


@pytest.mark.parametrize("family", goldens.families())
def test_sequences_of_a_batch_do_not_affect_each_other(family):
    model = tiny_model(family, mx.float32)
    for chunk, tokens in CHUNKS.items():
        both = mx.concatenate([tokens, tokens[:, ::-1]])
        alone = [run(model, row[None], chunk)[0] for row in both]
        assert np.abs(run(model, both, chunk) - np.stack(alone)).max() < TOLERANCE


@pytest.mark.parametrize("family", goldens.families())
def test_arrays_that_a_cache_held_do_not_change(family):
    """Snapshots keep references, so rows that they cover must stay the same. Later positions may be filled."""
    model = tiny_model(family, mx.float32)
    cache = model.make_cache()
    mx.eval(model(TOKENS[:, :9], cache))
    seen = [(..., slice(9), slice(None)) if layer.is_trimmable() else slice(None) for layer in cache for _ in range(2)]
    held = [array for layer in cache for array in layer.state[:2]]
    before = [np.array(array) for array in held]
    for i in range(9, 12):
        mx.eval(model(TOKENS[:, i : i + 1], cache))
    for array, old, part in zip(held, before, seen, strict=True):
        assert (np.array(array)[part] == old[part]).all()


def test_a_missing_extension_is_reported_once(no_extension):
    model = tiny_model("qwen3_moe", mx.float32)
    with pytest.warns(RuntimeWarning, match="install a C compiler"):
        model(TOKENS)
    model(TOKENS)  # another warning would be an error here


def test_only_float32_is_computed_natively():
    assert isinstance(backend.enter(TOKENS, mx.float32), np.ndarray)
    assert all(backend.enter(TOKENS, dtype) is TOKENS for dtype in (mx.bfloat16, mx.float16))


def test_sizes_that_the_kernels_refuse_are_computed_by_mlx(plain_operations):
    args = tiny_model("qwen3_moe", mx.float32).args
    assert Model(args, experts=None).suits_cpu
    layers = [replace(layer, mixer=replace(layer.mixer, head_dim=40)) for layer in args.layers]
    assert not Model(replace(args, layers=layers), experts=None).suits_cpu


def test_scales_stay_narrow_but_the_embedding_is_exact():
    model = load_model(tiny_directory("qwen3_moe"), dtype=mx.float32)
    assert model.lm_head.scales.dtype == mx.bfloat16
    assert model.model.embed_tokens.scales.dtype == mx.float32


def quantised(kind, rows, cols, bits, group_size):
    layer = kind(cols, rows) if kind is Linear else kind(rows, cols)
    dense = mx.random.normal((rows, cols), key=mx.random.key(0))
    layer.weight = dense
    if bits:
        layer.quant = Quant(bits, group_size)
        layer.weight, layer.scales, layer.biases = mx.quantize(dense, group_size, bits)
    return layer, np.array(dequantized(layer, mx.float32))


@pytest.mark.parametrize("bits, group_size", [(0, 0), (4, 64), (8, 64), (4, 32), (8, 128), (6, 64)])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_linear_and_embedding(bits, group_size, rows):
    x = np.random.default_rng(0).standard_normal((1, rows, 256), dtype=np.float32)
    layer, dense = quantised(Linear, 96, 256, bits, group_size)
    np.testing.assert_allclose(layer(x), x @ dense.T, rtol=1e-4, atol=1e-4)
    table, dense = quantised(Embedding, 96, 256, bits, group_size)
    ids = np.arange(rows)[None]
    np.testing.assert_allclose(table(ids), dense[ids], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits, group_size", [(0, 0), (4, 64), (8, 64), (4, 32)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_matrices_by_head(bits, group_size, dtype):
    layer, dense = quantised(Linear, 4 * 24, 128, bits, group_size)
    if bits:
        layer.scales, layer.biases = layer.scales.astype(dtype), layer.biases.astype(dtype)
        wide = (layer.scales.astype(mx.float32), layer.biases.astype(mx.float32))
        dense = np.array(mx.dequantize(layer.weight, *wide, group_size, bits))
    matrices = [matrix.copy() for matrix in by_head(layer, 4, slice(8, None))]
    np.testing.assert_allclose(np.stack(matrices), dense.reshape(4, 24, 128)[:, 8:], rtol=1e-5, atol=1e-5)


def test_log_softmax():
    logits = np.array([[1000.0, 999.0, -1000.0, -np.inf], [0, 0, 0, 0]], np.float32)
    got = np.array(log_softmax(mx.array(logits)))
    want = np.array([[-np.log1p(np.exp(-1)), -1 - np.log1p(np.exp(-1)), -2000.313262, -np.inf], [-np.log(4)] * 4])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert np.isnan(np.array(log_softmax(mx.array([[0.0, np.nan]])))).all()


def logits_with_ties(tokens, experts):
    return np.random.default_rng(0).integers(-3, 3, (tokens, experts)).astype(np.float32)


def test_routers_agree_with_mlx_and_break_ties_by_index():
    logits = logits_with_ties(50, 32)
    bias = np.random.default_rng(1).integers(-2, 2, 32).astype(np.float32)
    rules = [
        (Router(32, 6), None),
        (Router(32, 6, normalise=False), None),
        (Router(32, 6, "softmax", groups=4, kept_groups=2, scale=2.0), None),
        (Router(32, 6, "sigmoid", True, 4, 2, scale=2.5), mx.array(bias)),
        (Router(32, 6, "sigmoid", True, normalise=False), mx.array(bias)),
    ]
    for rule in rules:
        ids, weights = route(logits, *rule)
        want_ids, want_weights = (np.array(part) for part in route(mx.array(logits), *rule))
        assert isinstance(ids, np.ndarray) and (ids == want_ids).all()
        np.testing.assert_allclose(weights, want_weights, rtol=1e-5)
    equal, _ = route(np.zeros((1, 32), np.float32), Router(32, 4))
    assert equal.tolist() == [[0, 1, 2, 3]]


def test_huge_pages_change_nothing():
    array = mx.random.randint(0, 1 << 30, (3 << 20,), key=mx.random.key(0)).astype(mx.uint32)
    before = np.array(array)
    assert 0 <= native.huge_pages(array) <= array.nbytes
    assert (np.array(array) == before).all()
    assert native.huge_pages(mx.zeros(4)) == 0


def test_expanded_latents_are_held_once():
    """The keys and values of all heads are the largest temporaries of a long prompt on the CPU."""
    heads, nope, value, width, N, L = 16, 32, 64, 64, 2000, 16
    weights = Weight(heads * (nope + value), width)
    weights.weight = mx.random.normal((heads * (nope + value), width), key=mx.random.key(0))
    key, values = (HeadMatrices(weights, heads, rows) for rows in (slice(None, nope), slice(nope, None)))
    rng = np.random.default_rng(0)
    shapes = (L, heads, nope), (L, heads, 16), (N, width), (N, 16)
    q, q_pe, stored, k_pe = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    assert (key.height, values.height) == (nope, value)
    latent.expanded_native(q, q_pe, stored, k_pe, latent.Matrices(key, values, 0.1))
    tracemalloc.start()
    latent.expanded_native(q, q_pe, stored, k_pe, latent.Matrices(key, values, 0.1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.3 * 4 * heads * N * (nope + 16 + value)


@pytest.mark.parametrize("decay", [None, ChannelDecay(-5.0, 64)])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_the_delta_rule_holds_what_is_planned(decay, key_heads):
    """Its projections and all that is made of them."""
    if decay is not None and key_heads < 4:
        return  # a channel's decay belongs to one head
    sizes, L = Delta(key_heads, 4, 64, 64, 4, channel_decay=decay), 800
    a_width = sizes.key_width if decay else sizes.value_heads
    conv, log = mx.zeros((sizes.channels, 4, 1)), mx.zeros((sizes.value_heads,))
    weights = delta.DeltaWeights(conv, log, mx.zeros((a_width,)), mx.ones((64,)), 1e-6)
    widths = sizes.channels, sizes.value_width, sizes.value_heads, a_width

    def peak():
        tracemalloc.start()
        parts = [np.ones((1, L, width), np.float32) for width in widths]
        delta.delta(*parts, make_caches(sizes)[0], weights, sizes)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak()
    assert 0.95 < peak() / (4 * sizes.native_temporaries(L, L)) < 1.05


def test_an_array_becomes_one_of_the_kind_beside_it():
    """Beside numpy's arrays it is read in place, and the kernels of a GPU are not asked."""
    weight, host, here = mx.array([1.0, 2.0]), np.ones(2, np.float32), np.zeros(3, np.float32)
    mx.eval(weight)
    assert np.shares_memory(backend.of_kind(weight, here), np.asarray(weight))
    assert backend.of_kind(host, here) is host and backend.of_kind(weight, mx.zeros(1)) is weight
    assert isinstance(backend.of_kind(host, mx.zeros(1)), mx.array)
    asked = []
    assert not backend.kernels_take(here, lambda *case: asked.append(case), 1) and not asked
    assert backend.kernels_take(weight, lambda *case: asked.append(case), 1) and asked == [("ops", 1)]
