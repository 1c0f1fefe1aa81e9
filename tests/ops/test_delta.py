"""The small kernels against the numpy oracle, launched as in `test_kernels`."""

import mlx.core as mx
import numpy as np
import oracle
import pytest
from floats import wide
from grids import drawn
from tile_choices import Chosen

from metal import msl
from moeflux_mlx.caches.recurrent import RecurrentCache
from moeflux_mlx.errors import RequestError
from moeflux_mlx.kinds import Router
from moeflux_mlx.mixers.delta import op as delta
from moeflux_mlx.mixers.delta.spec import ChannelDecay, Delta
from moeflux_mlx.ops import route
from moeflux_mlx.ops.rows import StepRows
from moeflux_mlx.ops.tiles import MAX_TOKENS, Tile, using

pytestmark = pytest.mark.usefixtures("cpu_device")
FLOATS = [mx.float32, mx.bfloat16, mx.float16]
RULE = ChannelDecay(-5.0, 32)
LIMITS = {mx.float32: 2e-5, mx.bfloat16: 1.2e-2, mx.float16: 2e-3}  # largest error over largest value


@pytest.fixture
def text_only():
    with msl.launching(msl.TextKernel):
        yield


def random(rng, *shape, dtype=mx.float32, scale=1.0):
    return mx.array((rng.normal(size=shape) * scale).astype(np.float32)).astype(dtype)


def error(got, want):
    return np.abs(wide(got) - want).max() / np.abs(want).max()


@pytest.mark.parametrize("sizes, dtype", drawn([(1, 96, 4), (2, 40, 4), (9, 300, 4), (3, 64, 2)], FLOATS))
def test_conv_silu(host, sizes, dtype):
    T, C, taps = sizes
    rng = np.random.default_rng([T, C])
    x, state, weight = (random(rng, *s, dtype=dtype) for s in ((T, C), (taps - 1, C), (C, taps)))
    out, following = delta.conv_silu(x, state, weight)
    whole = np.concatenate([wide(state), wide(x)])
    want = sum(wide(weight)[:, j] * whole[j : j + T] for j in range(taps))
    assert error(out, want / (1 + np.exp(-want))) < LIMITS[dtype]
    assert np.array_equal(wide(following), whole[-(taps - 1) :])


def delta_case(rng, T, heads, key_heads, v_dim, k_dim, dtype):
    width = 2 * key_heads * k_dim + heads * v_dim
    return (
        random(rng, T, width, dtype=dtype),
        random(rng, T, heads, dtype=dtype, scale=2),
        random(rng, T, heads, dtype=dtype, scale=2),
        random(rng, heads),
        random(rng, heads),
        random(rng, heads, v_dim, k_dim),
        key_heads,
    )


def channels_case(rng, T, heads, v_dim, k_dim, dtype=mx.float32, rule=RULE):
    """Returns the same where each channel of a key has its own decay."""
    qkv, _, b, A_log, _, state, _ = delta_case(rng, T, heads, heads, v_dim, k_dim, dtype)
    a, dt_bias = random(rng, T, heads * k_dim, dtype=dtype, scale=2), random(rng, heads * k_dim)
    return qkv, a, b, A_log, dt_bias, state, heads, rule


