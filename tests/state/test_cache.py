"""What caches give to attention."""

import mlx.core as mx
import numpy as np
import pytest

from moeflux_mlx.caches import growing
from moeflux_mlx.mixers.grouped.cache import KVCache
from moeflux_mlx.mixers.grouped.spec import GroupedQuery

HEADS, WIDTH = 2, 8
PART = GroupedQuery(HEADS, HEADS, WIDTH, None)


def entries(length, seed):
    return mx.random.normal((1, HEADS, length, WIDTH), key=mx.random.key(seed))


def attend(kv, length, seed):
    q = entries(length, seed)
    k, v = kv.update_and_fetch(entries(length, seed + 100), entries(length, seed + 200))
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=kv.mask(length)), k.shape[2]


@pytest.mark.parametrize("lengths", [[5, 1, 1], [1, 1], [255, 1, 1], [300, 1, 2, 1]])
def test_one_token_on_a_gpu_attends_over_the_capacity_and_sees_the_same(lengths, kernels_are):
    whole, part = KVCache(PART), KVCache(PART)
    for seed, length in enumerate(lengths):
        kernels_are(True)
        got, seen = attend(whole, length, seed)
        kernels_are(False)
        want, positions = attend(part, length, seed)
        assert positions == part.offset == whole.offset
        assert seen == (whole.keys.shape[2] if length == 1 else positions)
        assert np.abs(np.array(got - want)).max() < 1e-6


def test_entries_that_fill_an_array_keep_nothing_else():
    """They are a part of what was projected for queries, keys and values together."""
    cache = KVCache(GroupedQuery(1, 1, 64, None))
    before = mx.get_active_memory()
    joined = mx.random.normal((1, cache.step, 20 * 64))
    mx.eval(joined)
    keys, values = (joined[..., i * 64 : (i + 1) * 64][:, None] for i in (18, 19))
    cache.append(keys, values)
    mx.eval(cache.keys, cache.values)
    del joined, keys, values
    mx.synchronize()  # a GPU's work holds its inputs
    assert mx.get_active_memory() - before < 2 * cache.nbytes


def test_a_copy_does_not_see_what_the_original_goes_on_with():
    cache = KVCache(PART)
    cache.append(entries(5, 0), entries(5, 1))
    copy = cache.copy()
    before = [np.array(array) for array in copy.stored()]
    cache.go_back(2, None)
    cache.append(entries(3, 2), entries(3, 3))
    assert all(np.array_equal(np.array(array), old) for array, old in zip(copy.stored(), before, strict=True))


def test_entries_that_were_trimmed_are_not_seen(kernels_are):
    kernels_are(True)
    whole, fresh = KVCache(PART), KVCache(PART)
    attend(whole, 7, 0)
    whole.trim(3)
    fresh.update_and_fetch(whole.keys[..., :4, :], whole.values[..., :4, :])
    assert mx.array_equal(attend(whole, 1, 9)[0], attend(fresh, 1, 9)[0])


def test_a_mask_with_one_position_too_many_is_noticed(kernels_are, monkeypatch):
    up_to = growing.up_to
    monkeypatch.setattr(growing, "up_to", lambda position, capacity: up_to(position + 1, capacity))
    with pytest.raises(AssertionError):
        test_one_token_on_a_gpu_attends_over_the_capacity_and_sees_the_same([5, 1], kernels_are)
