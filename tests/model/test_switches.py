"""Every switch of a layer's parts, compared with float64: natively, by plain operations and by kernels."""

from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from metal import fast, msl
from moeflux_mlx.errors import ConfigError
from moeflux_mlx.formats.layout_file import from_json, to_json
from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.kinds import (
    Activation,
    Experts,
    QueryGrowth,
    QueryLog,
    QueryScale,
    Rotation,
    Router,
    SharedExpert,
    ShortConvolution,
)
from moeflux_mlx.layers import MLP, Linear, RMSNorm, Stack
from moeflux_mlx.mixers.grouped.module import Attention
from moeflux_mlx.mixers.grouped.spec import GroupedQuery, RelativeBias
from moeflux_mlx.mixers.registry import make_caches
from moeflux_mlx.model.moe import MoE
from moeflux_mlx.model.tensors import needed
from moeflux_mlx.ops import native
from moeflux_mlx.ops.rope import Rope
from moeflux_mlx.spec import ModelArgs, check_args

pytestmark = pytest.mark.usefixtures("cpu_device")
HIDDEN, EPS = 48, 1e-2
PLAIN = GroupedQuery(4, 2, 32, Rotation(16, 1e4))
CUTS = (0, 5, 6, 7, 21, 22, 23)  # length of a text that fills the ring of a small window
CASES = {
    "norm of each head": PLAIN,
    "flat norms": replace(PLAIN, norm="flat"),
    "no norm": replace(PLAIN, norm=None),
    "norms of rotated heads": replace(PLAIN, rotates_first=True),
    "no rotation": replace(PLAIN, rotation=None),
    "neither": replace(PLAIN, norm=None, rotation=None),
    "biases and a gate": replace(PLAIN, bias=True, output_bias=True, gate="joined"),
    "value experts": replace(PLAIN, value_experts=Router(5, 2, "sigmoid", True, scale=2.5)),
    "normed results and a gate of each value": replace(PLAIN, gate="sigmoid", output_norm=True),
    "a softplus to base 2 of each value": replace(PLAIN, gate="softplus2"),
    "sinks": replace(PLAIN, sinks=True),
    "window": replace(PLAIN, window=3),
    "window of one": replace(PLAIN, window=1, sinks=True),
    "a window that the text ends in": replace(PLAIN, window=7),
    "a chunk": replace(PLAIN, window=5, chunked=True, sinks=True),
    "a chunk that the text ends in": replace(PLAIN, window=7, chunked=True),
    "a chunk of one": replace(PLAIN, window=1, chunked=True),
    "norms without weights": replace(PLAIN, norm="unit"),
    "norms without weights or rotation": replace(PLAIN, norm="unit", rotation=None),
    "sigmoid of each value": replace(PLAIN, gate="sigmoid", value_dim=16),
    "sigmoid of each head": replace(PLAIN, gate="sigmoid head"),
    "softplus of each head": replace(PLAIN, gate="softplus head"),
    "biases of gates": replace(PLAIN, gate="sigmoid", gate_bias=True),
    "a bias of a head's gate": replace(PLAIN, gate="sigmoid head", gate_bias=True),
    "queries that grow": replace(PLAIN, rotation=None, query_scale=QueryGrowth(0.7, 3)),
    "queries that grow in steps": replace(PLAIN, query_scale=QueryScale(0.7, 3)),
    "queries that grow in steps from the second on": replace(PLAIN, query_scale=QueryScale(0.7, 3, first=1)),
    "queries that grow by a logarithm": replace(PLAIN, query_scale=QueryLog(0.7, 3)),
    "a bias by distance": replace(PLAIN, rotation=None, relative=RelativeBias(3, 5), query_scale=QueryLog(0.7, 3)),
    "a bias by distance in a window": replace(PLAIN, rotation=None, window=7, relative=RelativeBias(3, 5)),
    "sinks of tokens and short heads": replace(
        PLAIN, rotation=None, norm="clip", clip=2.0, relative=RelativeBias(3, 5, clip=0.5), token_sinks=True
    ),
    "a convolution of keys and values": replace(PLAIN, convolution=ShortConvolution(128, 4)),
    "narrow values": replace(PLAIN, head_dim=96, value_dim=32, value_scale=0.5, scale=0.2),
    "values are keys": replace(PLAIN, value_is_key=True),
    "values in a norm": replace(PLAIN, value_norm=True),
    "pairs that do not turn": replace(PLAIN, rotation=Rotation(32, 1e4, pairs=3)),
    "Gemma": replace(PLAIN, rotation=Rotation(32, 1e4, pairs=4), scale=1.0, value_is_key=True, value_norm=True),
    "gpt-oss": replace(PLAIN, norm=None, bias=True, output_bias=True, window=4, sinks=True),
    "MiMo": replace(PLAIN, norm=None, head_dim=64, value_dim=32, value_scale=0.7, window=5, sinks=True),
}


