"""The kernels for one token's attention compared with float64, and the cache that gets its keys and values."""

import contextlib

import mlx.core as mx
import numpy as np
import pytest
from floats import wide
from grids import drawn, one_in_three

from metal import fast, msl
from moeflux_mlx.kinds import QueryGrowth, Rotation, Yarn
from moeflux_mlx.layers import RMSNorm
from moeflux_mlx.mixers.grouped import op as attend
from moeflux_mlx.mixers.grouped.spec import GroupedQuery
from moeflux_mlx.mixers.registry import make_caches
from moeflux_mlx.ops import backend, kv_rows
from moeflux_mlx.ops.rope import Rope
from moeflux_mlx.ops.rows import StepRows
from moeflux_mlx.ops.seen import SEEING_ALL, SeenBlocks

pytestmark = pytest.mark.usefixtures("cpu_device")
LIMITS = {mx.float32: 3e-5, mx.bfloat16: 2e-2, mx.float16: 6e-3}  # largest error over largest value
YARN = Yarn(4.0, 32, attention_factor=1.7)
CASES = {  # heads, kv heads, width, gates, rotation, switches
    "one group": (4, 2, 64, False, Rotation(64, 1e6), {}),
    "gates": (3, 1, 32, True, Rotation(16, 1e4), {}),
    "two threadgroups to a key head": (18, 1, 32, True, Rotation(32, 1e4, interleaved=True), {}),
    "YaRN": (2, 2, 128, False, Rotation(64, 1e6, YARN), {}),
    "more than 128 columns": (2, 1, 160, True, Rotation(32, 1e4), {}),
    "sinks": (4, 2, 64, False, Rotation(64, 1e6), {"sinks": True}),
    "window": (4, 2, 32, True, Rotation(32, 1e6), {"window": 50}),
    "window, sinks, narrow values": (4, 2, 96, False, Rotation(64, 1e4), {"window": 5, "sinks": True, "value_dim": 32}),
    "narrow values of a wide head": (4, 1, 192, False, Rotation(64, 1e4), {"value_dim": 128, "norm": None}),
    "queries that grow": (4, 2, 64, False, Rotation(64, 1e6), {"query_scale": QueryGrowth(0.7, 3)}),
    "norms behind the rotation": (4, 2, 64, False, Rotation(64, 1e6), {"rotates_first": True}),
    "norms behind YaRN": (4, 2, 64, False, Rotation(64, 1e6, YARN), {"rotates_first": True}),
    "chunk": (4, 2, 32, True, Rotation(32, 1e6), {"window": 50, "chunked": True}),
    "8 bits, chunk": (4, 2, 64, False, Rotation(64, 1e6), {"window": 50, "chunked": True, "kv_bits": 8}),
    "8 bits": (4, 2, 64, False, Rotation(64, 1e6), {"kv_bits": 8}),
    "8 bits, two groups, gates": (3, 1, 128, True, Rotation(16, 1e4), {"kv_bits": 8}),
    "8 bits, window, narrow values": (4, 2, 96, False, Rotation(64, 1e4), {"window": 5, "value_dim": 32, "kv_bits": 8}),
}


