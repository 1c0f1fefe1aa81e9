"""Samplers and logits processors against numpy, against mlx-lm's filters, and by counting what they draw."""

import math

import mlx.core as mx
import numpy as np
import pytest
from grids import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moeflux_mlx.driving.sampling import (
    drop_top_choices,
    greedy,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    likeliest,
    make_logits_processors,
    make_sampler,
)
from moeflux_mlx.errors import RequestError

QUICK = settings(deadline=None, max_examples=examples(100))
MARGIN = 1e-5  # in float32 a token this close to a threshold may be on either side of it


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


@st.composite
def rows(draw):
    """Draws log-probabilities [V] without ties, some of them -inf, from flat to sharply peaked."""
    size = draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.permutation(np.linspace(-1, 1, size)) * draw(st.sampled_from([0.01, 1, 5, 20]))
    if size > 2 and draw(st.booleans()):
        logits[rng.integers(size, size=size // 3)] = -np.inf
    assume(np.isfinite(logits).any())
    return log_softmax(logits).astype(np.float32)


def top_p_reference(row, top_p):
    """Returns the kept tokens: from the likeliest down, until the mass before a token reaches `top_p`."""
    probs = np.exp(row.astype(np.float64))
    probs /= probs.sum()
    kept, before = set(), 0.0
    for token in np.argsort(-row, kind="stable"):
        assume(abs(before - top_p) > MARGIN)
        if before >= top_p:
            break
        if probs[token] > 0:
            kept.add(int(token))
        before += probs[token]
    return kept


def min_p_reference(row, min_p, min_tokens_to_keep):
    probs = np.exp(row.astype(np.float64))
    threshold = min_p * probs.max()
    assume(np.all(np.abs(np.log(np.maximum(probs, 1e-300)) - math.log(threshold)) > MARGIN))
    safe = set(np.argsort(-row, kind="stable")[:min_tokens_to_keep].tolist())
    return {token for token, prob in enumerate(probs) if prob > 0 and (prob >= threshold or token in safe)}


def top_k_reference(row, top_k):
    return {int(token) for token in np.argsort(-row, kind="stable")[:top_k] if row[token] > -np.inf}


def xtc_reference(row, threshold):
    """Drops all tokens above the threshold but the least likely of them."""
    probs = np.exp(row.astype(np.float64))
    probs /= probs.sum()
    assume(np.all(np.abs(probs - threshold) > MARGIN))
    above = sorted((token for token in range(len(row)) if probs[token] > threshold), key=lambda token: probs[token])
    return {token for token in range(len(row)) if probs[token] > 0} - set(above[1:])


def kept(filtered, row):
    """Returns the tokens that a filter kept, after checking that it did not change their values."""
    filtered = np.array(filtered)
    tokens = np.flatnonzero(filtered > -np.inf)
    assert np.array_equal(filtered[tokens], row[tokens])
    return set(tokens.tolist())


@pytest.fixture(scope="module")
def theirs():
    """Returns mlx-lm's functions, uncompiled: compiling them for every length would take most of a minute."""
    sample_utils = pytest.importorskip("mlx_lm.sample_utils")
    mx.disable_compile()
    yield sample_utils
    mx.enable_compile()


@QUICK
@given(row=rows(), top_p=st.floats(0.01, 0.99))
def test_top_p_keeps_the_reference_set(row, top_p):
    assert kept(keep_top_p(mx.array(row), top_p), row) == top_p_reference(row, top_p)


def test_a_top_p_too_small_for_a_float32_keeps_the_likeliest():
    row = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    assert kept(keep_top_p(mx.array(row), 1e-46), row) == {1}


@pytest.mark.parametrize(
    "top_p, count", [(0.25, 1), (0.5, 1), (0.50001, 2), (0.75, 2), (0.76, 3), (0.875, 3), (0.9, 5)]
)
def test_top_p_ends_with_the_token_that_reaches_it(top_p, count):
    """float32 holds these probabilities exactly. The two least likely ones are equal, so both stay."""
    row = np.log(np.array([0.0625, 0.5, 0.0625, 0.125, 0.25], np.float32))
    likeliest = [1, 4, 3, 0, 2][:count]
    assert kept(keep_top_p(mx.array(row), top_p), row) == set(likeliest)


@QUICK
@given(row=rows(), min_p=st.floats(0.001, 1), least=st.integers(1, 70))
def test_min_p_keeps_the_reference_set(row, min_p, least):
    assert kept(keep_min_p(mx.array(row), min_p, least), row) == min_p_reference(row, min_p, least)


@QUICK
@given(row=rows(), top_k=st.integers(1, 70))
def test_top_k_keeps_the_reference_set(row, top_k):
    assert kept(keep_top_k(mx.array(row), top_k), row) == top_k_reference(row, top_k)


@QUICK
@given(row=rows(), threshold=st.floats(0, 0.5), spared=st.lists(st.integers(0, 70), max_size=3))
def test_xtc_drops_the_top_choices(row, threshold, spared):
    spared = [token for token in spared if token < len(row)]
    always = kept(drop_top_choices(mx.array(row), 1.0, threshold, spared), row)
    assert always == xtc_reference(row, threshold) | {token for token in spared if row[token] > -np.inf}
    never = kept(drop_top_choices(mx.array(row)[None], 0.0, threshold, key=mx.random.key(1))[0], row)
    assert never == {int(token) for token in np.flatnonzero(row > -np.inf)}


def test_xtc_is_drawn_for_each_row_and_step():
    logprobs = mx.array(np.log(np.array([[0.5, 0.3, 0.2]] * 64, np.float32)))
    filtered = np.array(drop_top_choices(logprobs, 0.3, 0.1, key=mx.random.key(4)))
    assert 8 < np.isinf(filtered[:, 0]).sum() < 32
    sample = make_sampler(1e-3, xtc_probability=0.5, key=mx.random.key(2))
    assert {sample(logprobs[:1]).item() for _ in range(30)} == {0, 2}, "the draw of a step is not that of the last one"


@settings(deadline=None, max_examples=examples(40))
@given(row=rows(), p=st.floats(0.01, 0.99), count=st.integers(1, 70))
def test_kept_sets_are_mlx_lm_s(theirs, row, p, count):
    top_p_reference(row, p), min_p_reference(row, p, 1)  # skips rows with a token on a threshold
    x = mx.array(row)
    least = min(count, len(row))
    assert kept(keep_top_p(x, p), row) == kept(theirs.apply_top_p(x, p), row)
    assert kept(keep_min_p(x, p, least), row) == kept(theirs.apply_min_p(x, p, least), row)
    if count < len(row):
        assert kept(keep_top_k(x, count), row) == kept(theirs.apply_top_k(x, count), row)


def test_filters_work_row_by_row():
    batch = np.stack([log_softmax(np.random.default_rng(seed).normal(size=30) * 3) for seed in range(4)])
    batch = mx.array(batch.astype(np.float32))
    for keep in (lambda x: keep_top_p(x, 0.7), lambda x: keep_min_p(x, 0.1, 3), lambda x: keep_top_k(x, 5)):
        alone = mx.concatenate([keep(batch[i : i + 1]) for i in range(4)])
        assert mx.array_equal(keep(batch), alone)


def test_ties():
    row = np.array([-1, -3, -1, -3, -1, -9], np.float32)
    assert kept(keep_top_p(mx.array(row), 0.1), row) == {0, 2, 4}
    assert kept(keep_min_p(mx.array(row), 1.0), row) == {0, 2, 4}
    assert len(kept(keep_top_k(mx.array(row), 2), row)) == 2
    assert greedy(mx.array(np.stack([row, -row, 0 * row]))).tolist() == [0, 5, 0]


def draw_counts(logprobs, count=40_000, seed=7, **options):
    """Returns how often each token is drawn for one row of log-probabilities."""
    batch = mx.broadcast_to(mx.array(logprobs.astype(np.float32)), (count, len(logprobs)))
    tokens = np.array(make_sampler(**options, key=mx.random.key(seed))(batch))
    assert tokens.shape == (count,)
    return np.bincount(tokens, minlength=len(logprobs))


def surprise(counts, probs):
    """Returns the chi-square of the counts, in standard deviations above its mean; infinite for an impossible token."""
    if counts[probs == 0].any():
        return math.inf
    expected = counts.sum() * probs[probs > 0]
    freedom = max(len(expected) - 1, 1)
    return (((counts[probs > 0] - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def expected_probs(logprobs, temp, kept_tokens):
    probs = np.zeros(len(logprobs))
    tokens = sorted(kept_tokens)
    probs[tokens] = np.exp(log_softmax(logprobs[tokens] / temp))
    return probs


ROW = log_softmax([2.0, 1.6, 1.1, 0.7, 0.2, -0.3, -0.9, -1.4, -2.2, -3.0, -np.inf, -4.0])
ALL = set(range(12)) - {10}


@pytest.mark.parametrize(
    ("options", "kept_tokens"),
    [
        ({"temp": 1.0}, ALL),
        ({"temp": 0.5}, ALL),
        ({"temp": 2.5}, ALL),
        ({"temp": 0.7, "top_k": 4}, {0, 1, 2, 3}),
        ({"temp": 1.5, "top_p": 0.8}, {0, 1, 2, 3}),
        ({"temp": 0.8, "min_p": 0.2}, {0, 1, 2, 3}),
        ({"temp": 0.8, "min_p": 0.9, "min_tokens_to_keep": 5}, {0, 1, 2, 3, 4}),
        ({"temp": 1.3, "top_p": 0.9, "min_p": 0.02, "top_k": 3}, {0, 1, 2}),
        ({"temp": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0}, ALL),
        ({"temp": 1.0, "top_p": 0.0, "top_k": 12}, ALL),
        ({"temp": 1.0, "top_k": 1000}, ALL),
    ],
)
def test_draws_follow_the_distribution(options, kept_tokens):
    counts = draw_counts(ROW, **options)
    assert surprise(counts, expected_probs(ROW, options["temp"], kept_tokens)) < 5
    # Planted faults: another temperature, one token too many, one too few.
    assert surprise(counts, expected_probs(ROW, options["temp"] * 1.1, kept_tokens)) > 5
    assert surprise(counts, expected_probs(ROW, options["temp"], kept_tokens - {min(kept_tokens)})) > 5
    if len(kept_tokens) < len(ALL):
        more = kept_tokens | {max(kept_tokens) + 1}
        assert surprise(counts, expected_probs(ROW, options["temp"], more)) > 5


def test_order_of_the_filters():
    probs = np.array([0.4, 0.3, 0.2, 0.1])
    # top-p of the whole row keeps three tokens; of the two that top-k leaves it would keep one.
    counts = draw_counts(np.log(probs), temp=1.0, top_p=0.55, top_k=2)
    assert set(np.flatnonzero(counts)) == {0, 1}
    assert kept_by(lambda x: keep_top_p(keep_top_k(x, 2), 0.55), probs) == {0}
    # At temperature 1 top-p keeps two tokens; of the flattened row it would keep three.
    counts = draw_counts(np.log(probs), temp=10.0, top_p=0.6)
    assert set(np.flatnonzero(counts)) == {0, 1}
    flattened = np.exp(log_softmax(np.log(probs) / 10))
    assert kept_by(lambda x: keep_top_p(x, 0.6), flattened) == {0, 1, 2}


def kept_by(keep, probs):
    row = np.log(probs).astype(np.float32)
    return kept(keep(mx.array(row)), row)


def test_impossible_tokens_are_never_drawn():
    row = np.full(20, -np.inf)
    row[[3, 11]] = np.log([0.9, 0.1])
    for options in ({}, {"top_p": 0.95}, {"min_p": 0.01, "min_tokens_to_keep": 8}, {"top_k": 9}):
        counts = draw_counts(row, 2_000, temp=1.0, **options)
        assert set(np.flatnonzero(counts)) == {3, 11}
    assert set(np.flatnonzero(draw_counts(row, 2_000, temp=1e-30))) == {3}


def test_one_certain_token():
    row = np.full(5, -np.inf)
    row[2] = 0
    for options in ({"temp": 0.0}, {"temp": 1.0, "top_p": 0.5, "min_p": 0.5, "top_k": 1}, {"temp": 100.0}):
        assert draw_counts(row, 100, **options).tolist() == [0, 0, 100, 0, 0]


def test_greedy_ignores_the_filters():
    logprobs = mx.array(np.stack([ROW, ROW[::-1]]).astype(np.float32))
    tokens = make_sampler(0.0, 0.1, 0.5, top_k=3)(logprobs)
    assert tokens.tolist() == [0, 11]
    assert tokens.dtype == mx.uint32


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_sampling_is_in_float32(dtype):
    """16 bits cannot add 4096 small probabilities to a large one: top-p would keep only one token."""
    probs = np.concatenate([[0.4], np.full(4096, 0.5 / 4096), np.full(1000, 0.1 / 1000)])
    row = mx.array(np.log(probs).astype(np.float32)).astype(dtype)
    tokens = make_sampler(1.0, 0.8, key=mx.random.key(0))(mx.broadcast_to(row, (2_000, len(probs))))
    assert tokens.dtype == mx.uint32
    assert len(set(tokens.tolist())) > 500
    assert max(tokens.tolist()) <= 4096


def test_a_key_makes_its_own_sequence():
    logprobs = mx.array(ROW.astype(np.float32))[None]

    def sequence(sampler, disturb=False):
        drawn = []
        for _ in range(30):
            drawn.append(sampler(logprobs).item())
            if disturb:
                mx.random.uniform()
        return drawn

    first = sequence(make_sampler(1.0, key=mx.random.key(3)))
    assert sequence(make_sampler(1.0, key=mx.random.key(3)), disturb=True) == first
    assert sequence(make_sampler(1.0, key=mx.random.key(4))) != first
    assert len(set(first)) > 3  # a key that never moved on would repeat one token
    mx.random.seed(5)
    seeded = sequence(make_sampler(1.0))
    mx.random.seed(5)
    assert sequence(make_sampler(1.0)) == seeded


def test_same_seed_draws_as_mlx_lm(theirs):
    logprobs = mx.array(ROW.astype(np.float32))[None]
    options = {"temp": 0.9, "top_p": 0.95, "min_p": 0.01, "top_k": 8, "xtc_probability": 0.4, "xtc_threshold": 0.05}
    options["xtc_special_tokens"] = [1]

    def sequence(make):
        mx.random.seed(11)
        sampler = make(**options)
        return [sampler(logprobs).item() for _ in range(50)]

    assert sequence(make_sampler) == sequence(theirs.make_sampler)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temp": -0.1}, r"temp is -0\.1; it must be 0 \(greedy\) or a finite number from 1e-30 up"),
        ({"temp": math.inf}, "temp is inf"),
        ({"temp": math.nan}, "temp is nan"),
        ({"temp": 1e-40}, "temp is 1e-40"),
        ({"temp": "0.5"}, "temp is '0.5'"),
        ({"top_p": -0.1}, r"top_p is -0\.1; it must be a number between 0 and 1"),
        ({"top_p": 1.01}, r"top_p is 1\.01"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -1}, "min_p is -1; it must be a number between 0 and 1"),
        ({"min_p": 2}, "min_p is 2"),
        ({"top_k": -1}, "top_k is -1; it must be an integer, at least 0"),
        ({"top_k": 1.5}, r"top_k is 1\.5"),
        ({"top_k": True}, "top_k is True"),
        ({"xtc_probability": 1.5}, r"xtc_probability is 1\.5; it must be a number between 0 and 1"),
        ({"xtc_threshold": 0.6}, r"xtc_threshold is 0\.6; it must be a number between 0 and 0\.5"),
        ({"xtc_special_tokens": [-1]}, "xtc_special_tokens is -1; it must be an integer, at least 0"),
        ({"min_tokens_to_keep": 0}, "min_tokens_to_keep is 0; it must be an integer, at least 1"),
    ],
)
def test_sampler_settings_out_of_range(options, message):
    for temp in (0.0, 1.0):
        with pytest.raises(RequestError, match=message):
            make_sampler(**{"temp": temp, **options})


def penalty_reference(tokens, logits, penalty, context_size):
    logits = logits.copy()
    for token in set(tokens[-context_size:]):
        column = logits[:, token]
        logits[:, token] = np.where(column < 0, column * penalty, column / penalty)
    return logits


@QUICK
@given(
    tokens=st.lists(st.integers(0, 9), max_size=12),
    penalty=st.floats(0.1, 3),
    context_size=st.integers(1, 15),
    batch=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_repetition_penalty(tokens, penalty, context_size, batch, seed):
    logits = np.random.default_rng(seed).normal(size=(batch, 10)).astype(np.float32)
    expected = penalty_reference(tokens, logits, np.float32(penalty), context_size)
    given_logits = mx.array(logits)
    options = {"repetition_penalty": penalty, "repetition_context_size": context_size}
    (ours,) = make_logits_processors(**options)
    for seen in (tokens, mx.array(tokens, dtype=mx.int32)):
        penalised = np.array(ours(seen, given_logits))
        assert np.allclose(penalised, expected, rtol=1e-6, atol=0)
    assert np.array_equal(np.array(given_logits), logits)
    # Planted fault: a context one token longer or shorter is noticed where it matters.
    for other in (context_size + 1, context_size - 1):
        if set(tokens[-other:] if other else []) != set(tokens[-context_size:]) and abs(penalty - 1) > 1e-3:
            wrong = penalty_reference(tokens, logits, penalty, other) if other else logits
            assert not np.allclose(penalised, wrong, rtol=1e-6, atol=0)


def test_logits_processors_are_mlx_lm_s(theirs):
    logits = np.random.default_rng(1).normal(size=(1, 50)).astype(np.float32)
    tokens = mx.array(np.random.default_rng(2).integers(0, 50, 40))
    options = {
        "logit_bias": {3: 5.0, 7: -100.0},
        "repetition_penalty": 1.3,
        "repetition_context_size": 25,
        "presence_penalty": 0.5,
        "presence_context_size": 30,
        "frequency_penalty": -0.25,
        "frequency_context_size": 35,
    }
    ours, expected = mx.array(logits), mx.array(logits)
    for processor in make_logits_processors(**options):
        ours = processor(tokens, ours)
    for processor in theirs.make_logits_processors(**options):
        expected = processor(tokens, expected)
    np.testing.assert_allclose(np.array(ours), np.array(expected), atol=1e-6)
    assert not np.array_equal(np.array(ours), logits)


def test_presence_counts_once_and_frequency_each_time():
    tokens = mx.array([9, 2, 5, 2, 2])
    for name, expected in (("presence", [0, 0, -0.5, 0, 0, -0.5]), ("frequency", [0, 0, -1.5, 0, 0, -0.5])):
        (ours,) = make_logits_processors(**{f"{name}_penalty": 0.5, f"{name}_context_size": 4})
        assert ours(tokens, mx.zeros((1, 6), mx.bfloat16)).tolist() == [expected]
        assert ours(mx.array([], mx.uint32), mx.zeros((1, 6))).tolist() == [[0] * 6]


def test_likeliest_tokens():
    row = mx.array([0.1, 0.5, 0.5, -math.inf, 0.2])
    assert [token for token, _ in likeliest(row, 3)] == [1, 2, 4]
    assert likeliest(row, 9)[0] == (1, 0.5) and len(likeliest(row, 9)) == 5
    assert likeliest(row, 0) == []


def test_logit_bias():
    (bias,) = make_logits_processors({1: 2.5, 4: -math.inf})
    logits = mx.zeros((2, 5), dtype=mx.bfloat16)
    biased = bias([], logits)
    assert biased.tolist() == [[0, 2.5, 0, 0, -math.inf]] * 2
    assert biased.dtype == mx.float32
    with pytest.raises(RequestError, match="logit_bias names token 4; the largest is 3"):
        bias([], mx.zeros((1, 4)))


def test_nothing_to_process():
    assert make_logits_processors() == []
    assert make_logits_processors({}, 0.0) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": -1.0}, r"repetition_penalty is -1\.0; it must be positive and finite"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
        ({"repetition_penalty": "1"}, "repetition_penalty is '1'"),
        ({"repetition_penalty": 1.1, "repetition_context_size": 0}, "repetition_context_size is 0"),
        ({"repetition_penalty": 1.1, "repetition_context_size": 2.0}, r"repetition_context_size is 2\.0"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan; it must be a finite number"),
        ({"frequency_penalty": 1.0, "frequency_context_size": 0}, "frequency_context_size is 0"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias token id is -1; it must be an integer, at least 0"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias token id is '3'"),
        ({"logit_bias": {3: math.nan}}, "logit_bias for token 3 is nan"),
        ({"logit_bias": {3: math.inf}}, "logit_bias for token 3 is inf"),
    ],
)
def test_processor_settings_out_of_range(options, message):
    with pytest.raises(RequestError, match=message):
        make_logits_processors(**options)
