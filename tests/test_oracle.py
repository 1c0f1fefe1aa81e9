"""The oracle against transformers' stored logits, mlx's quantisation and brute force; faults must show."""

import itertools
import json

import goldens
import mlx.core as mx
import numpy as np
import oracle
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("cpu_device")
TOLERANCE = 2e-4
CASES = [
    (family, variant)
    for family in goldens.families()
    for variant in ("hub", "dense", *(v for v in goldens.variants(family) if v in goldens.OWN_GOLDEN))
]
YARN = (64, 1e4, 40, 4096, 32, 1)
seeds = st.integers(0, 2**32 - 1)


def modest(test):
    return settings(deadline=None, max_examples=examples(40))(test)


def error(family, variant="hub", weights=None):
    """Returns the largest distance of the oracle's logits from the golden ones."""
    tokens, logits = goldens.golden(family, variant)
    weights = goldens.dequantised(family, variant) if weights is None else weights
    with np.errstate(all="ignore"):  # planted faults may overflow
        return np.nan_to_num(np.abs(oracle.forward(goldens.config(family), weights, tokens) - logits), nan=9).max()


# ---- against transformers ----


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_reproduces_transformers(family, variant):
    assert error(family, variant) < TOLERANCE


@pytest.mark.parametrize("family", goldens.families())
def test_reproduces_every_layer(family):
    tokens, _ = goldens.golden(family)
    hidden = []
    oracle.forward(goldens.config(family), goldens.dequantised(family), tokens, hidden)
    assert np.abs(np.stack(hidden) - goldens.golden_hidden(family)).max() < TOLERANCE


@pytest.mark.parametrize("family", goldens.families())
def test_goldens_are_usable(family):
    tokens, logits = goldens.golden(family)
    assert logits.shape == (40, goldens.text_config(family)["vocab_size"])
    assert len(set(tokens.tolist())) < len(tokens), "repeated tokens are part of the case"
    assert 0.5 < logits.std() < 2


def test_variants_are_distinct_cases():
    logits = [goldens.golden("deepseek_v3", v)[1] for v in ("hub", *goldens.OWN_GOLDEN)]
    assert all(np.abs(a - b).max() > 0.1 for a, b in itertools.combinations(logits, 2))


# ---- planted faults: each must leave the tolerance ----


def no_centring(config):
    return 0.0


def yarn_factor_in_the_power(plain, factor):
    exponent = -np.log(plain) / np.log(1e4)
    return (factor * 1e4) ** -exponent


def flat_qkvz(x, w, nk, nv, dk, dv):
    T, sizes = len(x), [nk * dk, 2 * nk * dk, 2 * nk * dk + nv * dv]
    q, k, v, z = np.split(x @ w["in_proj_qkvz.weight"].T, sizes, -1)
    return q, k, v, z.reshape(T, nv, dv), *np.split(x @ w["in_proj_ba.weight"].T, 2, -1)


def swapped_scale_and_bias(w, scales, biases, group_size=64, bits=4, right=oracle.dequantize):
    return right(w, biases, scales, group_size, bits)


def high_nibble_first(words, bits):
    q = (words[..., None] >> np.arange(32 - bits, -1, -bits, dtype=np.uint32)) & np.uint32(2**bits - 1)
    return q.reshape(*words.shape[:-1], -1)


def biased_weights(logits, bias, *rest, right=oracle.noaux_tc_topk):
    ids, _ = right(logits, bias, *rest)
    w = np.take_along_axis(oracle.sigmoid(logits) + bias, ids, -1)
    return ids, rest[3] * w / w.sum(-1, keepdims=True)


def newest_tap_first(x, w, right=oracle.causal_conv):
    return right(x, w[:, ::-1])