class Layer:
    """Random norms and tokens of one attention layer."""

    def __init__(self, heads, kv_heads, width, gates, rotation, switches, dtype=mx.float32):
        self.rng = np.random.default_rng([heads, width])
        self.dtype, self.sizes = dtype, (heads, kv_heads, width, gates)
        self.part = GroupedQuery(heads, kv_heads, width, rotation, **switches)
        self.norms = [RMSNorm(width, 1e-2), RMSNorm(width, 1e-2)] if self.part.norm else [None, None]
        for norm in filter(None, self.norms):
            norm.weight = self.normal(width)
        self.sinks = 2 * self.normal(heads) if self.part.sinks else None  # values of both signs
        self.rope, self.rotation = Rope(rotation), rotation
        self.interleaved = rotation.interleaved
        self.tokens, self.positions = [], []

    def cache(self):
        return make_caches(self.part)[0]

    def normal(self, *shape):
        return mx.array(self.rng.normal(size=shape).astype(np.float32)).astype(self.dtype)

    def feed(self, cache, tokens, seen=None):
        """Attends with `tokens` new tokens. Returns the output of the last one."""
        heads, kv_heads, width, gates = self.sizes
        shapes = (heads, width * (1 + gates)), (kv_heads, width), (kv_heads, self.part.value_width)
        parts = [self.normal(1, tokens, *shape) for shape in shapes]
        self.positions += range(cache.position, cache.position + tokens)
        self.tokens += [[wide(part)[0, t] for part in parts] for t in range(tokens)]
        return self.run(parts, cache, seen)[0, -1]

    def run(self, parts, cache, seen=None):
        q_norm, k_norm = self.norms
        more = {"window": self.part.window, "sinks": self.sinks}
        more |= {"query_scale": self.part.query_scale, "chunked": self.part.chunked}
        more["rotates_first"] = self.part.rotates_first
        return attend.attend(*parts, cache, attend.Terms(q_norm, k_norm, self.rope, 0.3, **more), seen=seen)

    def turned(self, x, norm, position):
        def normed(x):
            return x if norm is None else x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-2) * wide(norm.weight)

        x = x if self.part.rotates_first else normed(x)
        pairs = np.arange(self.rope.dims).reshape((-1, 2) if self.interleaved else (2, -1))
        first, second = pairs.T if self.interleaved else pairs
        out, (cosine, sine) = x.copy(), fast.turns(position, self.rope)
        out[:, first] = x[:, first] * cosine - x[:, second] * sine
        out[:, second] = x[:, first] * sine + x[:, second] * cosine
        return normed(out) if self.part.rotates_first else out

    def want(self, cache=None, places=None):
        """Computes the last token's output in float64. If keys and values are rounded, it uses those in `cache`.
        `places`: the positions that each key head sees; None: all.
        """
        heads, kv_heads, width, gates = self.sizes
        q = self.turned(self.tokens[-1][0][:, :width], self.norms[0], self.positions[-1])
        visible = self.part.window or len(self.tokens)
        visible = (len(self.tokens) - 1) % visible + 1 if self.part.chunked else visible
        seen = list(zip(self.positions, self.tokens, strict=True))[-visible:]
        k = np.array([self.turned(token[1], self.norms[1], p) for p, token in seen])
        v = np.array([token[2] for _, token in seen])
        if self.part.kv_bits:
            k, v = (self.kept(rows, cache.offset, part) for rows, part in zip(cache.state[:2], (k, v), strict=True))
        if places is not None:
            k, v = (np.stack([part[at, head] for head, at in enumerate(places)], axis=1) for part in (k, v))
        k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
        growth = self.part.query_scale
        q = q if growth is None else q * (1 + (self.positions[-1] + 1) / growth.length) ** growth.exponent
        scores = 0.3 * np.einsum("hd,phd->hp", q, k)
        weights = np.exp(scores)
        total = weights.sum(-1, keepdims=True) + (np.exp(wide(self.sinks))[:, None] if self.part.sinks else 0)
        out = np.einsum("hp,phd->hd", weights / total, v)
        if gates:
            out /= 1 + np.exp(-self.tokens[-1][0][:, width:])
        return out.reshape(-1)

    def kept(self, rows, offset, part):
        """Returns the rows of a cache for the newest keys or values `part` [N, kv heads, width], NaN where they differ.

        They may differ by half a step of the stored form.
        """
        count, _, width = part.shape
        slots = mx.arange(offset - count, offset) % rows.shape[2]
        got = wide(kv_rows.decode(mx.take(rows[0], slots, axis=1), width, mx.float32)).swapaxes(0, 1)
        groups = np.abs(part).reshape(*part.shape[:2], -1, kv_rows.group_of(width))
        step = np.repeat(groups.max(-1) / 127, kv_rows.group_of(width), axis=-1)
        is_near = np.abs(got - part) <= 0.5 * step + LIMITS[self.dtype] * np.abs(part).max()
        return np.where(is_near, got, np.nan)

    def error(self, lengths):
        cache = self.cache()
        for length in lengths:
            got = self.feed(cache, length)
        want = self.want(cache)
        return np.abs(wide(got) - want).max() / np.abs(want).max()


