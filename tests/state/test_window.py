"""The ring of a window: it goes back as far as it reaches and to kept states, and nowhere else."""

import mlx.core as mx
import numpy as np
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from moeflux_mlx.caches import traced
from moeflux_mlx.caches.layer_cache import MOST_DRAFTS
from moeflux_mlx.caches.traced import REACH, SPARE
from moeflux_mlx.errors import RequestError
from moeflux_mlx.mixers.grouped import op as attend
from moeflux_mlx.mixers.grouped.spec import GroupedQuery
from moeflux_mlx.mixers.registry import make_caches, untrimmable_bytes
from moeflux_mlx.model.step import MAX_OF_SEQUENCE
from moeflux_mlx.ops import causal_parts
from moeflux_mlx.planning.budget import state_bytes
from moeflux_mlx.spec import ModelArgs
from moeflux_mlx.state.rewind import RewindPoints

pytestmark = pytest.mark.usefixtures("cpu_device")
HEADS, WIDTH = 2, 16
TEXT = mx.random.normal((3, HEADS, 300, WIDTH), key=mx.random.key(0))  # a query, key and value for each position


def window_cache(window=5, chunked=False):
    return make_caches(GroupedQuery(HEADS, HEADS, WIDTH, None, window=window, chunked=chunked))[0]


def feed(cache, count):
    """Attends with the next positions of TEXT. Returns [heads, count, WIDTH]."""
    start = cache.offset
    q, k, v = (part[None, :, start : start + count].transpose(0, 2, 1, 3) for part in TEXT)
    terms = attend.Terms(None, None, None, 0.3, cache.window, chunked=cache.part.chunked)
    return attend.attend(q, k, v, cache, terms).reshape(count, HEADS, WIDTH).swapaxes(0, 1)


def wanted(position, window, chunked=False):
    """Computes one position in float64."""
    q, k, v = (np.array(part, np.float64) for part in TEXT)
    seen = slice(position - position % window if chunked else max(position - window + 1, 0), position + 1)
    weights = np.exp(0.3 * np.einsum("hd,hpd->hp", q[:, position], k[:, seen]))
    return np.einsum("hp,hpd->hd", weights / weights.sum(-1, keepdims=True), v[:, seen])


def close(got, position, window, chunked=False):
    return np.abs(np.array(got) - wanted(position, window, chunked)).max() < 1e-5


@pytest.fixture(params=[False, True], ids=["plain operations", "as on a GPU"])
def on_gpu(request, kernels_are):
    """Lets a single token attend to all slots, as on a GPU without a kernel for it."""
    if request.param:
        kernels_are(True)


@pytest.mark.parametrize("chunked", [False, True])
def test_each_position_sees_its_window_or_its_chunk(on_gpu, chunked):
    cache, at = window_cache(chunked=chunked), 0
    for count in (3, 1, 1, 9, 1, 1, 40, 1, 2, 1, 1):
        got, at = feed(cache, count), at + count
        assert all(close(got[:, i], at - count + i, 5, chunked) for i in range(count))


def test_a_long_prompt_is_cut_into_parts_that_see_few_positions(monkeypatch):
    monkeypatch.setattr(causal_parts, "LEAST_ROWS", 8)
    cache = window_cache(12)
    feed(cache, 7)
    got = feed(cache, 100)
    assert all(close(got[:, i], 7 + i, 12) for i in range(100))
    parts = list(causal_parts.in_parts(HEADS, 100, 107, "causal", 12))
    assert [(rows.start, seen.start, seen.stop) for rows, seen, _ in parts[:3]] == [
        (0, 0, 19),
        (12, 8, 31),
        (24, 20, 43),
    ]


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(1, 20), st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 8))
def test_rows_of_a_step_are_taken_back_over_the_end_of_the_ring(window, cuts, rows):
    """Each row has the bits of a text that was never taken back, and is not cut elsewhere."""
    cache, whole = window_cache(window), window_cache(window)
    for count in cuts:
        feed(cache, count)
    feed(whole, sum(cuts))
    for keep in range(rows + 1):
        ways = [cache.way_back()]
        for _ in range(rows):
            feed(cache, 1)
            ways.append(cache.way_back())
        cache.take_back(sum(cuts) + keep, ways[keep])
        assert cache.offset == sum(cuts) + keep
        again, after = feed(cache, 1), feed_rows(whole, keep + 1)
        assert mx.array_equal(again, after)
        cache.trim(keep + 1)
        whole.trim(keep + 1)


def feed_rows(cache, count):
    """Appends positions one by one. Returns the result of the last one."""
    return [feed(cache, 1) for _ in range(count)][-1]


def test_it_has_room_for_the_rows_of_a_step():
    assert REACH >= MAX_OF_SEQUENCE


