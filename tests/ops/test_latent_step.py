"""The kernels for one token's latent attention compared with float64, and the cache that gets its entries."""

import contextlib
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from floats import wide
from grids import drawn, one_in_three
from test_attend_step import check_stand_in

from metal import fast, msl
from moeflux_mlx.kinds import QueryScale, Rotation, Yarn
from moeflux_mlx.layers import RMSNorm
from moeflux_mlx.mixers.latent import op as latent
from moeflux_mlx.mixers.latent.cache import make_caches
from moeflux_mlx.mixers.latent.spec import Latent
from moeflux_mlx.ops.forms import settings, unpacked_float32
from moeflux_mlx.ops.matrix import Part
from moeflux_mlx.ops.rope import Rope
from moeflux_mlx.ops.seen import SeenBlocks
from moeflux_mlx.quant import Quant

pytestmark = pytest.mark.usefixtures("cpu_device")
LIMITS = {mx.float32: 3e-5, mx.bfloat16: 2e-2, mx.float16: 6e-3}  # largest error over largest value
YARN = Yarn(4.0, 32, attention_factor=1.7)
PAIRS = Rotation(8, 1e4, interleaved=True)
CASES = {  # heads, nope, latent, v, columns, rotation, stored queries, keys and values, whether the keys are transposed
    "values": (3, 12, 72, 5, 44, PAIRS, (None,) * 3, False),
    "no rotation": (3, 16, 72, 5, 44, None, (None,) * 3, False),
    "transposed values": (2, 24, 40, 16, 16, PAIRS, (None,) * 3, True),
    "transposed values that are no multiples of 8": (2, 12, 40, 16, 24, PAIRS, (None,) * 3, True),
    "codes": (4, 16, 192, 24, 320, Rotation(64, 1e6, YARN), (Quant(5, 64), Quant(4, 64), Quant(3, 32)), False),
    "transposed codes": (9, 64, 64, 8, 64, PAIRS, (Quant(4, 32, "mxfp4"), Quant(8, 32), Quant(4, 32, "mxfp4")), True),
}