@pytest.mark.parametrize("case, dtype", drawn(CASES, LIMITS))
def test_a_token_matches_oracle(host, case, dtype):
    # A kernel norms before it rotates, and a fast cosine and sine keep lengths to 1e-5 alone.
    factor = 2 if case == "norms behind YaRN" else 1
    assert Layer(*CASES[case], dtype).error([130, 1, 1]) < factor * LIMITS[dtype]


@pytest.fixture
def way(request, host):
    """The harness runs the text that a launch on Metal has, or that on CUDA."""
    if getattr(request, "param", "matrix") == "matrix":
        request.getfixturevalue("matrix_units")


@pytest.mark.parametrize("case, dtype, lengths", drawn(CASES, [mx.bfloat16, mx.float16], [[1], [31, 1], [300, 1, 1]]))
def test_matrix_units_match_oracle(way, case, dtype, lengths):
    assert Layer(*CASES[case], dtype).error(lengths) < LIMITS[dtype]


@pytest.mark.parametrize(
    "shared, width, switches", [(5, 256, {}), (8, 64, {"window": 40, "sinks": True}), (16, 128, {"kv_bits": 8})]
)
def test_any_number_of_heads_shares_a_key_head(way, shared, width, switches):
    layer = Layer(2 * shared, 2, width, False, Rotation(32, 1e4), switches, mx.bfloat16)
    assert layer.error([150, 1, 1]) < LIMITS[mx.bfloat16]


def test_weights_by_matrix_units_keep_their_precision(way):
    """As sums of two numbers of 16 bits they are as good as float32 beside values of 16 bits."""
    heads, width, length = 4, 64, 240  # fills all pieces
    rng = np.random.default_rng(0)
    q, k, v, keys, values = (
        mx.array(rng.normal(size=shape), mx.bfloat16)
        for shape in [(heads, width)] + 2 * [(1, width)] + 2 * [(250, width)]
    )
    types, limits = (mx.bfloat16, None, mx.bfloat16), (None, False, False, False, False, 0)
    step, _ = attend.plan_row(backend.name(), (q.shape, k.shape, v.shape), types, 250, (0, False), limits, SEEING_ALL)
    positions = mx.array([length, length, 250, 0], mx.int32)
    recent = mx.zeros(2 * attend.RECENT * width, mx.bfloat16)
    parts, _ = step(q, k, v, k, k, k, 0.0, 1.0, 0.3, positions, keys, values, recent, positions, positions)
    k, v = (np.concatenate([wide(kept)[:length], wide(own)]) for kept, own in ((keys, k), (values, v)))
    weights = np.exp(0.3 * wide(q) @ k.T)
    *sums, largest, totals = np.moveaxis(wide(parts).astype(np.float64), -1, 0)
    shares = np.exp(largest - largest.max(0))
    got = (np.stack(sums, -1) * shares[..., None]).sum(0) / (shares * totals).sum(0)[:, None]
    want = weights @ v / weights.sum(-1, keepdims=True)
    assert np.abs(got - want).max() / np.abs(want).max() < 2e-5


WAYS = pytest.mark.parametrize("way", ["plain", "matrix"], indirect=True)