def filled(module, seed=0):
    """Returns the module with random parameters."""
    rng = np.random.default_rng(seed)
    for part in module.modules():
        for name, value in part.items():
            if isinstance(value, mx.array):
                part[name] = mx.array(rng.normal(size=value.shape).astype(np.float32) * 0.3)
    for part in module.modules():
        if isinstance(part, Linear):
            part.filled = True
    module.arrange()
    return module


def wide(a):
    return np.array(a, np.float64)


def normed(x, norm):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * wide(norm.weight)


def turned(x, rotation):
    """Rotates x [L, heads, D] at positions from 0 on."""
    cosine, sine = (part[:, None] for part in fast.turns(np.arange(len(x))[:, None], Rope(rotation)))
    half = rotation.dims // 2
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cosine - second * sine, first * sine + second * cosine, rest], -1)


def query_factors(positions, by):
    """Computes the factors in float64 (transformers: `compute_attention_scaling` of Beam, `Llama4TextAttention`, and
    `InklingAttention`)."""
    if isinstance(by, QueryGrowth):
        return (1 + (positions + 1) / by.length) ** by.exponent
    if isinstance(by, QueryLog):
        return 1 + by.beta * np.log(np.maximum((positions + 1) / by.floor, 1))
    return 1 + by.beta * np.log1p((positions + by.first) // by.original_max_position_embeddings)


def projected(layer, x):
    return x @ wide(layer.weight).T + (wide(layer.bias) if "bias" in layer else 0)


VALUES = np.random.default_rng(5).normal(size=(5, 64, HIDDEN)) * 0.3  # matrices of value experts


def values(x, ids, weights):
    """Makes the values of rows by the matrices that they chose."""
    made = np.einsum("td,tkrd->tkr", wide(x), VALUES[np.array(ids)])
    made = (made / (1 + np.exp(-made)) * wide(weights)[..., None]).sum(1)
    return type(x)(made.astype(np.float32)) if isinstance(x, mx.array) else made.astype(np.float32)


def mixed(layer, h):
    """The weighed sum of silu(W h) over the value experts that each row chooses (IFM's K2 Horizon)."""
    own, rule = layer.value_experts, layer.value_experts.rule
    scores = 1 / (1 + np.exp(-projected(own.gate, h)))
    chosen = np.argsort(-scores - wide(own.e_score_correction_bias), axis=-1)[:, : rule.top_k]
    weights = np.zeros_like(scores)
    np.put_along_axis(weights, chosen, np.take_along_axis(scores, chosen, -1), -1)
    weights *= rule.scale / weights.sum(-1, keepdims=True)
    made = np.einsum("td,erd->ter", h, VALUES)
    return (made / (1 + np.exp(-made)) * weights[..., None]).sum(1)


def convolution(x, layer):
    """The sum of the last inputs of each channel of x [L, C], each times its tap, the last tap for the newest."""
    weight = wide(layer.weight)[..., 0].T
    padded = np.concatenate([np.zeros((len(weight) - 1, x.shape[1])), x])
    return sum(padded[i : i + len(x)] * tap for i, tap in enumerate(weight))


def clipped(x, limit):
    """Shortens heads that are longer than the limit to it (transformers, `Inkling2L2Clip`)."""
    return x * np.minimum(limit / np.linalg.norm(x, axis=-1, keepdims=True), 1)


def biases(layer, part, h):
    """Scores' biases [heads, L, L] by distance (transformers, `InklingRelativeLogits`)."""
    states = projected(layer.r_proj, h).reshape(len(h), part.heads, -1)
    if part.relative.clip:
        states = clipped(states * wide(layer.r_norm.weight), part.relative.clip)
    if part.query_scale:
        states = states * query_factors(np.arange(len(h)), part.query_scale)[:, None, None]
    profiles = np.pad(wide(layer.rel_proj), ((0, 0), (0, len(h))))
    ages = np.maximum(np.arange(len(h))[:, None] - np.arange(len(h)), 0)
    return np.einsum("qhd,dqk->hqk", states, profiles[:, ages])


def wanted(layer, part, norm, x):
    """Computes the layer over x [L, HIDDEN] in float64, in the plain form (Vaswani et al., arXiv:1706.03762, eq. 1)."""
    h, L, D = normed(x, norm), len(x), part.head_dim
    q, k = (projected(layer[f"{name}_proj"], h) for name in "qk")
    v = k if part.value_is_key else mixed(layer, h) if part.value_experts else projected(layer.v_proj, h)
    if part.convolution:
        k, v = k + convolution(k, layer.k_sconv), v + convolution(v, layer.v_sconv)
    q, gate = np.split(q.reshape(L, part.heads, -1), [D], axis=-1)
    k, v = k.reshape(L, -1, D), part.value_scale * v.reshape(L, -1, part.value_width)
    if part.value_norm:
        v = v / np.sqrt((v**2).mean(-1, keepdims=True) + EPS)
    if part.norm == "flat":
        q = normed(q.reshape(L, -1), layer.q_norm).reshape(q.shape)
        k = normed(k.reshape(L, -1), layer.k_norm).reshape(k.shape)
    if part.norm == "head" and not part.rotates_first:
        q, k = normed(q, layer.q_norm), normed(k, layer.k_norm)
    if part.norm == "clip":
        q, k = clipped(q * wide(layer.q_norm.weight), part.clip), clipped(k, part.clip)
    if part.norm == "unit":
        q, k = (one / np.sqrt((one**2).mean(-1, keepdims=True) + EPS) for one in (q, k))
    if part.rotation:
        q, k = turned(q, part.rotation), turned(k, part.rotation)
    if part.rotates_first:
        q, k = normed(q, layer.q_norm), normed(k, layer.k_norm)
    if part.query_scale:
        q = q * query_factors(np.arange(L), part.query_scale)[:, None, None]
    k, v = (np.repeat(one, part.heads // part.kv_heads, axis=1) for one in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * (part.scale or D**-0.5)
    if part.relative:
        scores += biases(layer, part, h)
    scores[:, ~np.tri(L, dtype=bool)] = -np.inf
    if part.chunked:
        chunks = np.arange(L) // part.window
        scores[:, chunks[:, None] != chunks] = -np.inf
    elif part.window:
        scores[:, np.tri(L, k=-part.window, dtype=bool)] = -np.inf
    weights = np.exp(scores)
    total = weights.sum(-1, keepdims=True) + (np.exp(wide(layer.sinks))[:, None, None] if part.sinks else 0)
    total = total + (np.exp(projected(layer.sink_proj, h)).T[..., None] if part.token_sinks else 0)
    out = np.einsum("hqk,khd->qhd", weights / total, v)
    if part.output_norm:
        out = out / np.sqrt((out**2).mean(-1, keepdims=True) + EPS)
    if part.gate == "joined":
        out = out / (1 + np.exp(-gate))
    if part.gate not in (None, "joined"):
        gate = projected(layer.g_proj, h).reshape(L, part.heads, -1)
        gate = gate + (wide(layer.gate_bias)[:, None] if part.gate_bias else 0)
        plus = {"softplus head": np.log1p(np.exp(gate)), "softplus2": np.log2(1 + 2**gate)}
        out = out * plus.get(part.gate, 1 / (1 + np.exp(-gate)))
    return x + projected(layer.o_proj, out.reshape(L, -1))


@pytest.fixture(params=["native", "plain operations", "kernels"])
def array(request, monkeypatch):
    """Returns the type of activations for the fixture's way of computing."""
    if request.param == "native":
        if not native.available():
            pytest.skip("the extension is not built")
        yield np.array
    elif request.param == "plain operations":
        yield mx.array
    else:
        with msl.launching():
            yield mx.array


@pytest.mark.parametrize("case", CASES)
def test_attention_with_each_switch(case, array):
    check_attention(CASES[case], array)


def check_attention(part, array):
    layer, norm, caches = filled(Attention(part, HIDDEN, EPS)), RMSNorm(HIDDEN, EPS), make_caches(part)
    if part.value_experts:
        layer.set_experts(values)
    x = np.random.default_rng(1).normal(size=(1, CUTS[-1], HIDDEN)).astype(np.float32)
    parts = [layer(array(x[:, start:end]), norm, caches) for start, end in pairwise(CUTS)]
    got, want = np.concatenate([wide(one) for one in parts], axis=1)[0], wanted(layer, part, norm, wide(x[0]))
    assert np.abs(got - want).max() < 2e-5 * np.abs(want).max()


@msl.needed
def test_values_that_a_kernel_norms_otherwise(monkeypatch):
    msl.plant(monkeypatch, "attend_step.metal", "head_value<V, VNORM>", "head_value<V, 0>")
    with msl.launching(), pytest.raises(AssertionError):
        check_attention(CASES["values in a norm"], mx.array)


DIFFERENT = [{"norm": "flat"}, {"norm": None}, {"rotation": None}, {"bias": True}, {"sinks": True}, {"window": 4}]
DIFFERENT += [{"value_is_key": True}, {"value_norm": True}, {"rotation": replace(PLAIN.rotation, pairs=1)}]
DIFFERENT += [
    {"gate": "sigmoid"},
    {"gate": "sigmoid head"},
    {"gate": "softplus head"},
    {"query_scale": QueryGrowth(0.7, 3)},
    {"query_scale": QueryScale(0.7, 3)},
    {"norm": "unit"},
    {"window": 4, "chunked": True},
    {"value_scale": 0.7},
    {"scale": 0.1},
    {"rotates_first": True},
    {"rotation": None, "relative": RelativeBias(3, 5)},
    {"rotation": None, "relative": RelativeBias(3, 2)},
    {"query_scale": QueryLog(0.7, 3)},
    {"rotation": None, "relative": RelativeBias(3, 5), "token_sinks": True},
    {"rotation": None, "relative": RelativeBias(3, 5), "norm": "clip", "clip": 2.0},
    {"convolution": ShortConvolution(128, 4)},
]


@pytest.mark.parametrize("switch", DIFFERENT)
def test_each_switch_makes_a_difference(switch):
    """Otherwise the comparison above would prove nothing."""
    x = wide(np.random.default_rng(1).normal(size=(7, HIDDEN)))
    norm = RMSNorm(HIDDEN, EPS)
    parts = [PLAIN, replace(PLAIN, **switch)]
    layers = [filled(Attention(part, HIDDEN, EPS)) for part in parts]
    for name in (name for name in ("q_proj", "k_proj", "v_proj", "o_proj") if name in layers[1]):
        layers[1][name].weight = layers[0][name].weight
    one, other = (wanted(layer, part, norm, x) for layer, part in zip(layers, parts, strict=True))
    assert np.abs(one - other).max() > 1e-2


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_activations_by_name(name, array):
    mlp = filled(MLP(32, 48, Activation(name)))
    x = np.random.default_rng(2).normal(size=(3, 32)).astype(np.float32)
    gate, up = (wide(x) @ wide(layer.weight).T for layer in (mlp.gate_proj, mlp.up_proj))
    tanh = np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))
    act = gate / (1 + np.exp(-gate)) if name == "silu" else 0.5 * gate * (1 + tanh)
    want = (act * up) @ wide(mlp.down_proj.weight).T
    assert np.abs(wide(mlp(array(x))) - want).max() < 1e-5 * np.abs(want).max()


ROUTERS = [
    Router(24, 4, logit_bias=True),
    Router(24, 4, "sigmoid", True, logit_bias=True, scale=2.5),
    Router(24, 4, "sigmoid", True, softcap=0.5, logit_bias=True),
]


@pytest.mark.parametrize("rule", ROUTERS, ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_routers_with_biases_and_limits_of_their_logits(rule, gated, array):
    """gpt-oss takes the softmax of the best logits, which equals that of all logits, normalised over the best."""
    shared, rng = SharedExpert(32, gated=True) if gated else None, np.random.default_rng(4)
    moe, norm = filled(MoE(Experts(rule, 32, shared), 64, 0, None)), RMSNorm(64, EPS)
    x = rng.normal(size=(1, 3, 64)).astype(np.float32)
    ids, weights = map(np.array, moe.prepare(array(x), norm)[2:4])
    logits = normed(wide(x[0]), norm) @ wide(moe.gate.weight).T + wide(moe.gate.bias)
    if rule.softcap:
        logits = rule.softcap * np.tanh(logits / rule.softcap)
    scores = np.exp(logits) if rule.score == "softmax" else 1 / (1 + np.exp(-logits))
    order = np.argsort(-scores - (wide(moe.e_score_correction_bias) if rule.correction_bias else 0))[:, :4]
    picked = np.take_along_axis(scores, order, -1)
    assert np.array_equal(ids, order)
    np.testing.assert_allclose(weights, rule.scale * picked / picked.sum(-1, keepdims=True), rtol=1e-4)


def test_layers_that_differ_in_their_biases_are_not_joined():
    layers = [Linear(32, 16, bias) for bias in (True, False)]
    for layer in layers:
        layer.weight, layer.filled = mx.ones(layer.shape), True
    assert Stack(*layers).stacked is None and Stack(layers[0], layers[0]).stacked is not None


def tiny_args(mixer, **change):
    args = ModelArgs.from_variant("qwen3-30b-a3b")
    layer = replace(args.layers[0], mixer=mixer, **change)
    return replace(args, layers=(layer, args.layers[1]))


def test_heads_and_widths_differ_by_layer_and_biases_are_tensors_of_their_own():
    matrices, plain, _ = needed(tiny_args(replace(PLAIN, bias=True)))
    assert matrices["model.layers.0.self_attn.q_proj"] == (128, 2048)
    assert matrices["model.layers.1.self_attn.q_proj"] == (4096, 2048)
    assert plain["model.layers.0.self_attn.q_proj.bias"] == (128,)
    assert "model.layers.1.self_attn.q_proj.bias" not in plain


def test_layers_may_differ_in_their_limits_alone():
    args = ModelArgs.from_variant("qwen3-30b-a3b")
    experts = args.experts
    layers = [replace(experts, activation=Activation("silu then clip", limit)) for limit in (7.0, 16.0)]
    shared = [replace(one, shared=SharedExpert(64, activation=one.activation)) for one in layers]
    for parts in (layers, shared, [experts, layers[0]]):
        made = replace(args, layers=tuple(replace(args.layers[0], feed_forward=part) for part in parts))
        check_args(made)
        layout = ExpertLayout.from_args(made)
        assert [layout.records[i].activation for i in (0, 1)] == [part.activation for part in parts]
        stated = to_json(layout)
        assert stated["format_version"] == 1 and from_json(stated, made, "layout.json") == layout
    for other in (replace(experts, width=64), replace(experts, biases=True), shared[0]):
        with pytest.raises(ConfigError, match="layer 1 has other experts than layer 0"):
            check_args(replace(args, layers=(args.layers[0], replace(args.layers[0], feed_forward=other))))