class Layer:
    """Random matrices and tokens of one layer."""

    def __init__(self, heads, nope, width, v, columns, rotation, quants, transposed, dtype=mx.float32):
        self.rng = np.random.default_rng([heads, width])
        self.dtype, self.heads, self.nope, self.width, self.columns = dtype, heads, nope, width, columns
        keys = (heads, width, nope) if transposed else (heads, nope, width)
        self.rotated = rotation.dims if rotation else 0
        shapes = (heads * (nope + self.rotated), columns), keys, (heads, v, width)
        parts = [self.matrix(quant, *shape) for quant, shape in zip(quants, shapes, strict=True)]
        self.norm, norm = RMSNorm(width, 0.1), RMSNorm(columns, 0.1)
        self.norm.weight, norm.weight = self.normal(width), self.normal(columns)
        self.queries = latent.Queries(heads, latent.Up(parts[0], norm))
        self.key = latent.HeadMatrices(parts[1], heads, transposed=transposed)
        self.value = latent.HeadMatrices(parts[2], heads)
        self.rope, self.interleaved = rotation and Rope(rotation), rotation and rotation.interleaved
        self.part = Latent(heads, columns, width, nope, v, rotation)
        self.tokens, self.sinks = [], None

    def cache(self):
        return make_caches(self.part)[0]

    def normal(self, *shape):
        return mx.array(self.rng.normal(size=shape).astype(np.float32)).astype(self.dtype)

    def matrix(self, quant, *shape):
        if quant is None:
            return Part(None, self.normal(*shape) * 0.05)
        with mx.stream(mx.cpu):
            codes, *scales = mx.quantize(self.normal(*shape).astype(mx.float32) * 0.05, **settings(quant))
        return Part(quant, codes, *(part if part.dtype == mx.uint8 else part.astype(self.dtype) for part in scales))

    def fill(self, cache, tokens):
        """Appends the latents and keys of `tokens` new tokens."""
        _, kv = self.draw(tokens)
        unused = self.normal(1, tokens, 1, self.rotated)
        *_, latents, keys = latent.parts_of(unused, kv, self.norm, self.rope, cache.offset)
        cache.update_and_fetch(latents[:, None], keys)

    def draw(self, tokens=1):
        parts = [self.normal(1, tokens, width) for width in (self.columns, self.width + self.rotated)]
        self.tokens += [[wide(part)[0, t] for part in parts] for t in range(tokens)]
        return parts

    def feed(self, cache):
        """Returns the output of one new token."""
        return self.run(self.draw(), cache)[0, 0]

    def run(self, parts, cache, seen=None):
        more = {"norm": self.norm, "rope": self.rope, "scale": 0.3, "sinks": self.sinks, "seen": seen}
        more["window"] = self.part.window
        return latent.attend_latent(*parts, cache, self.queries, self.key, self.value, **more)

    def turned(self, x, position):
        if self.rope is None:
            return x
        pairs = np.arange(self.rope.dims).reshape((-1, 2) if self.interleaved else (2, -1))
        first, second = pairs.T if self.interleaved else pairs
        out, (cosine, sine) = x.copy(), fast.turns(position, self.rope)
        out[..., first] = x[..., first] * cosine - x[..., second] * sine
        out[..., second] = x[..., first] * sine + x[..., second] * cosine
        return out

    def want(self, places=slice(None)):
        """Computes the last token's output over the positions `places` in float64."""
        key, value, last = dense(self.key), dense(self.value), len(self.tokens) - 1
        q, up, by = self.tokens[-1][0], self.queries.up, self.queries.scale
        q = q if up is None else dense(up) @ normed(q, up.norm)
        q = q.reshape(self.heads, -1)
        if by is not None:
            q = q * (1 + by.beta * np.log(1 + last // by.original_max_position_embeddings))
        split = [np.split(kv, [self.width]) for _, kv in self.tokens]
        latents = np.array([normed(x, self.norm) for x, _ in split])[places]
        keys = np.array([self.turned(x, p) for p, (_, x) in enumerate(split)])[places]
        absorbed = np.einsum("hd,hdn->hn", q[:, : self.nope], key)
        scores = 0.3 * (absorbed @ latents.T + self.turned(q[:, self.nope :], last) @ keys.T)
        weights = np.exp(scores)
        total = weights.sum(-1, keepdims=True) + (0 if self.sinks is None else np.exp(wide(self.sinks))[:, None])
        mixed = weights / total @ latents
        return np.einsum("hvn,hn->hv", value, mixed).reshape(-1)

    def error(self, before, steps):
        cache = self.cache()
        if before:
            self.fill(cache, before)
        for _ in range(steps):
            got = self.feed(cache)
        want = self.want(slice(-(self.part.window or 0), None))
        return np.abs(wide(got) - want).max() / np.abs(want).max()


def normed(x, norm):
    return x / np.sqrt((x**2).mean() + 0.1) * wide(norm.weight)


def dense(matrices):
    part, weight = matrices.weights, matrices.weights.weight
    if part.quant is not None:
        with mx.stream(mx.cpu):
            weight = unpacked_float32(part.quant, weight, part.second, part.third)
    return wide(weight.swapaxes(1, 2) if getattr(matrices, "transposed", False) else weight)


@pytest.mark.parametrize("case, dtype", drawn(CASES, LIMITS, seed=1))
def test_a_token_matches_oracle(host, case, dtype):
    assert Layer(*CASES[case], dtype).error(130, 2) < LIMITS[dtype]


@pytest.mark.parametrize("transposed", [False, True])
def test_at_the_shape_of_a_named_model(host, transposed):
    """The memory of a threadgroup must fit in Metal's 32 KB."""
    rotation = Rotation(64, 1e4, YARN, interleaved=True)
    layer = Layer(8, 128, 512, 128, 1536, rotation, (Quant(4, 64),) * 3, transposed, mx.bfloat16)
    assert layer.error(3, 1) < LIMITS[mx.bfloat16]


@pytest.mark.parametrize("is_kernel", [True, False])
@pytest.mark.parametrize("has_latent, scale", [(False, None), (True, QueryScale(0.7, 3)), (False, QueryScale(0.7, 3))])
def test_queries_without_a_latent_and_scaled_by_position(is_kernel, has_latent, scale):
    heads, nope, *_, rotation, _, _ = case = CASES["values"]
    columns = case[4] if has_latent else heads * (nope + rotation.dims)
    layer = Layer(*case[:4], columns, *case[5:])
    layer.queries = latent.Queries(heads, layer.queries.up if has_latent else None, scale)
    with msl.launching() if is_kernel else contextlib.nullcontext():
        assert layer.error(10, 2) < LIMITS[mx.float32]


@pytest.mark.parametrize("before, steps", [(0, 1), (31, 2), (127, 2), (200, 34), (254, 3)])
def test_wherever_pieces_and_arrays_end(host, before, steps):
    """Checks lengths around the end of a piece of the context, of the array of newest entries and of the capacity."""
    assert Layer(*CASES["values"]).error(before, steps) < LIMITS[mx.float32]


@msl.needed
@pytest.mark.parametrize("before", [139, 140, 141])
@pytest.mark.parametrize("count, ratio, has_own", [(140, 1, False), (5, 4, False), (34, 4, False), (3, 4, True)])
def test_a_token_that_attends_to_chosen_blocks(host, before, count, ratio, has_own):
    """The token also attends to the positions after the last whole block. Its own position may be in neither."""
    layer = Layer(*CASES["values"])
    cache = layer.cache()
    layer.fill(cache, before - 2)
    for _ in range(2):
        layer.feed(cache)
    whole = (before + 1 - has_own) // ratio
    chosen = np.sort(layer.rng.permutation(whole)[:count])
    places = [*(chosen[:, None] * ratio + np.arange(ratio)).reshape(-1), *range(whole * ratio, before + 1)]
    parts, seen = layer.draw(), SeenBlocks(mx.array(chosen[None, None], mx.int32), ratio, has_own)
    got, want = layer.run(parts, cache, seen)[0, 0], layer.want(places)
    assert np.abs(wide(got) - want).max() / np.abs(want).max() < LIMITS[mx.float32]
    assert cache.offset == before + 1


def with_window(window):
    layer = Layer(*CASES["values"])
    layer.part = replace(layer.part, window=window)
    return layer


@pytest.mark.parametrize("window, before, steps", [(20, 15, 8), (20, 300, 2), (150, 149, 34), (150, 700, 1)])
def test_a_window(host, window, before, steps):
    """Checks lengths around the window, one or two pieces of it, and before and after its ring is full."""
    assert with_window(window).error(before, steps) < LIMITS[mx.float32]


@msl.needed
@pytest.mark.parametrize(
    "file, old, new",
    [
        ("latent_attend", "place = WINDOW ? at % capacity : at", "place = at % 8"),
        ("latent_attend", "WINDOW ? at % capacity : at) * N", "at % 8) * N"),
        ("latent_attend", "first_seen<WINDOW, 0>(offset) + piece", "piece"),
        ("latent_combine", "- first_seen<WINDOW, 0>(offset) - 1", "- 1"),
        ("seen.h", "offset + 1 - WINDOW : 0", "offset - WINDOW : 0"),
    ],
)
def test_planted_faults_of_a_window_are_caught(host, monkeypatch, file, old, new):
    msl.plant(monkeypatch, f"{file}.metal", old, new)
    with contextlib.suppress(msl.Failure):
        assert not with_window(20).error(300, 2) < LIMITS[mx.float32]


@pytest.mark.usefixtures("both_builds")
def test_bits_do_not_depend_on_where_entries_lie(host):
    """The bits do not depend on the capacity either."""
    layer, moved = Layer(*CASES["values"]), Layer(*CASES["values"])
    one, other = layer.cache(), layer.cache()
    other.expect(600)
    layer.fill(one, 125)
    moved.fill(other, 125)
    for _ in range(5):
        assert mx.array_equal(layer.feed(one), moved.feed(other))
        assert other.state[2] == one.offset  # reading the cache moves the newest entries
    assert other.state[0].shape[2] > one.state[0].shape[2]
    for a, b in zip(one.state[:2], other.state[:2], strict=True):
        assert mx.array_equal(a[..., :130, :], b[..., :130, :])


def test_traced_stand_in_of_a_cache_gives_the_same(host):
    layer = Layer(*CASES["values"])
    cache = layer.cache()
    layer.fill(cache, 40)
    check_stand_in(layer, layer.draw, cache, layer.cache())


@pytest.mark.parametrize("back", [1, 3, 5])
def test_a_cache_that_was_trimmed_goes_on(host, back):
    layer = Layer(*CASES["values"])
    cache = layer.cache()
    layer.fill(cache, 20)
    for _ in range(3):
        layer.feed(cache)
    cache.trim(back)
    del layer.tokens[-back:]
    got, want = layer.feed(cache), layer.want()
    assert np.abs(wide(got) - want).max() / np.abs(want).max() < LIMITS[mx.float32]


def test_what_is_kept_of_a_cache_goes_on(host):
    """Tries a snapshot, and the cache of another session."""
    layer = Layer(*CASES["values"])
    cache, restored, taken = layer.cache(), layer.cache(), layer.cache()
    layer.fill(cache, 20)
    for _ in range(3):
        layer.feed(cache)
    taken.take_from(cache, 23, None)
    kept = [np.array(array) for array in cache.stored()]
    restored.state = restored.restored(*kept, 23, layer.dtype)
    parts = layer.draw()
    want, *others = (layer.run(parts, one) for one in (cache, restored, taken))
    assert all(mx.array_equal(got, want) for got in others)


def test_a_late_token_is_turned_as_many_are(host):
    """All angles have the same float32 rounding, so queries and keys of all positions fit together."""
    layer, late = Layer(*CASES["values"]), 100_003
    q, kv = layer.draw()
    keys, target = layer.key.stored(), "metal" if msl.AVAILABLE else "cuda"
    sizes, types = (3, 3 * 20, 44, 80, 256), (q.dtype, q.dtype)
    given = None, (keys.form, keys.form), (5, False, False), (8, True), None, None
    query, *_ = latent.plan_row(target, sizes, types, *given)
    positions, numbers = mx.array([late, late, 256, late], mx.int32), (0.1, 1.0, 0.3)
    norms = layer.queries.up.norm.weight, layer.norm.weight
    inputs = layer.queries(q), kv, *norms, layer.rope.periods, positions, *numbers
    rows, token = query(*inputs, latent._nothing(), q, q, *keys.arrays)
    _, q_pe, _, k_pe = latent.parts_of(layer.queries(q), kv, layer.norm, layer.rope, late)
    assert np.abs(np.array(rows)[:, 72:] - 0.3 * np.array(q_pe)[0, :, 0]).max() < 1e-4
    assert np.abs(np.array(token)[72:] - np.array(k_pe)[0, 0, 0]).max() < 1e-4


FAULTS = {
    "queries of the first head": ("latent_query", "head * HEIGHT + metal::min", "metal::min"),
    "queries of the first head, made before": ("latent_query", "x[head * HEIGHT + i]", "x[i]"),
    "the norm's weight is left out": ("input.h", "v[j] *= weight[j]", "v[j] *= 1.0f"),
    "not divided": ("latent_query", "total * factor", "total + 0.0f * factor"),
    "the squares of other lanes": ("latent_query", "lane_sum<L>(squares)", "squares"),
    "no epsilon": ("latent_query", "+ eps[0]", "+ 0 * eps[0]"),
    "unturned values too": ("latent_query", "whole[NOPE + first]", "whole[first]"),
    "pairs of the other kind": ("latent_query", "INTERLEAVED ?", "!INTERLEAVED ?"),
    "turned backwards": ("rotate.h", "-(b * sine)", "b * sine"),
    "no magnitude": ("latent_query", "magnitude[0] * metal::fast::sin", "metal::fast::sin"),
    "a weight for all": ("latent_query", "kv_norm[i]", "kv_norm[0]"),
    "keys of the first head": ("latent_query", "(head * NOPE + row)", "row"),
    "transposed keys of the first head": ("latent_query", "(head * N + column)", "column"),
    "teams are left out": ("latent_query", "i < TEAMS", "i < 8"),
    "not scaled": ("latent_query", "sum * scale[0]", "sum"),
    "the newest are old": ("latent_attend", "at < begun ? latents", "at <= begun ? latents"),
    "the latent for its key": ("latent_attend", "later + N", "later"),
    "its own position is left out": ("latent_attend", "uint(P), visible - top", "uint(P), visible - 1 - top"),
    "keys of another position": ("latent_attend", "e * (P / EACH) + tid / ACROSS, v", "e * (P / EACH), v"),
    "one latent for all": ("latent_attend", "latents + size_t(at) * N : later) + column", "latents : later) + column"),
    "every latent twice": ("latent_attend", "i = second", "i = 0"),
    "half of the latents": ("latent_attend", "acc[k] +=", "acc[k] ="),
    "the newest are forgotten": ("latent_attend", "next[i] = recent[i]", "next[i] = token[0]"),
    "the block behind": ("seen.h", "i % RATIO : seen", "i % RATIO + RATIO : seen"),
    "the tail from its second position": ("seen.h", "(offset) * RATIO + i - WHOLE", "(offset) * RATIO + i - WHOLE + 1"),
    "an unfinished block is whole": ("seen.h", "(offset + 1 - OWN) / RATIO", "(offset + RATIO - OWN) / RATIO"),
    "missing barrier": ("latent_attend", "threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    "a piece too few": ("latent_combine", "/ P + 1", "/ P"),
    "parts of one weight": ("latent_combine", "sum = metal::fma(share,", "sum = metal::fma(1.0f,"),
    "values of the first head": ("latent_combine", "(head * V + row)", "row"),
    "scales of another group": ("stored.h", "0, piece, &held", "0, piece / 2, &held"),
    "codes over another number": ("stored.h", "-float(ONE), sum", "-float(ONE - 1), sum"),
    "a bias of none": ("stored.h", "&held.bias);", "&held.bias); held.bias = 0;"),
}
SEEN_IN = dict.fromkeys(  # the case that shows the fault; the others are in "values"
    [
        *("queries of the first head", "the norm's weight is left out", "not divided", "the squares of other lanes"),
        *("no magnitude", "scales of another group", "codes over another number", "a bias of none"),
    ],
    "codes",
) | {"transposed keys of the first head": "transposed values"}


def with_sinks(case, dtype=mx.float32):
    layer = Layer(*CASES[case], dtype)
    layer.sinks = mx.array([3.0, -2.0, 40.0, 1.0][: layer.heads])
    return layer


@pytest.mark.parametrize("case", ["values", "codes"])
def test_sinks_of_heads(host, case):
    """One of them is above all scores."""
    assert with_sinks(case).error(130, 2) < LIMITS[mx.float32]


@msl.needed
@pytest.mark.parametrize("old, new", [("exp(sink - largest)", "exp(sink)"), ("sinks[head]", "sinks[0]")])
def test_planted_faults_of_sinks_are_caught(host, monkeypatch, old, new):
    msl.plant(monkeypatch, "latent_combine.metal", old, new)
    assert not with_sinks("values").error(130, 2) < LIMITS[mx.float32]


@msl.needed
@pytest.mark.parametrize("name", one_in_three(FAULTS))
def test_planted_fault_is_caught(host, monkeypatch, name):
    file, old, new = FAULTS[name]
    msl.plant(monkeypatch, f"{file}.metal", old, new)
    with contextlib.suppress(msl.Failure):
        if file == "seen.h":
            with pytest.raises(AssertionError):
                test_a_token_that_attends_to_chosen_blocks(host, 142, 5, 4, False)
            return
        assert not Layer(*CASES[SEEN_IN.get(name, "values")]).error(127, 3) < LIMITS[mx.float32]