@pytest.mark.usefixtures("both_builds")
@WAYS
@pytest.mark.parametrize("case, count, before", drawn(CASES, [2, 3, 8], [[3], [130, 1, 1, 1], [40, *[1] * 29]]))
def test_several_tokens_have_the_bits_of_each_alone(way, case, count, before):
    """Their outputs, and what the cache holds afterwards. Once they do not fit in the array of the newest keys."""
    layer = Layer(*CASES[case], mx.bfloat16)
    heads, kv_heads, width, gates = layer.sizes
    shapes = (heads, width * (1 + gates)), (kv_heads, width), (kv_heads, layer.part.value_width)
    caches, begun = [layer.cache(), layer.cache()], []
    for length in before:
        parts = [layer.normal(1, length, *shape) for shape in shapes]
        for cache in caches:
            layer.run(parts, cache)
    parts = [layer.normal(1, count, *shape) for shape in shapes]
    want = [layer.run([part[:, i : i + 1] for part in parts], caches[0]) for i in range(count)]
    got = layer.run(parts, StepRows([caches[1]] * count, lambda row: begun.append((row, caches[1].offset))))
    assert begun == [(i, sum(before) + i) for i in range(count)]
    assert np.array_equal(wide(got), wide(mx.concatenate(want, axis=1)))
    for one, other in zip(caches[1].state[:2], caches[0].state[:2], strict=True):
        assert np.array_equal(np.array(one.view(mx.uint8)), np.array(other.view(mx.uint8)))


@msl.needed
@pytest.mark.parametrize(
    "file, old, new",
    [
        ("attend_append", "positions[3] + int(token)", "positions[3]"),
        ("attend_append", "place = filled + token", "place = filled"),
        ("attend_append", "k + token * AT_K", "k"),
        ("attend_append", "unit < filled * KEY_UNITS", "unit < KEY_UNITS"),
        ("attend_step", "!APPENDED && part == 0", "part == 0"),
    ],
)
def test_a_planted_fault_between_tokens_is_caught(host, monkeypatch, file, old, new):
    msl.plant(monkeypatch, f"{file}.metal", old, new)
    with pytest.raises((AssertionError, msl.Failure)):
        test_several_tokens_have_the_bits_of_each_alone(None, "one group", 3, [130, 1, 1, 1])


