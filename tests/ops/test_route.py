"""Both routers and YaRN against the numpy oracle, for any shape; ties go to the lowest index."""

import mlx.core as mx
import numpy as np
import oracle
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflux_mlx.kinds import Rotation, Router, Yarn
from moeflux_mlx.mixers.latent.module import softmax_scale
from moeflux_mlx.ops.rope import Rope, yarn_inv_freq
from moeflux_mlx.ops.route import route, top_k
from moeflux_mlx.spec import ModelArgs


def logits_of(seed, T, E):
    """Returns logits that are distinct within a row, so that the choice is unique."""
    rng = np.random.default_rng(seed)
    return (rng.permuted(np.tile(np.arange(E), (T, 1)), axis=1) * 0.02 + rng.normal(size=(T, 1))).astype(np.float32)


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 10), st.integers(10, 80), st.booleans())
def test_softmax_topk(seed, T, K, E, norm):
    logits = logits_of(seed, T, E)
    ids, weights = route(mx.array(logits), Router(E, K, normalise=norm))
    want_ids, want_weights = oracle.softmax_topk(logits, K, norm)
    assert np.array_equal(np.array(ids), want_ids)
    np.testing.assert_allclose(np.array(weights), want_weights, rtol=2e-5)


@settings(max_examples=examples(60))
@given(
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.sampled_from([(8, 8, 4, 8), (4, 4, 2, 4), (2, 16, 1, 3), (1, 24, 1, 5), (4, 2, 3, 2)]),
    st.floats(-3, 3),
)
def test_noaux_tc_topk(seed, T, shape, shift):
    groups, size, kept, K = shape
    logits = logits_of(seed, T, groups * size)
    bias = (np.random.default_rng(seed + 1).normal(size=groups * size) * 0.1 + shift).astype(np.float32)
    rule = Router(groups * size, K, "sigmoid", True, groups, kept, scale=2.5)
    ids, weights = route(mx.array(logits), rule, mx.array(bias))
    want_ids, want_weights = oracle.noaux_tc_topk(logits, bias, K, groups, kept, 2.5)
    assert np.array_equal(np.sort(np.array(ids)), np.sort(want_ids))
    order = np.argsort(np.array(ids)), np.argsort(want_ids)
    got = np.take_along_axis(np.array(weights), order[0], 1)
    np.testing.assert_allclose(got, np.take_along_axis(want_weights, order[1], 1), rtol=2e-5)


def test_ties_go_to_the_lowest_index():
    scores = np.zeros((3, 512), np.float32)
    scores[1, [5, 300, 301]] = 1
    scores[2, 100:] = 2
    got = np.array(top_k(mx.array(scores), 8))
    assert got[0].tolist() == list(range(8))
    assert got[1].tolist() == [5, 300, 301, 0, 1, 2, 3, 4]
    assert got[2].tolist() == list(range(100, 108))


def test_yarn_frequencies_of_deepseek_v3():
    """The values that DeepSeek-V3's own configuration gives: 64 rotated dimensions, factor 40."""
    inv = yarn_inv_freq(64, 1e4, Yarn(40.0, 4096, 32.0, 1.0, 1.0, 1.0))
    want = [
        1,
        0.0562341325,
        0.0390069266,
        0.00833450895,
        0.000790569415,
        0.000177827941,
        3.33380358e-05,
        3.33380358e-06,
    ]
    np.testing.assert_allclose(inv[[0, 10, 11, 15, 20, 22, 23, 31]], want, rtol=1e-8)


# What transformers 5.23's `_compute_yarn_parameters` gives for 64 dimensions and theta 150000, as float32: the factor
# on cos and sin, and the frequencies of the pairs `PAIRS`.
PAIRS = [0, 8, 9, 10, 14, 16, 17, 18, 31]
TRUNCATED_40 = [
    1.0, 5.08132726e-02, 3.15988697e-02, 1.94208100e-02, 2.25687842e-03, 5.68037562e-04, 2.17940367e-04,
    3.06470502e-05, 2.41880912e-07,
]  # fmt: skip
WHOLE_32 = [
    1.0, 5.08132726e-02, 3.17056961e-02, 1.93349998e-02, 2.09379266e-03, 4.56483918e-04, 1.29318694e-04,
    3.83088118e-05, 3.02351140e-07,
]  # fmt: skip


@pytest.mark.parametrize(
    "yarn, magnitude, frequencies",
    [
        (Yarn(40, 4096, mscale=1.0, mscale_all_dim=0.5), 1.1557219901962608, TRUNCATED_40),
        (Yarn(40, 4096, mscale=0.707, mscale_all_dim=1.0), 0.9210423553163399, TRUNCATED_40),
        (Yarn(40, 4096, mscale=1.0, mscale_all_dim=1.0), 1.0, TRUNCATED_40),
        (Yarn(40, 4096, attention_factor=1.25), 1.25, TRUNCATED_40),
        (Yarn(32, 4096, truncate=False), 1.3465735902799727, WHOLE_32),
        (Yarn(8, 2048, mscale=1.0, mscale_all_dim=0.0), 1.2079441541679836, None),
    ],
)
def test_yarn_equals_hugging_face(yarn, magnitude, frequencies):
    rope = Rope(Rotation(64, 150000.0, yarn))
    assert rope.magnitude == pytest.approx(magnitude, rel=1e-12)
    if frequencies is not None:
        np.testing.assert_allclose(np.frombuffer(rope.frequencies)[PAIRS], frequencies, rtol=2e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_both_rotations_use_frequencies_and_magnitude(interleaved):
    yarn = Yarn(32, 4096, mscale=1.0, mscale_all_dim=0.5, truncate=False)
    rope = Rope(Rotation(64, 1e4, yarn, interleaved))
    x = np.random.default_rng(3).standard_normal((1, 5, 2, 80)).astype(np.float32)  # 64 of 80 values are rotated
    turn = oracle.rope_interleaved if interleaved else oracle.rope_half_split
    turned = turn(x[0, ..., :64].astype(float), np.frombuffer(rope.frequencies)) * rope.magnitude
    want = np.concatenate([turned, x[0, ..., 64:]], axis=-1)
    assert rope.magnitude > 1.1
    plain = np.array(rope(mx.array(x.transpose(0, 2, 1, 3)), 0)).transpose(0, 2, 1, 3)[0]
    np.testing.assert_allclose(plain, want, atol=2e-5)
    np.testing.assert_allclose(rope(x, 0)[0], want, atol=2e-5)


@settings(max_examples=examples(40))
@given(
    st.sampled_from([32, 64, 128]),
    st.floats(1e3, 1e7),
    st.floats(1, 64),
    st.sampled_from([2048, 4096, 32768]),
)
def test_yarn_matches_the_oracle(dims, theta, factor, original):
    got = yarn_inv_freq(dims, theta, Yarn(factor, original))
    np.testing.assert_allclose(got, oracle.yarn_inv_freq(dims, theta, factor, original), rtol=1e-9)


def test_softmax_scale_of_cogito():
    assert softmax_scale(ModelArgs.from_variant("cogito-v2-671b").mixers[0]) == pytest.approx(0.13523378, rel=1e-7)
