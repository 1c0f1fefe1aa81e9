"""Caches of keys and values in 8 bits: the same bytes after any cut, rewind, copy or save."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from grids import examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from moeflux_mlx.mixers.grouped import op as attend
from moeflux_mlx.mixers.grouped.cache import KVCache, QuantizedKVCache
from moeflux_mlx.mixers.grouped.spec import GroupedQuery
from moeflux_mlx.mixers.registry import make_caches
from moeflux_mlx.model.step import MAX_OF_SEQUENCE
from moeflux_mlx.ops import kv_rows, native

pytestmark = pytest.mark.usefixtures("cpu_device")
HEADS, WIDTH, VALUE_WIDTH, LONGEST = 2, 128, 64, 400
PART = GroupedQuery(HEADS, HEADS, WIDTH, None, value_dim=VALUE_WIDTH, kv_bits=8)
WINDOW = replace(PART, window=20)
RNG = np.random.default_rng(0)
QUERIES, KEYS, VALUES = (
    RNG.normal(size=(1, LONGEST, HEADS, width)).astype(np.float32) for width in (WIDTH, WIDTH, VALUE_WIDTH)
)
BYTES = [np.array(kv_rows.encode(mx.array(part.transpose(0, 2, 1, 3)))) for part in (KEYS, VALUES)]


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from([16, 32, 64, 96, 128, 192]), st.integers(0, 1000), st.sampled_from([1e-35, 1e-6, 1.0, 3e30]))
def test_a_row_is_rounded_to_the_nearest_code_of_its_group(width, seed, size):
    x = (np.random.default_rng(seed).standard_t(3, size=(3, width)) * size).astype(np.float32)
    rows = kv_rows.encode(mx.array(x))
    assert rows.shape == (3, kv_rows.row_bytes(width)) and rows.dtype == mx.uint8
    got = np.array(kv_rows.decode(rows, width, mx.float32)).astype(np.float64)
    group = kv_rows.group_of(width)
    step = np.repeat(np.abs(x.reshape(3, -1, group)).max(-1) / 127.0, group, axis=-1)
    wanted = np.rint(x / np.maximum(step, 1e-300)) * step if size > 1e-30 else np.zeros_like(x)
    assert np.all(np.abs(got - wanted) <= (step + np.abs(wanted)) * 1e-5 + step * is_tie(x, step))


def is_tie(x, step):
    """Returns whether two codes are about equally near."""
    return np.abs(np.abs(x / np.maximum(step, 1e-300)) % 1 - 0.5) < 1e-4


def test_a_row_of_zeros_stays_zeros():
    rows = kv_rows.encode(mx.zeros((2, 64)))
    assert mx.array_equal(kv_rows.decode(rows, 64, mx.float32), mx.zeros((2, 64)))


def test_rows_take_little():
    """Compares with the bytes of bfloat16."""
    assert kv_rows.row_bytes(128) / 256 == kv_rows.row_bytes(64) / 128 <= 0.54


def feed(cache, count):
    """Attends with the next positions.

    Returns [count, HEADS * VALUE_WIDTH]. A single position uses the native kernel.
    """
    parts = (part[:, cache.offset : cache.offset + count] for part in (QUERIES, KEYS, VALUES))
    return np.array(attend.attend(*parts, cache, attend.Terms(None, None, None, 0.1, cache.part.window)))[0]


class Text(RuleBasedStateMachine):
    """All that can happen to a cache. Its rows are always those that belong to its positions."""

    @initialize(windowed=st.booleans())
    def begin(self, windowed):
        self.part = WINDOW if windowed else PART
        self.cache, self.length = make_caches(self.part)[0], 0

    @rule(count=st.integers(2, 60))
    def absorb(self, count):
        count = min(count, LONGEST - self.length)
        if count:
            feed(self.cache, count)
        self.length += count

    @rule(count=st.integers(1, MAX_OF_SEQUENCE), keep=st.integers(0, MAX_OF_SEQUENCE))
    def step(self, count, keep):
        """Takes rows one by one, and takes the last ones back."""
        ways = []
        for _ in range(min(count, LONGEST - self.length)):
            ways.append(self.cache.way_back())
            feed(self.cache, 1)
        if keep < len(ways):
            self.cache.go_back(self.length + keep, ways[keep])
        self.length += min(keep, len(ways))

    @rule(count=st.integers(1, 30))
    def trim(self, count):
        is_near = self.cache.reaches(max(self.length - count, 0))
        assert self.cache.trim(count) == (min(count, self.length) if is_near else 0)
        self.length = self.cache.offset

    @precondition(lambda self: not self.part.window)
    @rule(share=st.floats(0, 1))
    def part_from_it(self, share):
        other, self.length = make_caches(self.part)[0], int(share * self.length)
        other.take_from(self.cache, self.length, None)
        self.cache = other

    @rule()
    def save_and_restore(self):
        shapes, other = self.cache.stored_shapes(self.length), make_caches(self.part)[0]
        arrays = [
            np.zeros(shape, np.uint8) if array is None else np.array(array)
            for array, shape in zip(self.cache.stored(), shapes, strict=True)
        ]
        assert [array.shape for array in arrays] == list(shapes)
        other.state = other.restored(*arrays, self.length, mx.float32)
        self.cache = other

    @rule()
    def copy(self):
        self.cache = self.cache.copy()

    @invariant()
    def has_its_rows(self):
        if not hasattr(self, "cache"):
            return
        end = self.length
        assert self.cache.offset == end
        if not end:
            return
        seen = end if self.part.window is None else min(end, self.part.window - 1)
        for array, wanted in zip(self.cache.state[:2], BYTES, strict=True):
            slots = np.arange(end - seen, end) % array.shape[2]
            assert np.array_equal(np.array(array)[:, :, slots], wanted[:, :, end - seen : end])


def check_texts(**more):
    run_state_machine_as_test(
        Text, settings=settings(max_examples=examples(60), stateful_step_count=20, deadline=None, **more)
    )


def test_after_any_operations_rows_are_those_of_their_positions():
    check_texts()


@pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
@pytest.mark.parametrize("part", [PART, WINDOW])
def test_whole_in_blocks_and_one_by_one_give_the_same_bits(part):
    """The native kernel sums a row alone as it does among others."""
    whole = feed(make_caches(part)[0], 90)
    for lengths in ([40, 30, 20], [1] * 90, [31, *[1] * 40, 19]):
        (cache,) = make_caches(part)
        assert np.array_equal(np.concatenate([feed(cache, length) for length in lengths]), whole)


def test_it_attends_to_rounded_rows_alone():
    """Every row is rounded, also the token's own: the results equal those of a cache with the decoded values."""
    (rounded,), (plain,) = make_caches(PART), make_caches(replace(PART, kv_bits=None))
    got, widths = feed(rounded, 50), (WIDTH, VALUE_WIDTH)
    k, v = (kv_rows.decode(mx.array(rows), width, mx.float32) for rows, width in zip(BYTES, widths, strict=True))
    q, k, v = mx.array(QUERIES[:, :50]), k[:, :, :50].transpose(0, 2, 1, 3), v[:, :, :50].transpose(0, 2, 1, 3)
    want = np.array(attend.attend(q, k, v, plain, attend.Terms(None, None, None, 0.1)))[0]
    assert np.abs(got - want).max() < 1e-5


FAULTS = {
    "rounded again when it is saved": lambda p: p.setattr(QuantizedKVCache, "restored", restored_of_values),
    "a row too many is taken back": lambda p: p.setattr(
        QuantizedKVCache, "go_back", lambda self, position, kept: KVCache.go_back(self, max(position - 1, 0), kept)
    ),
    "bytes of the newest are lost": lambda p: p.setattr(
        QuantizedKVCache, "parts", lambda self, recent, length: KVCache.parts(self, recent * 0, length)
    ),
}


def restored_of_values(self, first, second, length, dtype):
    """Restores rows as if they had been saved as values."""
    if not length:
        return None, None, 0
    again = (
        np.array(kv_rows.encode(kv_rows.decode(mx.array(rows), width, dtype)))
        for rows, width in zip((first, second), (WIDTH, VALUE_WIDTH), strict=True)
    )
    return super(QuantizedKVCache, self).restored(*again, length, mx.uint8)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught(monkeypatch, name):
    FAULTS[name](monkeypatch)
    with pytest.raises(AssertionError):
        check_texts(phases=[Phase.generate], report_multiple_bugs=False, derandomize=True, database=None)