FAULTS = {
    "half-split rope in MLA": ("deepseek_v3", "rope_interleaved", oracle.rope_half_split),
    "no mscale in the softmax": ("deepseek_v3", "yarn_mscale", lambda factor, mscale: 1.0),
    "YaRN factor inside the power": ("deepseek_v3", "yarn_interpolated", yarn_factor_in_the_power),
    "router weights with bias": ("deepseek_v3", "noaux_tc_topk", biased_weights),
    "norms without + 1": ("qwen3_next", "norm_offset", no_centring),
    "norms without + 1 (3.5)": ("qwen3_5_moe", "norm_offset", no_centring),
    "flat split of qkvz": ("qwen3_next", "split_grouped", flat_qkvz),
    "reversed convolution": ("qwen3_5_moe", "causal_conv", newest_tap_first),
    "full rotation": ("qwen3_next", "partial_rotary_factor", lambda c: 1.0),
    "interleaved rope": ("qwen3_moe", "rope_half_split", oracle.rope_interleaved),
    "swapped scale and bias": ("qwen3_moe", "dequantize", swapped_scale_and_bias),
    "wrong nibble order": ("qwen3_moe", "unpack_bits", high_nibble_first),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_breaks_the_tolerance(fault, monkeypatch):
    family, name, wrong = FAULTS[fault]
    if name == "rope_half_split":  # the interleaved form is built on the half-split one
        half = oracle.rope_half_split
        wrong = _interleaved_over(half)
    monkeypatch.setattr(oracle, name, wrong)
    assert error(family) > 10 * TOLERANCE


def _interleaved_over(half):
    def wrong(x, inv_freq):
        turned = half(np.concatenate([x[..., ::2], x[..., 1::2]], -1), inv_freq)
        return np.stack(np.split(turned, 2, -1), -1).reshape(x.shape)

    return wrong


def test_dropped_groups_at_zero_break_the_negative_bias_case(monkeypatch):
    weights = goldens.dequantised("deepseek_v3", "negbias")
    monkeypatch.setattr(oracle, "DROPPED_GROUP_SCORE", 0.0)
    assert error("deepseek_v3", "negbias", weights) > 10 * TOLERANCE
    assert error("deepseek_v3") < TOLERANCE, "the plain case cannot see this fault"


@pytest.mark.parametrize(("family", "variant"), [c for c in CASES if c[1] in ("fp8", "mlx4_embed_q", "dense")])
def test_each_golden_needs_its_own_weights(family, variant):
    assert error(family, variant, goldens.dequantised(family)) > 10 * TOLERANCE


# ---- checkpoints ----


@pytest.mark.parametrize("family", goldens.families())
def test_weights_are_the_ones_that_made_the_goldens(family):
    assert json.loads((goldens.FIXTURES / "checksums.json").read_text())[family] == goldens.checksum(family)


@pytest.mark.parametrize("family", goldens.families())
def test_mlx_reads_the_written_checkpoint(family):
    loaded = mx.load(str(goldens.checkpoint_dir(family) / "model.safetensors"))
    tensors = goldens.variant_tensors(family, "hub")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert np.array_equal(np.array(loaded[name].astype(mx.float32)), goldens.as_float(tensor)), name


def test_shards_hold_every_tensor_once(tmp_path):
    path = goldens.write_variant(tmp_path, "qwen3_moe", "hub_sharded")
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map) == set(goldens.variant_tensors("qwen3_moe", "hub"))
    for file in sorted(set(weight_map.values())):
        assert set(mx.load(str(path / file))) == {n for n, f in weight_map.items() if f == file}


@pytest.mark.parametrize("family", ["qwen3_5_moe", "deepseek_v3"])
def test_moeflux_directory_holds_the_mlx_tensors(tmp_path, family):
    path = goldens.write_variant(tmp_path, family, "moeflux")
    blob = (path / "artifacts" / "model_weights.bin").read_bytes()
    entries = json.loads((path / "artifacts" / "model_weights.json").read_text())["tensors"]
    tensors = {n.removeprefix("language_model."): t for n, t in goldens.mlx_tensors(family).items()}
    assert set(entries) == {n for n in tensors if ".switch_mlp." not in n}
    for name, entry in entries.items():
        data = np.frombuffer(blob[entry["offset"] :][: entry["size"]], goldens.DTYPES[entry["dtype"]])
        stored = entry["dtype"], data.reshape(entry["shape"])
        assert entry["offset"] % 64 == 0
        if entry["dtype"] == "U32":
            assert np.array_equal(stored[1], tensors[name][1])
        else:
            assert np.array_equal(goldens.as_float(stored), goldens.as_float(tensors[name]))


def test_unknown_variant_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no variant 'negbias'"):
        goldens.write_variant(tmp_path, "qwen3_moe", "negbias")


# ---- quantisation ----


@modest
@given(seed=seeds, rows=st.integers(1, 5), groups=st.integers(1, 3), bits=st.sampled_from([4, 8]))
def test_quantise_and_dequantise_equal_mlx(seed, rows, groups, bits):
    rng = np.random.default_rng(seed)
    w = rng.normal(rng.normal(), 10.0 ** rng.integers(-4, 2), (rows, 64 * groups))
    w = oracle.bf16_to_f32(oracle.f32_to_bf16(w))
    ours = oracle.quantize(w, bits=bits)
    theirs = mx.quantize(mx.array(w).astype(mx.bfloat16), 64, bits, stream=mx.cpu)
    bytes_ = [np.array(t if t.dtype == mx.uint32 else t.view(mx.uint16)) for t in theirs]
    assert all(np.array_equal(a, b) for a, b in zip(ours, bytes_, strict=True))
    wide = [theirs[0], *(t.astype(mx.float32) for t in theirs[1:])]
    expected = np.array(mx.dequantize(*wide, 64, bits, stream=mx.cpu))
    np.testing.assert_allclose(oracle.dequantize(*ours, bits=bits), expected, rtol=1e-6, atol=1e-6 * np.abs(w).max())