def delta_oracle(qkv, a, b, A_log, dt_bias, state, key_heads, rule=None):
    heads, v_dim, k_dim = state.shape
    T, kd = qkv.shape[0], key_heads * k_dim
    x = wide(qkv)
    q, k = (x[:, i * kd : (i + 1) * kd].reshape(T, key_heads, k_dim) for i in (0, 1))
    v = x[:, 2 * kd :].reshape(T, heads, v_dim)
    q = q / np.sqrt((q**2).sum(-1, keepdims=True) + 1e-6) * k_dim**-0.5
    k = k / np.sqrt((k**2).sum(-1, keepdims=True) + 1e-6)
    q, k = (np.repeat(one, heads // key_heads, axis=1) for one in (q, k))
    rates, logits = np.exp(wide(A_log)), wide(a) + wide(dt_bias)
    if rule is not None:
        rates, logits = rates[:, None], logits.reshape(T, heads, k_dim)
    if rule is None or rule.floor is None:
        decay = np.exp(-rates * np.logaddexp(logits, 0))
    else:
        decay = np.exp(rule.floor / (1 + np.exp(-rates * logits)))
    beta = 1 / (1 + np.exp(-wide(b)))
    return oracle.gated_delta_recurrence(q, k, v, decay, beta, wide(state))


@pytest.mark.parametrize("steps, T", [("gated_delta", 3), ("gated_delta_tokens", 11)])
@pytest.mark.parametrize("dtype", [mx.float32, pytest.param(mx.bfloat16, marks=pytest.mark.full)])
@pytest.mark.parametrize("rule", [RULE, ChannelDecay(None, None)])
def test_channels_that_decay_by_themselves(host, steps, T, dtype, rule):
    """Many tokens are computed in blocks, and the last block is not full."""
    case = channels_case(np.random.default_rng(T), T, 2, 20, 64, dtype, rule)
    out, following = getattr(delta, steps)(*case)
    want, state = delta_oracle(*case)
    assert error(out, want) < LIMITS[dtype] and error(following, state) < 2e-5


DELTA_CASES = [(1, 2, 1, 32, 128), (4, 4, 2, 20, 64), (3, 2, 2, 7, 32)]  # T, heads, key heads, value dim, key dim


@pytest.mark.parametrize("sizes, dtype", drawn(DELTA_CASES, FLOATS, seed=1))
def test_gated_delta(host, sizes, dtype):
    check_delta(delta.gated_delta, *sizes, dtype)


def check_delta(steps, T, heads, key_heads, v_dim, k_dim, dtype):
    case = delta_case(np.random.default_rng([T, heads]), T, heads, key_heads, v_dim, k_dim, dtype)
    out, following = steps(*case)
    want, state = delta_oracle(*case)
    assert error(out, want) < LIMITS[dtype]
    assert error(following, state) < 2e-5


TOKENS_CASES = [
    (1, 2, 1, 32, 128),
    (2, 4, 2, 20, 64),
    (9, 3, 3, 7, 32),
    (9, 2, 1, 9, 96),
    (16, 2, 2, 40, 64),
    (70, 4, 2, 36, 128),
]


@pytest.mark.parametrize("sizes, dtype", drawn(TOKENS_CASES, FLOATS, seed=2))
def test_gated_delta_tokens(host, sizes, dtype):
    check_delta(delta.gated_delta_tokens, *sizes, dtype)


@pytest.mark.parametrize("lanes, rows, simdgroups, ahead", [(4, 2, 1, 8), (8, 3, 2, 1), (16, 1, 4, 2), (32, 4, 2, 4)])
def test_gated_delta_tokens_at_other_tiles(host, lanes, rows, simdgroups, ahead):
    case = delta_case(np.random.default_rng(lanes), 11, 2, 1, 19, 128, mx.float32)
    want, state = delta_oracle(*case)
    with using(Chosen({"gated_delta_tokens": Tile(rows, lanes, simdgroups, ahead)})):
        out, following = delta.gated_delta_tokens(*case)
    assert error(out, want) < 2e-5 and error(following, state) < 2e-5


def test_a_tile_that_needs_too_much_threadgroup_memory_is_refused(host):
    case, tile = delta_case(np.random.default_rng(0), 11, 2, 1, 19, 128, mx.float32), Tile(8, 8, 8, 8)
    with using(Chosen({"gated_delta_tokens": tile})), pytest.raises(RequestError, match="bytes of threadgroup memory"):
        delta.gated_delta_tokens(*case)


@pytest.mark.parametrize("dtype", FLOATS)
def test_twin_of_gated_delta(dtype):
    qkv, a, b, A_log, dt_bias, state, key_heads = delta_case(np.random.default_rng(6), 9, 4, 2, 20, 64, dtype)
    out, following = delta.gated_delta_ops(qkv[None], a[None], b[None], A_log, dt_bias, state[None], key_heads)
    want, last = delta_oracle(qkv, a, b, A_log, dt_bias, state, key_heads)
    assert error(out[0], want) < 2 * LIMITS[dtype] and error(following[0], last) < 2 * LIMITS[dtype]


@pytest.mark.parametrize("T, rule", [(1, None), (MAX_TOKENS, None), (MAX_TOKENS + 1, None), (MAX_TOKENS + 1, RULE)])
def test_layer_on_kernels_equals_plain_operations(host, T, rule):
    rng = np.random.default_rng(T)
    sizes = Delta(2 if rule else 1, 2, 32, 16, 4, "silu" if T == 1 else "sigmoid", channel_decay=rule)
    qkv, z, b, a = (part[None] for part in step_inputs(rng, sizes, T=T))
    conv, recurrent, weights = step_state(rng, sizes)
    states = [state_of(sizes, conv, recurrent) for _ in range(3)]
    got = delta.delta(qkv, z, b, a, states[0], weights, sizes)[0]
    joined = mx.concatenate((qkv, z, b, a), axis=-1)
    assert np.array_equal(wide(got), wide(delta.delta(qkv, z, b, a, states[2], weights, sizes, joined)[0]))
    assert error(got, wide(delta._delta_ops(qkv, z, b, a, states[1], weights, sizes))[0]) < 1e-4
    assert error(states[0].recurrent, wide(states[1].recurrent)) < 1e-4


STEP_CASES = [(1, 2, 32, 16, 4), (2, 4, 64, 20, 4), (3, 3, 32, 7, 2), (2, 2, 96, 40, 3), (1, 2, 128, 128, 4)]
CHANNELS = (2, 2, 64, 24, 4)  # each channel has its own decay


@pytest.mark.usefixtures("both_builds")
@pytest.mark.parametrize("sizes, dtype", drawn([*STEP_CASES, CHANNELS], FLOATS, seed=3))
def test_delta_step_has_the_bits_of_its_parts(host, sizes, dtype):
    """The parts are compared with the oracle above. Every second case has the other gate."""
    rng, gate = np.random.default_rng(sizes), "sigmoid" if sizes[3] in (20, 24, 40) else "silu"
    sizes = Delta(*sizes, gate, channel_decay=RULE if sizes == CHANNELS else None)
    qkv, z, b, a = step_inputs(rng, sizes, dtype)
    conv, recurrent, weights = step_state(rng, sizes, dtype)
    state = state_of(sizes, conv, recurrent)
    got = [delta.delta(*(part[None] for part in (qkv, z, b, a)), state, weights, sizes), state.conv, state.recurrent]
    mixed, next_conv = delta.conv_silu(qkv, conv, weights.conv.reshape(sizes.channels, -1))
    rates, rule = (weights.A_log, weights.dt_bias), sizes.channel_decay
    out, following = delta.gated_delta(mixed, a, b, *rates, recurrent, sizes.key_heads, rule)
    out = delta.gated_norm(out, z.reshape(out.shape), weights.norm, weights.eps, gate)
    for one, want in zip(got, (out.reshape(1, -1), next_conv, following), strict=True):
        assert np.array_equal(wide(one)[0], wide(want))


@pytest.mark.usefixtures("both_builds")
@pytest.mark.parametrize("sizes, count", drawn([*STEP_CASES, CHANNELS], [2, 3, 8], seed=4))
@pytest.mark.parametrize("is_joined", [False, True])
def test_several_tokens_in_one_launch_have_the_bits_of_each_alone(host, sizes, count, is_joined):
    rng, sizes = np.random.default_rng(sizes), Delta(*sizes, channel_decay=RULE if sizes == CHANNELS else None)
    parts = [part[None] for part in step_inputs(rng, sizes, mx.bfloat16, count)]
    joined = mx.concatenate(parts, axis=-1) if is_joined else None
    conv, recurrent, weights = step_state(rng, sizes, mx.bfloat16)
    states, seen = [state_of(sizes, conv, recurrent) for _ in range(2)], []
    want, alone = [], []
    for row in (slice(i, i + 1) for i in range(count)):
        own = None if joined is None else joined[:, row]
        alone.append((states[0].conv, states[0].recurrent))
        want.append(delta.delta(*(part[:, row] for part in parts), states[0], weights, sizes, own))
    rows = StepRows([states[1]] * count, lambda i: seen.append((i, states[1].conv, states[1].recurrent)))
    got = delta.delta(*parts, rows, weights, sizes, joined)
    assert np.array_equal(wide(got), wide(mx.concatenate(want, axis=1)))
    alone.append((states[0].conv, states[0].recurrent))
    seen.append((count, states[1].conv, states[1].recurrent))
    for i, ((number, *own), others) in enumerate(zip(seen, alone, strict=True)):
        assert i == number and all(np.array_equal(wide(a), wide(b)) for a, b in zip(own, others, strict=True))
    assert states[1].offset == count


@msl.needed
@pytest.mark.parametrize(
    "file, old, new",
    [
        ("conv_silu.metal", "float(x[uint(at) * AT_X", "float(x[uint(at) * C"),
        ("delta_inputs.metal", "a[t * AT_A + h]", "a[t * NV + h]"),
        ("delta_inputs.metal", "b[t * AT_B + h]", "b[t * NV + h]"),
        ("gated_norm.metal", "* AT_Z", "* HEADS * D"),
    ],
)
def test_a_planted_fault_between_joined_rows_is_caught(host, monkeypatch, file, old, new):
    msl.plant(monkeypatch, file, old, new)
    with pytest.raises(AssertionError):
        test_layer_on_kernels_equals_plain_operations(None, MAX_TOKENS + 1, None)


@msl.needed
@pytest.mark.parametrize(
    "old, new",
    [
        ("a[step * AT_A + own]", "a[own]"),
        ("z[step * AT_Z + head", "z[head"),
        ("next_inputs, step, AT_QKV", "next_inputs, 0, AT_QKV"),
        ("of_step(next, step - 1)", "of_step(next, 0)"),
    ],
)
def test_a_planted_fault_between_tokens_is_caught(host, monkeypatch, old, new):
    msl.plant(monkeypatch, "delta_step.metal", old, new)
    with pytest.raises((AssertionError, msl.Failure)):
        test_several_tokens_in_one_launch_have_the_bits_of_each_alone(None, (2, 4, 64, 20, 4), 3, True)


@msl.needed
@pytest.mark.parametrize(
    "old, new",
    [
        ("NK + head / SHARED) * DK", "NK + head % NK) * DK"),
        ("head % SHARED == 0", "head == 0"),
        ("mixed[i] = float(X(", "mixed[i] = float(("),
        ("outs[first + r] = float(X(sum))", "outs[first + r] = sum"),
        ("z[step * AT_Z + head * DV + i]", "z[step * AT_Z + i]"),
        ("SIGMOID ? 1.0f : gate", "SIGMOID ? gate : 1.0f"),
        ("EACH ? head * DK + lane * N + i : head", "EACH ? head * DK + lane * N : head"),
    ],
)
def test_a_planted_fault_in_the_step_is_caught(host, monkeypatch, old, new):
    msl.plant(monkeypatch, "delta_step.metal", old, new)
    with pytest.raises((AssertionError, msl.Failure)):
        sizes = CHANNELS if old.startswith("EACH") else (2, 4, 64, 20, 4)
        test_delta_step_has_the_bits_of_its_parts(None, sizes, mx.bfloat16)


@msl.needed
@pytest.mark.parametrize(
    "file, old, new",
    [
        pytest.param("gated_delta_tokens.metal", "from + part / VECTORS >= steps", "false", marks=pytest.mark.full),
        pytest.param("delta_inputs.metal", "EACH ? 1.0f :", "EACH ? 0.5f :", marks=pytest.mark.full),
        ("decay.h.metal", "metal::precise::exp(-rate * u)", "metal::precise::exp(-u)"),
    ],
)
def test_a_planted_fault_in_decays_of_channels_is_caught(host, monkeypatch, file, old, new):
    msl.plant(monkeypatch, file, old, new)
    case = channels_case(np.random.default_rng(1), 3, 2, 8, 64)
    assert max(map(error, delta.gated_delta_tokens(*case), delta_oracle(*case))) > 1e-2


def step_inputs(rng, sizes, dtype=mx.float32, T=1):
    widths = sizes.channels, sizes.value_width, sizes.value_heads, _decays(sizes)
    return [random(rng, T, n, dtype=dtype) for n in widths]


def _decays(sizes):
    return sizes.key_width if sizes.channel_decay else sizes.value_heads


def state_of(sizes, conv, recurrent):
    """Returns a cache that holds the state of one text."""
    cache = RecurrentCache(sizes)
    cache.state = conv[None], recurrent[None], 0
    return cache


def step_state(rng, sizes, dtype=mx.float32):
    heads, conv = sizes.value_heads, (sizes.channels, sizes.taps, 1)
    weights = (random(rng, *conv, dtype=dtype), random(rng, heads), random(rng, _decays(sizes)))
    weights = delta.DeltaWeights(*weights, random(rng, sizes.value_dim, dtype=dtype), 1e-6)
    recurrent = random(rng, heads, sizes.value_dim, sizes.key_dim)
    return random(rng, sizes.taps - 1, sizes.channels, dtype=dtype), recurrent, weights


@pytest.mark.parametrize("steps, T, cut", [("gated_delta", 5, 2), ("gated_delta_tokens", 14, 3)])
def test_gated_delta_in_two_calls_is_one(host, steps, T, cut):
    qkv, a, b, *rest, state, key_heads = delta_case(np.random.default_rng(3), T, 2, 1, 16, 64, mx.float32)
    run = getattr(delta, steps)
    whole, last = run(qkv, a, b, *rest, state, key_heads)
    first, middle = run(qkv[:cut], a[:cut], b[:cut], *rest, state, key_heads)
    second, end = run(qkv[cut:], a[cut:], b[cut:], *rest, middle, key_heads)
    assert np.array_equal(np.array(whole), np.concatenate([np.array(first), np.array(second)]))
    assert np.array_equal(np.array(last), np.array(end))


@pytest.mark.parametrize("steps", ["gated_delta", "gated_delta_tokens"])
def test_decay_survives_extreme_inputs(host, steps):
    case = list(delta_case(np.random.default_rng(5), 2, 2, 1, 8, 32, mx.float32))
    case[1] = mx.array([[80.0, -80.0], [200.0, -200.0]])
    out, following = getattr(delta, steps)(*case)
    want, state = delta_oracle(*case)
    assert error(out, want) < 2e-5 and error(following, state) < 2e-5


@pytest.mark.parametrize("shape, dtype", drawn([(1, 4, 128), (3, 5, 64), (1, 1, 40)], FLOATS, seed=4))
def test_gated_norm(host, shape, dtype):
    rng = np.random.default_rng(shape[-1])
    x, z, weight = random(rng, *shape, dtype=dtype), random(rng, *shape, dtype=dtype), random(rng, shape[-1])
    want = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-6) * wide(weight)
    for gate, factor in (("silu", wide(z)), ("sigmoid", 1)):
        got = delta.gated_norm(x, z, weight, 1e-6, gate)
        assert error(got, want * factor / (1 + np.exp(-wide(z)))) < LIMITS[dtype]


NAMED = {  # value heads, key heads, experts, experts per token
    "Qwen3-Next-80B-A3B": (32, 16, 512, 10),
    "Qwen3.6-35B-A3B": (32, 16, 256, 8),
    "Qwen3.5-122B-A10B": (64, 16, 256, 8),
    "Qwen3.5-397B-A17B": (64, 16, 512, 10),
    "GLM-5.3-Flash": (64, 64, 288, 8),
}


@msl.needed
@pytest.mark.parametrize("name", NAMED)
def test_source_compiles_for_every_variant(text_only, name):
    heads, key_heads, E, K = NAMED[name]
    rng = np.random.default_rng(0)
    rule = ChannelDecay(-5.0, 128) if name.startswith("GLM") else None
    case = delta_case(rng, 1, heads, key_heads, 128, 128, mx.bfloat16)
    case = channels_case(rng, 1, heads, 128, 128, mx.bfloat16) if rule else case
    qkv = case[0]
    delta.conv_silu(qkv, mx.zeros((3, qkv.shape[1]), mx.bfloat16), mx.zeros((qkv.shape[1], 4), mx.bfloat16))
    out, _ = delta.gated_delta(*case)
    delta.gated_delta_tokens(*case)
    delta.gated_norm(out, out, mx.zeros((128,), mx.bfloat16), 1e-6)
    sizes = Delta(key_heads, heads, 128, 128, 4, channel_decay=rule)
    qkv, z, b, a = step_inputs(rng, sizes, mx.bfloat16)
    conv, recurrent, weights = step_state(rng, sizes, mx.bfloat16)
    delta.delta(*(part[None] for part in (qkv, z, b, a)), state_of(sizes, conv, recurrent), weights, sizes)
    route.route(mx.zeros((1, E)), Router(E, K))
    assert len(msl.TextKernel.texts) == 7 and all(text.isascii() for text in msl.TextKernel.texts)


@msl.needed
@pytest.mark.parametrize(
    "file, old, new",
    [
        ("gated_delta.metal", "s[r * N + i] *= decay[i];", "s[r * N + i] += 0 * decay[i];"),
        ("gated_delta.metal", "head / (NV / NK) * DK", "head % NK * DK"),
        ("gated_delta.metal", "* beta;", "+ beta;"),
        ("gated_delta_tokens.metal", "* NK + head / (NV / NK);", "* NK + head % NK;"),
        ("gated_delta_tokens.metal", "fma(-note[r].y, sums[r]", "fma(-note[r].z, sums[r]"),
        ("gated_delta_tokens.metal", "taken ? decay[i] : 1.0f", "decay[i]"),
        ("delta_inputs.metal", "k[i] * k_scale", "k[i] * q_scale * k_scale"),
        ("delta.h.metal", "int o = 1; o < L;", "int o = 1; o < L / 2;"),
        ("delta.h.metal", "odd ? b : a", "odd ? a : b"),
        ("conv_silu.metal", "t + j - KEPT", "t - j"),
        ("gated_norm.metal", "/ float(D)", ""),
    ],
)
def test_a_planted_fault_is_caught(host, monkeypatch, file, old, new):
    msl.plant(monkeypatch, file, old, new)
    rng = np.random.default_rng(1)
    if "delta" in file:
        case = delta_case(rng, 3, 4, 2, 8, 64, mx.float32)
        steps = delta.gated_delta if file == "gated_delta.metal" else delta.gated_delta_tokens
        assert max(map(error, steps(*case), delta_oracle(*case))) > 1e-2
        return
    x, weight = random(rng, 4, 32), random(rng, 32, 4)
    if file == "conv_silu.metal":
        whole = np.concatenate([np.zeros((3, 32)), wide(x)])
        want = sum(wide(weight)[:, j] * whole[j : j + 4] for j in range(4))
        got = delta.conv_silu(x, mx.zeros((3, 32)), weight)[0]
        want = want / (1 + np.exp(-want))
    else:
        want = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True)) * wide(x) / (1 + np.exp(-wide(x)))
        got = delta.gated_norm(x, x, mx.ones((32,)), 1e-6)
    assert error(got, want) > 1e-2