def test_it_goes_back_as_far_as_it_has_the_visible_positions():
    cache = window_cache(5)
    feed(cache, 12)
    assert cache.reaches(3) and cache.first == 0  # nothing is lost yet
    feed(cache, 20)
    assert cache.first == 32 - 13 and cache.reaches(23) and not cache.reaches(22)
    assert cache.trim(10) == 0 and cache.offset == 32
    with pytest.raises(RequestError, match="17 positions cannot go back from 32 to 22: it holds none before 19"):
        cache.go_back(22, None)
    assert cache.trim(9) == 9 and close(feed(cache, 1)[:, 0], 23, 5)
    assert not cache.reaches(22)  # lost positions stay lost
    assert cache.copy().first == cache.first == 19


@pytest.mark.parametrize("rows", [1, MOST_DRAFTS])
def test_rows_that_were_taken_back_leave_no_trace(rows):
    """Within the range of drafts, the ring can later go back as far as if the rows had never been there."""
    cache, other = window_cache(5), window_cache(5)
    for one in (cache, other):
        feed(one, 30)
    feed(cache, rows)
    cache.take_back(30, None)
    for steps in (5, 3, 1):
        assert [cache.reaches(p) for p in range(40)] == [other.reaches(p) for p in range(40)]
        assert mx.array_equal(feed(cache, 1), feed(other, 1))
        assert cache.trim(steps) == other.trim(steps)


def test_a_kept_state_reaches_further_back():
    cache = window_cache(5)
    points = RewindPoints([cache], 1 << 20)
    feed(cache, 20)
    points.keep(20)
    before = np.array(cache.state[0])
    feed(cache, 60)
    assert not points.can_trim and points.nearest(75) == 75 and points.nearest(60) == 20
    assert points.nbytes == cache.bytes_for(20, 4) == 2 * 17 * HEADS * WIDTH * 4 == cache.nbytes
    assert points.rewind(60) == 20 and np.array_equal(np.array(cache.state[0]), before)
    assert close(feed(cache, 1)[:, 0], 20, 5)
    assert points.rewind(8) == 0 and cache.empty()


@pytest.mark.parametrize("length", [1, 4, 5, 13, 31])
def test_what_is_saved_is_what_the_next_token_sees(length):
    cache, other = window_cache(5), window_cache(5)
    feed(cache, length)
    arrays = [np.array(array) for array in cache.stored()]
    assert (
        [array.shape for array in arrays] == list(cache.stored_shapes(length)) == [(min(length, 4), HEADS, WIDTH)] * 2
    )
    other.state = other.restored(*arrays, length, mx.float32)
    assert mx.array_equal(feed(other, 1), feed(cache, 1))
    assert other.reaches(length) and (length < 5 or not other.reaches(length - 1))


def test_another_text_diverges_from_it():
    cache = window_cache(5)
    feed(cache, 30)
    kept = cache.state[:2]
    feed(cache, 6)
    near, far = window_cache(5), window_cache(5)
    near.take_from(cache, 33, None)
    far.take_from(cache, 30, kept)
    assert close(feed(near, 1)[:, 0], 33, 5) and close(feed(far, 1)[:, 0], 30, 5)
    assert close(feed(cache, 1)[:, 0], 36, 5)
    with pytest.raises(RequestError, match="cannot go back"):
        far.take_from(cache, 20, None)


@pytest.mark.parametrize("kind", [traced.FixedRing, traced.FixedChunks])
def test_its_traced_stand_in_gives_the_same(kind, kernels_are):
    cache, other = (window_cache(5, kind is traced.FixedChunks) for _ in range(2))
    kernels_are(True)
    for one in (cache, other):
        feed(one, 2)
    for _ in range(30):
        stand_in = kind(*cache.step_arrays(), mx.array(cache.offset), mx.array(cache.position), None)
        q, k, v = (part[None, :, cache.offset, None] for part in TEXT)
        keys, values = stand_in.update_and_fetch(k, v)
        mask = stand_in.mask(1)
        got = mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.3, mask=mask)
        assert mx.array_equal(got[0], feed(other, 1))
        cache.take_step(stand_in.arrays)
    assert cache.offset == other.offset == 32 and cache.traced(1) is kind


def test_the_plan_equals_the_memory_of_its_text():
    args = ModelArgs.from_variant("gpt-oss-20b")
    ring, row = 140 * 8 * (64 + 64) * 2, 8 * (64 + 64) * 2
    assert state_bytes(args, 4096, 2) == 12 * (ring + 4096 * row)
    assert untrimmable_bytes(args.mixer_counts, 2) == 12 * ring
    model = tiny_model("gpt_oss", mx.float32)
    cache = model.make_cache()
    mx.eval(model(mx.array([list(range(100))]), cache))
    assert sum(layer.nbytes for layer in cache) == state_bytes(model.args, 100, 4)


FAULTS = {
    "a window too wide": lambda p: p.setattr(traced, "SPARE", SPARE - 1),
    "a window too narrow": lambda p: p.setattr(traced, "SPARE", SPARE + 1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught(monkeypatch, name, kernels_are):
    kernels_are(True)
    FAULTS[name](monkeypatch)
    with pytest.raises(AssertionError):
        test_each_position_sees_its_window_or_its_chunk(None, False)