@modest
@given(seed=seeds, bits=st.sampled_from([4, 8]))
def test_quantisation_error_is_at_most_a_step(seed, bits):
    w = np.random.default_rng(seed).normal(size=(3, 128)).astype(np.float32)
    words, scales, biases = oracle.quantize(w, bits=bits)
    step = np.repeat(np.abs(oracle.bf16_to_f32(scales)), 64, -1)
    rounding = np.abs(w).max() * 2.0**-7  # for a bf16 scale times up to 2**bits - 1, and for a bf16 bias
    assert (np.abs(oracle.dequantize(words, scales, biases, bits=bits) - w) <= step + rounding).all()


@modest
@given(seed=seeds)
def test_bf16_equals_mlx(seed):
    bits = np.random.default_rng(seed).integers(0, 2**32, 200, dtype=np.uint32)
    x = bits.view(np.float32)
    x = x[np.isfinite(x)]
    expected = np.array(mx.array(x).astype(mx.bfloat16).view(mx.uint16))
    assert np.array_equal(oracle.f32_to_bf16(x), expected)


def test_float8_equals_mlx_and_rounds_to_nearest():
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    values = oracle.e4m3_values()[codes]
    assert np.array_equal(np.array(mx.from_fp8(mx.array(codes), mx.float32)), values)
    assert np.array_equal(oracle.f32_to_e4m3(values), codes)
    x = np.random.default_rng(0).normal(0, 60, 1000).clip(-448, 448)
    nearest = np.abs(x[:, None] - values).min(1)
    assert np.array_equal(np.abs(oracle.e4m3_values()[oracle.f32_to_e4m3(x)] - x), nearest)
    ties = (values[1:7] + values[2:8]) / 2
    assert (oracle.f32_to_e4m3(ties) % 2 == 0).all()


def test_partial_float8_blocks_use_their_own_scale():
    scale = np.array([[1, 2], [4, 8]], np.float32)
    w = oracle.dequantize_fp8(np.full((130, 192), 0x38, np.uint8), scale)
    assert [w[0, 0], w[127, 127], w[0, 128], w[128, 0], w[129, 191]] == [1, 1, 2, 4, 8]


# ---- packed expert blocks ----


@modest
@given(seed=seeds, hidden=st.sampled_from([64, 128, 192]), inter=st.sampled_from([64, 128]))
def test_expert_block_round_trip(seed, hidden, inter):
    rng = np.random.default_rng(seed)
    parts = {}
    for p, shape in (("gate", (inter, hidden)), ("up", (inter, hidden)), ("down", (hidden, inter))):
        triple = oracle.quantize(rng.normal(size=shape).astype(np.float32))
        parts |= {f"{p}_proj.{n}": a for n, a in zip(("weight", "scales", "biases"), triple, strict=True)}
    block = oracle.pack_expert_block(parts)
    w, s = inter * hidden // 2, inter * hidden // 32
    assert len(block) == 3 * (w + 2 * s)
    assert block[w + 2 * s :][:4] == parts["up_proj.weight"].astype("<u4").tobytes()[:4]
    back = oracle.unpack_expert_block(block, hidden, inter)
    assert all(np.array_equal(back[n], parts[n]) for n in oracle.BLOCK_PARTS)
    with pytest.raises(ValueError, match="the layout needs"):
        oracle.unpack_expert_block(block + b"\0", hidden, inter)


# ---- experts, routers ----


@modest
@given(seed=seeds, k=st.integers(1, 8))
def test_combine_is_linear_and_ignores_order(seed, k):
    rng = np.random.default_rng(seed)
    h, shared, experts, w = rng.normal(size=16), rng.normal(size=16), rng.normal(size=(k, 16)), rng.random(k)
    out = oracle.combine(h, experts, w, shared)
    order = rng.permutation(k)
    np.testing.assert_allclose(oracle.combine(h, experts[order], w[order], shared), out, atol=1e-12)
    zero = oracle.combine(h, experts, 0 * w, shared)
    np.testing.assert_allclose(zero, h + shared)
    np.testing.assert_allclose(oracle.combine(h, experts, 2 * w, shared) - zero, 2 * (out - zero), atol=1e-12)