@msl.needed
@pytest.mark.parametrize("way, dtype", [("plain", mx.float32), ("matrix", mx.bfloat16)], indirect=["way"])
@pytest.mark.parametrize("before", [141, 142, 143])
@pytest.mark.parametrize("count, ratio, has_own, lists", [(5, 4, False, 1), (35, 4, False, 1), (3, 8, True, 2)])
def test_a_token_that_attends_to_chosen_blocks(way, dtype, before, count, ratio, has_own, lists):
    """And to the positions behind the last whole block; its own may be among neither. Key heads share a list or not."""
    layer = Layer(*CASES["one group"], dtype)
    cache, whole = layer.cache(), (before + 1 - has_own) // ratio
    layer.feed(cache, before - 2)
    for _ in range(2):
        layer.feed(cache, 1)
    chosen = np.sort([layer.rng.permutation(whole)[:count] for _ in range(lists)])
    got = layer.feed(cache, 1, SeenBlocks(mx.array(chosen[None, None], mx.int32), ratio, has_own))
    tail = range(whole * ratio, before + 1)
    places = [[*(one[:, None] * ratio + np.arange(ratio)).reshape(-1), *tail] for one in chosen]
    want = layer.want(places=places * (2 // lists))
    assert np.abs(wide(got) - want).max() / np.abs(want).max() < LIMITS[dtype]
    assert cache.offset == before + 1


GPT_OSS = {"window": 128, "sinks": True, "norm": None}
BYTES = {"kv_bits": 8}
MIMO = {"window": 129, "sinks": True, "norm": None, "value_dim": 128}


@pytest.mark.parametrize(
    "heads, kv_heads, width, switches",
    [
        *[(16, 2, 256, {}), (64, 8, 64, GPT_OSS), (64, 8, 192, MIMO), (96, 8, 128, {"window": 512})],
        *[(48, 8, 128, BYTES | {"norm": None}), (64, 8, 192, MIMO | BYTES)],
        *(
            pytest.param(*sizes, marks=pytest.mark.full)
            for sizes in [(32, 4, 128, {}), (64, 4, 128, {}), (32, 2, 256, {}), (32, 2, 256, BYTES)]
        ),
    ],
)
def test_at_the_shapes_of_named_models(host, heads, kv_heads, width, switches):
    """The memory of a threadgroup must fit in Metal's 32 KB."""
    layer = Layer(heads, kv_heads, width, width == 256, Rotation(width // 4, 1e7), switches, mx.bfloat16)
    assert layer.error([3, 1]) < LIMITS[mx.bfloat16]


@pytest.mark.parametrize("lengths", [[1], [31, 1], [32, 1], [63, 1, 1], [200, *[1] * 34], [255, 1, 2, 1], [1, 1, 9, 1]])
def test_wherever_pieces_and_arrays_end(host, lengths):
    """Checks lengths around the end of a piece of the context, of the array of newest keys and of the capacity."""
    assert Layer(*CASES["gates"]).error(lengths) < LIMITS[mx.float32]


ENDS = [[1], [4, 1], [5, 1], [13, 1], [31, *[1] * 40], [2, 1, 9, 1, 300, 1, 1]]


@pytest.mark.parametrize("way, dtype", [("plain", mx.float32), ("matrix", mx.float16)], indirect=["way"])
@pytest.mark.parametrize("window, lengths, chunked", drawn([1, 5, 40, 128], ENDS, [False, True]))
def test_wherever_a_window_or_a_chunk_and_its_ring_end(way, dtype, window, lengths, chunked):
    switches = {"window": window, "chunked": chunked, "sinks": True}
    layer = Layer(2, 1, 32, False, Rotation(32, 1e4), switches, dtype)
    assert layer.error(lengths) < LIMITS[dtype]


@pytest.mark.parametrize("window, bits", [(5, None), (40, 8), pytest.param(40, None, marks=pytest.mark.full)])
def test_bits_of_a_window_depend_on_the_position_alone(host, window, bits):
    """They do not depend on cuts of the text, on rewinds, or on the place of the newest keys."""
    switches = {"window": window, "kv_bits": bits}
    cut, whole = (Layer(2, 1, 32, False, Rotation(32, 1e4), switches) for _ in range(2))
    one, other = cut.cache(), whole.cache()
    parts = [[cut.normal(1, 1, heads, 32) for heads in (2, 1, 1)] for _ in range(100)]
    for at, part in enumerate(parts):
        want = whole.run(part, other)
        got = cut.run(part, one)
        assert mx.array_equal(got, want)
        if at % 9 == 8:
            mx.eval(one.state[:2])  # moves the newest keys into the ring
            assert one.trim(at % 8) == at % 8
            for again in parts[at + 1 - at % 8 : at + 1]:
                got = cut.run(again, one)
            assert mx.array_equal(got, want)


@pytest.mark.parametrize("shift", [70, -15])
def test_a_token_is_turned_by_its_rotary_position(host, shift):
    """A token's rotation does not depend on its place in the cache."""
    layer = Layer(*CASES["gates"])
    cache = layer.cache()
    layer.feed(cache, 20)
    cache.shift(shift)
    for length in (3, 1, 1):
        got = layer.feed(cache, length)
    assert layer.positions[-1] == 24 + shift
    assert np.abs(wide(got) - layer.want()).max() < LIMITS[mx.float32] * np.abs(layer.want()).max()


@pytest.mark.usefixtures("both_builds")
@pytest.mark.parametrize("way, dtype", [("plain", mx.float32), ("matrix", mx.bfloat16)], indirect=["way"])
@pytest.mark.parametrize("case", ["gates", "8 bits"])
def test_bits_do_not_depend_on_where_keys_lie(way, dtype, case):
    """The bits do not depend on the capacity either."""
    layer, moved = (Layer(*CASES[case], dtype) for _ in range(2))
    one, other = layer.cache(), layer.cache()
    for length in (240, *[1] * 9):
        got, want = layer.feed(one, length), moved.feed(other, length)
        assert mx.array_equal(got, want)
        assert other.state[2] == one.offset  # reading the cache moves the newest keys
        other.reserve(300)
    for a, b in zip(one.state[:2], other.state[:2], strict=True):
        assert mx.array_equal(a[..., : one.offset, :], b[..., : one.offset, :])


def test_arrays_that_were_shown_keep_what_they_covered(host):
    layer = Layer(*CASES["one group"])
    cache = layer.cache()
    for length in (20, 1, 1):
        layer.feed(cache, length)
    held = cache.state[:2]
    before = [np.array(array)[..., :22, :] for array in held]
    cache.trim(2)
    layer.feed(cache, 1)
    assert cache.state[2] == 21 and mx.array_equal(cache.state[0][..., :20, :], mx.array(before[0])[..., :20, :])


def check_stand_in(layer, draw, cache, other):
    """Checks that the traced stand-in of `cache` gives the same as `other` for tokens that `draw` draws. `cache` has 40
    tokens."""
    other.state = (*(array + 0 for array in cache.state[:2]), cache.offset)
    for _ in range(attend.RECENT + 2):
        parts = draw()
        cache.reserve(1)
        arrays = cache.step_arrays()
        assert len(arrays) == cache.traced(1).num_inputs
        stand_in = cache.traced(1)(*arrays, mx.array(cache.offset, mx.int32), mx.array(cache.position, mx.int32), None)
        assert mx.array_equal(layer.run(parts, stand_in), layer.run(parts, other))
        assert len(stand_in.arrays) == cache.traced(1).num_outputs
        cache.take_step(stand_in.arrays)
    assert cache.offset == other.offset == 74
    for a, b in zip(cache.state[:2], other.state[:2], strict=True):
        assert mx.array_equal(a[..., :74, :], b[..., :74, :])


@pytest.mark.parametrize("case", ["one group", "8 bits"])
def test_traced_stand_in_of_a_cache_gives_the_same(host, case):
    layer = Layer(*CASES[case])
    cache = layer.cache()
    layer.feed(cache, 40)
    check_stand_in(layer, lambda: [layer.normal(1, 1, heads, 64) for heads in (4, 2, 2)], cache, layer.cache())


@pytest.mark.parametrize("back", [1, 3, 5])
def test_a_cache_that_was_trimmed_goes_on(host, back):
    layer = Layer(*CASES["one group"])
    cache = layer.cache()
    for length in (20, 1, 1, 1):
        layer.feed(cache, length)
    cache.trim(back)
    del layer.tokens[-back:], layer.positions[-back:]
    got, want = layer.feed(cache, 1), layer.want()
    assert np.abs(wide(got) - want).max() / np.abs(want).max() < LIMITS[mx.float32]


def test_a_late_token_is_turned_as_many_are(host):
    """All angles have the same float32 rounding, so queries and keys of all positions fit together."""
    layer, late = Layer(*CASES["one group"]), 100_003
    q, k, v = parts = [layer.normal(1, 1, heads, 64) for heads in (4, 2, 2)]
    shapes, types = [part.shape[2:] for part in parts], (q.dtype,) * 3
    step, _ = attend.plan_row(
        backend.name(), shapes, types, 32, (64, False), (None, False, False, False, False, 0), SEEING_ALL
    )
    weights, numbers = [norm.weight for norm in layer.norms], (1e-2, 1.0, 0.3)
    kept, recent = mx.zeros((1, 2, 64, 64)), mx.zeros(2 * 2 * attend.RECENT * 64)
    positions = mx.array([late, late, 64, late], mx.int32)
    *_, recent = step(
        *parts, *weights, layer.rope.periods, *numbers, positions, kept, kept, recent, positions, positions
    )
    want = layer.rope(layer.norms[1](k).transpose(0, 2, 1, 3), late)
    assert np.abs(np.array(recent).reshape(2, 2, -1, 64)[0, :, 0] - np.array(want)[0, :, 0]).max() < 1e-4


FAULTS = {
    "weights of the query": ("attend_step", "is_key ? D : 0", "0"),
    "heads without gates": ("attend_step", "q + (head + h) * STRIDE", "q + (head + h) * D"),
    "pairs of the other kind": ("kv_head.h", "INTERLEAVED ?", "!INTERLEAVED ?"),
    "turned backwards": ("rotate.h", "-(b * sine)", "b * sine"),
    "no magnitude": ("kv_head.h", "magnitude * metal::fast::sin", "metal::fast::sin"),
    "no epsilon": ("kv_head.h", "+ eps)", "+ 0 * eps)"),
    "another key head": ("attend_step", "kv = head / G", "kv = 0"),
    "the newest are old": ("attend_step", "p < begun ?", "p <= begun ?"),
    "values of the newest": ("attend_step", "values_later + (p - begun) * VD", "values_later + row * VD"),
    "its own position is left out": ("attend_step", "row == own ? last", "row == own ? NONE"),
    "later positions": ("attend_step", "row < earlier ?", "row < P ?"),
    "a chunk that begins one later": ("seen.h", "offset - offset % WINDOW", "offset - offset % WINDOW + 1"),
    "a window too wide": ("seen.h", "offset + 1 - WINDOW : 0", "offset - WINDOW : 0"),
    "a window too narrow": ("seen.h", "offset + 1 - WINDOW : 0", "offset + 2 - WINDOW : 0"),
    "a ring out of order": ("attend_step", "(kept + (WINDOW ? p % capacity : p)) * KD", "(kept + p % WINDOW) * KD"),
    "values out of order": (
        "attend_step",
        "values + (kept + (WINDOW ? p % capacity : p)) * VD :",
        "values + kept * VD :",
    ),
    "no sinks": ("attend_combine", "total += metal::fast::exp(sink - largest)", "total += 0"),
    "sinks of the other sign": ("attend_combine", "exp(sink -", "exp(-sink -"),
    "values as wide as keys": (
        "attend_step",
        "KV * RECENT * KD + kv * RECENT * VD",
        "KV * RECENT * KD + kv * RECENT * KD",
    ),
    "missing barrier": ("attend_step", "threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    "a piece too few": ("attend_combine", "(visible) + 1", "(visible)"),
    "the query for its gate": ("attend_combine", "(2 * head + 1) * D", "2 * head * D"),
    "one of its shares": ("attend_combine", "s < SHARES - 1", "s < SHARES - 3"),
    "half of the positions": ("attend_step", "share == 1", "share == 2"),
    "a row's first columns": ("attend_step", "kv_load<D>(row, unit % UNITS,", "kv_load<D>(row, 0,"),
    "another zero": ("kv_rows.h", "(float(code) - 128.0f)", "(float(code) - 127.0f)"),
    "a key's first scale": ("kv_rows.h", "[unit * WORDS * 4 / kv_group(WIDTH)]", "[0]"),
    "a value's first scale": ("kv_rows.h", "[at / kv_group(WIDTH)]", "[0]"),
    "codes in another order": ("kv_rows.h", "(loaded.x >> (8 * j))", "(loaded.x >> (24 - 8 * j))"),
    "codes rounded down": ("kv_rows.h", "metal::rint(x[i] * inverse) + 128.0f", "x[i] * inverse + 128.0f"),
    "one scale for two groups": ("kv_rows.h", "[at / GROUP] = scale", "[0] = scale"),
    "its own value as it was": ("attend_step", ": sizeof(K) == 1 || VNORM ?", ": VNORM ?"),
    "its own key as it was": ("kv_rows.h", "x[i] = float(X(kv_decode(code, scale)))", "x[i] = float(X(x[i]))"),
    "parts of one weight": ("attend_combine", "sum = metal::fma(share,", "sum = metal::fma(1.0f,"),
}
SEEN_IN = {  # the case that shows the fault; the others are in "one group"
    "heads without gates": "gates",
    "no magnitude": "YaRN",
    "a window too wide": "window",
    "a window too narrow": "window",
    "a chunk that begins one later": "chunk",
    "no sinks": "sinks",
    "sinks of the other sign": "sinks",
    "values as wide as keys": "window, sinks, narrow values",
    "the query for its gate": "gates",
    "another zero": "8 bits",
    "a key's first scale": "8 bits, two groups, gates",
    "a value's first scale": "8 bits, two groups, gates",
    "codes in another order": "8 bits",
    "codes rounded down": "8 bits",
    "one scale for two groups": "8 bits, two groups, gates",
    "its own value as it was": "8 bits",
    "its own key as it was": "8 bits",
}


@msl.needed
@pytest.mark.parametrize("name", one_in_three(FAULTS))
def test_planted_fault_is_caught(host, monkeypatch, name):
    file, old, new = FAULTS[name]
    msl.plant(monkeypatch, f"{file}.metal", old, new)
    case = CASES[SEEN_IN.get(name, "one group")]
    with contextlib.suppress(msl.Failure):
        assert any(not Layer(*case).error(lengths) < LIMITS[mx.float32] for lengths in ([1], [70, 1, 1, 1]))


UNITS_FAULTS = {  # in the text for matrix units, and the case that shows it
    "missing barrier": ("attend_matrix", "threadgroup_barrier(mem_flags::mem_threadgroup);", "", "gates"),
    "heads without gates": ("attend_matrix", "q + (head + h) * STRIDE", "q + (head + h) * D", "gates"),
    "heads of another row": ("attend_matrix", "8 * third + 4 * (i % 2) + quad / 2", "8 * third + quad / 2", "gates"),
    "sums of earlier scores": ("attend_matrix", "acc[i] *= factors[i % 2]", "acc[i] *= factors[0]", "one group"),
    "total of earlier scores": ("attend_matrix", "total *= factor;", "", "gates"),
    "its own position is left out": ("attend_matrix", "lane == SG ? share : 0.0f", "0.0f", "window"),
    "later positions": ("attend_matrix", "position < stop ?", "position < stop + 1 ?", "gates"),
    "one piece": ("attend_matrix", "top = part * length", "top = 0", "gates"),
    "one key head": ("attend_matrix", "kv = head / G", "kv = 0", "8 bits"),
    "the newest are old": ("kv_matrix.h", "p < place.begun ?", "p <= place.begun ?", "gates"),
    "a ring out of order": ("kv_matrix.h", "p % place.capacity : p", "p % (place.capacity - 1) : p", "window"),
    "neighbours of a row": ("kv_matrix.h", "r / 2 * 8 + r % 2", "r / 2 * 8", "gates"),
    "columns of the first parts": (
        "kv_matrix.h",
        "const uint wanted = unit + 2 * ROWS * step",
        "const uint wanted = unit",
        "one group",
    ),
    "another zero": ("kv_matrix.h", "8388736.0f", "8388735.0f", "8 bits"),
    "the first scale": ("kv_matrix.h", "[column / kv_group(WIDTH)]", "[0]", "8 bits, two groups, gates"),
    "a part in another order": ("kv_matrix.h", "0x5410u", "0x1054u", "gates"),
}


@msl.needed
@pytest.mark.parametrize("name", one_in_three(UNITS_FAULTS))
def test_planted_fault_in_the_text_for_matrix_units_is_caught(way, monkeypatch, name):
    file, old, new, case = UNITS_FAULTS[name]
    msl.plant(monkeypatch, f"{file}.metal", old, new)
    with contextlib.suppress(msl.Failure):
        assert not Layer(*CASES[case], mx.float16).error([300, 1, 1]) < LIMITS[mx.float16]


@msl.needed
def test_weights_of_one_number_are_not_precise(way, monkeypatch):
    msl.plant(monkeypatch, "attend_matrix.metal", "second - float(Y(second))", "0.0f")
    with pytest.raises(AssertionError):
        test_weights_by_matrix_units_keep_their_precision(None)
