"""Families whose caches hold more than keys and values: texts are cut, kept, saved, stepped and stopped like others."""

import goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import drawn, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import logits_of_calls as logits
from tiny_models import tiny_model

from moeflux_mlx.caches.traced import REACH
from moeflux_mlx.experts.routing import finished
from moeflux_mlx.mixers.registry import cache_numbers
from moeflux_mlx.model.span import Span
from moeflux_mlx.model.step import SequenceRows
from moeflux_mlx.state.snapshot import load_state, save_state

# Lengths at which a text begins to see more positions than it attends to, and a few tokens less.
STARTS = {
    "axk2": 14,
    "dots3_note": 14,
    "deepseek_v32": 14,
    "deepseek_v4": 14,
    "glm5_next": 17,
    "glm_moe_dsa": 14,
    "inkling": 12,
    "inkling2": 12,
    "inkling2_loop": 12,
    "lfm2_moe": 3,
    "minimax_m3_vl": 21,
    "nemotron_h": 16,
    "qwen4_exp": 11,
}


BOTH_WAYS = pytest.mark.parametrize("family, computing", drawn(STARTS, ["native", "plain operations"]), indirect=True)


@pytest.fixture(params=STARTS)
def family(request):
    return request.param


def opened(family):
    return tiny_model(family, mx.float32, "hub"), goldens.golden(family)[0]


@BOTH_WAYS
def test_texts_side_by_side(family, computing):
    model, tokens = opened(family)
    both = np.stack([tokens[:40], tokens[24:]])
    for got, text in zip(np.array(model(mx.array(both))), both, strict=True):
        np.testing.assert_allclose(got, logits(model, text, (40,)), atol=2e-4)


@pytest.mark.parametrize("family", STARTS)
@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=5),
    back=st.integers(0, 60),
    way=st.sampled_from(["cut", "kept", "saved"]),
)
@settings(max_examples=examples(15), deadline=None)
def test_what_is_cut_kept_or_saved_goes_on_alike(family, lengths, back, way):
    """The text is cut if no layer is recurrent, taken back to a kept state, or saved and loaded."""
    model, tokens = opened(family)
    is_recurrent = any(mixer.attention is None or mixer.branches for mixer in model.args.mixers)
    lengths = lengths[: max(1, int(np.searchsorted(np.cumsum(lengths), 50)))]
    position, cache, fresh = sum(lengths), model.make_cache(), model.make_cache()
    logits(model, tokens, lengths, cache)
    if way == "saved":
        saved, cache = save_state(model, cache), model.make_cache()
        load_state(model, cache, saved)
    elif way == "kept" or is_recurrent:
        kept = [layer.kept() for layer in cache]
        logits(model, tokens[::-1].copy(), (9, 1, 1), cache)
        for layer, some in zip(cache, kept, strict=True):
            layer.go_back(position, some)
    else:
        before = position
        reached = [n for n in range(before + 1) if all(layer.reaches(n) for layer in cache)]
        position = max(before - back, min(reached))
        assert all(layer.trim(before - position) == before - position for layer in cache)
    if position:
        logits(model, tokens, (position,), fresh)
    rest, ones = tokens[position : position + 6], (1,) * 6
    assert np.abs(logits(model, rest, ones, cache) - logits(model, rest, ones, fresh)).max() < 1e-4


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("family", ["glm5_next", "minimax_m3_vl", "qwen4_exp"])
def test_a_few_tokens_at_a_time_give_the_same(family, index_values):
    model, tokens = opened(family)
    index_values(1 << 12)
    assert np.abs(logits(model, tokens, (64,)) - goldens.golden(family)[1]).max() < 2e-4


@pytest.mark.parametrize("family", ["glm5_next", "qwen4_exp"])
def test_attention_goes_back_a_few_positions_with_nothing_kept(family):
    """Layers of linear attention cannot go back. Those with blocks keep the newest index keys."""
    model, tokens = opened(family)
    cache, fresh = model.make_cache(), model.make_cache()
    logits(model, tokens, (40,), cache)
    linear, own = cache_numbers(model.args.mixers)[1:3]
    blocks = [cache[i] for i in own]
    assert all(one.reaches(40 - REACH) for one in blocks) and not blocks[1].reaches(24)
    assert not cache[linear.start].reaches(39)
    assert all(one.trim(5) == 5 and one.offset == 35 for one in blocks)
    logits(model, tokens, (35,), fresh)
    for i in own:
        for got, wanted in zip(cache[i].stored(), fresh[i].stored(), strict=True):
            np.testing.assert_allclose(np.array(got), np.array(wanted), atol=1e-5)


def test_a_cache_takes_the_memory_that_it_states(family):
    model, tokens = opened(family)
    cache = model.make_cache()
    logits(model, tokens, (64,), cache)
    assert [layer.nbytes for layer in cache] == [layer.bytes_for(64, 4) for layer in cache]


@BOTH_WAYS
def test_rows_of_several_texts_have_their_own_bits_and_are_taken_back(family, computing):
    """Also checks n-grams of rows that follow one another in a step."""
    model, tokens = opened(family)
    texts, starts = (tokens, tokens[::-1].copy()), (STARTS[family], 30)
    together, alone = ([model.make_cache() for _ in texts] for _ in range(2))
    for caches in (together, alone):
        for text, start, cache in zip(texts, starts, caches, strict=True):
            logits(model, text, (start,), cache)
    rows = [text[start : start + 5] for text, start in zip(texts, starts, strict=True)]
    step = model.step([SequenceRows(cache, row) for cache, row in zip(together, rows, strict=True)])
    wanted = [logits(model, row, (1,) * 5, cache) for row, cache in zip(rows, alone, strict=True)]
    assert np.array_equal(np.array(step.logits), np.concatenate(wanted))
    step.rewind(0, 1)
    assert np.array_equal(logits(model, rows[0][1:], (1,) * 4, together[0]), wanted[0][1:])


def test_a_span_that_was_left_between_two_layers_goes_on(family):
    model, tokens = opened(family)
    whole, left = (Span(mx.array(tokens[None]), 0, 20) for _ in range(2))
    wanted, cache, told = finished(model.advance(whole, model.make_cache())), model.make_cache(), []

    def stop(share):
        told.append(share)
        if len(told) in (3, 9):
            raise InterruptedError

    for _ in range(2):
        with pytest.raises(InterruptedError):
            finished(model.advance(left, cache), stop)
    assert mx.array_equal(finished(model.advance(left, cache), stop), wanted)