def test_expert_ffn_by_hand():
    gate, up, down = np.array([[1.0, 0]]), np.array([[0.0, 2]]), np.array([[3.0], [-1]])
    act = 0.5 / (1 + np.exp(-0.5)) * 2 * 0.25
    np.testing.assert_allclose(oracle.expert_ffn(np.array([0.5, 0.25]), gate, up, down), [3 * act, -act])


@modest
@given(seed=seeds, k=st.integers(1, 8), norm=st.booleans())
def test_softmax_topk_against_sorting(seed, k, norm):
    logits = np.random.default_rng(seed).integers(-3, 4, (4, 8)).astype(float)  # few different values, so many ties
    ids, w = oracle.softmax_topk(logits, k, norm)
    for row, chosen, weights in zip(logits, ids, w, strict=True):
        assert chosen.tolist() == sorted(range(8), key=lambda e: (-row[e], e))[:k]
        p = np.exp(row[chosen])
        np.testing.assert_allclose(weights, p / (p if norm else np.exp(row)).sum())


@modest
@given(seed=seeds, negative=st.booleans())
def test_noaux_router_against_brute_force(seed, negative):
    rng = np.random.default_rng(seed)
    logits, bias = rng.normal(size=(3, 12)), rng.normal(size=12) - (3 if negative else 0)
    ids, w = oracle.noaux_tc_topk(logits, bias, 3, n_group=4, topk_group=2, scale=2.5)
    for t in range(3):
        s = 1 / (1 + np.exp(-logits[t]))
        biased = s + bias
        score = {g: sum(sorted(biased[3 * g : 3 * g + 3])[-2:]) for g in range(4)}
        best = max(itertools.combinations(range(4), 2), key=lambda pair: sum(score[g] for g in pair))
        allowed = [e for e in range(12) if e // 3 in best]
        expected = sorted(allowed, key=lambda e: -biased[e])[:3]
        assert ids[t].tolist() == expected
        np.testing.assert_allclose(w[t], 2.5 * s[expected] / s[expected].sum())


# ---- rotary positions ----


def test_yarn_frequencies():
    inv = oracle.yarn_inv_freq(*YARN)
    expected = {
        0: 1,
        10: 0.0562341325,
        11: 0.0390069266,
        15: 0.00833450895,
        20: 0.000790569415,
        22: 0.000177827941,
        23: 3.33380358e-05,
        31: 3.33380358e-06,
    }
    np.testing.assert_allclose(inv[list(expected)], list(expected.values()), rtol=1e-8)
    scale = 192**-0.5 * oracle.yarn_mscale(40, 1.0) ** 2
    np.testing.assert_allclose(scale, 0.13523378, rtol=1e-7)


def test_yarn_goldens_see_the_factor_in_the_power(monkeypatch):
    right = oracle.yarn_inv_freq(*YARN)
    monkeypatch.setattr(oracle, "yarn_interpolated", yarn_factor_in_the_power)
    assert not np.allclose(oracle.yarn_inv_freq(*YARN), right, rtol=1e-2)


@modest
@given(seed=seeds, shift=st.integers(0, 20), form=st.sampled_from(["rope_half_split", "rope_interleaved"]))
def test_rope_scores_depend_on_distance_only(seed, shift, form):
    rng, inv = np.random.default_rng(seed), oracle.rope_inv_freq(16, 1e4)
    q, k = (np.tile(rng.normal(size=16), (30, 1)) for _ in range(2))
    turned_q, turned_k = (getattr(oracle, form)(x, inv) for x in (q, k))
    np.testing.assert_allclose(turned_q[shift] @ turned_k[0], turned_q[shift + 9] @ turned_k[9], atol=1e-9)
    np.testing.assert_allclose((turned_q**2).sum(-1), (q**2).sum(-1))


def test_partial_rope_passes_the_rest_through():
    x = np.random.default_rng(0).normal(size=(5, 2, 24))
    turned = oracle.rope_half_split(x, oracle.rope_inv_freq(8, 1e4))
    assert np.array_equal(turned[..., 8:], x[..., 8:])
    assert not np.allclose(turned[1:, :, :8], x[1:, :, :8])


@pytest.mark.parametrize("form", [oracle.rope_half_split, oracle.rope_interleaved])
def test_rope_pairs_equal_mlx(form):
    x = np.random.default_rng(0).normal(size=(7, 1, 16)).astype(np.float32)
    traditional = form is oracle.rope_interleaved
    options = {"traditional": traditional, "base": 1e4, "scale": 1.0, "offset": 0}
    theirs = mx.fast.rope(mx.array(x.swapaxes(0, 1)[None]), 16, **options)[0]
    ours = form(x.astype(float), oracle.rope_inv_freq(16, 1e4))
    np.testing.assert_allclose(ours, np.array(theirs).swapaxes(0, 1), atol=1e-5)


# ---- token mixers ----


def delta_inputs(seed, T=9, H=2, dk=4, dv=3):
    rng = np.random.default_rng(seed)
    q, k, v = rng.normal(size=(T, H, dk)), rng.normal(size=(T, H, dk)), rng.normal(size=(T, H, dv))
    return q, k / np.linalg.norm(k, axis=-1, keepdims=True), v, rng.random((T, H)), rng.random((T, H))


@modest
@given(seed=seeds, cut=st.integers(0, 9))
def test_delta_rule_continues_from_its_state(seed, cut):
    inputs = delta_inputs(seed)
    whole, state = oracle.gated_delta_recurrence(*inputs)
    first, middle = oracle.gated_delta_recurrence(*(a[:cut] for a in inputs))
    second, last = oracle.gated_delta_recurrence(*(a[cut:] for a in inputs), state=middle)
    np.testing.assert_allclose(np.concatenate([first, second]), whole)
    np.testing.assert_allclose(last, state)


@modest
@given(seed=seeds)
def test_delta_rule_is_a_product_of_matrices(seed):
    q, k, v, g, beta = delta_inputs(seed)
    out, _ = oracle.gated_delta_recurrence(q, k, v, g, beta)
    for h in range(2):
        S = np.zeros((3, 4))
        for t in range(len(q)):
            erase = np.eye(4) - beta[t, h] * np.outer(k[t, h], k[t, h])
            S = g[t, h] * S @ erase + beta[t, h] * np.outer(v[t, h], k[t, h])
            np.testing.assert_allclose(S @ q[t, h], out[t, h], atol=1e-10)


def test_full_writes_are_read_back():
    q, k, v, g, _ = delta_inputs(0)
    out, _ = oracle.gated_delta_recurrence(k, k, v, g, np.ones_like(g))
    np.testing.assert_allclose(out, v)


@pytest.mark.parametrize("family", goldens.families())
def test_earlier_positions_do_not_depend_on_later_ones(family):
    tokens, _ = goldens.golden(family)
    weights, config = goldens.dequantised(family), goldens.config(family)
    other = np.concatenate([tokens[:20], (tokens[20:] + 1) % 256])
    a, b = (oracle.forward(config, weights, t) for t in (tokens, other))
    np.testing.assert_allclose(a[:20], b[:20], atol=1e-9)
    assert np.abs(a[20:] - b[20:]).max() > 0.1


@modest
@given(seed=seeds)
def test_materialised_mla_equals_the_absorbed_form(seed):
    rng, (T, H, D, nope, rope, v_dim, rank) = np.random.default_rng(seed), (5, 2, 8, 6, 4, 3, 7)
    shapes = {"q_a_proj": (6, D), "q_b_proj": (H * (nope + rope), 6), "kv_a_proj_with_mqa": (rank + rope, D)}
    shapes |= {"kv_b_proj": (H * (nope + v_dim), rank), "o_proj": (D, H * v_dim)}
    w = {f"{n}.weight": rng.normal(size=s) for n, s in shapes.items()}
    w |= {"q_a_layernorm.weight": rng.random(6) + 0.5, "kv_a_layernorm.weight": rng.random(rank) + 0.5}
    x, inv = rng.normal(size=(T, D)), oracle.rope_inv_freq(rope, 1e4)
    out = oracle.mla(x, w, H, nope, rope, v_dim, rank, inv, 1.3, 1e-6)
    q = oracle.rms_norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"]) @ w["q_b_proj.weight"].T
    q = q.reshape(T, H, -1)
    latent, k_pe = np.split(x @ w["kv_a_proj_with_mqa.weight"].T, [rank], -1)
    latent, k_pe = oracle.rms_norm(latent, w["kv_a_layernorm.weight"]), oracle.rope_interleaved(k_pe, inv)
    keys, values = np.split(w["kv_b_proj.weight"].reshape(H, -1, rank), [nope], 1)
    q_pe = oracle.rope_interleaved(q[..., nope:], inv)
    scores = np.einsum("qhn,hnr,kr->hqk", q[..., :nope], keys, latent) + np.einsum("qhd,kd->hqk", q_pe, k_pe)
    p = oracle.causal_softmax(scores * (nope + rope) ** -0.5 * 1.69)
    o = np.einsum("hqk,kr,hvr->qhv", p, latent, values)
    np.testing.assert_allclose(out, o.reshape(T, -1) @ w["o_proj.weight"].T, atol=1e-9)
